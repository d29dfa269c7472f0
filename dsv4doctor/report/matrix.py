"""A matrix of verdicts as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv4doctor import __version__, jsonio
from dsv4doctor.matrix import TIERS_TEXT, Cell, Choice, FlagSet, Key, Matrix, Part
from dsv4doctor.matrix_fix import Patch
from dsv4doctor.models import Arch, Verdict

SCHEMA = "dsv4doctor-matrix/1"
MARKS = {Verdict.RUNS: "✓", Verdict.FALLBACK: "~", Verdict.FAILS: "✕", Verdict.UNKNOWN: "?"}
_SPECIAL = re.compile(r"[\\`*_\[\]<>|~@#!&$]")
MOST_CHOICES = 3


@dataclass(frozen=True)
class Advice:
    """What to choose for one GPU and checkpoint; no choices: nothing in the matrix works."""

    arch: Arch
    checkpoint: str
    model: str
    """As the launch names it."""
    choices: tuple[Choice, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """The launch's own variables."""
    left_out: tuple[str, ...] = ()
    """What would run the experts and fails in another hot path."""
    cautions: tuple[str, ...] = ()
    """What choices take for granted."""
    patch: Patch | None = None
    """Fixes with which a draft would run."""

    def command(self, choice: Choice) -> str:
        """The launch as a shell line."""
        before = "".join(f"{name}={shlex.quote(v)} " for name, v in self.environment.items())
        words = ["python", "-m", "sglang.launch_server", "--model-path", self.model]
        return before + shlex.join([*words, *choice.flags])

    @property
    def caveat(self) -> str | None:
        said = []
        if not self.choices:
            said.append("Nothing in this matrix runs main and draft on it.")
        elif self.choices[0].cell.draft is None:
            said.append("Without speculative decoding: no draft model in this matrix runs.")
        if self.left_out:
            said.append(
                f"Left out for a hot path that fails: {'; '.join(self.left_out)}. "
                "`dsv4doctor check` of that launch names a way out, if there is one."
            )
        said += self.cautions
        said += [self.patch.text] if self.patch else []
        return " ".join(said) or None

    @property
    def patch_command(self) -> str | None:
        return self.patch.command(self.model, self.environment) if self.patch else None


def counted(matrix: Matrix) -> str:
    """The matrix in one line."""
    counts = {verdict: 0 for verdict in Verdict}
    for cell in matrix.cells:
        counts[cell.verdict] += 1
    said = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count)
    missing = _size(matrix) - len(matrix.cells)
    return f"{said or 'no cells'}{f', {missing} not reached' if missing else ''}"


def _size(matrix: Matrix) -> int:
    return (
        len(matrix.releases) * len(matrix.archs) * len(matrix.checkpoints) * len(matrix.flag_sets)
    )


# ------------------------------------------------------------------------------ JSON, CSV


def as_json(matrix: Matrix, advice: Sequence[Advice]) -> str:
    """docs/matrix.schema.json."""
    return jsonio.dump(
        {
            "schema": SCHEMA,
            "tool_version": __version__,
            "releases": list(matrix.releases),
            "archs": [arch.name for arch in matrix.archs],
            "checkpoints": list(matrix.checkpoints),
            "flag_sets": [{"name": one.name, "flags": list(one.flags)} for one in matrix.flag_sets],
            "cells": [_cell(cell) for cell in matrix.cells],
            "recommendations": [_advice(one) for one in advice],
            "notes": list(matrix.notes),
            "interrupted": matrix.interrupted,
        }
    )


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "release": cell.key.release,
        "arch": cell.key.arch.name,
        "checkpoint": cell.key.checkpoint,
        "flag_set": cell.key.flag_set,
        "verdict": cell.verdict.value,
        "works": cell.works,
        "traced": cell.traced,
        "path_problem": cell.path_problem,
        "main": jsonio.to_plain(cell.main),
        "draft": jsonio.to_plain(cell.draft) if cell.draft else None,
    }


def _advice(one: Advice) -> dict[str, Any]:
    return {
        "arch": one.arch.name,
        "checkpoint": one.checkpoint,
        "caveat": one.caveat,
        "patch": one.patch_command,
        "choices": [
            {
                "release": choice.cell.key.release,
                "flag_set": choice.cell.key.flag_set,
                "why": choice.why,
                "command": one.command(choice),
            }
            for choice in one.choices
        ],
    }


_COLUMNS = ("release", "arch", "checkpoint", "flag_set", "role", "verdict", "works", "reason")
_PART = ("layers", "stored_format", "quant_method", "runner_backend", "kernel", "decided_at")


