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
    """Keep `value`, a dataclass of `models`, in `path`; a folder that cannot be written is fine.

    The file appears whole or not at all.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".new")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(jsonio.to_plain(value)))
            os.replace(name, path)
        except OSError:
            os.unlink(name)
