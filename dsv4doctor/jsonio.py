"""JSON for the types in `models`: enums as their value, tuples as lists, dataclasses as objects."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from typing import Any, TypeVar

from dsv4doctor.errors import UsageError

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """`value`, a dataclass of `models`, as dicts, lists, strings and numbers."""
    return asdict(value, dict_factory=_plain_dict)


def _plain_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.value if isinstance(value, Enum) else value for key, value in pairs}


def dump(value: Any) -> str:
    """`value` as indented JSON with a final newline."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def from_plain(plain: Any, kind: type[T], source: str) -> T:
    """The `kind` that `plain` describes.

    Raises UsageError naming `source` and the first field that does not fit.
    """
    import cattrs  # only snapshots and cached traces are read back

    converter = cattrs.Converter(forbid_extra_keys=False)
    try:
        return converter.structure(plain, kind)
    except Exception as error:
        first = cattrs.transform_error(error, path=source)[0]
        raise UsageError(f"{source}: not what dsv4doctor writes ({first})") from error
