"""Reading a shell script word by word, quoting kept.  Work is linear in the length of the text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import NoReturn

from dsv4doctor.errors import UsageError


class Kind(Enum):
    LITERAL = "literal"
    PARAMETER = "parameter"
    """`text` is what stands between the braces, or the name."""
    COMMAND = "command"
    """A command, process or arithmetic substitution; `text` is what stands inside."""


@dataclass(frozen=True)
class Part:
    kind: Kind
    text: str
    quoted: bool


@dataclass(frozen=True)
class Word:
    parts: tuple[Part, ...]
    line: int

    @property
    def literal(self) -> str | None:
        """The word's text when it is one unquoted literal."""
        if len(self.parts) == 1 and self.parts[0].kind is Kind.LITERAL:
            return None if self.parts[0].quoted else self.parts[0].text
        return None


@dataclass(frozen=True)
class Assignment:
    """`NAME=value`, `NAME+=value` or `NAME=(words)`."""

    name: str
    append: bool
    value: Word | tuple[Word, ...]
    line: int


_PLAIN = re.compile(r"[^\s\\'\"$`|&;()<>#]+")
_PLAIN_QUOTED = re.compile(r'[^\\"$`]+')
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]")
_ANSI_C = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "e": "\x1b"}
_MAX_DEPTH = 200


def parse_word(text: str, source: str, line: int, quoted: bool) -> Word:
    """`text`, e.g. the default in `${A:-text}`, as one word; blanks belong to it."""
    parser = Scanner(text, source, line)
    parts: list[Part] = []
    while parser.position < len(text):
        parser.part(parts, quoted=quoted, everything=True)
    return Word(tuple(parts), line)


