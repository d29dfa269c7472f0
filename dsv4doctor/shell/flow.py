"""Which commands of a script would run: `if`, `case`, loops, `&&` and `||`.

A command is left out only when it is known not to run.  Where it is not known which of several
arms runs, each is read from the same start, and a variable on which they do not agree is unknown
afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from dsv4doctor.errors import UsageError
from dsv4doctor.shell.conditions import evaluate, matches
from dsv4doctor.shell.expand import text
from dsv4doctor.shell.scope import Field, Scope, Value, unknown
from dsv4doctor.shell.syntax import Command
from dsv4doctor.shell.words import Kind, Word

_MAX_NESTING = 100
_ENDS = {"fi": "if", "esac": "case", "done": "loop", "}": "group"}
_Arm = Mapping[str, "Value | None"]


class Way(Enum):
    SKIPPED = "skipped"
    RUNS = "runs"
    MAYBE = "maybe"
    """It may run: `[ -f x ] && A=1`."""


@dataclass
class _Block:
    kind: str
    """"if", "case", "loop" or "group"."""
    line: int
    word: Field | None = None
    """Of a `case`."""
    in_condition: bool = False
    active: bool = True
    """The current condition or arm may run."""
    is_open: bool = False
    """What it sets is kept apart, for it is not known whether it runs."""
    taken: bool = False
    """An arm is known to run, so that no later one does."""
    arms: list[_Arm] = field(default_factory=list)
    """What the arms that may run have set."""
    falls: bool = False
    """A `;&` was met."""
    reads_arguments: bool = False
    """A loop over the script's own arguments, of which none is taken to be given."""

    @property
    def what(self) -> str:
        names = {"if": "this condition", "case": "the word of this case", "loop": "this loop"}
        return names.get(self.kind, "whether this runs")


