"""Facts kept between runs: one JSON file an entry, never in the way when it cannot be used."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import TypeVar

from dsv4doctor import jsonio
from dsv4doctor.errors import UsageError

T = TypeVar("T")


def load_entry(path: Path, kind: type[T]) -> T | None:
    """The `kind` kept in `path`; None when there is none, or none that can be read."""
    try:
        return jsonio.from_plain(json.loads(path.read_bytes()), kind, str(path))
    except (OSError, ValueError, RecursionError, UsageError):
        return None


def save_entry(path: Path, value: object) -> None:
    """Keep `value`, a dataclass of `models`, in `path`; a folder that cannot be written is fine."""
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(jsonio.to_plain(value)))


def write_whole(path: Path, text: str) -> None:
    """`text` as the file `path`, which appears whole or not at all; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
