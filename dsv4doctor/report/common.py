"""What more than one format says."""

from __future__ import annotations

from pathlib import PurePath

from dsv4doctor.models import Facts, Finding, Remedy, Report, Severity

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
