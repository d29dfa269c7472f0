"""Variables and flags for a launch with a hot path that does not run, traced like the launch.

What is worth trying is what SGLang's own code read on its way to the kernel: its switches, turned
the other way.  A prompt that is cut into shorter chunks may take another way too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dsv4doctor.errors import DoctorError
from dsv4doctor.facts.snapshot import redacted_flags
from dsv4doctor.flags import without
from dsv4doctor.models import Alternative, Trace, Verdict
from dsv4doctor.rules.common import TRITON_MLA, is_true

_CHUNK = "--chunked-prefill-size"
_SHORTER = 8192
_SWITCH = ("True", "False")
_MOST = 6
_RUN = (Verdict.RUNS, Verdict.FALLBACK)


def path_candidates(
    trace: Trace,
    flags: tuple[str, ...],
    environment: Mapping[str, str],
    defaults: Mapping[str, str],
) -> tuple[Alternative, ...]:
    """What is worth trying in place of `flags`, which resolved to `trace`; the smallest first.

    `environment`: the server's variables; `defaults`: SGLang's own, as its source has them.
    """
    found = tuple(_candidates(trace, flags, environment, defaults))
    # With too many to try all, those that hold several others are not the ones to leave out.
    several = [one for one in found if len(one.environment) > 1]
    single = [one for one in found if len(one.environment) <= 1][: _MOST - len(several)]
    return tuple(one for one in found if one in several or one in single)


def _candidates(
    trace: Trace,
    flags: tuple[str, ...],
    environment: Mapping[str, str],
    defaults: Mapping[str, str],
) -> Iterator[Alternative]:
    paths = trace.failing_paths
    read = dict.fromkeys(name for path in paths for name in path.flags_consulted)
    values = {
        name: value
        for name in read
        if (value := _other(name, environment.get(name, defaults.get(name)), defaults)) is not None
    }
    switches = [
        Alternative(f"{name}={value}", flags, None, environment={name: value})
        for name, value in values.items()
    ]
    if len(switches) > 1:  # each may be what one of several paths hangs on
        every = " and ".join(one.change for one in switches)
        switches.append(Alternative(every, flags, None, environment=values))
    yield from switches
    size = trace.resolved_args.get("chunked_prefill_size")
    is_long = not isinstance(size, int) or not 0 < size <= _SHORTER
    if is_long and any(path.name.endswith("-prefill") for path in paths):
        change = f"{_CHUNK} {_SHORTER}"
        cut = (*without(flags, (_CHUNK,)), *change.split())
        yield Alternative(change, cut, None)
        for one in switches:
            yield replace(one, change=f"{one.change} and {change}", flags=cut)


def _other(name: str, value: str | None, defaults: Mapping[str, str]) -> str | None:
    """What a variable that is `value` can be instead; None: nothing that is known."""
    backend, _, triton = TRITON_MLA.partition("=")
    if name == backend:
        return triton if value != triton else None
    if defaults.get(name) not in _SWITCH:
        return None
    return "0" if is_true(value) else "1"


def path_outcome(candidate: Alternative, result: Trace | DoctorError, before: Trace) -> Alternative:
    """The candidate with what stands against it; `result` is its trace and `before` the one
    without it, both judged.  Its flags are for printing: secrets are redacted."""
    problem = "the trace failed" if isinstance(result, DoctorError) else _problem(result, before)
    return replace(candidate, flags=redacted_flags(candidate.flags), problem=problem)


def _problem(trace: Trace, before: Trace) -> str | None:
    if trace.errors:
        return f"SGLang raises {trace.errors[0].type}"
    if trace.unresolved:
        return "the trace stopped short"
    for path in trace.failing_paths:
        return f"{path.role.value} {path.name}: {path.reason}"
    for wanted in before.failing_paths:
        found = [
            path for path in trace.paths if (path.role, path.name) == (wanted.role, wanted.name)
        ]
        unknown = [path for path in found if path.verdict is Verdict.UNKNOWN]
        if unknown or not found:
            reason = unknown[0].reason if unknown else "it was not reached"
            return f"{wanted.role.value} {wanted.name}: {reason}"
    return _lost_experts(trace, before)


def _lost_experts(trace: Trace, before: Trace) -> str | None:
    """The routed experts that ran before and are not known to run any more."""
    now = {(layer.role, layer.name): layer for layer in trace.layers}
    for layer in before.layers:
        if layer.verdict not in _RUN:
            continue
        found = now.get((layer.role, layer.name))
        if found is None or found.verdict not in _RUN:
            reason = "they were not built" if found is None else found.reason
            return f"{layer.role.value} experts: {reason}"
    return None
