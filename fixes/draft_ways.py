"""The methods that FIX101 lets the draft's experts have, and which one a launch gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsv4doctor.fixes import edit
from dsv4doctor.fixes.fix import Aim, Sources
from dsv4doctor.models import Role, Trace

CUTLASS = "sglang/srt/layers/quantization/mxfp4_flashinfer_cutlass_moe.py"
MARLIN = "sglang/srt/layers/quantization/mxfp4_marlin_moe.py"
_MAIN_FLAG, _OWN_FLAG = "moe_runner_backend", "speculative_moe_runner_backend"
_WORDS = {
    "cutlass": "FlashInfer's CUTLASS method",
    "marlin": "the Marlin method",
    "triton": "dsv4doctor's Triton method",
}
_METHODS = {
    "cutlass": "Mxfp4FlashinferCutlassMoEMethod",
    "marlin": "Mxfp4MarlinMoEMethod",
    "triton": "Dsv4DoctorMxfp4MoEMethod",
}


@dataclass(frozen=True)
class Way:
    """One of the methods that the branch chooses among."""

    target: str
    condition: str
    """In the inserted code; "": whatever is left."""
    holds: Callable[[str, int], bool]
    """The same, of the backend and the ranks of expert parallelism."""


def _sends_global_ids(backend: str) -> bool:
    return backend.startswith("flashinfer")


def ways_of(sources: Sources, target: str) -> tuple[Way, ...]:
    """The methods in the order in which they are asked; the last one takes what is left."""
    asked = Way(
        "cutlass",
        "backend.is_flashinfer_mxfp4() or backend.is_flashinfer_cutlass()",
        lambda backend, ranks: backend in ("flashinfer_mxfp4", "flashinfer_cutlass"),
    )
    cutlass = [asked] if cutlass_takes_sm12x(sources) else []
    has_marlin = MARLIN in sources
    rest = Way(target, "", lambda backend, ranks: True)
    if target == "triton":
        own = Way("marlin", "backend.is_marlin()", lambda backend, ranks: backend == "marlin")
        return (*([own] if has_marlin else []), *cutlass, rest)
    if target == "cutlass":
        local = Way(
            "marlin", "not global_ids", lambda backend, ranks: not _sends_global_ids(backend)
        )
        ours = Way("triton", "backend.is_triton()", lambda backend, ranks: backend == "triton")
        return (ours, *([local] if has_marlin else []), rest)
    ours = Way(
        "triton",
        "backend.is_triton() or (global_ids and layer.moe_ep_size > 1)",
        lambda backend, ranks: backend == "triton" or (_sends_global_ids(backend) and ranks > 1),
    )
    return (*cutlass, ours, rest)


def cutlass_takes_sm12x(sources: Sources) -> bool:
    """Whether the tree's CUTLASS method for MXFP4 has a form for sm_12x."""
    names = edit.names_in(edit.parsed(sources, CUTLASS))
    return bool(names & {"is_sm120_supported", "is_sm120"})


def listed(ways: Sequence[Way]) -> str:
    *rest, last = [words for target, words in _WORDS.items() if target in {w.target for w in ways}]
    return f"{', '.join(rest)} or {last}" if rest else last


def aim(ways: Sequence[Way], trace: Trace, auto: str | None) -> Aim | None:
    """By the backend in force while the draft is built."""
    main, own = (trace.resolved_args.get(name) for name in (_MAIN_FLAG, _OWN_FLAG))
    derived = any(c.name == _OWN_FLAG and c.before is None for c in trace.arg_changes)
    follows = own is None or (derived and own == main)
    backend = (auto or main) if follows else own
    ranks = trace.resolved_args.get("ep_size") or 1
    if not isinstance(backend, str) or not isinstance(ranks, int):
        return None
    target = next(way.target for way in ways if way.holds(backend, ranks))
    operation = "moe_mxfp4" if target == "triton" else None
    return Aim(Role.DRAFT, target, _METHODS[target], operation=operation)
