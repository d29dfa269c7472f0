"""What the bodies of loops set: it may differ from round to round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dsv4doctor.shell.syntax import Command
from dsv4doctor.shell.words import Assignment, Word

_MAX_NESTING = 100


def assigned(commands: Iterable[Command]) -> frozenset[str]:
    """The names that the commands set, and what they call as "name()"."""
    return frozenset(name for command in commands for name in _names(command))


def loop_names(commands: Sequence[Command]) -> dict[int, frozenset[str]]:
    """Index of the command with a loop's `do` -> what is set up to its `done`, as of `assigned`."""
    found: dict[int, frozenset[str]] = {}
    stack: list[tuple[int, set[str]]] = []
    for index, command in enumerate(commands):
        for keyword in command.keywords:
            if keyword == "do" and len(stack) < _MAX_NESTING:
                stack.append((index, set()))
            elif keyword == "done" and stack:
                start, names = stack.pop()
                found[start] = frozenset(names)
                if stack:
                    stack[-1][1].update(names)
        if stack:
            stack[-1][1].update(_names(command))
    return found


def _names(command: Command) -> Iterable[str]:
    words = [item.literal for item in command.items if isinstance(item, Word)]
    first = words[0] if words else None
    if first in ("read", "mapfile", "readarray", "unset", "export", "local", "declare"):
        yield from (word for word in words[1:] if word and word[:1] != "-")
    elif first is not None:
        yield f"{first}()"
    for item in command.items:
        if isinstance(item, Assignment):
            yield item.name
