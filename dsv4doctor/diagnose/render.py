"""The diagnosis for people and for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from io import StringIO
from typing import Any

from rich.console import Console
from rich.text import Text

from dsv4doctor import __version__
from dsv4doctor.diagnose.evidence import Evidence, evidence
from dsv4doctor.diagnose.judge import Diagnosis, Match, RankedCause
from dsv4doctor.diagnose.lines import Line, rank_number
from dsv4doctor.diagnose.signature import CONSEQUENCE, NOTE
from dsv4doctor.jsonio import dump, to_plain
from dsv4doctor.models import SglangTree

SCHEMA = "dsv4doctor-diagnosis-1"
_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
_OUTCOMES = {0: "clean", 1: "cause", 3: "unexplained"}
_SHOWN_ERRORS = 10
_COMMAND = "command"
"""The style of a row that is a command."""


def outcome(diagnosis: Diagnosis) -> str:
    """ "clean", "cause" or "unexplained"."""
    return _OUTCOMES[diagnosis.exit_code]


def summary(diagnosis: Diagnosis) -> str:
    """One line for standard error."""
    found = [match for match in diagnosis.matches if match.signature.tier < CONSEQUENCE]
    if found:
        top = found[0]
        return f"{top.signature.id}: {top.signature.title}, line {top.line.number}"
    if diagnosis.unexplained:
        return f"an error that no signature explains, line {diagnosis.unexplained[0].number}"
    notes = [match for match in diagnosis.matches if match.signature.tier == NOTE]
    if notes:
        return f"nothing wrong found; a note: {notes[0].signature.id}, {notes[0].signature.title}"
    return "nothing wrong found"


# ------------------------------------------------------------------------------ console


def console(diagnosis: Diagnosis, tree: SglangTree | None, width: int, color: bool) -> str:
    """The diagnosis, `width` columns; ANSI colours only with `color`."""
    out = Console(
        file=StringIO(),
        width=width,
        color_system="standard" if color else None,
        force_terminal=color,
        highlight=False,
    )
    for style, indent, text in _console_lines(diagnosis, tree):
        space = " " * indent
        lines = textwrap.wrap(text, max(width - indent, 30), break_on_hyphens=False) or [""]
        if style == _COMMAND:  # it has to be whole when it is copied
            lines, style = [text], ""
        for line in lines:
            out.print(Text(space + line, style=style), soft_wrap=True)
    assert isinstance(out.file, StringIO)
    return out.file.getvalue()


_Row = tuple[str, int, str]
"""Style, indent, text."""


def _console_lines(diagnosis: Diagnosis, tree: SglangTree | None) -> Iterator[_Row]:
    yield "bold", 0, _header(diagnosis)
    if diagnosis.launch is not None:
        yield "", 0, _launch(diagnosis)
    for note in diagnosis.notes:
        yield "dim", 0, f"note: {note}"
    yield "", 0, ""
    if diagnosis.first is not None:
        yield "bold", 0, f"First sign of trouble: {_at(diagnosis.first)}"
        yield "", 2, _shown(diagnosis.first)
        yield "", 0, ""
    roots = [match for match in diagnosis.matches if match.signature.tier < CONSEQUENCE]
    for number, match in enumerate(roots):
        yield from _match_lines(match, tree, is_main=number == 0)
    if not roots and not diagnosis.unexplained:
        yield "", 0, "Nothing wrong found: no error, and none of the known failures."
    if diagnosis.unexplained:
        yield from _unexplained_lines(diagnosis)
    for match in diagnosis.matches:
        if match.signature.tier == CONSEQUENCE:
            yield "dim", 0, f"line {match.line.number}: {match.message}"
        elif match.signature.tier == NOTE:
            yield from _note_lines(match)


def _header(diagnosis: Diagnosis) -> str:
    facts = diagnosis.facts
    parts = [f"{diagnosis.source}: {diagnosis.lines} lines"]
    named = {"sglang": "SGLang", "vllm": "vLLM", "tensorrt-llm": "TensorRT-LLM"}
    version = f" {facts.sglang}" if facts.sglang and facts.engine == "sglang" else ""
    if facts.engine in ("vllm", "tensorrt-llm"):
        parts.append(f"log of another engine, {named[facts.engine]}: only shared causes are known")
    elif facts.engine == "sglang":
        parts.append(f"SGLang{version or ', release not in the log'}")
    if facts.flashinfer:
        parts.append(f"FlashInfer {facts.flashinfer}")
    if facts.arch:
        parts.append(f"{facts.arch} (from {facts.arch_source})")
    return "; ".join(parts)


def _launch(diagnosis: Diagnosis) -> str:
    found = diagnosis.launch
    assert found is not None
    kind = "command" if found.is_command else "arguments as SGLang resolved them"
    return (
        f"Launch (line {found.line}, {kind}): {found.launch.model or 'model not in the log'} "
        f"{' '.join(found.launch.flags)}"
    )


def _match_lines(match: Match, tree: SglangTree | None, is_main: bool) -> Iterator[_Row]:
    lead = "Most likely root" if is_main else "Also"
    title = f"{lead}: {match.signature.title} [{match.signature.id}]"
    yield _STYLES[match.signature.severity.value], 0, title
    yield "", 2, f"{_at(match.line)}{_where(match)}: {match.message}"
    yield "dim", 2, f"log: {_shown(match.line)}"
    for number, cause in enumerate(match.causes, 1):
        yield from _cause_lines(number, cause, is_first=number == 1)
    if tree is not None:
        for item in evidence(match, tree):
            yield "", 2, _evidence(item)
    yield "dim", 2, f"releases: {match.signature.releases}"
    for link in match.signature.links[:3]:
        yield "dim", 2, link
    yield "", 0, ""


def _cause_lines(number: int, cause: RankedCause, is_first: bool) -> Iterator[_Row]:
    yield "bold" if is_first else "", 2, f"cause {number} ({cause.confidence}): {cause.text}"
    if cause.seen_for:
        yield "", 6, f"for: {'; '.join(cause.seen_for)}"
    if cause.seen_against:
        yield "", 6, f"against: {'; '.join(cause.seen_against)}"
    yield "green" if is_first else "", 6, f"fix: {cause.remedy}"
    for command in cause.commands:
        yield _COMMAND, 10, command


def _evidence(item: Evidence) -> str:
    place = item.location
    inside = f" in {place.function}" if place.function else ""
    return f"{place.file}:{place.line}{inside}: {place.source or ''} ({item.note})"


def _unexplained_lines(diagnosis: Diagnosis) -> Iterator[_Row]:
    count = len(diagnosis.unexplained)
    lines = "line" if count == 1 else "lines"
    yield "bold red", 0, f"{count} error {lines} that no signature explains:"
    for line in diagnosis.unexplained[:_SHOWN_ERRORS]:
        yield "", 2, f"{_at(line)}: {_shown(line)}"
    if count > _SHOWN_ERRORS:
        yield "", 2, f"and {count - _SHOWN_ERRORS} more"


def _note_lines(match: Match) -> Iterator[_Row]:
    """What slows a server that works."""
    title = f"note: {match.signature.title} [{match.signature.id}]"
    yield "cyan", 0, title
    yield "", 2, f"{_at(match.line)}{_where(match)}: {match.message}"
    yield "", 2, f"fix: {match.causes[0].remedy}"


def _where(match: Match) -> str:
    parts = []
    if match.role is not None:
        parts.append(f"{match.role} model")
    if match.layer is not None:
        parts.append(f"layer {match.layer}")
    if match.count > 1:
        ranks = f" on {len(match.ranks)} ranks" if len(match.ranks) > 1 else ""
        parts.append(f"{match.count} times{ranks}")
    distinct = max((len(values) for values in match.values.values()), default=0)
    if distinct > 1:
        parts.append(f"{distinct} different values")
    return f" ({', '.join(parts)})" if parts else ""


def _at(line: Line) -> str:
    rank = f", {line.rank}" if line.rank else ""
    time = f", {line.time}" if line.time else ""
    return f"line {line.number}{time}{rank}"


def _shown(line: Line) -> str:
    text = "".join(char if char.isprintable() else " " for char in line.text.strip())
    return text if len(text) <= 400 else f"{text[:400]}…"


# ------------------------------------------------------------------------------ JSON


def as_json(diagnosis: Diagnosis, tree: SglangTree | None, checked: dict[str, Any] | None) -> str:
    """The diagnosis in the format of docs/diagnose.md; `checked` is check's report, or None."""
    facts, found = diagnosis.facts, diagnosis.launch
    return dump(
        {
            "schema": SCHEMA,
            "tool_version": __version__,
            "outcome": outcome(diagnosis),
            "log": {
                "source": diagnosis.source,
                "lines": diagnosis.lines,
                "bytes": diagnosis.size,
                "engine": facts.engine,
                "sglang_version": facts.sglang,
                "flashinfer_version": facts.flashinfer,
                "arch": facts.arch,
                "arch_source": facts.arch_source,
            },
            "launch": None
            if found is None
            else {
                "line": found.line,
                "kind": "command" if found.is_command else "resolved arguments",
                "model": found.launch.model,
                "flags": list(found.launch.flags),
                "notes": list(found.launch.notes),
            },
            "first": _line(diagnosis.first),
            "matches": [_match(match, tree) for match in diagnosis.matches],
            "unexplained": [_line(line) for line in diagnosis.unexplained],
            "notes": list(diagnosis.notes),
            "check": checked,
        }
    )


