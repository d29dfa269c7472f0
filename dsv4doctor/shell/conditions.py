"""What a simple test of known values gives."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence

from dsv4doctor.shell.expand import text
from dsv4doctor.shell.scope import Field, Scope
from dsv4doctor.shell.syntax import Command
from dsv4doctor.shell.words import Word

_NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
}
_NAMES = (
    ". : cd echo export declare local mkdir printf readonly set shift shopt sleep source "
    "trap typeset ulimit umask unset wait"
)
_SUCCEED = frozenset(_NAMES.split())
"""Commands of which scripts take for granted that they succeed."""


def evaluate(scope: Scope, command: Command) -> bool | None:
    """Whether `command` succeeds: of tests and a few others; None: not known."""
    words = [item for item in command.items if isinstance(item, Word)]
    if not words:
        return True  # assignments alone
    first = words[0].literal
    if first in _SUCCEED:
        return True
    if first in ("true", "false"):
        return first == "true"
    if first not in ("[", "[[", "test") or len(words) != len(command.items):
        return None
    scope.unset_is_known = True
    fields = [text(scope, word) for word in words[1:]]
    scope.unset_is_known = False
    closing = {"[": "]", "[[": "]]"}.get(first)
    if closing is not None and (not fields or fields.pop().text != closing):
        return None
    # In [[ ]] a quoted right side is no pattern; which of the two it was shows in the word.
    plain = [not any(part.quoted for part in word.parts) for word in words[1:]]
    return _any_of(fields, plain, is_extended=first == "[[")


def _any_of(fields: Sequence[Field], plain: Sequence[bool], is_extended: bool) -> bool | None:
    """`a && b || c`; the two bind alike from the left where no brackets say otherwise."""
    result: bool | None = None
    pending = ""
    at = 0
    texts = [piece.text for piece in fields]
    while at <= len(texts):
        end = next(
            (i for i in range(at, len(texts)) if is_extended and texts[i] in ("&&", "||")),
            len(texts),
        )
        one = _negated(fields[at:end], plain[at:end], is_extended)
        if not pending:
            result = one
        elif pending == "&&":
            result = False if False in (result, one) else None if None in (result, one) else True
        else:
            result = True if True in (result, one) else None if None in (result, one) else False
        if end == len(texts):
            return result
        # && binds more tightly than ||: a mixture is not looked into.
        if pending and texts[end] != pending:
            return None
        pending, at = texts[end], end + 1
    return result


def _negated(fields: Sequence[Field], plain: Sequence[bool], is_extended: bool) -> bool | None:
    if len(fields) > 1 and fields[0].text == "!":
        inner = _test(fields[1:], plain[1:], is_extended)
        return None if inner is None else not inner
    return _test(fields, plain, is_extended)


def _test(fields: Sequence[Field], plain: Sequence[bool], is_extended: bool) -> bool | None:
    if not all(piece.known for piece in fields):
        return None
    texts = [piece.text for piece in fields]
    if len(texts) == 1:
        return texts[0] != ""
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return (texts[1] == "") == (texts[0] == "-z")
    if len(texts) != 3:
        return None
    left, operator, right = texts
    if operator in ("=", "==", "!="):
        same = matches(left, right) if is_extended and plain[2] else left == right
        return None if same is None else same == (operator != "!=")
    if operator in _NUMERIC and _is_number(left) and _is_number(right):
        return _NUMERIC[operator](int(left), int(right))
    return None


def matches(word: str, pattern: str) -> bool | None:
    """Whether the shell pattern covers `word`; None: more than `*`, `?` and `[...]` is in it."""
    if "\\" in pattern or "(" in pattern or pattern.count("*") > 8 or len(pattern) > 1000:
        return None
    return fnmatch.fnmatchcase(word, pattern.replace("[^", "[!"))


def _is_number(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdecimal() and len(digits) < 19
