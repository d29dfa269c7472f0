"""The text of a shell script as a list of simple commands.

The commands of every block are in the list, with the keywords in front of them kept aside: what
of it would run is for `flow` to say.  Here-documents are skipped.  Work is linear in the length
of the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dsv4doctor.shell.words import Assignment, Kind, Part, Scanner, Word

Item = Word | Assignment


@dataclass(frozen=True)
class Command:
    """One simple command; its words may hold assignments (`export A=1`, `ARGS=(...)`)."""

    items: tuple[Item, ...]
    line: int
    last_line: int
    keywords: tuple[str, ...] = ()
    """What stood in front, e.g. ("then",); with `fi` and the like there are no items.

    Ours: "for" has the variable and the words as its items, "case" the word, "arm" the patterns
    of an arm, "function" the name; "fall" is an arm that goes on into the next one.
    """
    joined: str = ""
    """"&&" or "||" where one stands between this command and the one before."""


_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_OPERATORS = ("&&", "||", "|&", ";;&", ";;", ";&", "|", "&", ";", "(", ")")
_REDIRECTION = re.compile(r"(?:\d+|\{\w+\})?(?:<<<|<<-?|<>|<&|<|>>|>&|>\||>)|&>>?")
_IN_TEST = re.compile(r"&&|\|\||[|&;()<>]")
_WORDS = "if then elif else fi while until do done esac { } ! time"
_KEYWORDS = frozenset(_WORDS.split())
_LONGEST_HEAD = 20
"""Keywords in front of `case` or a function's name; more are not looked through."""


def parse(text: str, source: str, first_line: int = 1) -> tuple[Command, ...]:
    """The commands of `text`.  Raises UsageError naming `source` and the line."""
    return _Parser(text, source, first_line).script()


