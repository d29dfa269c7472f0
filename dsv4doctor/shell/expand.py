"""Words -> the strings that the shell would pass, as far as that can be known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dsv4doctor.errors import UsageError
from dsv4doctor.shell.arithmetic import evaluate
from dsv4doctor.shell.scope import (
    Element,
    Field,
    Scope,
    Segment,
    Value,
    is_name,
    merged,
    plain,
    reason,
    text_of,
)
from dsv4doctor.shell.words import Kind, Part, Word, parse_word

_BRACED = re.compile(
    r"(?P<length>[#!])?(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?$!-])"
    r"(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)",
    re.DOTALL,
)
_OPERATION = re.compile(r"(?P<colon>:?)(?P<operator>[-=+?])(?P<argument>.*)", re.DOTALL)
_OWN_FOLDER = re.compile(
    r"cd(--)?(?P<dir>dirname(--)?\$(0|\{0\}|\{?BASH_SOURCE(\[0\])?\}?))&&pwd(-P)?"
)
_MAX_NESTING = 20


@dataclass(frozen=True)
class _Piece:
    text: str
    quoted: bool
    """It is not split at blanks."""
    why: str = ""


_Pieces: TypeAlias = "list[_Piece | None]"
"""None stands between the elements of `"${A[@]}"`."""


def fields(scope: Scope, words: Sequence[Word]) -> list[Field]:
    """`words` after expansion and splitting."""
    return [piece for word in words for piece in _Expansion(scope, word.line).split(word)]


def element(scope: Scope, word: Word) -> Element:
    """`word` after expansion, unsplit, as on the right of an assignment."""
    pieces = _Expansion(scope, word.line).pieces(word.parts)
    parts = merged(Segment(" ") if one is None else Segment(one.text, one.why) for one in pieces)
    scope.spend(sum(len(part.text) for part in parts), word.line)
    return parts


def text(scope: Scope, word: Word) -> Field:
    """The same as one text."""
    parts = element(scope, word)
    return Field("".join(part.text for part in parts), _why(part.why for part in parts))


def _why(reasons: Iterable[str]) -> str:
    return next((reason for reason in reasons if reason), "")


@dataclass
class _Expansion:
    scope: Scope
    line: int
    depth: int = 0

    def split(self, word: Word) -> list[Field]:
        done: list[Field] = []
        found: list[str] = []
        why, present = "", False

        def end() -> None:
            nonlocal why, present
            if present:
                done.append(Field("".join(found), why))
                self.scope.spend(len(done[-1].text), self.line)
            found.clear()
            why, present = "", False

        for piece in self.pieces(word.parts):
            if piece is None:
                end()
                continue
            why = why or piece.why
            if piece.quoted:
                present = True
                found.append(piece.text)
                continue
            for index, chunk in enumerate(re.split(r"([ \t\n]+)", piece.text)):
                if index % 2:
                    end()
                    why = piece.why
                elif chunk:
                    present = True
                    found.append(chunk)
        end()
        return done

    def pieces(self, parts: Sequence[Part]) -> _Pieces:
        found: _Pieces = []
        for index, part in enumerate(parts):
            if part.kind is Kind.LITERAL:
                said = part.text
                if index == 0 and not part.quoted and (said == "~" or said.startswith("~/")):
                    said = self.scope.inherited.get("HOME", "~") + said[1:]
                # A literal is never split, and quoted "" counts as an argument.
                found.append(_Piece(said, True))
            elif part.kind is Kind.COMMAND:
                found.append(self.substitution(part))
            else:
                found.extend(self.parameter(part))
        return found

    def substitution(self, part: Part) -> _Piece:
        squeezed = re.sub(r"[\s\"]|(>/dev/null)?2?>&?1?/dev/null|\$\(|\)", "", part.text)
        own = _OWN_FOLDER.fullmatch(squeezed) or _OWN_FOLDER.fullmatch(f"cd{squeezed}&&pwd")
        if own and self.scope.folder is not None:
            return _Piece(str(self.scope.folder), part.quoted)
        if part.text.startswith("(") and part.text.endswith(")"):
            number = evaluate(part.text[1:-1], self.number)
            if number is not None:
                return _Piece(str(number), True)
        return self.cannot_know(f"$({_short(part.text)})")

    def number(self, name: str) -> str | None:
        """The value of a variable in `$((...))`, where an unset one is 0."""
        value = self.scope.lookup(name)
        return "0" if value is None else text_of(value[0]) if value else None

    def cannot_know(self, shown: str, why: str = "") -> _Piece:
        if not why:
            self.scope.note(self.line, f"cannot know {shown}")
            why = f"line {self.line}: {shown} is known only when the script runs"
        return _Piece(shown, True, why)

    # ------------------------------------------------------------------ parameters

    def parameter(self, part: Part) -> _Pieces:
        match = _BRACED.fullmatch(part.text)
        if match is None or match["length"]:
            return [self.unknown(part)]
        name = match["name"]
        operation = _OPERATION.fullmatch(match["rest"]) if match["rest"] else None
        if match["rest"] and operation is None:
            return [self.unknown(part)]
        if name in ("?", "$", "!", "-"):
            return [self.unknown(part)]
        is_own = not is_name(name) and self.scope.arguments is None
        if is_own and operation is None and name not in ("@", "*"):
            return [self.unknown(part)]
        value = self.scope.lookup(name) if is_name(name) else self.argument(name)
        if operation is not None:
            if is_own and name.isdecimal() and operation["operator"] != "?":
                self.scope.note(self.line, f"${name} is taken as not given")
            empty = value is None or (bool(operation["colon"]) and value in ((), plain("")))
            return self.operation(part, match, operation, empty, value)
        if value is None or (is_own and not value):
            return self.unset(part, name)
        return self.value(part, name, match["index"], value)

    def argument(self, name: str) -> Value | None:
        if name.isdecimal() or name in ("@", "*", "#"):
            return self.scope.argument(name)
        return None

    def unset(self, part: Part, name: str) -> _Pieces:
        self.scope.note(self.line, f"${name} is not set; read as nothing")
        # Not known: an argument made from it cannot be trusted.
        why = "" if self.scope.unset_is_known else f"line {self.line}: ${name} is not set here"
        return [_Piece("", part.quoted and name != "@", why)]

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
        if not empty and value is not None:
            return self.value(part, name, match["index"], value)
        if operator == "?":
            self.scope.note(self.line, f"${name} is not set, and the script stops without it")
            return [_Piece("", part.quoted, f"line {self.line}: ${name} is not set here")]
        pieces = self.default(operation["argument"], part.quoted)
        if operator == "=" and is_name(name):
            parts = merged(Segment(piece.text, piece.why) for piece in pieces if piece)
            self.scope.set(name, (parts,))
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
                pieces.append(_Piece(part.text, quoted))
            else:
                pieces.extend(self.pieces((part,)))
        self.depth -= 1
        return pieces

    def value(self, part: Part, name: str, index: str | None, value: Value) -> _Pieces:
        if name in ("@", "*"):
            index = name
        if index is not None and index not in ("@", "*") and not index.isdecimal():
            return [self.unknown(part)]
        if index in ("@", "*"):
            chosen = value
        else:
            at = int(index[:6]) if index else 0
            why = reason(value[:at])
            if why:
                return [self.cannot_know(f"${{{_short(part.text)}}}", why)]
            chosen = value[at : at + 1] or plain("")
        pieces: _Pieces = []
        for one in chosen:
            if pieces:
                pieces.append(_Piece(" ", True) if index == "*" and part.quoted else None)
            pieces += self.element(name, one, part.quoted, is_array=index is not None)
        if not pieces and index == "*" and part.quoted:
            pieces.append(_Piece("", True))
        return pieces

    def element(self, name: str, parts: Element, quoted: bool, is_array: bool) -> _Pieces:
        """A variable's element: what the user says of it, where the script does not tell."""
        self.scope.spend(sum(len(part.text) for part in parts), self.line)
        if name in self.scope.given and parts and all(part.why for part in parts):
            return [_Piece(self.scope.given[name], quoted and not is_array)]
        if len(parts) == 1 and parts[0].why and is_name(name) and not is_array:
            return [self.cannot_know(f"${name}", parts[0].why)]
        return [_Piece(part.text, quoted or bool(part.why), part.why) for part in parts]

    def unknown(self, part: Part) -> _Piece:
        bare = re.fullmatch(r"\w+|[@*#?$!-]", part.text)
        return self.cannot_know(f"${part.text}" if bare else f"${{{_short(part.text)}}}")


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else flat[:57] + "..."
