"""Words -> the strings that the shell would pass, as far as that can be known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from dsv4doctor.errors import UsageError
from dsv4doctor.shell.syntax import Kind, Part, Word, parse_word

Value: TypeAlias = tuple[str, ...]
"""A variable's elements; a plain variable has one."""

_BRACED = re.compile(
    r"(?P<length>[#!])?(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?$!-])"
    r"(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)",
    re.DOTALL,
)
_OPERATION = re.compile(r"(?P<colon>:?)(?P<operator>[-=+?])(?P<argument>.*)", re.DOTALL)
_OWN_FOLDER = re.compile(
    r"cd(--)?(?P<dir>dirname(--)?\$(0|\{0\}|\{?BASH_SOURCE(\[0\])?\}?))&&pwd(-P)?"
)
_MAX_WORD = 1 << 20
_MAX_TOTAL = 8 << 20
_FIELD_COST = 32
"""Counted for each expansion beside its length, so that many short ones end as well."""
_MAX_NESTING = 20


@dataclass(frozen=True)
class Field:
    """One argument; not `known` when part of it could not be told (see the notes)."""

    text: str
    known: bool = True


@dataclass
class Scope:
    """The variables of one shell, and what could not be followed."""

    source: str
    folder: Path | None
    """The script's folder, for `$(dirname "$0")`."""
    inherited: Mapping[str, str]
    """The environment around the shell; looked at for names that the script does not set."""
    variables: dict[str, Value | None] = field(default_factory=dict)
    """None: set to something that cannot be known without running the script."""
    notes: dict[str, None] = field(default_factory=dict)
    spent: int = 0
    unset_is_known: bool = False
    """Whether an unset variable counts as known to be empty, as in a condition."""

    def note(self, line: int, text: str) -> None:
        self.notes.setdefault(f"line {line}: {text}")

    def lookup(self, name: str) -> tuple[bool, Value | None]:
        """Whether `name` is set, and its value (None: not knowable)."""
        if name in self.variables:
            return True, self.variables[name]
        if name in self.inherited:
            return True, (self.inherited[name],)
        if name in ("@", "*"):
            return False, None
        return not re.match(r"[A-Za-z_]", name), None

    def fields(self, words: Sequence[Word]) -> list[Field]:
        """`words` after expansion and splitting."""
        return [piece for word in words for piece in _Expansion(self, word.line).split(word)]

    def text(self, word: Word) -> Field:
        """`word` after expansion, unsplit, as on the right of an assignment."""
        return _Expansion(self, word.line).joined(word)

    def spend(self, size: int, line: int) -> None:
        self.spent += size + _FIELD_COST
        if size > _MAX_WORD or self.spent > _MAX_TOTAL:
            raise UsageError(
                f"{self.source}:{line}: the variables expand to more than a megabyte",
                "give the SGLang flags after `--` instead of --launch",
            )


_Piece: TypeAlias = tuple[str, bool, bool]
"""Text, whether it is quoted, whether it is known."""
_Pieces: TypeAlias = "list[_Piece | None]"
"""None stands between the elements of `"${A[@]}"`."""


