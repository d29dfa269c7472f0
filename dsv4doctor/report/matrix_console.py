"""A matrix of verdicts for the terminal."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dsv4doctor.matrix import TIERS_TEXT, Cell, FlagSet, Matrix
from dsv4doctor.models import Verdict
from dsv4doctor.report.console import Style, Unwrapped, printed
from dsv4doctor.report.matrix import MOST_CHOICES, Advice, roles, row

_STYLES = {
    Verdict.RUNS: "green",
    Verdict.FALLBACK: "yellow",
    Verdict.FAILS: "bold red",
    Verdict.UNKNOWN: "magenta",
}
_EVIDENCE = re.compile(r" \(table of known kernels[^()]*\)$")
_MOST_REASONS = 12


def as_console(matrix: Matrix, advice: Sequence[Advice], style: Style) -> str:
    """Tables, the reasons behind them, and the advice."""
    parts: list[Any] = [_legend(matrix.flag_sets)]
    for checkpoint in matrix.checkpoints:
        parts += [Text(""), Text(checkpoint, style="bold"), _table(matrix, checkpoint)]
        parts += _reasons(matrix, checkpoint, style.verbose)
    for advised in advice:
        parts += _advice_text(advised)
    parts += [Text(f"Note: {note}") for note in matrix.notes]
    if matrix.interrupted:
        parts.append(Text("Interrupted: this is what there was.", style="bold yellow"))
    return printed(parts, style)


def _table(matrix: Matrix, checkpoint: str) -> Table:
    """A line a release and flag set, a column a GPU, main before draft."""
    several = len(matrix.flag_sets) > 1
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("SGLang", no_wrap=True)
    if several:
        table.add_column("flags")
    for arch in matrix.archs:
        table.add_column(arch.name)
    for release in matrix.releases:
        for flag_set in matrix.flag_sets:
            cells = [_cell_text(one) for one in row(matrix, checkpoint, flag_set, release)]
            names = [release, flag_set.name] if several else [release]
            table.add_row(*map(Text, names), *cells)
    return table


def _cell_text(cell: Cell | None) -> Text:
    if cell is None:
        return Text("-")
    text = Text()
    for place, (_, part) in enumerate(roles(cell)):
        text.append(" / " if place else "")
        text.append(part.verdict.value, style=_STYLES[part.verdict])
    return text


def _legend(flag_sets: Sequence[FlagSet]) -> Table:
    """The flags of each set; what all of them have, and what all that speculate have, once."""
    parted = [_parted(one.flags) for one in flag_sets]
    several = len(parted) > 1
    shared = _common(parted) if several else []
    guessing = [parts for parts in parted if any(map(_speculates, parts))]
    guesses = [part for part in _common(guessing) if _speculates(part) and part not in shared]
    guesses = guesses if len(guessing) > 1 else []
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", overflow="fold")
    grid.add_column(style="cyan", overflow="fold", ratio=1)
    for name, parts in (("every set", shared), (_SPECULATION, guesses)):
        if parts:
            grid.add_row(name, _words_of(parts))
    for one, parts in zip(flag_sets, parted, strict=True):
        own = [part for part in parts if part not in shared and part not in guesses]
        said = [_SPECULATION] if guesses and guesses[0] in parts else []
        said += [_words_of(own)] if own else []
        grid.add_row(one.name, ", ".join(said) or ("nothing more" if parts else "no flags"))
    return grid


_SPECULATION = "speculation"


def _speculates(part: tuple[str, ...]) -> bool:
    return part[0].startswith("--speculative-") and "moe" not in part[0]


def _common(several: Sequence[list[tuple[str, ...]]]) -> list[tuple[str, ...]]:
    first = several[0] if several else []
    return [part for part in first if all(part in other for other in several)]


def _parted(flags: Sequence[str]) -> list[tuple[str, ...]]:
    """Each flag with its values."""
    found: list[tuple[str, ...]] = []
    for word in flags:
        if word.startswith("--") or not found:
            found.append((word,))
        else:
            found[-1] = (*found[-1], word)
    return found


def _words_of(parts: Sequence[tuple[str, ...]]) -> str:
    return shlex.join(word for part in parts for word in part)


def _hanging(label: Text, text: Text) -> Padding:
    """A label, and text that wraps under itself."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, min_width=8)
    grid.add_column(overflow="fold", ratio=1)
    grid.add_row(label, text)
    return Padding(grid, (0, 0, 0, 2))


def _reasons(matrix: Matrix, checkpoint: str, verbose: bool) -> Iterator[Text | Padding]:
    """Why, each reason once; without `verbose` not of what runs, and without the evidence."""
    found: dict[tuple[Verdict, str], list[str]] = {}
    for cell in matrix.cells:
        for _, part in roles(cell) if cell.key.checkpoint == checkpoint else ():
            if verbose or part.verdict is not Verdict.RUNS:
                reason = part.reason if verbose else _EVIDENCE.sub("", part.reason)
                where = found.setdefault((part.verdict, reason), [])
                where.append(f"{cell.key.release} {cell.key.arch.name}")
    listed = sorted(found.items(), key=lambda one: -len(one[1]))
    for (verdict, reason), where in listed if verbose else listed[:_MOST_REASONS]:
        places = list(dict.fromkeys(where))
        more = f" and {len(places) - 2} more" if len(places) > 2 else ""
        where_text = Text(f"({', '.join(places[:2])}{more}): {reason}")
        yield _hanging(Text(verdict.value, style=_STYLES[verdict]), where_text)
    if len(listed) > _MOST_REASONS and not verbose:
        yield Text(f"  and {len(listed) - _MOST_REASONS} more reasons: --verbose")


def _advice_text(one: Advice) -> Iterator[Text | Padding | Unwrapped]:
    yield Text("")
    yield Text(f"What to use on {one.arch.name}: {one.checkpoint}", style="bold")
    if one.caveat:
        yield Padding(Text(one.caveat, style="yellow"), (0, 0, 0, 2))
    if one.patch_command:
        yield Unwrapped(f"     {one.patch_command}")
    for place, choice in enumerate(one.choices[:MOST_CHOICES], 1):
        key = choice.cell.key
        said = Text(f"{place}. SGLang {key.release}, {key.flag_set}: {choice.why}")
        yield Padding(said, (0, 0, 0, 2))
        yield Unwrapped(f"     {one.command(choice)}")
    left = len(one.choices) - MOST_CHOICES
    if left > 0:
        yield Text(f"     {left} more work: --format json")
    if one.choices:
        yield Padding(Text(TIERS_TEXT), (0, 0, 0, 2))