@dataclass
class _Parser(Scanner):
    commands: list[Command] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    joined: str = ""
    cases: list[bool] = field(default_factory=list)
    """For each open `case`: whether the patterns of an arm come next."""

    def script(self) -> tuple[Command, ...]:
        while self.skip_blanks():
            character = self.text[self.position]
            if self.cases and self.cases[-1]:
                self.arm()
            elif character == "\n":
                if self.items and not self.is_case_head():
                    self.end_command()
                self.newline()
            elif character == "#":
                self.skip_comment()
            elif self.in_test() and (match := _IN_TEST.match(self.text, self.position)):
                plain = Part(Kind.LITERAL, match.group(), quoted=False)
                self.items.append(Word((plain,), self.line))
                self.position = match.end()
            elif match := _REDIRECTION.match(self.text, self.position):
                self.redirection(match)
            elif operator := self.operator():
                self.after(operator)
            else:
                self.items.append(self.item())
                self.head()
        self.end_command()
        return tuple(self.commands)

    # ------------------------------------------------------------------ commands

    def end_command(self, operator: str = "") -> None:
        keywords, kept = _split_keywords(self.items)
        if keywords or kept:
            line = (kept or self.items)[0].line
            self.add(kept, line, keywords)
        self.items.clear()
        self.joined = operator if operator in ("&&", "||") else ""
        if "esac" in keywords and self.cases:
            self.cases.pop()

    def add(self, items: list[Item], line: int, keywords: tuple[str, ...]) -> None:
        self.commands.append(Command(tuple(items), line, self.line, keywords, self.joined))

    def after(self, operator: str) -> None:
        """What an operator ends."""
        if operator == "(" and self.is_name() and self.closes_at_once():
            self.definition()
            return
        self.end_command(operator)
        if operator in (";;", ";&", ";;&") and self.cases:
            self.cases[-1] = True
            if operator != ";;":
                self.add([], self.line, ("fall",))

    def head(self) -> None:
        """Whether the items so far are the head of a `case` or of a function."""
        if len(self.items) > _LONGEST_HEAD:
            return
        last = self.items[-1]
        if isinstance(last, Word) and last.literal == "in" and self.is_case_head(complete=True):
            at = _lead(self.items)
            keywords = tuple(_literal(item) or "" for item in self.items[:at])
            self.add([self.items[at + 1]], self.items[at].line, (*keywords, "case"))
            self.items.clear()
            self.joined = ""
            self.cases.append(True)
        elif len(self.items) > 1 and _literal(self.items[-2]) == "function":
            del self.items[-2]
            if self.skip_blanks() and self.text[self.position] == "(":
                self.position += 1
                if not self.closes_at_once():
                    return
            self.definition()

    def is_case_head(self, complete: bool = False) -> bool:
        if len(self.items) > _LONGEST_HEAD:
            return False
        rest = self.items[_lead(self.items) :]
        return len(rest) == (3 if complete else 2) and _literal(rest[0]) == "case"

    def is_name(self) -> bool:
        rest = self.items[_lead(self.items) :] if len(self.items) < _LONGEST_HEAD else ()
        return len(rest) == 1 and bool(_literal(rest[0]))

    def closes_at_once(self) -> bool:
        """Move past the ")" of `name()`, if it is that."""
        if self.skip_blanks() and self.text[self.position] == ")":
            self.position += 1
            return True
        return False

    def definition(self) -> None:
        at = _lead(self.items)
        keywords = tuple(_literal(item) or "" for item in self.items[:at])
        self.add(self.items[at:], self.line, (*keywords, "function"))
        self.items.clear()
        self.joined = ""

    def arm(self) -> None:
        """`pattern | pattern)`, or the `esac` after the last arm."""
        line, character = self.line, self.text[self.position]
        if character == "\n":
            self.newline()
            return
        if character == "#":
            self.skip_comment()
            return
        if character == "(":
            self.position += 1
            self.skip_blanks()
        patterns: list[Item] = []
        while self.skip_blanks() and self.text[self.position] not in "\n&;<>()":
            if self.text[self.position] == "|":
                self.position += 1
            else:
                patterns.append(self.word())
            if len(patterns) == 1 and _literal(patterns[0]) == "esac":
                self.cases.pop()
                self.add([], line, ("esac",))
                return
        if self.position < len(self.text) and self.text[self.position] != "\n":
            self.position += 1
        if patterns:
            self.joined = ""
            self.add(patterns, line, ("arm",))
            self.cases[-1] = False

    def in_test(self) -> bool:
        """Whether `[[` is open, where operators are words."""
        items = self.items
        at = _lead(items) if len(items) < _LONGEST_HEAD else 0
        is_open = len(items) > at and _literal(items[at]) == "[["
        return is_open and _literal(items[-1]) != "]]"

    def operator(self) -> str | None:
        for operator in _OPERATORS:
            if self.text.startswith(operator, self.position):
                if operator == "(" and self.text.startswith("((", self.position):
                    self.skip_balanced(self.position + 1, ")")
                    return "(("
                self.position += len(operator)
                return operator
        return None

    def redirection(self, match: re.Match[str]) -> None:
        operator = match.group().lstrip("0123456789")
        self.position = match.end()
        if self.text.startswith("(", self.position) and operator in ("<", ">"):
            self.skip_balanced(self.position, ")")  # a process substitution, as an argument
            return
        if not self.skip_blanks() or self.text[self.position] in "\n|&;()<>":
            return
        target = self.word()
        if operator in ("<<", "<<-"):
            delimiter = "".join(part.text for part in target.parts)
            self.here_documents.append((delimiter, operator == "<<-"))

    def item(self) -> Item:
        line = self.line
        match = _ASSIGNMENT.match(self.text, self.position)
        if match is None:
            return self.word()
        name, append = match.group(1), bool(match.group(2))
        self.position = match.end()
        if not self.text.startswith("(", self.position):
            return Assignment(name, append, self.word(), line)
        self.position += 1
        words: list[Word] = []
        while self.skip_blanks():
            character = self.text[self.position]
            if character == ")":
                self.position += 1
                return Assignment(name, append, tuple(words), line)
            if character == "\n":
                self.newline()
            elif character == "#":
                self.skip_comment()
            elif character in "|&;(<>":
                self.fail(f"unexpected {character!r} in the array {name}", self.line)
            else:
                words.append(self.word())
        self.fail(f"the array {name}=( is never closed", line)


def _literal(item: Item) -> str | None:
    return item.literal if isinstance(item, Word) else None


def _lead(items: list[Item]) -> int:
    """How many keywords stand in front."""
    return next(
        (index for index, item in enumerate(items) if _literal(item) not in _KEYWORDS), len(items)
    )


def _split_keywords(items: list[Item]) -> tuple[tuple[str, ...], list[Item]]:
    """The keywords in front, and the rest; of `for x in ...` the variable and the words."""
    at = _lead(items)
    keywords = tuple(_literal(item) or "" for item in items[:at])
    first = _literal(items[at]) if at < len(items) else None
    if first in ("for", "select"):
        rest = items[at + 1 :]
        return (*keywords, "for"), [*rest[:1], *rest[2:]]
    if first in ("case", "function"):
        return keywords, []
    return keywords, items[at:]
