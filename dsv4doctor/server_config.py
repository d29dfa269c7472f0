"""The model that a file of SGLang's --config names.

SGLang puts such a file's keys in front of the command line's flags, so a flag counts more.
"""

from __future__ import annotations

import re
from pathlib import Path

_ENTRY = re.compile(
    r"""^(?P<quote>['"]?)(?:model[-_]path|model)(?P=quote)[ \t]*:(?P<value>[ \t][^\n]*)?$""",
    re.MULTILINE,
)
_PLAIN = re.compile(r"""([\w./~][^\n]*?)(?:[ \t]+#.*)?""")
_QUOTED = re.compile(r"""(?:'([^'\n]*)'|"([^"\\\n]*)")(?:[ \t]+#.*)?""")


def model_of(path: Path) -> str | None:
    """The model in the YAML file at `path`, the last one named; None: none that can be told.

    Raises OSError where it cannot be read.
    """
    entries = list(_ENTRY.finditer(path.read_text(encoding="utf-8", errors="replace")))
    value = (entries[-1]["value"] or "").strip() if entries else ""
    if quoted := _QUOTED.fullmatch(value):
        return quoted[1] or quoted[2] or None
    plain = _PLAIN.fullmatch(value)
    return plain[1] if plain and ": " not in plain[1] else None
