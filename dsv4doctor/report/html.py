"""One self-contained HTML page: no script, no request, light and dark.

Built from small functions and `html.escape`: every text goes through `text`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from dsv4doctor import __version__
from dsv4doctor.errors import shortened
from dsv4doctor.folding import fold
from dsv4doctor.models import (
    Failure,
    Finding,
    Layer,
    Outcome,
    Report,
    Role,
    Run,
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
from dsv4doctor.report.html_path import diagrams, place, prose, sources, text
from dsv4doctor.report.html_style import STYLE

_MARKS = {
    Verdict.RUNS: "✓",
    Verdict.FALLBACK: "~",
    Verdict.FAILS: "✕",
    Verdict.UNKNOWN: "?",
}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(run: Run) -> str:
    """The whole page; several targets one below the other, with a list of them on top."""
    names = [
        outcome.target if isinstance(outcome, Failure) else target_name(outcome)
        for outcome in run.outcomes
    ]
    sections = [
        _failure(outcome, number) if isinstance(outcome, Failure) else _report(outcome, number)
        for number, outcome in enumerate(run.outcomes, 1)
    ]
    sections += [
        f'<section id="between"><h1>Between {text(both)} {_badge(pair)}</h1>'
        f"{_findings(pair)}</section>\n"
        for both, pair in between(run)
        if pair.findings
    ]
    title = text(f"dsv4doctor: {', '.join(names)}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{_contents(run, names)}{''.join(sections)}"
        f'<p class="soft">dsv4doctor {text(__version__)}</p>\n</body>\n</html>\n'
    )


def _contents(run: Run, names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    rows = "".join(
        f'<li>{_badge(_own(outcome))} <a href="#target-{number}">{text(name)}</a></li>'
        for number, (name, outcome) in enumerate(zip(names, run.outcomes, strict=True), 1)
    )
    for both, pair in between(run):
        if pair.findings:
            rows += f'<li>{_badge(pair)} <a href="#between">Between {text(both)}</a></li>'
    return f'<nav class="card"><ul>{rows}</ul></nav>\n'


def _own(outcome: Report | Failure) -> Report | Failure:
    return of_one(outcome) if isinstance(outcome, Report) else outcome


def _badge(outcome: Report | Failure) -> str:
    code = outcome.exit_code if isinstance(outcome, Failure) else outcome.gate.exit_code
    tone, word = {0: ("runs", "passes"), 1: ("fails", "fails")}.get(
        code, ("unknown", "not determined")
    )
    return f'<span class="verdict {tone}">{word}</span>'


def _failure(failure: Failure, number: int) -> str:
    hint = f'<p class="soft">{text(failure.hint)}</p>' if failure.hint else ""
    return (
        f'<section id="target-{number}"><h1>{text(failure.target)} {_badge(failure)}</h1>'
        f'<div class="card"><p>{text(failure.message)}</p>{hint}</div></section>\n'
    )


def _report(report: Report, number: int) -> str:
    own = of_one(report)
    parts = [_summary(own), _layers(own), _findings(own), _path(own), _rest(own)]
    return f'<section id="target-{number}">{"".join(parts)}</section>\n'


def _summary(report: Report) -> str:
    facts = report.facts
    snapshot, launch = facts.snapshot, facts.snapshot.launch
    tree = facts.trace.sglang if facts.trace else snapshot.sglang
    gpus = [gpu.name for gpu in snapshot.gpu.gpus if gpu.arch == facts.arch]
    gpu = f", {len(gpus)} × {gpus[0]}" if gpus else ""  # noqa: RUF001
    rows = [("GPU", f"{facts.arch.name} (from {facts.arch_source}){gpu}")]
    if (rates := measured(facts)) is not None:
        rows.append(("Measured", rates))
    if tree is not None:
        rows.append(("SGLang", f"{tree.version}, {tree.origin}, {tree.root}"))
    if snapshot.checkpoint is not None:
        rows.append(("Checkpoint", snapshot.checkpoint.path))
    if launch is not None:
        line = f":{launch.line}" if launch.line else ""
        rows.append(("Launch", f"{launch.source}{line}"))
        rows.append(("Flags", shortened(shlex.join(launch.flags)) or "none"))
    rows += [("Note", note) for note in facts.notes]
    if report.gate.undetermined is not None:
        rows.append(("Not determined", report.gate.undetermined))
    body = "".join(f"<dt>{name}</dt><dd>{text(value)}</dd>" for name, value in rows)
    return (
        f"<h1>{text(target_name(report))} {_badge(report)}</h1>"
        f'<p class="soft">{text(summary(report))}</p><dl class="card">{body}</dl>'
    )


# ------------------------------------------------------------------------------ layers


def _layers(report: Report) -> str:
    trace = report.facts.trace
    if trace is None:
        said = report.facts.trace_failure or "there is no trace"
        return f'<h2>Routed experts</h2><p class="card">{text(said)}</p>'
    strips = "".join(
        f"<h3>{'Main' if role is Role.MAIN else 'Draft'} model</h3>{_strip(trace.of(role))}"
        for role in Role
        if trace.of(role)
    )
    errors = "".join(
        f'<p class="fails"><span class="verdict">{text(error.phase)}</span> stops with '
        f"{text(error.type)}: {text(error.message)}</p>"
        for error in trace.errors
    )
    legend = "".join(
        f'<span class="{verdict.value}">{_MARKS[verdict]} {verdict.value}</span>'
        for verdict in Verdict
    )
    return (
        f'<h2>Routed experts</h2><div class="card">{errors}{strips}'
        f'<p class="legend">{legend}</p>{_table(trace.layers)}</div>'
    )


def _strip(layers: Sequence[Layer]) -> str:
    cells = "".join(
        f'<span class="{layer.verdict.value}" title="{text(f"{layer.name}: {layer.reason}")}">'
        f"<b>{_MARKS[layer.verdict]}</b>{text(_number(layer.name, position))}</span>"
        for position, layer in enumerate(layers)
    )
    return f'<div class="strip">{cells}</div>'


def _number(name: str, position: int) -> str:
    return next((part for part in name.split(".") if part.isdigit()), str(position))


def _table(layers: Sequence[Layer]) -> str:
    heads = ("verdict", "layer", "stored", "quant method", "runner", "kernel")
    rows = []
    for layer_range in fold(layers):
        layer = layer_range.layer
        cells = [
            layer_range.name,
            layer.stored_format.value if layer.stored_format else "-",
            layer.quant_method or "-",
            layer.runner_backend or "-",
            layer.kernel.symbol.rpartition(".")[2] if layer.kernel else "-",
        ]
        read = ", ".join(layer.flags_consulted) or "no flag"
        row = "".join(f"<td>{text(cell)}</td>" for cell in cells)
        verdict = layer.verdict.value
        rows.append(
            f'<tr><td class="verdict-cell {verdict}">{_MARKS[layer.verdict]} {verdict}</td>{row}'
            f'</tr><tr><td></td><td class="soft" colspan="5">{text(layer.reason)}; decided at '
            f"{text(place(layer.decided_at))}, which read {text(read)}</td></tr>"
        )
    body = "".join(rows)
    return f'<div class="scroll"><table class="layers"><tr>{_heads(heads)}</tr>{body}</table></div>'


def _heads(names: Sequence[str]) -> str:
    return "".join(f"<th>{name}</th>" for name in names)


# ------------------------------------------------------------------------------ findings


def _findings(report: Report) -> str:
    found = by_severity(report)
    body = "".join(_finding(finding) for finding in found)
    crashed = "".join(
        f'<p class="card error">Rule {text(result.rule)} crashed: {text(result.reason or "")}</p>'
        for result in report.results
        if result.outcome is Outcome.CRASH
    )
    own = " of its own" if report.facts.peer is not None else ""
    others = " beside those accepted" if report.gate.accepted else ""
    none = f'<p class="card">None{own}{others}.</p>'
    return f"<h2>Findings</h2>{body or none}{crashed}"


def _finding(finding: Finding) -> str:
    evidence = "".join(f"<li>{text(line)}</li>" for line in finding.evidence)
    where = sources(finding.locations)
    todo = ""
    if finding.remedy is not None:
        sentences = "".join(
            f"<p>{prose(line)}</p>" for line in what_to_do(finding.remedy).splitlines()
        )
        commands = "".join(f"<pre>{text(line)}</pre>" for line in finding.remedy.commands)
        todo = f"<h4>What to do</h4>{sentences}{commands}"
    severity = finding.severity.value
    return (
        f'<article class="card finding {severity}"><h3><span class="severity">{severity}</span> '
        f"{text(finding.rule)} <code>{text(finding.subject)}</code></h3>"
        f"<p>{text(finding.message)}</p><p>{text(finding.consequence)}</p>"
        f"<h4>Evidence</h4><ul>{evidence}</ul>{where}{todo}</article>"
    )


# ------------------------------------------------------------------------------ the rest


def _path(report: Report) -> str:
    trace = report.facts.trace
    if trace is None or not trace.steps:
        return ""
    return f"<h2>Decision path</h2>{diagrams(trace)}"


def _rest(report: Report) -> str:
    accepted = "".join(
        f"<tr><td>{text(one.finding.rule)}</td><td>{text(one.finding.subject)}</td>"
        f"<td>{text(one.by)}</td><td>{text(one.reason)}</td><td>{text(one.expires or '')}</td></tr>"
        for one in report.gate.accepted
    )
    parts = []
    if accepted:
        heads = _heads(("rule", "subject", "accepted by", "reason", "until"))
        parts.append(
            "<h2>Accepted</h2>"
            f'<div class="card scroll"><table><tr>{heads}</tr>{accepted}</table></div>'
        )
    parts += [f'<p class="card">{text(note)}</p>' for note in report.gate.notes]
    rules = "".join(
        f"<tr><td>{text(result.rule)}</td><td>{text(result.title)}</td>"
        f"<td>{'not checked' if result.outcome is Outcome.SKIP else result.outcome.value}"
        f"{text(f': {result.reason}' if result.reason else '')}</td></tr>"
        for result in report.results
    )
    parts.append(
        '<h2>Rules</h2><details class="card"><summary>All rules and how they ended</summary>'
        f'<div class="scroll"><table>{rules}</table></div></details>'
    )
    return "".join(parts)
