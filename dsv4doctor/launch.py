"""A serve.sh or a command line -> environment, model and SGLang flags.

Nothing is run: `dsv4doctor.shell` reads the script, this module finds the SGLang command in it,
whatever stands in front.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from dsv4doctor.errors import UsageError
from dsv4doctor.models import Launch
from dsv4doctor.shell.scope import Field
from dsv4doctor.shell.script import Invocation, Shell, read_text
from dsv4doctor.shell.wrappers import Surroundings, unwrap
from dsv4doctor.unknown_flags import settle

_MODULES = ("sglang.launch_server", "sglang.srt.entrypoints.http_server")
_CLI_MODULES = ("sglang", "sglang.cli.main")
_PYTHON = re.compile(r"python[0-9.]*|pypy3?")
_PRINTING = "echo printf cat tee sed awk grep egrep pgrep pkill kill killall ps pip [ [[ test"
_PRINTS = frozenset(_PRINTING.split())
_MODEL_FLAGS = ("--model-path", "--model")
_OTHER_ENGINES = {
    "vllm": "vLLM",
    "vllm.entrypoints.openai.api_server": "vLLM",
    "trtllm-serve": "TensorRT-LLM",
    "trtllm-llmapi-launch": "TensorRT-LLM",
    "lmdeploy": "LMDeploy",
    "llama-server": "llama.cpp",
    "text-generation-launcher": "TGI",
}
_MAX_NESTING = 4
_MAX_NOTES = 40


def read_script(
    path: Path,
    base_environment: Mapping[str, str],
    line: int | None = None,
    given: Mapping[str, str] | None = None,
) -> Launch:
    """The SGLang command in the shell script at `path`.

    `base_environment` is what the script's variables are looked up in when the script does not
    set them; it is not part of the result's environment.  `given` are values of variables that
    the script sets to something only a running shell knows.  `line` picks one of several SGLang
    commands.  Raises UsageError when the file cannot be read or is not a script, when it holds
    no SGLang command, and when it holds several and `line` picks none of them.
    """
    notes: dict[str, None] = {}
    text = read_text(path)
    shell = Shell.starting(str(path), path.parent.absolute(), base_environment, notes, given)
    found: list[_Found] = []
    engines: dict[str, int] = {}

    def look(invocations: Iterable[Invocation]) -> None:
        for invocation in invocations:
            found.extend(_launches(invocation, shell, notes, ()))
            for piece in invocation.fields:
                engine = _OTHER_ENGINES.get(PurePosixPath(piece.text).name)
                if engine is not None:
                    engines.setdefault(engine, invocation.line)

    look(shell.run(text))
    if not found:
        look(shell.uncalled())
    if not found and shell.passed_over:
        raise UsageError(
            f"{path}:{shell.passed_over[0]}: this SGLang command would not run",
            "a condition in front of it does not hold; set what it asks for with --env",
        )
    chosen = _choose(path, found, line, engines)
    own = chosen.launch.notes
    # What an own note gives as its reason is not said twice.
    others = [note for note in notes if not any(_reason(note) in said for said in own)]
    shown = [*own, *others]
    if len(shown) > _MAX_NOTES:
        shown[_MAX_NOTES:] = [f"and {len(shown) - _MAX_NOTES} more of this kind"]
    return replace(chosen.launch, notes=tuple(shown))


def from_arguments(
    model: str | None, flags: Sequence[str], environment: Mapping[str, str]
) -> Launch:
    """The launch given on our own command line: MODEL, the flags after `--`, and --env.

    Raises UsageError when MODEL and `--model-path` in the flags disagree.
    """
    named, rest = _split_model([Field(flag) for flag in flags])
    if model is not None and named is not None and named.text != model:
        raise UsageError(
            f"MODEL is {model}, but --model-path after `--` says {named.text}", "give one of them"
        )
    return Launch(
        source="command line",
        line=None,
        environment=dict(environment),
        model=model if model is not None else (named.text if named is not None else None),
        flags=tuple(piece.text for piece in rest),
    )


def _reason(note: str) -> str:
    return f"({note.replace('cannot know ', '', 1)} "


@dataclass(frozen=True)
class _Found:
    launch: Launch
    line: int
    last_line: int


@dataclass(frozen=True)
class _Program:
    """Where SGLang stands among the arguments of a command."""

    start: int
    """Index of Python, or of `sglang`."""
    arguments: int
    """Index of SGLang's first argument."""
    is_serve: bool


def _choose(
    path: Path, found: Sequence[_Found], line: int | None, engines: Mapping[str, int]
) -> _Found:
    if line is not None:
        for candidate in found:
            if candidate.line <= line <= candidate.last_line:
                return candidate
        raise UsageError(f"{path}:{line}: no SGLang command on this line", _where(found))
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{path}: {len(found)} SGLang commands", _where(found))
    if engines:
        engine, at = next(iter(engines.items()))
        raise UsageError(
            f"{path}: no SGLang command; line {at} starts {engine}",
            "dsv4doctor reads SGLang launches only",
        )
    raise UsageError(
        f"{path}: no SGLang command",
        "it needs a line with `python -m sglang.launch_server ...` or `sglang serve ...`; "
        "or give the flags after `--`",
    )


def _where(found: Sequence[_Found]) -> str:
    if not found:
        return "the script has no SGLang command"
    lines = ", ".join(str(candidate.line) for candidate in found)
    return f"SGLang commands start on line {lines}; keep one, or pick one by its line"


