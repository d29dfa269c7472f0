"""The variables of a shell, as far as they can be known without running it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from dsv4doctor.errors import UsageError

_MAX_WORD = 1 << 20
_MAX_TOTAL = 4 << 20
_FIELD_COST = 32
"""Counted for each expansion beside its length, so that many short ones end as well."""
_MAX_SEGMENTS = 32
_STEP_COST = 64
"""Counted for each command, so that functions which call each other end."""


class Segment(NamedTuple):
    """A piece of a value."""

    text: str
    why: str = ""
    """Why it cannot be known, e.g. "line 3: $(nproc)"; empty: it is known."""


Element: TypeAlias = tuple[Segment, ...]
Value: TypeAlias = tuple[Element, ...]
"""A variable's elements; a plain variable has one, an unset one none."""


@dataclass(frozen=True)
class Field:
    """One argument."""

    text: str
    why: str = ""
    """Why it, or a part of it, cannot be known; empty: it is known."""

    @property
    def known(self) -> bool:
        return not self.why


def plain(text: str) -> Value:
    return ((Segment(text),),)


def unknown(name: str, why: str) -> Value:
    return ((Segment(f"${name}", why),),)


def reason(elements: Iterable[Element]) -> str:
    """Why it cannot be known how many arguments these are; empty: it can.

    Without quotes an unknown value is any number of them.
    """
    return next((part.why for one in elements for part in one if part.why), "")


def text_of(element: Element) -> str | None:
    """None: not known."""
    return None if any(part.why for part in element) else "".join(part.text for part in element)


def merged(parts: Iterable[Segment]) -> Element:
    """The same text in as few segments as can be, and never many."""
    found: list[Segment] = []
    for part in parts:
        last = found[-1] if found else None
        if last is not None and (bool(last.why) == bool(part.why) or len(found) >= _MAX_SEGMENTS):
            found[-1] = Segment(last.text + part.text, last.why or part.why)
        else:
            found.append(part)
    return tuple(found) or (Segment(""),)


@dataclass
class Scope:
    """The variables of one shell, and what could not be followed."""

    source: str
    folder: Path | None
    """The script's folder, for `$(dirname "$0")`."""
    inherited: Mapping[str, str]
    """The environment around the shell; looked at for names that the script does not set."""
    given: Mapping[str, str] = field(default_factory=dict)
    """What the user says of variables whose value the script does not tell."""
    variables: dict[str, Value] = field(default_factory=dict)
    arguments: Value | None = None
    """`$1`, `$2`, ...; None: those of the script, which are not known."""
    notes: dict[str, None] = field(default_factory=dict)
    spent: int = 0
    unset_is_known: bool = False
    """Whether an unset variable counts as known to be empty, as in a condition."""
    journals: list[dict[str, Value | None]] = field(default_factory=list)
    """For each arm that may run, what its variables were before; None: unset."""

    def note(self, line: int, text: str) -> None:
        self.notes.setdefault(f"line {line}: {text}")

    def lookup(self, name: str) -> Value | None:
        """The value of the variable `name`; None: it is not set."""
        if name in self.variables:
            return self.variables[name]
        if name in self.inherited:
            return plain(self.inherited[name])
        return None

    def argument(self, name: str) -> Value | None:
        """The value of `$1`, `$@`, `$#` in a function; None: it is not given."""
        given = self.arguments or ()
        if name in ("@", "*"):
            return given
        if name == "#":
            why = reason(given)
            return unknown(name, why) if why else plain(str(len(given)))
        at = int(name) - 1 if len(name) < 6 else len(given)
        if at < 0:
            return None
        why = reason(given[:at])
        return unknown(name, why) if why else given[at : at + 1] or None

    def set(self, name: str, value: Value | None) -> None:
        if self.journals:
            self.journals[-1].setdefault(name, self.variables.get(name))
        if value is None:
            self.variables.pop(name, None)
        else:
            self.variables[name] = value

    def open_arm(self) -> None:
        """What follows may or may not run."""
        self.journals.append({})

    def close_arm(self) -> dict[str, Value | None]:
        """What the arm set; the variables are again as before it."""
        before = self.journals.pop()
        after = {name: self.variables.get(name) for name in before}
        for name, value in before.items():
            if value is None:
                self.variables.pop(name, None)
            else:
                self.variables[name] = value
        return after

    def join(self, arms: Sequence[Mapping[str, Value | None]], line: int, what: str) -> None:
        """One of `arms` ran, it is not known which: what they do not agree on is not known."""
        for name in dict.fromkeys(name for arm in arms for name in arm):
            ways = [arm.get(name, self.variables.get(name)) for arm in arms]
            self.spend(sum(len(way or ()) for way in ways), line)
            if all(way == ways[0] for way in ways):
                self.set(name, ways[0])
            else:
                self.set(name, _joined(name, ways, f"line {line}: {what}"))

    def spend(self, size: int, line: int) -> None:
        self.spent += size + _FIELD_COST
        if size > _MAX_WORD or self.spent > _MAX_TOTAL:
            raise UsageError(
                f"{self.source}:{line}: the variables expand to more than a megabyte",
                "give the SGLang flags after `--` instead of --launch",
            )

    def step(self, line: int) -> None:
        """A command is read; there is an end to that too."""
        self.spend(_STEP_COST, line)


def _joined(name: str, ways: Sequence[Value | None], why: str) -> Value:
    """What they have in common, and then what only some of them have."""
    lists = [way for way in ways if way is not None]
    longest = max(lists, key=len)
    if len(lists) < len(ways) or len(longest) < 2:
        return unknown(name, why)
    shared = 0
    while all(len(way) > shared and way[shared] == longest[shared] for way in lists):
        shared += 1
    rest = tuple((Segment("".join(part.text for part in one), why),) for one in longest[shared:])
    return (*longest[:shared], *rest)


def is_name(text: str) -> bool:
    return bool(re.match(r"[A-Za-z_]", text))
