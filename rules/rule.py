"""What a rule is, and the examples beside it that are its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dsv4doctor.models import Facts, Finding, Severity


@dataclass(frozen=True)
class Rule:
    id: str
    title: str
    severity: Severity
    """The worst that its findings can be."""
    reads: tuple[str, ...]
    """The facts it needs, of `FACTS`; where one is missing the rule is skipped."""
    check: Callable[[Facts], Iterable[Finding]]


@dataclass(frozen=True)
class Example:
    title: str
    facts: Facts
    expect: tuple[str, ...] = ()
    """The subjects of the findings, in order; empty: the rule passes."""


def _trace(facts: Facts) -> str | None:
    return None if facts.trace is not None else facts.trace_failure or "there is no trace"


def _checkpoint(facts: Facts) -> str | None:
    return None if facts.snapshot.checkpoint is not None else "no checkpoint was read"


def _launch(facts: Facts) -> str | None:
    return None if facts.snapshot.launch is not None else "no launch command was read"


FACTS: dict[str, Callable[[Facts], str | None]] = {
    "trace": _trace,
    "checkpoint": _checkpoint,
    "launch": _launch,
}
"""Name -> why that fact is missing, or None when it is there."""
