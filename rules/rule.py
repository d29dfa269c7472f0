"""What a rule is, and the examples beside it that are its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dsv4doctor.models import Facts, Finding, Severity


class NotChecked(Exception):
    """What kept a rule from being checked; --strict insists on it only when `required`."""

    def __init__(self, reason: str, required: bool = True) -> None:
        super().__init__(reason)
        self.required = required


@dataclass(frozen=True)
class Rule:
    id: str
    title: str
    severity: Severity
    """The worst that its findings can be."""
    reads: tuple[str, ...]
    """The facts it needs, of `FACTS`; where one is missing the rule is skipped."""
    check: Callable[[Facts], Iterable[Finding]]
    """Raises NotChecked where a fact that this launch needs is missing."""
    about_machine: bool = False
    """It asks about the serving machine, which --strict does not insist on."""


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


def _features(facts: Facts) -> str | None:
    return None if facts.features is not None else "the SGLang tree's sources were not read"


def _stack(facts: Facts) -> str | None:
    return None if facts.snapshot.stack is not None else "the installed packages were not read"


def _host(facts: Facts) -> str | None:
    if facts.snapshot.host is None:
        return "the machine's facts were not read"
    return None if facts.snapshot.gpu.gpus else "this machine has no GPU: it is not the server"


FACTS: dict[str, Callable[[Facts], str | None]] = {
    "trace": _trace,
    "checkpoint": _checkpoint,
    "launch": _launch,
    "features": _features,
    "stack": _stack,
    "host": _host,
}
"""Name -> why that fact is missing, or None when it is there."""