@dataclass
class Flow:
    scope: Scope
    stack: list[_Block] = field(default_factory=list)
    status: bool | None = True
    """What the last command gave; None: not known."""
    repeated: frozenset[str] = frozenset()
    """What the body of the loop that begins with this command sets."""

    def enter(self, command: Command) -> Way:
        """How the next command of the script runs; `leave` follows unless it is skipped."""
        for keyword in command.keywords:
            self.keyword(keyword, command)
        if not all(block.active for block in self.stack):
            return Way.SKIPPED
        if not command.items or {"case", "arm", "for"} & set(command.keywords):
            return Way.SKIPPED
        return self.after(command.joined)

    def after(self, joined: str) -> Way:
        if not joined or self.status is (joined == "&&"):
            return Way.RUNS
        if self.status is None:
            return Way.MAYBE
        return Way.SKIPPED

    def leave(self, command: Command, way: Way) -> None:
        result = evaluate(self.scope, command)
        if "!" in command.keywords and result is not None:
            result = not result
        self.status = result if way is Way.RUNS or result == self.status else None

    def close(self) -> None:
        """The script ended, perhaps inside a block."""
        while self.stack:
            self.end()

    # ------------------------------------------------------------------ keywords

    def keyword(self, keyword: str, command: Command) -> None:
        line = command.line
        if keyword == "if":
            self.push(_Block("if", line, in_condition=True))
        elif keyword in ("while", "until", "for"):
            block = _Block("loop", line, in_condition=keyword != "for")
            block.reads_arguments = self.scope.arguments is None and _over_arguments(command)
            self.push(block)
            if keyword == "for" and command.items and isinstance(command.items[0], Word):
                self.loop_variable(command.items[0].literal or "", line)
        elif keyword == "case" and isinstance(command.items[0], Word):
            is_read = all(block.active for block in self.stack)
            word = self.word(command.items[0]) if is_read else None
            self.push(_Block("case", line, word=word))
        elif keyword == "{":
            self.push(self.group(command))
        elif keyword in _ENDS:
            if self.stack and self.stack[-1].kind == _ENDS[keyword]:
                self.end()
        elif self.stack:
            self.inside(self.stack[-1], keyword, command)

    def inside(self, block: _Block, keyword: str, command: Command) -> None:
        if keyword == "then" and block.kind == "if":
            self.arm(block, self.status)
        elif keyword == "elif" and block.kind == "if":
            self.next_arm(block)
            block.in_condition, block.active = True, not block.taken
        elif keyword == "else" and block.kind == "if":
            self.next_arm(block)
            self.arm(block, True)
        elif keyword == "do" and block.kind == "loop":
            result = self.status if block.in_condition else None
            block.in_condition = False
            block.active = result is not False
            if result is None and block.reads_arguments:
                block.active = False
                self.scope.note(block.line, "the script is taken to be called without arguments")
            self.open(block)
            for name in sorted(self.repeated) if block.active else ():
                # Not the first round's value alone: another round may have set it before.
                self.scope.set(name, unknown(name, f"line {block.line}: a loop sets ${name}"))
        elif keyword == "arm" and block.kind == "case":
            falls, block.falls = block.falls and block.active, False
            if falls and not block.is_open:
                return  # it runs right after the one before
            result = None if falls else self.covers(block, command)
            if falls and block.is_open:
                why = f"line {block.line}: cannot know {block.what}"
                arm = self.scope.close_arm()
                block.arms.append({name: unknown(name, why) for name in arm})
                block.is_open = False
            self.next_arm(block)
            self.arm(block, result)
        elif keyword == "fall":
            block.falls = True

    def push(self, block: _Block) -> None:
        if len(self.stack) >= _MAX_NESTING:
            raise UsageError(
                f"{self.scope.source}:{block.line}: conditions are nested too deeply",
                "give the SGLang flags after `--` instead of --launch",
            )
        self.stack.append(block)

    def group(self, command: Command) -> _Block:
        """`{ ...; }`, perhaps behind `&&`."""
        block = _Block("group", command.line)
        outer = all(one.active for one in self.stack)
        way = self.after(command.joined) if outer else Way.RUNS
        block.active = way is not Way.SKIPPED
        if way is Way.MAYBE:
            self.open(block)
        return block

    # ------------------------------------------------------------------ arms

    def arm(self, block: _Block, result: bool | None) -> None:
        """The next arm, which runs if `result` and no earlier one did."""
        block.in_condition = False
        block.active = result is not False and not block.taken
        if block.active and (result is None or block.arms):
            self.open(block)
        if result is None and block.active and all(one.active for one in self.stack):
            said = f"cannot know {block.what}; every arm that may run was read"
            self.scope.note(block.line, said)
        block.taken = block.taken or result is True

    def next_arm(self, block: _Block) -> None:
        if block.is_open:
            block.arms.append(self.scope.close_arm())
            block.is_open = False

    def open(self, block: _Block) -> None:
        self.scope.open_arm()
        block.is_open = True

    def end(self) -> None:
        if not self.stack:
            return
        block = self.stack.pop()
        self.next_arm(block)
        if block.arms:
            ways = block.arms if block.taken else [*block.arms, {}]
            self.scope.join(ways, block.line, f"cannot know {block.what}")
        self.status = None if block.arms else self.status

    # ------------------------------------------------------------------ words

    def word(self, word: Word) -> Field:
        self.scope.unset_is_known = True
        said = text(self.scope, word)
        self.scope.unset_is_known = False
        return said

    def covers(self, block: _Block, command: Command) -> bool | None:
        """Whether one of an arm's patterns covers the word of the `case`."""
        results: list[bool | None] = []
        for item in command.items:
            said = self.word(item) if isinstance(item, Word) else Field("", "?")
            if isinstance(item, Word) and item.literal == "*":
                results.append(True)
            elif not said.known or block.word is None or not block.word.known:
                results.append(None)
            elif isinstance(item, Word) and any(part.quoted for part in item.parts):
                results.append(block.word.text == said.text)
            else:
                results.append(matches(block.word.text, said.text))
        return True if True in results else None if None in results else False

    def loop_variable(self, name: str, line: int) -> None:
        if name:
            self.scope.set(name, unknown(name, f"line {line}: a loop sets ${name}"))


def _over_arguments(command: Command) -> bool:
    """Whether a loop's head asks for `$#`, `$1` or `$@`, or is `getopts`."""
    words = [item for item in command.items if isinstance(item, Word)]
    if "for" in command.keywords:
        words = words[1:]
        if not words:
            return True  # for x; do
    names = {part.text for word in words for part in word.parts if part.kind is Kind.PARAMETER}
    is_getopts = bool(words) and words[0].literal == "getopts"
    return is_getopts or bool(names & {"#", "1", "@", "*", "1:-", "1-"})
