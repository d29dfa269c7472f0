"""`$((...))` over known whole numbers."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_SAFE = re.compile(r"[\w\s+\-*/%()$]{1,200}")
_NAME = re.compile(r"\$?([A-Za-z_]\w*)")
_NUMBER = re.compile(r"0|[1-9]\d{0,17}")
_LIMIT = 1 << 63


def _quotient(a: int, b: int) -> int:
    return int(abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: _quotient,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
}


def evaluate(text: str, value: Callable[[str], str | None]) -> int | None:
    """The number that `text` gives; None: not a simple sum, or not known.

    `value` is the text of a variable, None where it cannot be known.
    """
    if not _SAFE.fullmatch(text) or "**" in text or "//" in text:
        return None
    known = True

    def said(match: re.Match[str]) -> str:
        nonlocal known
        number = (value(match[1]) or "").strip() or "?"
        known = known and bool(_NUMBER.fullmatch(number.removeprefix("-")))
        return f"({number})"

    replaced = _NAME.sub(said, text).replace("/", "//")
    if not known or "$" in replaced or len(replaced) > 2000:
        return None
    try:
        number = _number(ast.parse(replaced.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return number if number is not None and abs(number) < _LIMIT else None


def _number(node: ast.expr) -> int | None:
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _number(node.operand)
        return None if number is None else -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _number(node.left), _number(node.right)
        if left is None or right is None or max(abs(left), abs(right)) >= _LIMIT:
            return None
        return _OPERATIONS[type(node.op)](left, right)
    return None
