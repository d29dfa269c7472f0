"""What is said beside a plan or a proof: our kernels to verify, and what stays as it is.

A trace runs no kernel and asks for no stamp.  Routed experts on our kernel have no other right
path: without its stamp the server stops.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from dsv4doctor.fixes.fix import Change, Fix
from dsv4doctor.models import Facts, Trace
from dsv4doctor.patching import disk
from dsv4doctor.patching.plan import Plan
from dsv4doctor.patching.proof import named
from dsv4doctor.verdicts import known_kernel

_COMMAND = "kernels verify --only"
_IN_REASON = re.compile(rf"{_COMMAND} (\w+)")
_IN_SOURCE = re.compile(rb"from dsv4doctor\.kernels\.adapters\.(moe_\w+) import")


def summary(change: Change, verified: Mapping[str, str]) -> str:
    """What the fix changes, and what it takes on the serving machine.

    `verified`: our kernels that were verified on it, if it is this one, and the day.
    """
    asks = change.asks
    if asks is None:
        return change.summary
    command = f"`dsv4doctor {_COMMAND} {asks.operation}`"
    if (day := verified.get(asks.operation)) is not None:
        said = f"The kernel was verified on this machine on {day}."
    elif asks.stops:
        stops = _stops(asks.operation)
        said = f"{stops[0].upper()}{stops[1:]}."
    else:
        said = f"Until {command} on the serving machine SGLang's own path stays in use."
    return f"{change.summary} {said}"


def of_plan(planned: Plan, facts: Facts, verified: Mapping[str, str]) -> list[str]:
    """Of the layers that go to our kernels, and those that are there already.

    `verified`: as of `summary`.
    """
    wanted = _experts(facts.trace)
    for step in planned.steps:
        if step.aim is not None and step.aim.operation is not None:
            wanted.setdefault(step.aim.operation, []).extend(step.aimed)
    return list(_stopping(wanted, verified))


def of_trace(after: Facts | None) -> list[str]:
    """What the trace of a patched tree cannot prove: our kernels' numbers on the GPU."""
    if after is None or after.trace is None:
        return []
    wanted = _experts(after.trace)
    on_paths = (name for path in after.trace.paths for name in _IN_REASON.findall(path.reason))
    found = sorted({*wanted, *on_paths})
    if not found:
        return []
    only = " ".join(f"--only {name}" for name in found)
    run = f"run this on the serving machine before the server: dsv4doctor kernels verify {only}"
    return [*_stopping(wanted), run]


def of_tree(
    root: Path,
    fixes: Sequence[Fix],
    verified: Mapping[str, str],
    stops_for: Sequence[str] | None = None,
) -> list[str]:
    """The same of the code that is in a tree, of the kernels in `stops_for` only.

    None: which launches come by it is not known.  `verified`: as of `summary`.
    """
    files = (disk.read(root / name) for name in dict.fromkeys(n for f in fixes for n in f.files))
    contents = [file.content for file in files if file is not None]
    found = {name.decode() for content in contents for name in _IN_SOURCE.findall(content)}
    return [
        f"routed experts that go to dsv4doctor's own kernel: {_said(name, verified)}"
        for name in sorted(found)
        if stops_for is None or name in stops_for
    ]


def stops_for(trace: Trace) -> tuple[str, ...]:
    """Our kernels that the launch's routed experts go to, verified here or not: a stamp may age."""
    kernels = (known_kernel(layer) for layer in trace.layers)
    return tuple(sorted({one.operation for one in kernels if one and one.operation}))


def left_open(planned: Plan, facts: Facts) -> list[str]:
    """What the fixes leave as it is in this launch."""
    said = (step.fix.leaves(facts, step.outcome) for step in planned.steps)
    return [text for text in said if text is not None]


def _experts(trace: Trace | None) -> dict[str, list[str]]:
    """Operation -> the layers whose kernel it is, where it was not verified on this machine."""
    wanted: dict[str, list[str]] = {}
    for layer in trace.layers if trace else ():
        for name in _IN_REASON.findall(layer.reason):
            wanted.setdefault(name, []).append(layer.name)
    return wanted


def _stopping(
    wanted: Mapping[str, Sequence[str]], verified: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    for operation, layers in sorted(wanted.items()):
        yield f"{named(layers)} on dsv4doctor's own kernel: {_said(operation, verified)}"


def _said(operation: str, verified: Mapping[str, str]) -> str:
    day = verified.get(operation)
    return f"verified on this machine on {day}" if day is not None else _stops(operation)


def _stops(operation: str) -> str:
    return (
        "the server stops while it builds the model until "
        f"`dsv4doctor {_COMMAND} {operation}` was run on the serving machine"
    )
