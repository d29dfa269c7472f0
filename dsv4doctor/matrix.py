"""Releases x GPUs x checkpoints x flag sets as one table of verdicts, and what to choose of it.

Pure: traces that are judged come in, cells and a ranking go out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsv4doctor.errors import DoctorError, UsageError
from dsv4doctor.evidence.grounds import Grounds
from dsv4doctor.facts.callsite import text_at
from dsv4doctor.flags import DRAFT_FLAG, MAIN_FLAG, without, without_speculation
from dsv4doctor.folding import fold
from dsv4doctor.models import Arch, Layer, Role, StoredFormat, Trace, Verdict
from dsv4doctor.verdicts import (
    NO_CLAMP,
    after_imports,
    judge,
    judge_path,
    known_kernel,
    raised,
    said_of_clamp,
)

_WORST = (Verdict.FAILS, Verdict.UNKNOWN, Verdict.FALLBACK, Verdict.RUNS)
WORKING = (Verdict.RUNS, Verdict.FALLBACK)


@dataclass(frozen=True)
class FlagSet:
    name: str
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Key:
    """Which launch a cell is about."""

    release: str
    arch: Arch
    checkpoint: str
    flag_set: str


@dataclass(frozen=True)
class Part:
    """The routed experts of one model of a launch, by the worst of their layers."""

    verdict: Verdict
    reason: str
    layers: str = ""
    """The layers that it is about, e.g. "model.layers.0-42.mlp.experts"."""
    stored_format: StoredFormat | None = None
    quant_method: str | None = None
    runner_backend: str | None = None
    kernel: str | None = None
    decided_at: str | None = None
    tier: int | None = None
    """The kernel's place in the order of `recommend`; None: it has none."""


@dataclass(frozen=True)
class Cell:
    key: Key
    main: Part
    draft: Part | None
    """None: the launch has no draft model."""
    traced: bool
    """False: there is no answer, and `main` says why."""
    path_problem: str | None = None
    """A hot path beside the experts that will fail; None also where they were not looked at."""
    attention_caveat: str | None = None
    """Why its attention is not known to run, where the trace of it says so."""

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.main,) if self.draft is None else (self.main, self.draft)

    @property
    def verdict(self) -> Verdict:
        """The worse of main and draft."""
        return min((part.verdict for part in self.parts), key=_WORST.index)

    @property
    def is_determined(self) -> bool:
        """False where a model's kernel could not be traced; as `check` has it, exit code 3."""
        gaps = (part.verdict is Verdict.UNKNOWN and part.kernel is None for part in self.parts)
        return self.traced and not any(gaps)

    @property
    def works(self) -> bool:
        """The experts of main and draft run, as the model needs it."""
        return all(part.verdict in WORKING for part in self.parts)


@dataclass(frozen=True)
class Matrix:
    releases: tuple[str, ...]
    archs: tuple[Arch, ...]
    checkpoints: tuple[str, ...]
    flag_sets: tuple[FlagSet, ...]
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()
    interrupted: bool = False

    def at(self, key: Key) -> Cell | None:
        """None: it was not reached before the end."""
        return self._by_key.get(key)

    @functools.cached_property
    def _by_key(self) -> dict[Key, Cell]:
        return {cell.key: cell for cell in self.cells}


# ------------------------------------------------------------------------------ cells


def cell(
    key: Key,
    outcome: Trace | DoctorError,
    texts: dict[str, str],
    *,
    grounds: Grounds | None,
    has_clamp: bool,
) -> Cell:
    """The cell of one launch; `outcome` is its trace, not judged yet, `texts` its call sites."""
    if isinstance(outcome, DoctorError):
        # The interpreter was tried before: what is left to refuse are the flags.
        refused = isinstance(outcome, UsageError)
        verdict = Verdict.FAILS if refused else Verdict.UNKNOWN
        return Cell(key, Part(verdict, outcome.message), None, traced=refused)
    main = _part(outcome, Role.MAIN, texts, grounds, has_clamp)
    speculates = bool(outcome.resolved_args.get("speculative_algorithm"))
    draft = None
    if speculates or outcome.of(Role.DRAFT):
        draft = _part(outcome, Role.DRAFT, texts, grounds, has_clamp)
    problem, caveat = _path_problem(outcome, grounds), _attention_caveat(outcome)
    return Cell(key, main, draft, True, problem, caveat)


def _attention_caveat(trace: Trace) -> str | None:
    for path in trace.paths:
        if path.name.startswith("sparse-mla") and path.reason and path.error is None:
            return f"{path.role.value} {path.name}: {path.reason}"
    return None


def _path_problem(trace: Trace, grounds: Grounds | None) -> str | None:
    for path in (judge_path(one, trace.arch, grounds) for one in trace.paths):
        if path.verdict is Verdict.FAILS:
            return f"{path.role.value} {path.name}: {path.reason}"
    return None


def _part(
    trace: Trace, role: Role, texts: dict[str, str], grounds: Grounds | None, has_clamp: bool
) -> Part:
    ended = _stopped(trace, role)
    if ended is not None:
        return ended
    layers = [
        after_imports(judge(layer, trace.arch, text_at(texts, layer), grounds), trace.missing)
        for layer in trace.of(role)
    ]
    if not layers:
        return Part(Verdict.UNKNOWN, f"the trace has no routed experts of the {role.value} model")
    parts = [
        _of_layer(range_.layer, range_.name, text_at(texts, range_.layer), has_clamp)
        for range_ in fold(layers)
    ]
    return min(parts, key=lambda part: _WORST.index(part.verdict))