def as_csv(matrix: Matrix) -> str:
    """A line a model: two a cell where there is a draft."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_COLUMNS, *_PART])
    for cell in matrix.cells:
        key = cell.key
        for role, part in roles(cell):
            plain = jsonio.to_plain(part)
            start = [key.release, key.arch.name, key.checkpoint, key.flag_set, role]
            judged = [part.verdict.value, str(cell.works).lower(), _plain(part.reason)]
            writer.writerow([*start, *judged, *(_plain(plain[name] or "") for name in _PART)])
    return out.getvalue()


def _plain(value: str) -> str:
    """Never a formula: a spreadsheet computes what starts like one."""
    return f"'{value}" if value[:1] in ("=", "+", "-", "@") else value


def roles(cell: Cell) -> Iterator[tuple[str, Part]]:
    yield "main", cell.main
    if cell.draft is not None:
        yield "draft", cell.draft


# ------------------------------------------------------------------------------ tables


def tables(matrix: Matrix) -> Iterator[tuple[str, FlagSet]]:
    """(checkpoint, flag set) of each table, in the order to print them."""
    for checkpoint in matrix.checkpoints:
        for flag_set in matrix.flag_sets:
            yield checkpoint, flag_set


def row(matrix: Matrix, checkpoint: str, flag_set: FlagSet, release: str) -> list[Cell | None]:
    return [matrix.at(Key(release, arch, checkpoint, flag_set.name)) for arch in matrix.archs]


def reasons(
    matrix: Matrix, checkpoint: str, flag_set: FlagSet, hidden: Sequence[Verdict] = ()
) -> list[tuple[str, Part, list[str]]]:
    """(role, one of the parts, where) for each distinct reason, the most frequent first."""
    found: dict[tuple[str, Verdict, str], tuple[Part, list[str]]] = {}
    for cell in matrix.cells:
        if cell.key.checkpoint == checkpoint and cell.key.flag_set == flag_set.name:
            for role, part in roles(cell):
                if part.verdict not in hidden:
                    key = (role, part.verdict, part.reason)
                    place = f"{cell.key.release} {cell.key.arch.name}"
                    found.setdefault(key, (part, []))[1].append(place)
    listed = [(role, part, where) for (role, _, _), (part, where) in found.items()]
    return sorted(listed, key=lambda one: -len(one[2]))


def as_markdown(matrix: Matrix, advice: Sequence[Advice]) -> str:
    parts = [f"## dsv4doctor matrix\n\n{_escaped(counted(matrix))}"]
    for checkpoint, flag_set in tables(matrix):
        parts.append(f"### {_escaped(checkpoint)}\n\n{_flags_line(flag_set)}")
        heads = ["SGLang", *(arch.name for arch in matrix.archs)]
        lines = [" | ".join(map(_escaped, heads)), " | ".join("---" for _ in heads)]
        for release in matrix.releases:
            cells = [_words(cell) for cell in row(matrix, checkpoint, flag_set, release)]
            lines.append(" | ".join([_escaped(release), *cells]))
        parts.append("\n".join(f"| {line} |" for line in lines))
        said = [
            f"- {role} **{part.verdict.value}** ({len(where)} cells, e.g. {_escaped(where[0])}): "
            f"{_escaped(part.reason)}"
            for role, part, where in reasons(matrix, checkpoint, flag_set, (Verdict.RUNS,))
        ]
        if said:
            parts.append("\n".join(said))
    for one in advice:
        parts.append("\n".join(_advice_markdown(one)))
    parts += [f"Note: {_escaped(note)}" for note in matrix.notes]
    return "\n\n".join(parts) + "\n"


def _flags_line(flag_set: FlagSet) -> str:
    flags = shlex.join(flag_set.flags)
    return f"Flags ({_escaped(flag_set.name)}): {_code(flags) if flags else 'none'}"


def _code(text: str) -> str:
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def _advice_markdown(one: Advice) -> Iterator[str]:
    yield f"### What to use on {one.arch.name}: {_escaped(one.checkpoint)}\n"
    if one.caveat:
        yield f"{_escaped(one.caveat)}\n"
    if one.patch_command:
        yield f"{_code(one.patch_command)}\n"
    for place, choice in enumerate(one.choices[:MOST_CHOICES], 1):
        yield f"{place}. SGLang {_escaped(choice.cell.key.release)}: {_escaped(choice.why)}  "
        yield f"   {_code(one.command(choice))}"
    if one.choices:
        yield f"\n{_escaped(TIERS_TEXT)}"


def _words(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return " / ".join(f"{MARKS[part.verdict]} {part.verdict.value}" for _, part in roles(cell))


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda found: "\\" + found[0], " ".join(text.split()))
