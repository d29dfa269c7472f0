"""The report for people: a header, the layers, the findings; the decision path when asked for."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.text import Text

from dsv4doctor.errors import shortened
from dsv4doctor.models import (
    Checkpoint,
    Facts,
    Failure,
    Finding,
    Gate,
    Outcome,
    Report,
    Role,
    Run,
    Severity,
    Verdict,
)
from dsv4doctor.report.common import between, measured, of_one, what_to_do
from dsv4doctor.report.console_layers import layer_parts, pairs, place
from dsv4doctor.report.console_path import decision_path
from dsv4doctor.report.hot_paths import only_paths, path_parts
from dsv4doctor.terminal import harmless

_SEVERITY_STYLES = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "yellow",
    Severity.INFO: "cyan",
}


@dataclass(frozen=True)
class Style:
    width: int
    color: bool = False
    """ANSI colours."""
    verbose: bool = False
    why: bool = False
    """Also the decision path."""


def render_run(run: Run, style: Style, *, with_findings: bool) -> str:
    """All targets, one below the other; a heading each where there are several."""
    render = render_check if with_findings else render_trace
    several = len(run.outcomes) > 1
    texts = []
    for outcome in run.outcomes:
        name = outcome.target if isinstance(outcome, Failure) else outcome.gate.target
        heading = [Text(f"Target {name}", style="bold reverse")] if several else []
        if isinstance(outcome, Failure):
            said = f"not determined: {outcome.message}"
            texts.append(printed([*heading, Text(said, style="bold red")], style))
        else:
            own = of_one(outcome) if with_findings else outcome
            text = render(own, style.width, style.color, verbose=style.verbose, why=style.why)
            texts.append((printed(heading, style) if heading else "") + text)
    if with_findings:
        texts += [printed(parts, style) for parts in _between(run)]
    return "\n".join(texts)


def _between(run: Run) -> Iterator[list[RenderableType | Unwrapped]]:
    """What is about two servers stands under the names of both."""
    for names, pair in between(run):
        if not pair.findings:
            continue
        yield [Text(f"Between {names}", style="bold reverse"), *_findings(pair)]


def render_check(report: Report, width: int, color: bool, *, verbose: bool, why: bool) -> str:
    """The whole report, `width` columns; ANSI colours only with `color`."""
    parts: list[RenderableType | Unwrapped] = [
        _header(report.facts),
        Text(),
        *layer_parts(report.facts, width),
    ]
    if why:
        parts += [Text(), *decision_path(report.facts.trace)]
    parts += [Text(), *_findings(report), *_gate(report.gate)]
    if verbose:
        parts += [Text(), *_details(report)]
    return printed(parts, Style(width, color))


def render_trace(report: Report, width: int, color: bool, *, verbose: bool, why: bool) -> str:
    """The layers, and the other hot paths that were traced."""
    parts: list[RenderableType | Unwrapped] = [_header(report.facts)]
    if not only_paths(report.facts.trace):
        parts += [Text(), *layer_parts(report.facts, width)]
    parts += path_parts(report.facts.trace)
    if why:
        parts += [Text(), *decision_path(report.facts.trace)]
    if verbose:
        parts += [Text(), *_details(report)]
    return printed(parts, Style(width, color))


def summary(report: Report) -> str:
    """The findings counted, in one line."""
    counts = Counter(finding.severity for finding in report.findings)
    said = [
        f"{counts[severity]} {severity.value}{'s' if counts[severity] != 1 else ''}"
        for severity in (Severity.ERROR, Severity.WARNING)
        if counts[severity]
    ]
    if counts[Severity.INFO]:
        said.append(f"{counts[Severity.INFO]} info")
    found = ", ".join(said) if said else "no findings"
    accepted = len(report.gate.accepted)
    return f"{found}, {accepted} accepted" if accepted else found


def layer_summary(report: Report) -> str:
    """The layers' verdicts counted, in one line."""
    trace = report.facts.trace
    layers = trace.layers if trace else ()
    counts = Counter((layer.role, layer.verdict) for layer in layers)
    said = [
        f"{counts[role, verdict]} {role.value} {verdict.value}"
        for role in Role
        for verdict in Verdict
        if counts[role, verdict]
    ]
    return f"layers: {', '.join(said)}" if said else "no layers"


@dataclass(frozen=True)
class _Harmless:
    """A part whose texts, whoever wrote them, cannot steer the terminal."""

    part: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.part, options):
            yield segment._replace(text=harmless(segment.text))


@dataclass(frozen=True)
class Unwrapped:
    """A line that stays one however long it is: a command has to be whole when it is copied."""

    text: str


def printed(parts: Sequence[RenderableType | Unwrapped], style: Style) -> str:
    """The parts one below the other, as text that cannot steer a terminal."""
    sink = StringIO()
    console = Console(
        file=sink,
        width=style.width,
        force_terminal=style.color,
        color_system="standard" if style.color else None,
        highlight=False,
        emoji=False,
        markup=False,
    )
    for part in parts:
        if isinstance(part, Unwrapped):
            sink.write(f"{harmless(part.text)}\n")
        else:
            console.print(_Harmless(part))
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines()) + "\n"


# ------------------------------------------------------------------------------ header