def _stopped(trace: Trace, role: Role) -> Part | None:
    """Why the layers of `role` are not there, or not all: SGLang or the trace stopped."""
    phases = ("arguments", role.value)
    some = bool(trace.of(role))
    before = (Role.MAIN.value,) if role is Role.DRAFT and not trace.of(Role.MAIN) else ()
    for error in trace.errors:
        if error.phase.startswith((*phases, *before)):
            return Part(Verdict.FAILS, raised(error))
    stops = (text for text in trace.unresolved if not some or text.startswith(phases))
    reason = next(stops, None)
    return Part(Verdict.UNKNOWN, f"the trace stopped short: {reason}") if reason else None


def _of_layer(layer: Layer, name: str, text: str, has_clamp: bool) -> Part:
    reason = (said_of_clamp(layer, text) if has_clamp else layer).reason
    verdict = Verdict.FAILS if reason.startswith(NO_CLAMP) else layer.verdict
    known = known_kernel(layer, text)
    at = layer.decided_at
    return Part(
        verdict,
        reason,
        name,
        layer.stored_format,
        layer.quant_method,
        layer.runner_backend,
        layer.kernel.symbol if layer.kernel else None,
        f"{at.file}:{at.line}" if at else None,
        known.tier if known else None,
    )


# ------------------------------------------------------------------------------ what to choose


@dataclass(frozen=True)
class Choice:
    """A launch that works, and its place."""

    cell: Cell
    flags: tuple[str, ...]
    why: str


def recommend(
    matrix: Matrix, arch: Arch, checkpoint: str, newest_first: Sequence[str]
) -> tuple[Choice, ...]:
    """The launches that work on `arch`, the fastest known first; none with a failing hot path.

    In this order: a draft model that runs too; no fallback; the kernels' tiers (the table of
    known kernels), the main model's first; the newer release; the flag set as given.
    """
    names = [flag_set.name for flag_set in matrix.flag_sets]
    flags = {flag_set.name: flag_set.flags for flag_set in matrix.flag_sets}
    found = [
        one
        for one in matrix.cells
        if one.works and not one.path_problem
        if one.key.arch == arch and one.key.checkpoint == checkpoint
    ]

    def place(one: Cell) -> tuple[object, ...]:
        worst = max((_tier(part) for part in one.parts), default=_LAST)
        return (
            one.draft is None,
            one.verdict is Verdict.FALLBACK,
            _tier(one.main),
            worst,
            newest_first.index(one.key.release),
            names.index(one.key.flag_set),
        )

    return tuple(
        Choice(one, flags[one.key.flag_set], _why(one)) for one in sorted(found, key=place)
    )


def left_out(matrix: Matrix, arch: Arch, checkpoint: str) -> tuple[str, ...]:
    """Where the experts run and another hot path fails: release and path, each once."""
    return tuple(
        dict.fromkeys(
            path_text(one)
            for one in matrix.cells
            if one.works and one.path_problem
            if one.key.arch == arch and one.key.checkpoint == checkpoint
        )
    )


def path_text(one: Cell) -> str:
    """A cell's release, and the hot path that fails there."""
    return f"SGLang {one.key.release} ({one.path_problem})"


_LAST = 9
TIERS_TEXT = (
    "Tiers: 1 computes in 4 bits, or is made for this GPU and format; 2 reads 4-bit weights and "
    "computes in wider arithmetic; 3 is Triton, compiled for whatever GPU there is. They are an "
    "order of what the hardware can do, not measured speeds."
)


def _tier(part: Part) -> int:
    return _LAST if part.tier is None else part.tier


def _why(one: Cell) -> str:
    said = []
    for role, part in (("main", one.main), ("draft", one.draft)):
        if part is not None:
            short = (part.kernel or "").rpartition(".")[2] or "unknown kernel"
            tier = f"tier {part.tier}" if part.tier else "no tier"
            said.append(f"{role} {short} ({tier}{', fallback' if _slow(part) else ''})")
    if one.draft is None:
        said.append("no draft model")
    return ", ".join(said)


def _slow(part: Part) -> bool:
    return part.verdict is Verdict.FALLBACK


_TRIED = {
    StoredFormat.NVFP4: ("flashinfer_cutlass", "flashinfer_trtllm_routed", "marlin", "triton"),
    StoredFormat.MXFP4: ("flashinfer_mxfp4", "marlin", "triton"),
    StoredFormat.FP8_BLOCK: ("triton", "cutlass", "deep_gemm"),
}
"""By stored format, the MoE backends that a release may run such experts with."""


def flag_sets_to_try(
    flags: Sequence[str], stored: Iterable[StoredFormat | None]
) -> tuple[FlagSet, ...]:
    """What `--recommend` tries where the user gave no flag sets: `flags` as they are, with each
    MoE backend that fits the stored formats, and the same without speculative decoding."""
    given = tuple(flags)
    formats = [StoredFormat(one) for one in dict.fromkeys(stored) if one is not None]
    backends = dict.fromkeys(name for one in formats for name in _TRIED.get(one, ()))
    bare = without(given, (MAIN_FLAG, DRAFT_FLAG))
    found = {given: "as given"}
    for backend in backends:
        found.setdefault((*bare, MAIN_FLAG, backend), backend)
    for backend in backends:
        if "flashinfer_cutlass" in backends and backend == "marlin":
            mixed = (*bare, MAIN_FLAG, "flashinfer_cutlass", DRAFT_FLAG, backend)
            found.setdefault(mixed, f"flashinfer_cutlass, draft {backend}")
    if any(flag.startswith("--speculative-") for flag in given):
        for with_draft, name in list(found.items()):
            if DRAFT_FLAG not in with_draft:
                found.setdefault(without_speculation(with_draft), f"{name}, no draft")
    return tuple(FlagSet(name, flags) for flags, name in found.items())
