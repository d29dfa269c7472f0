"""Markdown for a job summary or a comment on a pull request."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from dsv4doctor.errors import shortened
from dsv4doctor.folding import fold
from dsv4doctor.models import (
    Facts,
    Failure,
    Finding,
    Layer,
    Outcome,
    Report,
    Run,
    Severity,
    Verdict,
)
from dsv4doctor.report.common import (
    between,
    by_severity,
    measured,
    of_one,
    target_name,
    what_to_do,
)
from dsv4doctor.report.console import summary

_MARKS = {Severity.ERROR: "❌", Severity.WARNING: "⚠️", Severity.INFO: "ℹ️"}  # noqa: RUF001
_VERDICTS = {
    Verdict.RUNS: "✅",
    Verdict.FALLBACK: "🐢",
    Verdict.FAILS: "❌",
    Verdict.UNKNOWN: "❔",
}
_SPECIAL = re.compile(r"[\\`*_\[\]<>|~@#!&$]")


def render(run: Run) -> str:
    parts: list[str] = []
    for outcome in run.outcomes:
        if isinstance(outcome, Failure):
            parts += _failure(outcome)
        else:
            parts += _report(of_one(outcome))
    for names, pair in between(run):
        if pair.findings:
            parts.append(f"## {_mark(pair)} Between {_text(names)}")
        for finding in by_severity(pair):
            parts += _finding(finding)
    return "\n\n".join(parts) + "\n"


def _failure(failure: Failure) -> Iterator[str]:
    yield f"## ❔ dsv4doctor: {_text(failure.target)}"
    hint = f" {_text(failure.hint)}" if failure.hint else ""
    yield f"**Not determined.** {_text(failure.message)}.{hint}"


def _mark(report: Report) -> str:
    return {0: "✅", 1: "❌"}.get(report.gate.exit_code, "❔")


def _report(report: Report) -> Iterator[str]:
    yield f"## {_mark(report)} dsv4doctor: {_text(target_name(report))}"
    yield f"**{_text(summary(report))}** · {_about(report.facts)}"
    if (rates := measured(report.facts)) is not None:
        yield f"Measured: {_text(rates)}"
    if report.gate.undetermined is not None:
        yield f"**Not determined:** {_text(report.gate.undetermined)}"
    for result in report.results:
        if result.outcome is Outcome.CRASH:
            yield f"**Rule {_text(result.rule)} crashed:** {_text(result.reason or '')}"
    for finding in by_severity(report):
        yield from _finding(finding)
    layers = report.facts.trace.layers if report.facts.trace else ()
    if layers:
        yield _details("Routed experts", _layers(layers))
    if report.gate.accepted:
        rows = [
            [one.finding.rule, one.finding.subject, one.by, one.reason, one.expires or ""]
            for one in report.gate.accepted
        ]
        head = ["rule", "subject", "accepted by", "reason", "until"]
        yield _details(f"Accepted: {len(rows)}", _table(head, rows))
    for note in report.gate.notes:
        yield f"> {_text(note)}"


def _about(facts: Facts) -> str:
    tree = facts.trace.sglang if facts.trace else facts.snapshot.sglang
    launch = facts.snapshot.launch
    parts = [facts.arch.name, *([f"SGLang {tree.version}"] if tree else [])]
    if launch is not None:
        line = f":{launch.line}" if launch.line else ""
        parts.append(f"{launch.source}{line}")
        parts.append(shortened(shlex.join(launch.flags)))
    return " · ".join(_text(part) for part in parts if part)


def _finding(finding: Finding) -> Iterator[str]:
    yield f"### {_MARKS[finding.severity]} {_text(finding.rule)} {_text(finding.subject)}"
    yield f"{_text(finding.message)}\n\n{_text(finding.consequence)}"
    if finding.evidence:
        yield "\n".join(f"- {_text(text)}" for text in finding.evidence)
    if finding.remedy is not None:
        yield f"**What to do:** {_prose(what_to_do(finding.remedy))}"
        if finding.remedy.commands:
            yield _fenced(finding.remedy.commands)


def _layers(layers: Sequence[Layer]) -> str:
    head = ["", "layer", "role", "stored", "quant method", "runner", "kernel", "decided at"]
    rows = []
    for layer_range in fold(layers):
        layer = layer_range.layer
        at = layer.decided_at
        rows.append(
            [
                f"{_VERDICTS[layer.verdict]} {layer.verdict.value}",
                layer_range.name,
                layer.role.value,
                layer.stored_format.value if layer.stored_format else "",
                layer.quant_method or "",
                layer.runner_backend or "",
                layer.kernel.symbol.rpartition(".")[2] if layer.kernel else "",
                f"{at.file}:{at.line}" if at else "",
            ]
        )
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _details(title: str, body: str) -> str:
    return f"<details><summary>{_text(title)}</summary>\n\n{body}\n\n</details>"


def _fenced(commands: Sequence[str]) -> str:
    body = "\n".join(commands)
    longest = max((len(run) for run in re.findall("`+", body)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}sh\n{body}\n{fence}"


def _prose(text: str) -> str:
    """A sentence of ours: what stands between backticks is code."""
    parts = " ".join(text.split()).split("`")
    if len(parts) % 2 == 0:
        return _text(text)
    return "".join(f"`{part}`" if odd % 2 else _escaped(part) for odd, part in enumerate(parts))


def _text(text: str) -> str:
    """`text` as it is: no markup, no mention, no HTML, on one line."""
    return _escaped(" ".join(text.split()))


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", text)
