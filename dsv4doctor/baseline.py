"""The baseline: findings that were there when somebody decided to go on from here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4doctor import jsonio
from dsv4doctor.errors import UsageError
from dsv4doctor.facts.files import regular_size
from dsv4doctor.models import Severity

SCHEMA = "dsv4doctor-baseline/1"


@dataclass(frozen=True)
class Entry:
    """One known finding; rule and subject are there for readers of the file."""

    target: str | None
    """None: written where the target had no name; it holds for every target."""
    rule: str
    subject: str
    severity: Severity
    """A finding that is worse than this is new."""
    fingerprint: str


@dataclass(frozen=True)
class Baseline:
    source: str
    entries: tuple[Entry, ...] = ()

    def of(self, target: str | None) -> tuple[Entry, ...]:
        """What is known of `target`, its own entries first."""
        return (*self.own(target), *(self.own(None) if target is not None else ()))

    def own(self, target: str | None) -> tuple[Entry, ...]:
        """The entries that were written for `target` and no other."""
        return tuple(entry for entry in self.entries if entry.target == target)


def read(path: Path, *, may_be_missing: bool = False) -> Baseline:
    """The baseline in `path`; UsageError names the file and what is wrong in it."""
    try:
        if path.exists() and regular_size(path, _AGAIN) > _LIMIT:
            raise UsageError(f"--baseline {path}: over {_LIMIT >> 20} MiB", _AGAIN)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if may_be_missing:
            return Baseline(str(path))
        raise UsageError(
            f"--baseline {path}: there is no such file", "write it with --update-baseline"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"--baseline {path}: cannot be read ({why})", _AGAIN) from error
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--baseline {path}: not JSON", _AGAIN) from error
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
        raise UsageError(f"--baseline {path}: not a baseline ({SCHEMA})", _AGAIN)
    rows = jsonio.from_plain(plain.get("findings"), tuple[Entry, ...], f"--baseline {path}")
    return Baseline(str(path), rows)


def render(entries: Iterable[Entry]) -> str:
    """The file's text: one order, so that a diff shows what has changed."""
    rows: Sequence[dict[str, Any]] = [jsonio.to_plain(entry) for entry in entries]
    ordered = sorted(rows, key=lambda row: [str(value) for value in row.values()])
    return jsonio.dump({"schema": SCHEMA, "findings": ordered})


_LIMIT = 64 << 20  # bytes
_AGAIN = "write it again with --update-baseline"
