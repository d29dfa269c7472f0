"""What more than one format says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath

from dsv4doctor.gate import fails
from dsv4doctor.models import Facts, Finding, Remedy, Report, Run, Severity
from dsv4doctor.pair import in_order
from dsv4doctor.rules import PAIR_RULES

ABOUT_PAIRS = frozenset(rule.id for rule in PAIR_RULES)
COMMAND_LINE = "command line"
"""How a launch without a script calls its source."""


def scripts(facts: Facts, finding: Finding) -> tuple[tuple[str, int], ...]:
    """The user's own files to point at, the one to show first: the launch script and the line of
    its SGLang command, of a finding about a pair that of the other side too, and before them the
    router's script where the finding is about that."""
    sides = [facts, facts.peer] if finding.rule in ABOUT_PAIRS else [facts]
    launches = [side.snapshot.launch for side in sides if side is not None]
    found = [
        (launch.source, max(1, launch.line or 1))
        for launch in launches
        if launch is not None and launch.source != COMMAND_LINE
    ]
    router = facts.router
    if router is not None and any(one.file == router.source for one in finding.locations):
        found.insert(0, (router.source, max(1, router.line)))
    return tuple(dict.fromkeys(found))


def names_of(run: Run) -> tuple[str, ...]:
    """The targets that are a pair; empty: there is none."""
    return tuple(str(one.gate.target) for one in run.reports if one.facts.peer is not None)


def measured(facts: Facts) -> str | None:
    """What `--level full` measured, in one line; None: nothing was."""
    host = facts.snapshot.host
    if host is None or not host.measured:
        return None
    return ", ".join(
        f"{one.name} {one.outcome}"
        if one.gigabytes_per_second is None
        else f"{one.name} {one.gigabytes_per_second:.1f} GB/s"
        for one in host.measured
    )


def is_about_pair(finding: Finding) -> bool:
    return finding.rule in ABOUT_PAIRS


def of_one(report: Report) -> Report:
    """`report` as if nothing had been found about the pair that its launch is half of."""
    if report.facts.peer is None:
        return report
    results = [
        replace(result, findings=()) if result.rule in ABOUT_PAIRS else result
        for result in report.results
    ]
    return _held(replace(report, results=tuple(results)))


def _held(report: Report) -> Report:
    """`report` with the exit code of the findings that it has."""
    if report.gate.exit_code not in (0, 1):
        return report
    code = int(any(fails(finding, report.gate.fail_on) for finding in report.findings))
    return replace(report, gate=replace(report.gate, exit_code=code))


def between(run: Run) -> Iterator[tuple[str, Report]]:
    """Of a pair its servers' names, and a report with nothing but the rules about both."""
    sides = [report for report in run.reports if report.facts.peer is not None]
    if sides:
        one = in_order(sides)[0]
        results = tuple(result for result in one.results if result.rule in ABOUT_PAIRS)
        accepted = tuple(one for one in one.gate.accepted if is_about_pair(one.finding))
        gate = replace(one.gate, accepted=accepted, notes=(), undetermined=None, exit_code=0)
        yield " and ".join(names_of(run)), _held(replace(one, results=results, gate=gate))


def what_to_do(remedy: Remedy) -> str:
    """The remedy in words, a line a way out."""
    if remedy.fix is None:
        return remedy.text
    how = f"`dsv4doctor fix --only {remedy.fix}` with this launch's options"
    return f"{remedy.text}\n{how} tells whether a patch helps."


def sentences(finding: Finding) -> str:
    """The finding in one paragraph: what, what follows, what to do."""
    remedy = f" {what_to_do(finding.remedy)}" if finding.remedy else ""
    return " ".join(f"{finding.message} {finding.consequence}{remedy}".split())


def lines(finding: Finding) -> str:
    """The finding line by line, with its evidence and commands."""
    parts = [finding.message, finding.consequence, *(f"- {text}" for text in finding.evidence)]
    if finding.remedy is not None:
        parts += [
            what_to_do(finding.remedy),
            *(f"$ {command}" for command in finding.remedy.commands),
        ]
    return "\n".join(parts)


def by_severity(report: Report) -> list[Finding]:
    """The findings that count, the worst first."""
    return sorted(report.findings, key=lambda found: list(Severity).index(found.severity))


def target_name(report: Report) -> str:
    """The target's name, else its model's, else "launch"."""
    checkpoint = report.facts.snapshot.checkpoint
    return report.gate.target or (checkpoint.name if checkpoint else "launch")


def is_absolute(path: str) -> bool:
    return PurePath(path).is_absolute()
