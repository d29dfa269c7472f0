"""Which findings count: fingerprints, suppressions, the baseline, and the exit code."""

from __future__ import annotations

import fnmatch
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date

from dsv4doctor.audit import exit_code, undetermined
from dsv4doctor.baseline import Baseline, Entry
from dsv4doctor.folding import fold
from dsv4doctor.models import (
    Accepted,
    Facts,
    Failure,
    Finding,
    Gate,
    HotPath,
    Layer,
    Outcome,
    Report,
    Run,
    Severity,
)

_RANK = (Severity.INFO, Severity.WARNING, Severity.ERROR)
_WORST_LAST = (0, 1, 3, 2)


@dataclass(frozen=True)
class Suppression:
    """Findings that somebody has looked at and accepts until a day."""

    rule: str
    reason: str
    expires: date
    """The last day on which it holds."""
    source: str
    """Where it is written, e.g. "dsv4doctor.toml: suppress 2"."""
    subject: str = "*"
    """A shell pattern."""
    target: str | None = None
    """None: every target."""

    def covers(self, finding: Finding, target: str | None) -> bool:
        return (
            self.rule == finding.rule
            and fnmatch.fnmatchcase(finding.subject, self.subject)
            and self.target in (None, target)
        )


@dataclass(frozen=True)
class Policy:
    """What one target's findings are held against."""

    target: str | None = None
    fail_on: Severity | None = Severity.ERROR
    strict: bool = False
    strict_paths: bool = False
    """`strict` is about the other hot paths too, as of `trace`."""
    suppressions: tuple[Suppression, ...] = ()
    baseline: Baseline | None = None


def decide(report: Report, policy: Policy, today: date) -> Report:
    """`report` with accepted findings taken out of its results, and the exit code."""
    accepted: list[Accepted] = []
    notes: list[str] = []
    results = []
    known = Counter[tuple[str, str]]()
    for result in report.results:
        kept = []
        for finding in result.findings:
            why = _accepted(finding, report.facts, policy, today, known)
            if why is None:
                kept.append(finding)
            else:
                accepted.append(why)
        results.append(replace(result, findings=tuple(kept)))
    notes += _expired(report, policy, today)
    notes += _unused(report, policy, today)
    notes += _gone(report, policy)
    counted = replace(report, results=tuple(results))
    gate = Gate(
        target=policy.target,
        fail_on=policy.fail_on,
        accepted=tuple(accepted),
        notes=tuple(notes),
        undetermined=undetermined(counted, policy.strict, policy.strict_paths),
        exit_code=exit_code(counted, policy.fail_on, policy.strict, policy.strict_paths),
    )
    return replace(counted, gate=gate)


def worst(run: Run) -> int:
    """The exit code of all targets: 2 before 3 before 1 before 0."""
    codes = [
        outcome.exit_code if isinstance(outcome, Failure) else outcome.gate.exit_code
        for outcome in run.outcomes
    ]
    return max(codes, key=_WORST_LAST.index, default=0)


def fails(finding: Finding, fail_on: Severity | None) -> bool:
    """True for a finding at or above the bar."""
    return fail_on is not None and _RANK.index(finding.severity) >= _RANK.index(fail_on)


# ------------------------------------------------------------------------------ fingerprints


def fingerprint(finding: Finding, facts: Facts) -> str:
    """What makes a finding the same one tomorrow: rule, subject, role, quant method, kernel and
    the type of error.  No line, no path, no version: a new release changes none of it by itself.
    """
    layer, path = _layer(finding, facts), _path(finding, facts)
    errors = facts.trace.errors if facts.trace else ()
    raised = [error.type for error in errors if error.phase == finding.subject]
    parts = [finding.rule, finding.subject]
    if layer is not None:
        parts += [
            layer.role.value,
            layer.quant_method or "",
            layer.kernel.symbol if layer.kernel else "",
        ]
        raised += [layer.error.type] if layer.error else []
    if path is not None:
        parts += [path.kernel.symbol if path.kernel else ""]
        raised += [path.error.type] if path.error else []
    text = "\0".join([*parts, *raised])
    # "backslashreplace": a file name may be no text.
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32]


def _layer(finding: Finding, facts: Facts) -> Layer | None:
    layers = facts.trace.layers if facts.trace else ()
    return next((one.layer for one in fold(layers) if one.name == finding.subject), None)


def _path(finding: Finding, facts: Facts) -> HotPath | None:
    """The first of those that fail, which such a finding is about."""
    paths = facts.trace.failing_paths if facts.trace else ()
    return next((one for one in paths if f"{one.role.value} {one.name}" == finding.subject), None)


def entries(report: Report) -> tuple[Entry, ...]:
    """The report's findings as a baseline holds them."""
    return tuple(_entry(finding, report) for finding in report.findings)


def _entry(finding: Finding, report: Report) -> Entry:
    return Entry(
        target=report.gate.target,
        rule=finding.rule,
        subject=finding.subject,
        severity=finding.severity,
        fingerprint=fingerprint(finding, report.facts),
    )


# ------------------------------------------------------------------------------ acceptance


def _accepted(
    finding: Finding,
    facts: Facts,
    policy: Policy,
    today: date,
    known: Counter[tuple[str, str]],
) -> Accepted | None:
    for one in policy.suppressions:
        if one.covers(finding, policy.target) and today <= one.expires:
            return Accepted(finding, "suppression", one.reason, one.expires.isoformat())
    if policy.baseline is None:
        return None
    mark = fingerprint(finding, facts)
    # Two findings with one fingerprint are two entries: a third is new.
    same = [entry for entry in policy.baseline.of(policy.target) if entry.fingerprint == mark]
    used = known[(finding.rule, mark)]
    if used >= len(same) or _RANK.index(finding.severity) > _RANK.index(same[used].severity):
        return None
    known[(finding.rule, mark)] += 1
    return Accepted(finding, "baseline", f"known from {policy.baseline.source}")


def _expired(report: Report, policy: Policy, today: date) -> Iterator[str]:
    for one in policy.suppressions:
        if today <= one.expires:
            continue
        met = [found for found in report.findings if one.covers(found, policy.target)]
        if met:
            yield (
                f"{one.source}: the suppression of {one.rule} ended on {one.expires.isoformat()} "
                f"({one.reason}); its findings count again"
            )


def _unused(report: Report, policy: Policy, today: date) -> Iterator[str]:
    for one in policy.suppressions:
        if today > one.expires or one.target not in (None, policy.target):
            continue
        was_checked = _was_checked(report, one.rule)
        if was_checked and not any(one.covers(found, policy.target) for found in report.findings):
            yield f"{one.source}: the suppression of {one.rule} meets no finding"


def _gone(report: Report, policy: Policy) -> Iterator[str]:
    """Baseline entries that a rule which ran did not find again."""
    if policy.baseline is None:
        return
    seen = Counter(fingerprint(found, report.facts) for found in report.findings)
    # One without a target may be another target's finding.
    for entry in policy.baseline.own(policy.target):
        if seen[entry.fingerprint] > 0:
            seen[entry.fingerprint] -= 1
        elif _was_checked(report, entry.rule):
            yield (
                f"{entry.rule} {entry.subject} is gone; {policy.baseline.source} still lists it "
                "(--update-baseline takes it out)"
            )


def _was_checked(report: Report, rule: str) -> bool:
    ran: Sequence[Outcome] = (Outcome.PASS, Outcome.FINDING)
    return any(result.rule == rule and result.outcome in ran for result in report.results)
