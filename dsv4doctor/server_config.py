"""The flags that a YAML file of SGLang's --config stands for.

SGLang puts such a file's keys in front of the command line's flags, so a flag counts more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def flags_of(path: Path) -> tuple[str, ...]:
    """The keys of the file at `path` as flags; a switch that is off is none.

    () where it holds no mapping: what is wrong with it SGLang says itself.  Raises OSError where it
    cannot be read.
    """
    import yaml  # most launches have no such file

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except (yaml.YAMLError, ValueError, RecursionError):
        return ()
    items = content.items() if isinstance(content, dict) else ()
    return tuple(word for key, value in items for word in _words(str(key), value))


def _words(key: str, value: Any) -> Iterator[str]:
    name = "--" + key.replace("_", "-")
    if value is False or value == []:
        return
    yield name
    if isinstance(value, dict):
        yield json.dumps(value, default=str)
    elif value is not True:
        yield from map(str, value if isinstance(value, list) else [value])
