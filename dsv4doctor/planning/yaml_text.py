"""Plain data as YAML: block style, every string in double quotes, so nothing is read as another
type."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_PLAIN_KEY = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "y", "n", "null"))
"""What older readers take for something else than text."""


def yaml_text(value: Any) -> str:
    """Of dicts with string keys, lists, strings, numbers, booleans and None."""
    return "\n".join(_lines(value, "")) + "\n"


def _lines(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _entry(f"{indent}{_key(key)}:", item, indent + "  ")
    elif isinstance(value, list) and value:
        for item in value:
            first, *rest = _lines(item, indent + "  ")
            yield f"{indent}- {first.strip()}"
            yield from rest
    else:
        yield indent + _scalar(value)


def _entry(head: str, item: Any, indent: str) -> Iterator[str]:
    if isinstance(item, dict | list) and item:
        yield head
        yield from _lines(item, indent)
    else:
        yield f"{head} {_scalar(item)}"


def _key(text: str) -> str:
    return text if _PLAIN_KEY.fullmatch(text) and text.lower() not in _WORDS else _scalar(text)


def _scalar(value: Any) -> str:
    # A JSON string is a double-quoted YAML scalar; empty collections are the same in both.
    return json.dumps(value, ensure_ascii=True)