def _header(facts: Facts) -> RenderableType:
    snapshot = facts.snapshot
    tree = facts.trace.sglang if facts.trace else snapshot.sglang
    rows: list[tuple[str, str | Text]] = []
    if tree is not None:
        rows.append(("SGLang", f"{tree.version}, {tree.origin}, {tree.root}"))
    rows.append(("GPU", _gpu(facts)))
    if (rates := measured(facts)) is not None:
        rows.append(("Measured", rates))
    if snapshot.checkpoint is not None:
        rows.append(("Checkpoint", _checkpoint(snapshot.checkpoint)))
    launch = snapshot.launch
    if launch is not None:
        line = f":{launch.line}" if launch.line else ""
        flags = shortened(shlex.join(launch.flags))
        rows.append(("Launch", f"{launch.source}{line}  {flags}".rstrip()))
    rows += [("Note", note) for note in facts.notes]
    return pairs(rows)


def _gpu(facts: Facts) -> str:
    gpus = [gpu for gpu in facts.snapshot.gpu.gpus if gpu.arch == facts.arch]
    name = f", {len(gpus)}x {gpus[0].name}" if gpus else ""
    return f"{facts.arch.name} (from {facts.arch_source}){name}"


def _checkpoint(checkpoint: Checkpoint) -> str:
    parts = []
    for label, layers in (("main", checkpoint.main_layers), ("draft", checkpoint.draft_layers)):
        formats = sorted({layer.stored_format.value for layer in layers})
        if layers:
            parts.append(f"{len(layers)} {label} {'/'.join(formats)}")
    return f"{checkpoint.name}, routed experts: {', '.join(parts) or 'none'}"


# ------------------------------------------------------------------------------ findings


def _findings(report: Report) -> Iterator[RenderableType | Unwrapped]:
    findings = sorted(report.findings, key=lambda found: list(Severity).index(found.severity))
    if findings:
        yield Text(f"Findings: {summary(report)}", style="bold")
    else:
        others = " beside those accepted" if report.gate.accepted else ""
        own = " of its own" if report.facts.peer is not None else ""
        yield Text(f"No findings{own}{others}.", style="green")
    for finding in findings:
        yield Text()
        yield Padding(_finding(finding), (0, 0, 0, 2))
        for command in finding.remedy.commands if finding.remedy else ():
            yield Unwrapped(f"    {command}")
    for result in report.results:
        if result.outcome is Outcome.CRASH:
            yield Text(f"rule {result.rule} crashed: {result.reason}", style="bold red")


def _finding(finding: Finding) -> RenderableType:
    rows: list[tuple[str, str | Text]] = [("what happens", finding.consequence)]
    rows += [("evidence" if not index else "", text) for index, text in enumerate(finding.evidence)]
    if finding.remedy is not None:
        rows.append(("what to do", what_to_do(finding.remedy)))
    style = _SEVERITY_STYLES[finding.severity]
    title = Text.assemble(
        (finding.severity.value, style), f" {finding.rule}  ", (finding.subject, "bold")
    )
    body = Group(Text(finding.message, overflow="fold"), pairs(rows))
    return Group(title, Padding(body, (0, 0, 0, 2)))


def _gate(gate: Gate) -> Iterator[RenderableType]:
    if gate.accepted:
        yield Text()
        yield Text(f"Accepted: {len(gate.accepted)}", style="bold")
        for one in gate.accepted:
            until = f", until {one.expires}" if one.expires else ""
            text = f"{one.finding.rule}  {one.finding.subject}  {one.by}: {one.reason}{until}"
            yield Padding(Text(text, style="dim", overflow="fold"), (0, 0, 0, 2))
    if gate.notes:
        yield Text()
        yield pairs([("Note", note) for note in gate.notes])


# ------------------------------------------------------------------------------ details


def _details(report: Report) -> Iterator[RenderableType]:
    yield Text("Rules", style="bold")
    rows: list[tuple[str, str | Text]] = []
    for result in report.results:
        outcome = "not checked" if result.outcome is Outcome.SKIP else result.outcome.value
        reason = f" ({result.reason})" if result.reason else ""
        rows.append((f"  {result.rule}", f"{outcome}{reason}: {result.title}"))
    yield pairs(rows)
    facts = report.facts
    trace = facts.trace
    if facts.snapshot.stack is not None:
        yield Text("Packages", style="bold")
        yield _packages(facts)
    if trace is not None and trace.arg_changes:
        yield Text("Arguments that SGLang changed", style="bold")
        yield pairs(
            [
                (f"  {change.name}", f"{change.before} -> {change.after}  {place(change.at)}")
                for change in trace.arg_changes
            ]
        )
    if trace is not None and trace.leniencies:
        yield Text("Stood in for", style="bold")
        for text in trace.leniencies:
            yield Padding(Text(text), (0, 0, 0, 2))
    yield Text("Seconds", style="bold")
    yield Text("  " + ", ".join(f"{name} {value:.2f}" for name, value in report.timings.items()))


def _packages(facts: Facts) -> RenderableType:
    stack = facts.snapshot.stack
    rows: list[tuple[str, str | Text]] = []
    for package in stack.packages if stack else ():
        wanted = f", SGLang wants {package.required}" if package.required else ""
        style = "yellow" if package.satisfied is False else ""
        rows.append(
            (f"  {package.name}", Text(f"{package.version or 'not installed'}{wanted}", style))
        )
    return pairs(rows)
