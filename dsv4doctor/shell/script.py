"""A script's commands with their arguments and environment, in the order they are written."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsv4doctor.errors import UsageError
from dsv4doctor.shell.conditions import Conditions
from dsv4doctor.shell.expand import Field, Scope, Value
from dsv4doctor.shell.syntax import Assignment, Command, Kind, Part, Word, parse

MAX_BYTES = 1 << 20
_DECLARE = frozenset(("export", "declare", "typeset", "readonly", "local"))
_MAX_EVAL = 4
_MAX_SOURCED = 16


@dataclass(frozen=True)
class Invocation:
    """One command as the shell would start it."""

    fields: tuple[Field, ...]
    environment: dict[str, str]
    """What the script exports, and sets in front of this command."""
    source: str
    line: int
    last_line: int


def read_text(path: Path) -> str:
    """The script at `path` with Unix line endings.

    Raises UsageError when it is not a regular UTF-8 text file of at most 1 MiB.
    """
    hint = "give a shell script that starts SGLang, or the flags after `--`"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            what = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise UsageError(f"{path}: this is {what}", hint)
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path}: {reason}", hint) from error
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: larger than 1 MiB", hint)
    if b"\0" in content:
        raise UsageError(f"{path}: this is a binary file", hint)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}", hint) from error
    if not text.strip():
        raise UsageError(f"{path}: the file is empty", hint)
    return text.replace("\r\n", "\n")


@dataclass
class Shell:
    """Follows assignments, exports and `source` through a script; runs nothing."""

    scope: Scope
    exported: set[str] = field(default_factory=set)
    export_all: bool = False
    sourced: set[Path] = field(default_factory=set)
    evaluating: int = 0

    @classmethod
    def starting(
        cls, source: str, folder: Path | None, inherited: Mapping[str, str], notes: dict[str, None]
    ) -> Shell:
        """A fresh shell; what it cannot follow is added to `notes`."""
        return cls(Scope(source, folder, inherited, notes=notes))

    def run(self, text: str, first_line: int = 1) -> Iterator[Invocation]:
        """Every command of `text` that is not an assignment or the like."""
        script = parse(text, self.scope.source, first_line)
        if script.block_line is not None:
            self.scope.note(
                script.block_line, "loops, cases and functions were read straight through"
            )
        for name in script.loop_variables:
            self.scope.variables[name] = None
        conditions = Conditions(self.scope)
        for command in script.commands:
            if conditions.admits(command):
                yield from self.command(command)

    def command(self, command: Command) -> Iterator[Invocation]:
        items = command.items
        count = next((i for i, item in enumerate(items) if isinstance(item, Word)), len(items))
        prefix, rest = items[:count], items[count:]
        if not rest:
            for item in prefix:
                if isinstance(item, Assignment):
                    self.assign(item)
            return
        first = rest[0].literal if isinstance(rest[0], Word) else None
        if first in _DECLARE:
            self.declare(first, rest[1:])
            return
        words = [item if isinstance(item, Word) else _as_word(item) for item in rest]
        fields = self.scope.fields(words)
        if not fields:
            return
        environment = self.environment() | self.own_environment(prefix)
        name = fields[0].text
        if name in ("source", ".") and len(fields) > 1:
            yield from self.source(fields[1], command.line)
        elif name == "eval" and self.evaluating < _MAX_EVAL:
            self.evaluating += 1
            yield from self.run(" ".join(piece.text for piece in fields[1:]), command.line)
            self.evaluating -= 1
        elif name == "unset":
            for piece in fields[1:]:
                self.scope.variables[piece.text] = ()
                self.exported.discard(piece.text)
        elif name == "set":
            self.set_options([piece.text for piece in fields[1:]])
        else:
            yield Invocation(
                tuple(fields), environment, self.scope.source, command.line, command.last_line
            )

    def assign(self, item: Assignment) -> None:
        before = self.scope.lookup(item.name)[1] if item.append else ()
        value: Value | None
        if isinstance(item.value, tuple):
            elements = tuple(piece.text for piece in self.scope.fields(item.value))
            value = None if before is None else (*before, *elements)
        else:
            piece = self.scope.text(item.value)
            joined = "".join(before[:1] if before else ()) + piece.text
            self.scope.spend(len(joined), item.line)
            value = (joined,) if piece.known and before is not None else None
        self.scope.variables[item.name] = value
        if self.export_all or item.name in self.scope.inherited:
            self.exported.add(item.name)

    def declare(self, keyword: str, items: tuple[Word | Assignment, ...]) -> None:
        export = keyword == "export"
        for item in items:
            if isinstance(item, Assignment):
                self.assign(item)
                if export:
                    self.exported.add(item.name)
                continue
            for piece in self.scope.fields([item]):
                if piece.text.startswith("-"):
                    if keyword == "export" and "n" in piece.text:
                        export = False
                    elif keyword != "export" and "x" in piece.text:
                        export = True
                elif "=" in piece.text:
                    name, value = piece.text.split("=", 1)
                    self.scope.variables[name] = (value,) if piece.known else None
                    if export:
                        self.exported.add(name)
                elif export:
                    self.exported.add(piece.text)
                elif keyword == "export":
                    self.exported.discard(piece.text)

    def set_options(self, options: list[str]) -> None:
        for index, option in enumerate(options):
            if option in ("-", "--"):
                return
            named = option in ("-o", "+o") and options[index + 1 : index + 2] == ["allexport"]
            if named or re.fullmatch(r"[-+][a-zA-Z]*a[a-zA-Z]*", option):
                self.export_all = option.startswith("-")

    def environment(self) -> dict[str, str]:
        """The exported variables; one whose value cannot be known is left out, with a note."""
        found: dict[str, str] = {}
        for name in sorted(self.exported):
            value = self.scope.lookup(name)[1]
            if value:
                found[name] = value[0]
            elif value is None:
                self.scope.notes.setdefault(f"${name} is exported with a value not known here")
        return found

    def own_environment(self, prefix: tuple[Word | Assignment, ...]) -> dict[str, str]:
        found: dict[str, str] = {}
        for item in prefix:
            if isinstance(item, Assignment) and isinstance(item.value, Word):
                piece = self.scope.text(item.value)
                if piece.known:
                    found[item.name] = piece.text
        return found

    def source(self, target: Field, line: int) -> Iterator[Invocation]:
        """Follow `source FILE` once, when FILE lies in the script's own folder."""
        folder = self.scope.folder
        path = Path(target.text)
        if path.name == "activate" and path.parent.name == "bin" and target.known:
            self.scope.variables["VIRTUAL_ENV"] = (str(path.parent.parent),)
            self.exported.add("VIRTUAL_ENV")
            return
        full = folder / path if folder is not None else path
        if not target.known or folder is None or full.parent.resolve() != folder.resolve():
            self.scope.note(line, f"{target.text} is sourced from elsewhere and was not read")
            return
        if full in self.sourced:
            return
        if len(self.sourced) >= _MAX_SOURCED:
            self.scope.note(line, f"{target.text} was not read: too many sourced files")
            return
        self.sourced.add(full)
        try:
            text = read_text(full)
        except UsageError as error:
            self.scope.note(line, f"sourced file not read: {error.message}")
            return
        outer, self.scope.source = self.scope.source, str(full)
        yield from self.run(text)
        self.scope.source = outer


def _as_word(item: Assignment) -> Word:
    """`A=B` after the command's name is an ordinary argument."""
    name = Part(Kind.LITERAL, f"{item.name}{'+' if item.append else ''}=", quoted=False)
    parts = item.value.parts if isinstance(item.value, Word) else ()
    return Word((name, *parts), item.line)
