"""A comparison of prediction and recording, in its three formats."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dsv4doctor import __version__, jsonio
from dsv4doctor.drift import Comparison, Difference, Standing
from dsv4doctor.report.console import Style, printed

SCHEMA = "dsv4doctor-diff/1"
_STYLES = {Standing.DRIFT: "bold red", Standing.UNKNOWN: "yellow", Standing.SAME: "green"}
_TITLES = {Standing.DRIFT: "Drift", Standing.UNKNOWN: "Not known"}


def as_json(comparison: Comparison) -> str:
    return jsonio.dump(
        {
            "schema": SCHEMA,
            "tool": {"name": "dsv4doctor", "version": __version__},
            "exit_code": comparison.exit_code,
            "differences": [jsonio.to_plain(one) for one in comparison.differences],
            "not_recorded": list(comparison.not_recorded),
        }
    )


def as_console(comparison: Comparison, color: bool) -> str:
    parts: list[RenderableType] = []
    for standing in (Standing.DRIFT, Standing.UNKNOWN):
        found = comparison.of(standing)
        if found:
            parts += [Text(_TITLES[standing], style=_STYLES[standing]), _table(found), Text()]
    same = len(comparison.of(Standing.SAME))
    parts.append(Text(f"{same} of {len(comparison.differences)} as predicted", style="bold"))
    if comparison.not_recorded:
        parts.append(Text(f"not recorded: {', '.join(comparison.not_recorded)}", style="dim"))
    return printed(parts, Style(100, color))


def _table(found: tuple[Difference, ...]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold")
    for one in found:
        grid.add_row(f"  {one.subject}", f"{one.what}: {_sides(one)}")
    return grid


def _sides(one: Difference) -> str:
    text = f"predicted {one.predicted or '-'}, recorded {one.recorded or '-'}"
    return f"{text} ({one.reason})" if one.reason else text


def as_markdown(comparison: Comparison) -> str:
    lines = ["| | subject | what | predicted | recorded |", "| --- | --- | --- | --- | --- |"]
    for standing in (Standing.DRIFT, Standing.UNKNOWN):
        for one in comparison.of(standing):
            cells = (standing.value, one.subject, one.what, one.predicted, one.recorded)
            lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    same = len(comparison.of(Standing.SAME))
    lines += ["", f"{same} of {len(comparison.differences)} as predicted."]
    if comparison.not_recorded:
        lines.append(f"Not recorded: {', '.join(comparison.not_recorded)}.")
    return "\n".join(lines) + "\n"


def _cell(text: str | None) -> str:
    return " ".join((text or "-").split()).replace("|", "\\|")