@dataclass
class _Expansion:
    scope: Scope
    line: int
    depth: int = 0

    def joined(self, word: Word) -> Field:
        pieces = self.pieces(word.parts)
        text = "".join(" " if piece is None else piece[0] for piece in pieces)
        self.scope.spend(len(text), self.line)
        return Field(text, all(piece[2] for piece in pieces if piece))

    def split(self, word: Word) -> list[Field]:
        done: list[Field] = []
        text: list[str] = []
        known, present = True, False

        def end() -> None:
            nonlocal known, present
            if present:
                done.append(Field("".join(text), known))
                self.scope.spend(len(done[-1].text), self.line)
            text.clear()
            known, present = True, False

        for piece in self.pieces(word.parts):
            if piece is None:
                end()
                continue
            content, quoted, is_known = piece
            known = known and is_known
            if quoted:
                present = True
                text.append(content)
                continue
            for index, chunk in enumerate(re.split(r"([ \t\n]+)", content)):
                if index % 2:
                    end()
                    known = is_known
                elif chunk:
                    present = True
                    text.append(chunk)
        end()
        return done

    def pieces(self, parts: Sequence[Part]) -> _Pieces:
        found: _Pieces = []
        for index, part in enumerate(parts):
            if part.kind is Kind.LITERAL:
                text = part.text
                if index == 0 and not part.quoted and (text == "~" or text.startswith("~/")):
                    text = self.scope.inherited.get("HOME", "~") + text[1:]
                # A literal is never split, and quoted "" counts as an argument.
                found.append((text, True, True))
            elif part.kind is Kind.COMMAND:
                found.append(self.substitution(part))
            else:
                found.extend(self.parameter(part))
        return found

    def substitution(self, part: Part) -> _Piece:
        squeezed = re.sub(r"[\s\"]|(>/dev/null)?2?>&?1?/dev/null|\$\(|\)", "", part.text)
        own = _OWN_FOLDER.fullmatch(squeezed) or _OWN_FOLDER.fullmatch(f"cd{squeezed}&&pwd")
        if own and self.scope.folder is not None:
            return (str(self.scope.folder), part.quoted, True)
        shown = f"$({_short(part.text)})"
        self.scope.note(self.line, f"{shown} is known only when the script runs")
        return (shown, True, False)

    def parameter(self, part: Part) -> _Pieces:
        match = _BRACED.fullmatch(part.text)
        if match is None or match["length"]:
            return self.unknown(part)
        is_set, value = self.scope.lookup(match["name"])
        operation = _OPERATION.fullmatch(match["rest"]) if match["rest"] else None
        if match["rest"] and operation is None:
            return self.unknown(part)
        if operation is not None:
            if match["name"].isdecimal():
                self.scope.note(self.line, f"${match['name']} is taken as not given")
                is_set = False
            empty = not is_set or (bool(operation["colon"]) and value in ((), ("",)))
            return self.operation(part, match, operation, empty, value)
        if not is_set:
            self.scope.note(self.line, f"${match['name']} is not set; read as nothing")
            # Not known: an argument made from it cannot be trusted.
            return [("", part.quoted and match["name"] != "@", self.scope.unset_is_known)]
        return self.value(part, match["name"], match["index"], value)

    def operation(
        self,
        part: Part,
        match: re.Match[str],
        operation: re.Match[str],
        empty: bool,
        value: Value | None,
    ) -> _Pieces:
        operator, name = operation["operator"], match["name"]
        if operator == "+":
            return [] if empty else self.default(operation["argument"], part.quoted)
        if not empty:
            return self.value(part, name, match["index"], value)
        if operator == "?":
            self.scope.note(self.line, f"${name} is not set, and the script stops without it")
            return [("", part.quoted, False)]
        pieces = self.default(operation["argument"], part.quoted)
        if operator == "=" and re.match(r"[A-Za-z_]", name):
            self.scope.variables[name] = ("".join(piece[0] for piece in pieces if piece),)
        return pieces

    def default(self, argument: str, quoted: bool) -> _Pieces:
        if self.depth >= _MAX_NESTING:
            raise UsageError(
                f"{self.scope.source}:{self.line}: defaults are nested too deeply",
                "give the SGLang flags after `--` instead of --launch",
            )
        word = parse_word(argument, self.scope.source, self.line, quoted)
        self.depth += 1
        pieces: _Pieces = []
        for part in word.parts:
            if part.kind is Kind.LITERAL and not part.quoted:
                pieces.append((part.text, quoted, True))
            else:
                pieces.extend(self.pieces((part,)))
        self.depth -= 1
        return pieces

    def value(self, part: Part, name: str, index: str | None, value: Value | None) -> _Pieces:
        if value is None:
            return self.unknown(part)
        if name in ("@", "*"):
            index = name
        if index == "*" and part.quoted:
            return [(" ".join(value), True, True)]
        if index in ("@", "*"):
            pieces: _Pieces = []
            for element in value:
                if pieces:
                    pieces.append(None)
                pieces.append((element, part.quoted, True))
            return pieces
        if index is not None and not index.isdecimal():
            return self.unknown(part)
        at = int(index[:6]) if index else 0
        text = value[at] if at < len(value) else ""
        self.scope.spend(len(text), self.line)
        return [(text, part.quoted, True)]

    def unknown(self, part: Part) -> _Pieces:
        plain = re.fullmatch(r"\w+|[@*#?$!-]", part.text)
        shown = f"${part.text}" if plain else f"${{{_short(part.text)}}}"
        self.scope.note(self.line, f"{shown} is known only when the script runs")
        return [(shown, True, False)]


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else flat[:57] + "..."