@dataclass
class Scanner:
    text: str
    source: str
    line: int
    position: int = 0
    here_documents: list[tuple[str, bool]] = field(default_factory=list)

    def fail(self, what: str, line: int) -> NoReturn:
        raise UsageError(
            f"{self.source}:{line}: {what}", "check the script with `bash -n`; it was not run"
        )

    def skip_blanks(self) -> bool:
        """Move to the next token; False at the end of the text."""
        text, end = self.text, len(self.text)
        while self.position < end:
            if text[self.position] in " \t\r\f\v":
                self.position += 1
            elif text.startswith("\\\n", self.position):
                self.position += 2
                self.line += 1
            else:
                return True
        return False

    def skip_comment(self) -> None:
        end = self.text.find("\n", self.position)
        self.position = len(self.text) if end < 0 else end

    def newline(self) -> None:
        self.position += 1
        self.line += 1
        pending, self.here_documents = self.here_documents, []
        for delimiter, strip_tabs in pending:
            self.skip_here_document(delimiter, strip_tabs)

    def skip_here_document(self, delimiter: str, strip_tabs: bool) -> None:
        while self.position < len(self.text):
            end = self.text.find("\n", self.position)
            end = len(self.text) if end < 0 else end
            row = self.text[self.position : end]
            self.position = min(end + 1, len(self.text))
            self.line += 1
            if (row.lstrip("\t") if strip_tabs else row).rstrip("\r") == delimiter:
                return

    # ------------------------------------------------------------------ words

    def word(self) -> Word:
        line = self.line
        parts: list[Part] = []
        while self.position < len(self.text):
            character = self.text[self.position]
            if character in " \t\r\f\v\n|&;()<>":
                break
            self.part(parts, quoted=False)
        return Word(tuple(parts), line)

    def part(self, parts: list[Part], quoted: bool, everything: bool = False) -> None:
        """Read one piece of a word; `everything`: blanks and operators are plain text."""
        text, at = self.text, self.position
        character = text[at]
        if character == "\\":
            self.escape(parts, quoted)
        elif character == "'" and not quoted:
            end = self.closing("'", at + 1)
            self.literal(parts, text[at + 1 : end], end + 1, quoted=True)
        elif character == '"':
            self.double_quoted(parts)
        elif character == "$":
            self.dollar(parts, quoted)
        elif character == "`":
            end = self.closing("`", at + 1)
            parts.append(Part(Kind.COMMAND, text[at + 1 : end], quoted))
            self.advance(end + 1)
        elif not quoted and (match := _PLAIN.match(text, at)):
            self.literal(parts, match.group(), match.end(), quoted=False)
        elif everything or quoted or character == "#":
            self.literal(parts, character, at + 1, quoted)
        else:
            self.fail(f"unexpected {character!r}", self.line)

    def literal(self, parts: list[Part], text: str, end: int, quoted: bool) -> None:
        parts.append(Part(Kind.LITERAL, text, quoted))
        self.advance(end)

    def advance(self, end: int) -> None:
        self.line += self.text.count("\n", self.position, end)
        self.position = end

    def closing(self, quote: str, start: int) -> int:
        """The index of the next unescaped `quote` (a backslash is plain between '...')."""
        end = self.text.find(quote, start)
        while quote != "'" and end > 0 and _escaped(self.text, end, start):
            end = self.text.find(quote, end + 1)
        if end < 0:
            self.fail(f"a {quote} is never closed", self.line)
        return end

    def escape(self, parts: list[Part], quoted: bool) -> None:
        following = self.text[self.position + 1 : self.position + 2]
        if following == "\n":
            self.advance(self.position + 2)
        elif quoted and following not in ("$", "`", '"', "\\"):
            self.literal(parts, "\\", self.position + 1, quoted=True)
        else:
            self.literal(parts, following or "\\", self.position + 1 + len(following), True)

    def double_quoted(self, parts: list[Part]) -> None:
        line = self.line
        self.position += 1
        if self.text.startswith('"', self.position):
            parts.append(Part(Kind.LITERAL, "", quoted=True))  # "" is an argument
        while self.position < len(self.text):
            at = self.position
            if self.text[at] == '"':
                self.position += 1
                return
            if match := _PLAIN_QUOTED.match(self.text, at):
                self.literal(parts, match.group(), match.end(), quoted=True)
            else:
                self.part(parts, quoted=True)
        self.fail('a " is never closed', line)

    def dollar(self, parts: list[Part], quoted: bool) -> None:
        text, at = self.text, self.position
        if text.startswith(("$(", "${"), at):
            opening = at + 1
            closer = ")" if text[opening] == "(" else "}"
            end = self.skip_balanced(opening, closer)
            kind = Kind.COMMAND if closer == ")" else Kind.PARAMETER
            parts.append(Part(kind, text[opening + 1 : end], quoted))
        elif text.startswith("$'", at) and not quoted:
            end = at + 2
            while (end := self.closing("'", end)) and _escaped(text, end, at + 2):
                end += 1
            body = re.sub(r"\\(.)", lambda m: _ANSI_C.get(m[1], m[0]), text[at + 2 : end])
            self.literal(parts, body, end + 1, quoted=True)
        elif match := _PARAMETER.match(text, at + 1):
            parts.append(Part(Kind.PARAMETER, match.group(), quoted))
            self.position = match.end()
        elif text.startswith('$"', at) and not quoted:
            self.position += 1
        else:
            self.literal(parts, "$", at + 1, quoted)

    def skip_balanced(self, opening: int, closer: str) -> int:
        """Move past the bracket at `opening`; returns the index of its closing one."""
        text, line = self.text, self.line
        stack = [closer]
        at = opening + 1
        while at < len(text):
            character = text[at]
            if character == "\\":
                at += 2
                continue
            if character == stack[-1]:
                stack.pop()
                if not stack:
                    self.advance(at + 1)
                    return at
            elif character == "'" and stack[-1] != '"':
                at = self.closing("'", at + 1)
            elif character == '"':
                stack.append('"')
            elif character == "(" and stack[-1] == ")":
                stack.append(")")
            elif character == "$" and text[at + 1 : at + 2] in ("(", "{"):
                at += 1
                stack.append(")" if text[at] == "(" else "}")
            if len(stack) > _MAX_DEPTH:
                self.fail("brackets are nested too deeply", line)
            at += 1
        self.fail(f"a {text[opening - 1 : opening + 1].strip()} is never closed", line)


def _escaped(text: str, index: int, start: int) -> bool:
    """Whether an odd number of backslashes stands in front of `index`."""
    before = index
    while before > start and text[before - 1] == "\\":
        before -= 1
    return (index - before) % 2 == 1
