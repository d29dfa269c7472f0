"""A signature: how one kind of failure shows in a log, its causes, and what to do.

The data is in rules/signatures/*.toml, with the examples that are its tests beside it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dsv4doctor.models import Severity

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).resolve().parent.parent / "rules" / "signatures"
CONSEQUENCE = 2
"""The tier of what only follows from something else."""
NOTE = 3
"""The tier of what only slows a server that works."""


@dataclass(frozen=True)
class Sign:
    """Something that, when the log shows it, speaks for or against a cause."""

    pattern: re.Pattern[str]
    says: str


@dataclass(frozen=True)
class Cause:
    text: str
    prior: float
    """How likely it is before the rest of the log is looked at, 0 to 1."""
    confirms: tuple[Sign, ...]
    refutes: tuple[Sign, ...]
    remedy: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogExample:
    title: str
    text: str
    fields: dict[str, str]
    """Extracted values that the match must have."""
    matches: bool = True
    """False: a look-alike that must not match."""
    top: str = ""
    """Text that the likeliest cause contains."""


@dataclass(frozen=True)
class Signature:
    id: str
    title: str
    severity: Severity
    engine: str
    """"sglang", "vllm" or "any": whose logs it is looked for in."""
    tier: int
    """0: names the root cause; 1: generic; 2: follows from something else; 3: a note, the
    server works."""
    literals: tuple[str, ...]
    """A line without any of these is not looked at."""
    patterns: tuple[re.Pattern[str], ...]
    near: tuple[re.Pattern[str], ...]
    """Each must be seen in the line or those before it."""
    absent: tuple[re.Pattern[str], ...]
    """None may be seen within the lines around."""
    requires: re.Pattern[str] | None
    """Must hold for the log as a whole (`facts` of the judgement), else it is only a note."""
    excludes: re.Pattern[str] | None
    """Must not hold for the log as a whole, e.g. for a GPU where the line is right."""
    yields_to: tuple[str, ...]
    """Signatures beside which this one, being more general, is not reported."""
    at_end: bool
    """Counts only where the log shows no progress after it."""
    message: str
    """What happened; {field} stands for an extracted value."""
    releases: str
    links: tuple[str, ...]
    rules: tuple[str, ...]
    """The rules of `check` that see the same failure before a start."""
    emitted_at: tuple[tuple[str, str], ...]
    """(file in the SGLang tree, text of the statement) that writes the line."""
    causes: tuple[Cause, ...]
    examples: tuple[LogExample, ...]


@lru_cache(maxsize=1)
def signatures() -> tuple[Signature, ...]:
    """Every signature, by id."""
    found: list[Signature] = []
    for path in sorted(FOLDER.glob("*.toml")):
        with path.open("rb") as file:
            found += [_signature(entry) for entry in tomllib.load(file)["signature"]]
    return tuple(sorted(found, key=lambda signature: signature.id))


def _signature(entry: Mapping[str, Any]) -> Signature:
    requires, excludes = entry.get("requires"), entry.get("excludes")
    return Signature(
        id=entry["id"],
        title=entry["title"],
        severity=Severity(entry["severity"]),
        engine=entry.get("engine", "any"),
        tier=entry.get("tier", 0),
        literals=tuple(entry["literals"]),
        patterns=_compiled(entry["patterns"]),
        near=_compiled(entry.get("near", ())),
        absent=_compiled(entry.get("absent", ())),
        requires=re.compile(requires) if requires else None,
        excludes=re.compile(excludes) if excludes else None,
        yields_to=tuple(entry.get("yields_to", ())),
        at_end=entry.get("at_end", False),
        message=entry["message"],
        releases=entry.get("releases", "any"),
        links=tuple(entry.get("links", ())),
        rules=tuple(entry.get("rules", ())),
        emitted_at=tuple((where["file"], where["text"]) for where in entry.get("emitted_at", ())),
        causes=tuple(_cause(cause) for cause in entry["cause"]),
        examples=tuple(
            LogExample(
                example["title"],
                example["text"],
                example.get("fields", {}),
                example.get("matches", True),
                example.get("top", ""),
            )
            for example in entry.get("example", ())
        ),
    )


def _cause(entry: Mapping[str, Any]) -> Cause:
    return Cause(
        text=entry["text"],
        prior=float(entry["prior"]),
        confirms=_signs(entry.get("confirms", ())),
        refutes=_signs(entry.get("refutes", ())),
        remedy=entry["remedy"],
        commands=tuple(entry.get("commands", ())),
    )


def _signs(entries: Any) -> tuple[Sign, ...]:
    return tuple(Sign(re.compile(entry["see"], re.MULTILINE), entry["says"]) for entry in entries)


def _compiled(patterns: Any) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern, re.MULTILINE) for pattern in patterns)
