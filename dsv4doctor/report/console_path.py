"""The decision path for people in a terminal: every condition met, and what it came to."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from dsv4doctor.folding import LayerRange, fold
from dsv4doctor.models import Location, Step, Trace

_LEGEND = (
    "yes, no: the way it went, in a loop the last time; ?: it was asked, and which way it went was "
    "not seen"
)


def decision_path(trace: Trace | None) -> Iterator[RenderableType]:
    """Each dispatch function with its conditions; for main and draft at the end the line that
    decided and the call that reached the kernel."""
    yield Text("Decision path", style="bold")
    steps = trace.steps if trace else ()
    if steps:
        yield Padding(Text(_LEGEND, style="dim"), (0, 0, 0, 2))
    layers = fold(trace.layers) if trace else ()
    for phase in dict.fromkeys(step.phase for step in steps):
        for step in steps:
            if step.phase == phase:
                yield Padding(_step(step), (0, 0, 0, 2))
        for layer_range in layers:
            if layer_range.layer.role.value == phase:
                yield Padding(_end(layer_range), (0, 0, 0, 2))


def _step(step: Step) -> RenderableType:
    times = f" x{step.times}" if step.times > 1 else ""
    returned = f" -> {step.returned}" if step.returned not in (None, "None") else ""
    head = Text.assemble(
        (f"{step.phase}  ", "dim"),
        (step.function, "bold"),
        f"{times}{returned}  ",
        (step.file, "dim"),
        overflow="fold",
    )
    lines: list[RenderableType] = [head]
    for branch in step.branches:
        taken = {True: "yes", False: "no", None: "?"}[branch.taken]
        said = f"{_short(branch.location)}  {branch.condition}  {taken}"
        lines.append(Padding(Text(said, overflow="fold"), (0, 0, 0, 2)))
        values = ", ".join(f"{name} = {value}" for name, value in branch.values.items())
        if values:
            lines.append(Padding(Text(values, style="dim", overflow="fold"), (0, 0, 0, 6)))
    return Group(*lines)


def _end(layers: LayerRange) -> RenderableType:
    layer = layers.layer
    lines: list[RenderableType] = [
        Text.assemble(
            (f"{layer.role.value}  ", "dim"),
            (layers.name, "bold"),
            f" is {layer.quant_method or 'not decided'}",
            overflow="fold",
        )
    ]
    where = [("decided at", layer.decided_at)]
    if layer.kernel is not None:
        where.append((f"{layer.kernel.symbol} called at", layer.kernel.call_site))
    for what, location in where:
        if location is not None:
            source = f"  {location.source}" if location.source else ""
            text = f"{what} {location.file}:{location.line}{source}"
            lines.append(Padding(Text(text, overflow="fold"), (0, 0, 0, 2)))
    return Group(*lines)


def _short(location: Location) -> str:
    return f"{location.file.rpartition('/')[2]}:{location.line}"
