"""The tables of `dsv4doctor kernels`."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence

from dsv4doctor.terminal import width


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table, or where no word of it would stay whole, a block a row.

    Without a terminal as wide as COLUMNS says, or 200."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    is_terminal = sys.stdout.isatty()
    columns = width(is_terminal) if is_terminal or "COLUMNS" in os.environ else 200
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    needed = 0
    for title, cells in zip(head, zip(*rows, strict=True), strict=False):
        prose = any(" " in line for cell in cells for line in cell.splitlines())
        drawn.add_column(title, no_wrap=not prose)
        words = [word for text in (title, *cells) for word in text.split()]
        needed += max(map(len, words), default=0) + 2
    if needed > columns:
        return "\n".join(_block(head, row, columns) for row in rows)
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    console = Console(file=sys.stdout, width=columns)
    with console.capture() as capture:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _block(head: Sequence[str], row: Sequence[str], columns: int) -> str:
    """One row, a cell below the other; no word is broken, however narrow the terminal."""
    wide = max(map(len, head)) + 2
    lines = [row[0]]
    for title, cell in zip(head[1:], row[1:], strict=True):
        for line in cell.splitlines():
            pieces = textwrap.wrap(
                line, max(columns - wide - 2, 20), break_long_words=False, break_on_hyphens=False
            )
            for piece in pieces:
                lines.append(f"  {title:<{wide}}{piece}")
                title = ""
    return "\n".join(lines)
