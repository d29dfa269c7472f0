"""JSON for the types in `models`: enums as their value, tuples as lists, dataclasses as objects."""

from __future__ import annotations

import json
import re
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
    converter.register_structure_hook(str, _text)
    try:
        return converter.structure(plain, kind)
    except Exception as error:
        first = cattrs.transform_error(error, path=source)[0]
        problem, _, place = first.rpartition(" @ ")
        field = place.removeprefix(source).lstrip(".") or "its contents"
        why = _INTERNAL.sub("", problem)
        raise UsageError(f"{source}: not what dsv4doctor writes ({field}: {why})") from error


_INTERNAL = re.compile(r",? expected (?:an? )?[\w.\[\], |]+$| for type$|(?<=value) for type")


def _text(value: object, kind: type[str]) -> str:
    """A number is no text: cattrs would make it one.  Enums of text come here too."""
    if not isinstance(value, str):
        raise TypeError("not a text")
    return kind(value)