def _launches(
    invocation: Invocation, shell: Shell, notes: dict[str, None], outer: tuple[str, ...]
) -> Iterator[_Found]:
    """The SGLang commands that `invocation` starts, also through `bash -c "..."`."""
    words = [piece.text for piece in invocation.fields]
    if PurePosixPath(words[0]).name in _PRINTS:
        return
    program = _find_program(words)
    if program is not None:
        yield _found(invocation, program, shell, notes, outer)
        return
    for index, word in enumerate(words):
        if index and "sglang" in word and re.search(r"\s", word):
            around = unwrap(words[:index], invocation.environment, shell.scope.inherited)
            notes.update(dict.fromkeys(around.notes))
            inherited = {**shell.scope.inherited, **around.environment}
            scope = shell.scope
            inner = Shell.starting(invocation.source, scope.folder, inherited, notes, scope.given)
            inner.evaluating = shell.evaluating + 1
            if inner.evaluating > _MAX_NESTING:
                return
            for command in inner.run(word, invocation.line):
                nested = replace(
                    command,
                    environment={**around.environment, **command.environment},
                    line=invocation.line,
                    last_line=invocation.last_line,
                )
                for found in _launches(nested, inner, notes, outer + around.wrappers):
                    yield _inside(found, around)


def _find_program(words: Sequence[str]) -> _Program | None:
    for index, word in enumerate(words):
        name = PurePosixPath(word).name
        following = words[index + 1] if index + 1 < len(words) else ""
        if word == "-m" and following in _MODULES:
            return _Program(_python_before(words, index), index + 2, False)
        if word.startswith("-m") and word[2:] in _MODULES:
            return _Program(_python_before(words, index), index + 1, False)
        if word == "-m" and following in _CLI_MODULES and words[index + 2 : index + 3] == ["serve"]:
            return _Program(_python_before(words, index), index + 3, True)
        if name == "sglang" and following == "serve":
            return _Program(index, index + 2, True)
        if word.endswith("sglang/launch_server.py"):
            return _Program(_python_before(words, index), index + 1, False)
    return None


def _python_before(words: Sequence[str], index: int) -> int:
    """The index of the Python that runs the module named at `index`, or `index`."""
    at = index - 1
    while at >= 0:
        if _PYTHON.fullmatch(PurePosixPath(words[at]).name):
            return at
        takes_value = at > 0 and words[at - 1] in ("-X", "-W")
        if not words[at].startswith("-") and not takes_value:
            return index
        at -= 1
    return index


def _found(
    invocation: Invocation,
    program: _Program,
    shell: Shell,
    notes: dict[str, None],
    outer: tuple[str, ...],
) -> _Found:
    words = [piece.text for piece in invocation.fields]
    around = unwrap(words[: program.start], invocation.environment, shell.scope.inherited)
    notes.update(dict.fromkeys(around.notes))
    arguments = list(invocation.fields[program.arguments :])
    model, rest = _split_model(arguments, program.is_serve)
    known, unknown, own_notes = settle(rest, invocation.line)
    if model is not None and not model.known:
        own_notes.append(
            f"line {invocation.line}: cannot know the model, {model.text or 'empty'} ({model.why})"
        )
    launch = Launch(
        source=invocation.source,
        line=invocation.line,
        environment=around.environment,
        model=model.text if model is not None and model.known and model.text else None,
        flags=known,
        interpreter=_interpreter(words[program.start], program, around.environment),
        wrappers=outer + around.wrappers,
        numa_nodes=around.numa_nodes,
        notes=tuple(own_notes),
        unknown=unknown,
    )
    found = _Found(launch, invocation.line, invocation.last_line)
    return _inside(found, around)


def _inside(found: _Found, around: Surroundings) -> _Found:
    """`found` as seen from outside the container that `around` starts, if it starts one."""
    launch = found.launch
    if not around.container:
        return found
    model, notes = launch.model, list(launch.notes)
    for inside, outside in around.volumes:
        if model is not None and (model == inside or model.startswith(inside.rstrip("/") + "/")):
            model = outside.rstrip("/") + model[len(inside.rstrip("/")) :]
            notes.append(f"{launch.model} in the container is {model} outside")
            break
    launch = replace(launch, model=model, interpreter=None, notes=tuple(notes))
    return replace(found, launch=replace(launch, devices=around.devices or launch.devices))


def _interpreter(word: str, program: _Program, environment: Mapping[str, str]) -> str | None:
    """The Python of the command as a path, also through `/venv/bin/sglang` or an activated venv."""
    path = PurePosixPath(word)
    if _PYTHON.fullmatch(path.name):
        if "/" in word:
            return word
    elif path.name == "sglang" and program.is_serve and "/" in word:
        return str(path.parent / "python")
    elif path.name != "sglang":
        return None
    venv = environment.get("VIRTUAL_ENV")
    return f"{venv}/bin/python" if venv else None


def _split_model(
    arguments: Sequence[Field], is_serve: bool = False
) -> tuple[Field | None, list[Field]]:
    """The model and the other arguments; as in argparse, the last one named counts."""
    model: Field | None = None
    rest: list[Field] = []
    pending = list(arguments)
    if is_serve and pending and not pending[0].text.startswith("-"):
        model = pending.pop(0)
    index = 0
    while index < len(pending):
        piece = pending[index]
        name, equals, value = piece.text.partition("=")
        # `sglang serve` takes --model-type for itself; the server does not know it.
        if name in _MODEL_FLAGS or (is_serve and name == "--model-type"):
            if not equals:
                index += 1
            taken = Field(value, piece.why) if equals else None
            if taken is None and index < len(pending):
                taken = pending[index]
            if name in _MODEL_FLAGS:
                model = taken
        else:
            rest.append(piece)
        index += 1
    return model, rest
