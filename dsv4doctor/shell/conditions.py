"""Which arms of an `if` would run, where its condition is a simple test of known values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dsv4doctor.errors import UsageError
from dsv4doctor.shell.expand import Scope
from dsv4doctor.shell.syntax import Command, Word

_NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
}
_MAX_NESTING = 100


@dataclass
class _If:
    results: list[bool | None] = field(default_factory=list)
    """What the commands of the current condition give."""
    in_condition: bool = True
    taken: bool = False
    """An earlier arm is known to run."""
    active: bool = True
    """The current condition or arm may run."""


@dataclass
class Conditions:
    """Follows `if`, `elif`, `else` and `fi`; an arm is left out only when known not to run."""

    scope: Scope
    stack: list[_If] = field(default_factory=list)

    def admits(self, command: Command) -> bool:
        """Whether `command`, the next one of the script, may run."""
        for keyword in command.keywords:
            self.keyword(keyword, command.line)
        if not all(block.active for block in self.stack):
            return False
        if self.stack and self.stack[-1].in_condition and command.items:
            result = evaluate(self.scope, command)
            if "!" in command.keywords and result is not None:
                result = not result
            self.stack[-1].results.append(result)
        return True

    def keyword(self, keyword: str, line: int) -> None:
        if keyword == "if":
            if len(self.stack) >= _MAX_NESTING:
                raise UsageError(
                    f"{self.scope.source}:{line}: conditions are nested too deeply",
                    "give the SGLang flags after `--` instead of --launch",
                )
            self.stack.append(_If())
            return
        if not self.stack:
            return
        block = self.stack[-1]
        if keyword == "fi":
            self.stack.pop()
        elif keyword == "elif":
            block.in_condition, block.active, block.results = True, not block.taken, []
        elif keyword == "else":
            block.in_condition, block.active = False, not block.taken
        elif keyword == "then":
            result = block.results[0] if len(block.results) == 1 else None
            block.in_condition = False
            if block.taken:
                return
            block.active = result is not False
            block.taken = result is True
            if result is None and all(outer.active for outer in self.stack):
                self.scope.note(line, "its condition is not known; this arm and the next were read")


def evaluate(scope: Scope, command: Command) -> bool | None:
    """What `[ ... ]`, `[[ ... ]]`, `test`, `true` or `false` gives; None: not known."""
    words = [item for item in command.items if isinstance(item, Word)]
    if len(words) != len(command.items):
        return None
    scope.unset_is_known = True
    fields = [scope.text(word) for word in words]
    scope.unset_is_known = False
    texts = [piece.text for piece in fields]
    if not all(piece.known for piece in fields):
        return None
    if texts in (["true"], ["false"]):
        return texts == ["true"]
    if len(texts) > 2 and (texts[0], texts[-1]) in (("[", "]"), ("[[", "]]")):
        texts = texts[1:-1]
    elif len(texts) > 1 and texts[0] == "test":
        texts = texts[1:]
    else:
        return None
    if texts[0] == "!" and len(texts) > 1:
        inner = _test(texts[1:])
        return None if inner is None else not inner
    return _test(texts)


def _test(texts: list[str]) -> bool | None:
    if len(texts) == 1:
        return texts[0] != ""
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return (texts[1] == "") == (texts[0] == "-z")
    if len(texts) != 3:
        return None
    left, operator, right = texts
    if operator in ("=", "==", "!="):
        if any(character in right for character in "*?["):
            return None  # a pattern
        return (left == right) == (operator != "!=")
    if operator in _NUMERIC and _is_number(left) and _is_number(right):
        return _NUMERIC[operator](int(left), int(right))
    return None


def _is_number(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdecimal() and len(digits) < 19
