"""The source of the call through which a layer reached its kernel."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

from dsv4doctor.models import Layer, Location


def call_texts(root: Path, layers: Iterable[Layer]) -> dict[str, str]:
    """ "file:line" -> the source of the kernel call there, for every call site that can be read."""
    found: dict[str, str] = {}
    for layer in layers:
        site = layer.kernel.call_site if layer.kernel else None
        if site is not None and site_key(site) not in found:
            text = _call_text(root / site.file, site.line)
            if text is not None:
                found[site_key(site)] = text
    return found


def text_at(texts: Mapping[str, str], layer: Layer) -> str:
    """The source of the call to the layer's kernel; "" when it is not known."""
    site = layer.kernel.call_site if layer.kernel else None
    return texts.get(site_key(site), "") if site else ""


def site_key(site: Location) -> str:
    return f"{site.file}:{site.line}"


def _call_text(path: Path, line: int) -> str | None:
    """The smallest call that covers `line`; None when the file cannot be read as Python."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    starting = [node for node in calls if node.lineno == line] or calls
    if not starting:
        return None
    # A call's first line also starts the calls among its arguments: the outermost is meant.
    outermost = max(starting, key=lambda node: (node.end_lineno or 0) - node.lineno)
    return _segment(source, outermost)


def _segment(source: str, node: ast.Call) -> str:
    """`node`'s part of `source`; ast.get_source_segment takes as long as parsing does."""
    last_line, last_column = node.end_lineno, node.end_col_offset
    assert last_line is not None
    # Columns are in bytes; reading the file has made every end of line "\n".
    lines = [line.encode() for line in source.split("\n")[node.lineno - 1 : last_line]]
    lines[-1] = lines[-1][:last_column]
    lines[0] = lines[0][node.col_offset :]
    return b"\n".join(lines).decode()