def _line(line: Line | None) -> dict[str, Any] | None:
    if line is None:
        return None
    return {
        "line": line.number,
        "time": line.time,
        "rank": line.rank,
        "tp_rank": rank_number(line.rank),
        "text": _shown(line),
    }


def _match(match: Match, tree: SglangTree | None) -> dict[str, Any]:
    signature = match.signature
    return {
        "signature": signature.id,
        "title": signature.title,
        "severity": signature.severity.value,
        "is_consequence": signature.tier == CONSEQUENCE,
        "is_note": signature.tier == NOTE,
        "message": match.message,
        "at": _line(match.line),
        "ranks": list(match.ranks),
        "layer": match.layer,
        "role": match.role,
        "count": match.count,
        "fields": match.fields,
        "values": {name: list(values) for name, values in match.values.items()},
        "causes": [
            {
                "text": cause.text,
                "confidence": cause.confidence,
                "score": cause.score,
                "for": list(cause.seen_for),
                "against": list(cause.seen_against),
                "remedy": cause.remedy,
                "commands": list(cause.commands),
            }
            for cause in match.causes
        ],
        "evidence": [
            {**to_plain(item.location), "note": item.note}
            for item in (evidence(match, tree) if tree else ())
        ],
        "releases": signature.releases,
        "links": list(signature.links),
    }
