"""What a kernel is for, from its name: `rules/data/gpu_categories.toml`, first row that matches."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Row:
    id: str
    category: str
    pattern: re.Pattern[str]
    sources: tuple[str, ...]
    family: str | None = None
    fp32: bool = False


UNKNOWN = Row("", "unknown", re.compile(""), ())
"""For a name that no row matches."""


def category_of(name: str) -> Row:
    """The row that puts the kernel `name` where it belongs, or UNKNOWN."""
    name = name[:_LONGEST_NAME]
    return next((row for row in rows() if row.pattern.search(name)), UNKNOWN)


_LONGEST_NAME = 1 << 14  # no kernel's: each pattern goes through all of it


@functools.cache
def rows() -> tuple[Row, ...]:
    return tuple(_row(row) for row in _table()["kernel"])


def families_of(symbol: str) -> frozenset[str]:
    """The families of MoE kernels that run when SGLang reaches `symbol`; empty: not known."""
    for row in _table()["expect"]:
        if fnmatchcase(symbol, row["symbol"]):
            return frozenset(row["families"])
    return frozenset()


@functools.cache
def _table() -> dict[str, Any]:
    text = resources.files("dsv4doctor.rules").joinpath("data/gpu_categories.toml")
    return tomllib.loads(text.read_text("utf-8"))


def _row(row: dict[str, Any]) -> Row:
    pattern = re.compile("|".join(f"(?:{name})" for name in row["names"]))
    return Row(
        id=row["id"],
        category=row["category"],
        pattern=pattern,
        sources=tuple(row["sources"]),
        family=row.get("family"),
        fp32=row.get("fp32", False),
    )
