"""Unified diffs that `git apply` and `patch -p1` take."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

_NO_END = "\\ No newline at end of file\n"


def unified(changes: Mapping[str, tuple[bytes, bytes]]) -> bytes:
    """The diff of every file, relative to the folder that it is to be applied in.

    `changes`: file -> (bytes before, bytes after); files that are equal are left out.
    """
    return b"".join(
        _one(file, before, after) for file, (before, after) in changes.items() if before != after
    )


def _one(file: str, before: bytes, after: bytes) -> bytes:
    # Without git's own "diff --git" line, which would make git look for the files in the top folder
    # of a repository around, and leave them out without a word.
    hunks = difflib.unified_diff(_lines(before), _lines(after), f"a/{file}", f"b/{file}")
    text = "".join(line if line.endswith("\n") else f"{line}\n{_NO_END}" for line in hunks)
    return text.encode("utf-8", "surrogateescape")


def _lines(content: bytes) -> list[str]:
    """Only "\\n" ends a line to git; bytes that are no UTF-8 come back as they were."""
    lines = content.decode("utf-8", "surrogateescape").split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
