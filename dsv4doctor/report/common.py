"""What more than one format says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath

from dsv4doctor.models import Facts, Finding, Gate, Remedy, Report, Run, Severity
from dsv4doctor.rules import PAIR_RULES

_ABOUT_PAIRS = frozenset(rule.id for rule in PAIR_RULES)
COMMAND_LINE = "command line"
"""How a launch without a script calls its source."""


def script(facts: Facts, finding: Finding) -> tuple[str, int] | None:
    """The user's own file to point at: the launch script and the line of its SGLang command, or
    the router's script where the finding is about that."""
    router = facts.router
    if router is not None and any(one.file == router.source for one in finding.locations):
        return router.source, max(1, router.line)
    launch = facts.snapshot.launch
    if launch is None or launch.source == COMMAND_LINE:
        return None
    return launch.source, max(1, launch.line or 1)


def of_one(report: Report) -> Report:
    """`report` without what was found about the pair that its launch is half of."""
    if report.facts.peer is None:
        return report
    results = [
        replace(result, findings=()) if result.rule in _ABOUT_PAIRS else result
        for result in report.results
    ]
    return replace(report, results=tuple(results))


def between(run: Run) -> Iterator[tuple[str, Report]]:
    """The names of a pair's servers, and a report with nothing but what was found about both."""
    names = " and ".join(str(report.gate.target) for report in run.reports)
    for report in run.reports:
        found = tuple(one for one in report.results if one.rule in _ABOUT_PAIRS and one.findings)
        if report.facts.peer is not None and found:
            yield names, replace(report, results=found, gate=Gate())


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
