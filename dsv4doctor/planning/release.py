"""What an SGLang tree's sources offer for a launch, read as text: nothing of the tree is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsv4doctor.flags import options_of

_ARGUMENTS = "sglang/srt/server_args.py"
_FIELDS = "sglang/srt/arg_groups/fields"
_CHOICES = "sglang/srt/arg_groups/choices.py"
_REASONING = "sglang/srt/parser/reasoning_parser.py"
_TOOLS = "sglang/srt/function_call/function_call_parser.py"


@dataclass(frozen=True)
class Release:
    """Names as the release spells them; empty where its sources do not tell."""

    options: frozenset[str]
    """Command-line options."""
    transfer_backends: tuple[str, ...]
    reasoning_parsers: tuple[str, ...]
    tool_parsers: tuple[str, ...]


def read_release(root: Path) -> Release:
    """Of the tree whose `sglang/` lies in `root`."""
    fields = sorted((root / _FIELDS).glob("*.py"))
    texts = [text_of(file) for file in (root / _ARGUMENTS, *fields)]
    lists = [*texts[:1], text_of(root / _CHOICES)]
    return Release(
        options=frozenset(options_of(texts)),
        transfer_backends=_first(lists, "DISAGG_TRANSFER_BACKEND_CHOICES"),
        reasoning_parsers=_first([text_of(root / _REASONING)], "DetectorMap"),
        tool_parsers=_first([text_of(root / _TOOLS)], "ToolCallParserEnum"),
    )


def text_of(file: Path) -> str:
    """The file's text; empty where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _first(texts: list[str], name: str) -> tuple[str, ...]:
    return next((found for text in texts if (found := tuple(_strings(text, name)))), ())


def _strings(text: str, name: str) -> Iterator[str]:
    """The strings of the list, or the keys of the dict, that is assigned to `name` in `text`."""
    # Only the assignment is parsed: the files around are large.
    start = re.search(rf"^( *){name}\b[^=\n]*= *(?=[\[{{(])", text, re.MULTILINE)
    if start is None:
        return
    end = re.compile(rf"^{start[1]}[\]}})]", re.MULTILINE).search(text, start.end())
    try:
        value = ast.parse(text[start.end() : end.end() if end else None].strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return
    items = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
    for item in items:
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            yield item.value
