"""A router script -> what it points at.  Nothing is run, as for `dsv4doctor.launch`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from dsv4doctor.errors import UsageError
from dsv4doctor.models import RouterLaunch
from dsv4doctor.shell.script import Invocation, Shell, read_text

_MODULES = ("sglang_router.launch_router", "sglang_router", "sglang_router.mini_lb")
_PROGRAMS = ("sglang-router", "smg", "amg")
_NO_LAUNCHERS = frozenset(
    ("echo", "printf", "pip", "pip3", "kill", "pkill", "killall", "pgrep", "grep")
)
_PREFIX = "--router-"
_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", "30000"
"""As the router's own arguments have them."""


def reads_as_router(path: Path, environment: Mapping[str, str]) -> bool:
    """True for a script that starts SGLang's router; UsageError as for `read_router`."""
    return any(True for _ in _commands(path, environment))


def read_router(path: Path, environment: Mapping[str, str]) -> RouterLaunch:
    """The router that the shell script at `path` starts.

    Raises UsageError when the file cannot be read and when it starts no router, or several.
    """
    found = list(_commands(path, environment))
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(
            f"{path}: no SGLang router",
            "it needs a line with `python -m sglang_router.launch_router ...` or `sglang-router`",
        )
    lines = ", ".join(str(router.line) for router in found)
    raise UsageError(f"{path}: {len(found)} routers (lines {lines})", "keep one")


def _commands(path: Path, environment: Mapping[str, str]) -> Iterator[RouterLaunch]:
    notes: dict[str, None] = {}
    text = read_text(path)
    shell = Shell.starting(str(path), path.parent.absolute(), environment, notes)
    for invocation in shell.run(text):
        start = _start([piece.text for piece in invocation.fields])
        if start is not None:
            yield _router(invocation, start)


def _start(words: Sequence[str]) -> int | None:
    """The index of the router's first argument; None where the command is no router."""
    for index, word in enumerate(words):
        if word == "-m" and words[index + 1 : index + 2] and words[index + 1] in _MODULES:
            return index + 2
        name = PurePosixPath(word).name
        if name in _NO_LAUNCHERS:
            return None
        if name in _PROGRAMS:
            return index + 1
    return None


def _router(invocation: Invocation, start: int) -> RouterLaunch:
    said = _options([piece.text for piece in invocation.fields[start:]])

    def last(name: str) -> str | None:
        values = said.get(name, [])
        return values[-1][0] if values and values[-1] else None

    return RouterLaunch(
        source=invocation.source,
        line=invocation.line,
        pd="--pd-disaggregation" in said,
        prefill=tuple(
            (values[0], values[1] if len(values) > 1 and values[1] != "none" else None)
            for values in said.get("--prefill", [])
            if values
        ),
        decode=tuple(values[0] for values in said.get("--decode", []) if values),
        workers=tuple(url for values in said.get("--worker-urls", []) for url in values),
        host=last("--host") or _DEFAULT_HOST,
        port=last("--port") or _DEFAULT_PORT,
        metrics_port=last("--prometheus-port"),
        environment=invocation.environment,
    )


def _options(words: Sequence[str]) -> dict[str, list[list[str]]]:
    """Option -> its values, for each time that it is given."""
    found: dict[str, list[list[str]]] = {}
    current: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if name.startswith(_PREFIX):
                name = f"--{name.removeprefix(_PREFIX)}"
            current = [value] if equals else []
            found.setdefault(name, []).append(current)
        elif current is not None:
            current.append(word)
    return found
