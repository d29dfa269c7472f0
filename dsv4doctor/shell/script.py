"""A script's commands with their arguments and environment, in the order they are written."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsv4doctor.errors import UsageError
from dsv4doctor.shell import expand
from dsv4doctor.shell.flow import Flow, Way
from dsv4doctor.shell.loops import assigned, loop_names
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
    unknown,
)
from dsv4doctor.shell.syntax import Command, parse
from dsv4doctor.shell.words import Assignment, Kind, Part, Word

MAX_BYTES = 1 << 17
_DECLARE = frozenset(("export", "declare", "typeset", "readonly", "local"))
_MAX_EVAL = 4
_MAX_SOURCED = 16
_MAX_CALLS = 20


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

    Raises UsageError when it is not a regular UTF-8 text file of at most 128 KiB.
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
        raise UsageError(f"{path}: larger than 128 KiB", hint)
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

    functions: dict[str, tuple[Command, ...]] = field(default_factory=dict)
    """Those that were defined and not called yet, and those that were."""
    called: set[str] = field(default_factory=set)
    calls: int = 0
    """How deep we are in functions."""
    passed_over: list[int] = field(default_factory=list)
    """Lines of commands that name SGLang and would not run."""

    @classmethod
    def starting(
        cls,
        source: str,
        folder: Path | None,
        inherited: Mapping[str, str],
        notes: dict[str, None],
        given: Mapping[str, str] | None = None,
    ) -> Shell:
        """A fresh shell; what it cannot follow is added to `notes`."""
        return cls(Scope(source, folder, inherited, given or {}, notes=notes))

    def run(self, text: str, first_line: int = 1) -> Iterator[Invocation]:
        """Every command of `text` that is not an assignment or the like."""
        yield from self.sequence(parse(text, self.scope.source, first_line))

    def uncalled(self) -> Iterator[Invocation]:
        """The commands of functions that nothing called, e.g. behind `trap` or `"$@"`."""
        for name in [name for name in self.functions if name not in self.called]:
            self.called.add(name)
            yield from self.sequence(self.functions[name])

    def sequence(self, commands: tuple[Command, ...]) -> Iterator[Invocation]:
        flow, bodies, loops = Flow(self.scope), _bodies(commands), loop_names(commands)
        index = 0
        while index < len(commands):
            command = commands[index]
            index += 1
            self.scope.step(command.line)
            flow.repeated = self.also_called(loops.get(index - 1, frozenset()))
            way = flow.enter(command)
            if "function" in command.keywords:
                end = bodies.get(index)
                if all(block.active for block in flow.stack) and end is not None:
                    name = command.items[0]
                    called = name.literal if isinstance(name, Word) else None
                    self.functions[called or ""] = commands[index : end + 1]
                index = index if end is None else end + 1
            elif way is not Way.SKIPPED:
                if way is Way.MAYBE:
                    self.scope.open_arm()
                yield from self.command(command)
                if way is Way.MAYBE:
                    arm = self.scope.close_arm()
                    what = "cannot know whether this runs"
                    self.scope.join([arm, {}], command.line, what)
                flow.leave(command, way)
            elif _names_sglang(command):
                self.passed_over.append(command.line)
        flow.close()

    def also_called(self, names: frozenset[str]) -> frozenset[str]:
        """What is set, by the functions that are called too; `names` as of `assigned`."""
        called = {name[:-2] for name in names if name.endswith("()")}
        bodies = [self.functions[name] for name in called if name in self.functions]
        every = names.union(*(assigned(body) for body in bodies))
        return frozenset(name for name in every if is_name(name) and not name.endswith("()"))

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
        fields = expand.fields(self.scope, words)
        if not fields:
            return
        environment = self.environment() | self.own_environment(prefix)
        name = fields[0].text
        if name in self.functions:
            yield from self.call(name, fields[1:], command.line)
        elif name in ("source", ".") and len(fields) > 1:
            yield from self.source(fields[1], command.line)
        elif name == "eval" and self.evaluating < _MAX_EVAL:
            self.evaluating += 1
            yield from self.run(" ".join(piece.text for piece in fields[1:]), command.line)
            self.evaluating -= 1
        elif name == "unset":
            for piece in fields[1:]:
                self.scope.set(piece.text, ())
                self.exported.discard(piece.text)
        elif name == "set":
            self.set_options([piece.text for piece in fields[1:]])
        elif name in ("read", "mapfile", "readarray"):
            for piece in fields[1:]:
                if is_name(piece.text):
                    why = f"line {command.line}: {name} sets ${piece.text}"
                    self.scope.set(piece.text, unknown(piece.text, why))
        elif name == "shift":
            self.shift(fields[1:])
        else:
            yield Invocation(
                tuple(fields), environment, self.scope.source, command.line, command.last_line
            )

    def call(self, name: str, fields: list[Field], line: int) -> Iterator[Invocation]:
        """A function of the script, with these arguments."""
        self.called.add(name)
        if self.calls >= _MAX_CALLS:
            self.scope.note(line, f"cannot know what {name} does: it calls itself")
            return
        outer, self.scope.arguments = self.scope.arguments, tuple(map(_element, fields))
        self.calls += 1
        yield from self.sequence(self.functions[name])
        self.calls -= 1
        self.scope.arguments = outer

    def shift(self, fields: list[Field]) -> None:
        if self.scope.arguments is not None:
            said = fields[0].text if fields else "1"
            count = int(said) if said.isdecimal() and len(said) < 6 else 0
            why = reason(self.scope.arguments[:count])
            rest = self.scope.arguments[count:]
            marked = tuple((Segment("".join(part.text for part in one), why),) for one in rest)
            self.scope.arguments = marked or unknown("@", why) if why else rest

    def assign(self, item: Assignment) -> None:
        before = (self.scope.lookup(item.name) or ()) if item.append else ()
        if isinstance(item.value, tuple):
            value: Value = (*before, *map(_element, expand.fields(self.scope, item.value)))
        else:
            start = before[0] if before else ()
            added = merged((*start, *expand.element(self.scope, item.value)))
            self.scope.spend(sum(len(part.text) for part in added), item.line)
            value = (added, *before[1:])
        self.scope.set(item.name, value)
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
            for piece in expand.fields(self.scope, [item]):
                if piece.text.startswith("-"):
                    if keyword == "export" and "n" in piece.text:
                        export = False
                    elif keyword != "export" and "x" in piece.text:
                        export = True
                elif "=" in piece.text:
                    name, value = piece.text.split("=", 1)
                    self.scope.set(name, ((Segment(value, piece.why),),))
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
            value = self.scope.lookup(name)
            said = text_of(value[0]) if value else None
            if said is not None:
                found[name] = said
            elif value and name in self.scope.given:
                found[name] = self.scope.given[name]
            elif value:
                why = next(part.why for part in value[0] if part.why)
                self.scope.notes.setdefault(f"cannot know ${name}, which is exported ({why})")
        return found

    def own_environment(self, prefix: tuple[Word | Assignment, ...]) -> dict[str, str]:
        found: dict[str, str] = {}
        for item in prefix:
            if isinstance(item, Assignment) and isinstance(item.value, Word):
                piece = expand.text(self.scope, item.value)
                if piece.known:
                    found[item.name] = piece.text
                else:
                    self.scope.note(item.line, f"cannot know {item.name}, set for this command")
        return found

    def source(self, target: Field, line: int) -> Iterator[Invocation]:
        """Follow `source FILE` once, when FILE lies in the script's own folder."""
        folder = self.scope.folder
        path = Path(target.text)
        if path.name == "activate" and path.parent.name == "bin" and target.known:
            self.scope.set("VIRTUAL_ENV", plain(str(path.parent.parent)))
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


def _element(piece: Field) -> Element:
    return (Segment(piece.text, piece.why),)


def _bodies(commands: tuple[Command, ...]) -> dict[int, int]:
    """Index of a command that begins with `{` -> index of the one with its `}`."""
    found: dict[int, int] = {}
    stack: list[int | None] = []
    for index, command in enumerate(commands):
        for number, keyword in enumerate(command.keywords):
            if keyword == "{":
                stack.append(index if number == 0 else None)
            elif keyword == "}" and stack:
                start = stack.pop()
                if start is not None:
                    found[start] = index
    return found


def _names_sglang(command: Command) -> bool:
    words = [item for item in command.items if isinstance(item, Word)]
    return any("sglang" in part.text for word in words for part in word.parts)
