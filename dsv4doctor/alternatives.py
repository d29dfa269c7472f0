"""Other flags for a launch that does not run, traced like the launch itself.

A remedy is only worth printing when this SGLang really resolves it to something that runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dsv4doctor.errors import DoctorError
from dsv4doctor.facts.callsite import text_at
from dsv4doctor.facts.snapshot import redacted_flags
from dsv4doctor.flags import DRAFT_FLAG, MAIN_FLAG, flag_value, without, without_speculation
from dsv4doctor.models import Alternative, Layer, Role, StoredFormat, Trace, Verdict
from dsv4doctor.verdicts import drops_clamp, format_needed

_BACKENDS = {
    StoredFormat.NVFP4: ("flashinfer_cutlass", "marlin"),
    StoredFormat.MXFP4: ("flashinfer_mxfp4", "marlin"),
    StoredFormat.FP8_BLOCK: ("triton", "cutlass"),
}
"""By stored format, the backends that some release runs such experts with on sm_12x."""


_SGLANGS_OWN = 10
"""The compute capability that SGLang's own choice of backends is made for."""
_NO_DRAFT = " without speculative decoding"
DROPS_CLAMP = "drops swiglu_limit"
_QUANTIZATION = "--quantization"
_EXPERT_RANKS = "--ep-size"
_HYBRID_METHOD = "ModelOptNvFp4FusedMoEMethod"


@dataclass(frozen=True)
class Candidate:
    change: str
    flags: tuple[str, ...]


def candidates(
    trace: Trace, flags: Sequence[str], stored: StoredFormat | None, *, clamp_lost: bool
) -> tuple[Candidate, ...]:
    """What is worth trying in place of `flags`, which resolved to `trace`.

    `stored`: the format of the main experts.  `clamp_lost`: they run, without the model's SwiGLU
    clamp.
    """
    backends = _BACKENDS.get(stored, ()) if stored else ()
    found: dict[tuple[str, ...], Candidate] = {tuple(sorted(flags)): Candidate("", ())}
    base, note = tuple(flags), ""
    if stored is StoredFormat.NVFP4 and _misquantised(trace, flags):
        base, note = without(flags, (_QUANTIZATION,)), f" without {_QUANTIZATION}"
        found[tuple(sorted(base))] = Candidate(f"the same flags{note}", base)
    for candidate in _candidates(trace, base, backends, clamp_lost):
        named = replace(candidate, change=f"{candidate.change}{note}")
        found.setdefault(tuple(sorted(candidate.flags)), named)
    return tuple(found.values())[1:]


def _misquantised(trace: Trace, flags: Sequence[str]) -> bool:
    """True where --quantization keeps the main experts from the method of a hybrid checkpoint:
    with it no backend helps."""
    methods = {layer.quant_method for layer in trace.of(Role.MAIN)}
    return flag_value(flags, _QUANTIZATION) is not None and methods != {_HYBRID_METHOD}


def _candidates(
    trace: Trace, flags: tuple[str, ...], backends: tuple[str, ...], clamp_lost: bool
) -> Iterator[Candidate]:
    main, draft = trace.of(Role.MAIN), trace.of(Role.DRAFT)
    draft_fails = any(layer.verdict is Verdict.FAILS for layer in draft)
    main_fails = not main or any(layer.verdict is Verdict.FAILS for layer in main)
    speculates = any(flag.startswith("--speculative-") for flag in flags)
    # A draft decided without any argument: no flag can change it, so speculation has to go.
    fixed_draft = draft_fails and not any(layer.flags_consulted for layer in draft)
    plain = without_speculation(flags)
    bases = [(plain, _NO_DRAFT)] if fixed_draft else [(flags, "")]
    if not fixed_draft and speculates and (draft_fails or not draft):
        bases.append((plain, _NO_DRAFT))
    needs_backend = main_fails or clamp_lost
    ranks = _ranks_to_spread(trace)
    for base, suffix in bases:
        if ranks is not None:
            yield Candidate(f"{_EXPERT_RANKS} {ranks}{suffix}", (*base, _EXPERT_RANKS, str(ranks)))
        if base is plain and not main_fails:
            yield Candidate(f"the same flags{_NO_DRAFT}", plain)
        if needs_backend or (base is flags and draft_fails):
            own = without(base, (MAIN_FLAG, DRAFT_FLAG))
            if trace.arch.major == _SGLANGS_OWN and own != base:
                yield Candidate(f"no {MAIN_FLAG}{suffix}", own)
            for backend in backends:
                yield Candidate(f"{MAIN_FLAG} {backend}{suffix}", (*own, MAIN_FLAG, backend))


def _ranks_to_spread(trace: Trace) -> int | None:
    """The ranks that can each have whole experts, where the cut of one was too small for a kernel.

    None where that is not what stopped it, or experts are spread already."""
    ranks, spread = trace.resolved_args.get("tp_size"), trace.resolved_args.get("ep_size")
    cut = any(
        error.phase in ("main", "draft") and "intermediate" in error.message
        for error in trace.errors
    )
    return ranks if cut and isinstance(ranks, int) and ranks > 1 and spread == 1 else None


def outcome(
    candidate: Candidate, result: Trace | DoctorError, texts: Mapping[str, str], has_clamp: bool
) -> Alternative:
    """The candidate with what stands against it; `result` is its trace, judged.

    Its flags are for printing: secrets are redacted.
    """
    flags = redacted_flags(candidate.flags)
    if isinstance(result, DoctorError):
        return Alternative(candidate.change, flags, "the trace failed")
    problem = _problem(result, texts, has_clamp)
    return Alternative(candidate.change, flags, problem, result.layers)


def _problem(trace: Trace, texts: Mapping[str, str], has_clamp: bool) -> str | None:
    if trace.errors:
        return f"SGLang raises {trace.errors[0].type}"
    speculates = trace.resolved_args.get("speculative_algorithm") is not None
    roles = [Role.MAIN, Role.DRAFT] if speculates else [Role.MAIN]
    if trace.unresolved or not all(trace.of(role) for role in roles):
        return "the trace stopped short"
    for layer in trace.layers:
        if layer.verdict not in (Verdict.RUNS, Verdict.FALLBACK):
            return _trouble(layer)
        if has_clamp and drops_clamp(layer, text_at(texts, layer)):
            return DROPS_CLAMP
    failing = next(iter(trace.failing_paths), None)
    return f"{failing.role.value} {failing.name}: {failing.reason}" if failing else None


def _trouble(layer: Layer) -> str:
    if layer.error is not None:
        return f"SGLang raises {layer.error.type}"
    if layer.verdict is Verdict.UNKNOWN:
        return f"unknown: {layer.reason}"
    if format_needed(layer) is not None:
        return layer.reason
    kernel = layer.kernel.symbol.rpartition(".")[2] if layer.kernel else "its kernel"
    return f"{layer.role.value} experts still reach {kernel}"
