"""The routed experts of the report for people: a table where it fits, else a block each."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dsv4doctor.errors import cut
from dsv4doctor.folding import LayerRange, fold
from dsv4doctor.models import Facts, Layer, Location, Verdict
from dsv4doctor.verdicts import NO_CLAMP

WIDE = 160
"""Columns from which the layers are a table where it fits; else they are a block each."""

_VERDICT_STYLES = {
    Verdict.RUNS: "green",
    Verdict.FALLBACK: "yellow",
    Verdict.FAILS: "bold red",
    Verdict.UNKNOWN: "yellow",
}


def pairs(rows: list[tuple[str, str | Text]]) -> Table:
    """Labels on the left, text that wraps under itself on the right."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, text)
    return grid


def layer_parts(facts: Facts, width: int) -> Iterator[RenderableType]:
    trace = facts.trace
    yield Text("Routed experts", style="bold")
    if trace is None:
        yield Text(f"  not traced: {facts.trace_failure}")
        return
    ranges = fold(trace.layers)
    if not ranges:
        yield Text("  none: SGLang built no such layer")
    elif width >= WIDE and _natural_width(table := _table(ranges)) + 2 <= width:
        yield Padding(table, (0, 0, 0, 2))
        whys = [(one.name, one.layer.reason) for one in ranges if _has_why(one.layer)]
        if whys:
            yield Padding(pairs([(f"why {name}", reason) for name, reason in whys]), (0, 0, 0, 2))
    else:
        for layers in ranges:
            yield from _block(layers)
    for error in trace.errors:
        said = cut(error.message.strip().partition("\n")[0], 300)
        text = f"{error.phase}: stops with {error.type}{f': {said}' if said else ''}"
        yield Padding(Text(text, style="bold red", overflow="fold"), (0, 0, 0, 2))
    for text in trace.unresolved:
        yield Padding(Text(f"not determined: {text}", style="yellow"), (0, 0, 0, 2))


def _natural_width(table: Table) -> int:
    """The columns that `table` takes with no cell folded."""
    console = Console(width=9999)
    return Measurement.get(console, console.options, table).maximum


def _table(ranges: tuple[LayerRange, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in ("layer", "role", "stored", "quant method", "runner"):
        table.add_column(heading, overflow="fold")
    for heading in ("kernel", "decided at", "flags read"):
        table.add_column(heading, overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for layers in ranges:
        layer = layers.layer
        table.add_row(
            layers.name,
            layer.role.value,
            _stored(layer),
            layer.quant_method or "-",
            layer.runner_backend or "-",
            layer.kernel.symbol.rpartition(".")[2] if layer.kernel else "-",
            _short(layer.decided_at),
            "\n".join(layer.flags_consulted) or "none",
            _verdict(layer),
        )
    return table


def _block(layers: LayerRange) -> Iterator[RenderableType]:
    layer = layers.layer
    count = f" ({layers.count} layers)" if layers.count > 1 else ""
    yield Padding(
        Text.assemble(
            _verdict(layer), f"  {layer.role.value}  ", (layers.name, "bold"), (count, "dim")
        ),
        (0, 0, 0, 2),
    )
    rows: list[tuple[str, str | Text]] = [
        ("stored", _stored(layer)),
        ("method", layer.quant_method or "-"),
        ("runner", layer.runner_backend or "-"),
        ("kernel", layer.kernel.symbol if layer.kernel else "-"),
        ("decided at", place(layer.decided_at)),
        ("flags read", ", ".join(layer.flags_consulted) or "none"),
    ]
    if _has_why(layer):
        rows.append(("why", layer.reason))
    yield Padding(pairs(rows), (0, 0, 0, 6))


def _has_why(layer: Layer) -> bool:
    return layer.verdict is not Verdict.RUNS or layer.reason.startswith(NO_CLAMP)


def _stored(layer: Layer) -> str:
    return layer.stored_format.value if layer.stored_format else "-"


def _verdict(layer: Layer) -> Text:
    return Text(layer.verdict.value, style=_VERDICT_STYLES[layer.verdict])


def place(location: Location | None) -> str:
    return f"{location.file}:{location.line}" if location else "-"


def _short(location: Location | None) -> str:
    """The file's own name and the line; the whole path is in the narrow layout and in JSON."""
    return f"{location.file.rpartition('/')[2]}:{location.line}" if location else "-"
