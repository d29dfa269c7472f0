"""Reading JSON files that may be anything: bounded, and every failure a UsageError."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from dsv4doctor.errors import UsageError

MIB = 1 << 20

_DEEPEST = 100
"""Levels of JSON, many times what any file read here has.  Python's own limit is its version's, and
may let in what cannot be walked."""

DOWNLOAD_HINT = "Download the file again, or point to another copy of the checkpoint."


def shown(text: str) -> str:
    """`text` from a file, fit for a terminal: printable and at most about 120 characters."""
    if len(text) > 120:
        text = text[:117] + "..."
    return text if text.isprintable() else repr(text)


def regular_size(path: Path, hint: str = DOWNLOAD_HINT) -> int:
    """The size in bytes of the regular file (or link to one) at `path`."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and os.path.lexists(path):
            raise UsageError(f"{path}: a link to a file that is not there", hint) from error
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{shown(str(path))}: cannot be read ({reason})", hint) from error
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
    raise UsageError(f"{path}: {kind} where a file should be", hint)


def read_file(path: Path, limit: int) -> bytes:
    """All of the regular file at `path`, which must hold 1 to `limit` bytes."""
    size = regular_size(path)
    if size > limit:
        raise UsageError(
            f"{path}: {size} bytes, and such a file has at most {limit}", DOWNLOAD_HINT
        )
    raw = read_part(path, limit + 1)
    if not raw:
        raise UsageError(f"{path}: empty", DOWNLOAD_HINT)
    return raw


def read_part(path: Path, count: int, offset: int = 0) -> bytes:
    """Up to `count` bytes of the file at `path` from `offset` on."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(count)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})", DOWNLOAD_HINT) from error


def read_json(path: Path, limit: int, hint: str, name: str | None = None) -> Any:
    """The JSON in the regular file at `path`, of at most `limit` bytes; `name` stands for it in
    errors, which are UsageErrors with `hint`."""
    name = name or str(path)
    if regular_size(path, hint) > limit:
        raise UsageError(f"{name}: over {limit // MIB} MiB", hint)
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(limit + 1))
        _refuse_depth(value)
        return value
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({error.strerror})", hint) from error
    except RecursionError as error:
        raise UsageError(f"{name}: JSON nested too deeply", hint) from error
    except ValueError as error:
        raise UsageError(f"{name}: not JSON ({error})", hint) from error


def parse_object(raw: bytes, source: str, any_depth: bool = False) -> dict[str, Any]:
    """The JSON object in `raw`; `source` names it in errors.

    `any_depth`: the caller keeps its first levels only.
    """
    try:
        value = json.loads(raw.decode("utf-8"))
        if not any_depth:
            _refuse_depth(value)
        if b"\\u" in raw:  # half a surrogate pair would fail much later, when it is written
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not UTF-8 text (byte {error.start})", DOWNLOAD_HINT) from error
    except UnicodeEncodeError as error:
        raise UsageError(f"{source}: not valid Unicode text", DOWNLOAD_HINT) from error
    except RecursionError as error:
        raise UsageError(f"{source}: JSON nested too deeply", DOWNLOAD_HINT) from error
    except ValueError as error:
        raise UsageError(f"{source}: not JSON ({error})", DOWNLOAD_HINT) from error
    if not isinstance(value, dict):
        raise UsageError(f"{source}: should be an object, not {_kind(value)}", DOWNLOAD_HINT)
    return value


def _refuse_depth(value: Any) -> None:
    """RecursionError for more levels than can be walked and written again."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(_DEEPEST):
        boxes = (box.values() if isinstance(box, dict) else box for box in level)
        level = [item for box in boxes for item in box if isinstance(item, (dict, list))]
        if not level:
            return
    raise RecursionError


def field(mapping: dict[str, Any], key: str, kind: type[Any], source: str) -> Any:
    """`mapping[key]`, a `kind` or None (absent or null); UsageError for any other type.

    true and false are no integers.
    """
    value = mapping.get(key)
    if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
        return value
    raise _wrong(key, kind, value, source)


def number(mapping: dict[str, Any], key: str, low: int, high: int, source: str) -> int | None:
    """`mapping[key]`, an integer from `low` to `high`, or None."""
    value: int | None = field(mapping, key, int, source)
    if value is not None and not low <= value <= high:
        raise UsageError(f"{source}: {key} should be {low} to {high}", DOWNLOAD_HINT)
    return value


def strings(mapping: dict[str, Any], key: str, source: str) -> list[str] | None:
    """`mapping[key]`, a list of strings, or None."""
    value: list[Any] | None = field(mapping, key, list, source)
    for item in value or ():
        if not isinstance(item, str):
            raise UsageError(
                f"{source}: {key} should hold strings, not {_kind(item)}", DOWNLOAD_HINT
            )
    return value


def objects(mapping: dict[str, Any], key: str, source: str) -> dict[str, dict[str, Any]] | None:
    """`mapping[key]`, an object whose values are objects, or None."""
    value: dict[str, Any] | None = field(mapping, key, dict, source)
    for name, item in (value or {}).items():
        if not isinstance(item, dict):
            raise _wrong(f"{key}.{name}", dict, item, source)
    return value


def _wrong(key: str, kind: type[Any], value: Any, source: str) -> UsageError:
    want = {dict: "an object", list: "a list", str: "a string", int: "an integer"}[kind]
    return UsageError(f"{source}: {shown(key)} should be {want}, not {_kind(value)}", DOWNLOAD_HINT)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names = {dict: "an object", list: "a list", str: "a string", int: "a number"}
    return names.get(type(value), "a number")
