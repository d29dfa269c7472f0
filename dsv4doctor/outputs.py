"""Outputs that would cost something that is read: an input, a checkpoint, an SGLang tree."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from dsv4doctor.errors import UsageError

if TYPE_CHECKING:
    from dsv4doctor.asked import Options

Output: TypeAlias = "tuple[str, str | Path | None]"
"""(flag, path); None: standard output."""
Input: TypeAlias = "tuple[str | Path | None, str]"
"""(path, what it is).  A file, `FILE:LINE` or a folder; what is not there is none."""

_HINT = "give another place"
_LINE = re.compile(r":[0-9]{1,9}\Z")
_SOURCED = re.compile(r"(?:^|[\s;&|(])(?:source|\.)[ \t]+([^\n;&|]+)", re.MULTILINE)
_NAME = re.compile(r"[^\s/\"'(){}$`]+")
_SCRIPT_BYTES = 1 << 20
_BESIDE_CONFIG = (
    *("hf_quant_config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json"),
)
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_DIST_INFO = re.compile(r"sglang-.*\.(?:dist|egg)-info")


def refuse_inputs(outputs: Sequence[Output], inputs: Sequence[Input]) -> None:
    """UsageError for an output that takes the place of an input or lies in a folder that is one,
    for a folder to be written that holds an input, for two outputs in one place, and for what
    `refuse_place` refuses.  Links are followed."""
    written = [(flag, str(path)) for flag, path in outputs if path is not None]
    for place, (flag, path) in enumerate(written):
        refuse_place(path, flag)
        for given, what in inputs:
            for name in _readings(str(given)) if given is not None else ():
                relation = _relation(path, name)
                if relation is not None:
                    raise UsageError(f"{flag} {path}: {relation} {what}", _HINT)
        if any(_relation(path, other) for _, other in written[:place]):
            raise UsageError(f"{flag} {path}: it is written twice", _HINT)


def refuse_place(path: str | Path, flag: str) -> None:
    """UsageError for an output in a checkpoint's folder, in SGLang's package or its metadata.

    Such a folder is known by what is in it: whatever a command will read in the end, its launch's
    model and its interpreter's SGLang are not written to.
    """
    try:
        starts = {os.path.abspath(path), os.path.realpath(path)}
    except (OSError, ValueError):
        return  # it cannot be written either, and that says why
    for start in starts:
        for folder in (start, *map(str, Path(start).parents)):
            what = _protected(folder)
            if what is not None:
                raise UsageError(f"{flag} {path}: this is in {what}, {folder}", _HINT)


def read_by(options: Options) -> tuple[Input, ...]:
    """The files and folders that `options` name, and those that the launch script sources."""
    sourced = _sourced(options.launch) if options.launch is not None else ()
    python = os.path.expanduser(options.python) if options.python else sys.executable
    model = options.model and os.path.expanduser(options.model)
    return (
        (options.launch, "the launch script"),
        *((path, "a file that the launch script sources") for path in sourced),
        (options.snapshot, "the snapshot"),
        (model, "the model"),
        (python, "the interpreter"),
    )


def _readings(given: str) -> tuple[str, ...]:
    """`FILE:LINE` names a line of a script, or is a file's own name."""
    return (given, _LINE.sub("", given)) if _LINE.search(given) else (given,)


def _relation(output: str, name: str) -> str | None:
    """How the output is to what is called `name`, in words; either may be yet to be written."""
    try:
        if os.path.exists(output) and os.path.exists(name) and os.path.samefile(output, name):
            # A terminal or /dev/null may be named twice.
            return "this is" if os.path.isfile(output) or os.path.isdir(output) else None
        one, other = os.path.realpath(output), os.path.realpath(name)
    except (OSError, ValueError):
        return None
    if one == other:
        return "this is"
    if _in(one, other):
        return "this is in"
    return "this holds" if _in(other, one) else None


def _in(path: str, folder: str) -> bool:
    return os.path.isdir(folder) and path.startswith(os.path.join(folder, ""))


def _protected(folder: str) -> str | None:
    """What `folder` is, where nothing may be written to it."""
    name, package = os.path.basename(folder), os.path.join(folder, "srt")
    if _DIST_INFO.fullmatch(name):
        return "SGLang's metadata"
    if os.path.isfile(os.path.join(package, "server_args.py")) or (
        name == "sglang" and os.path.isdir(package)
    ):
        return "an SGLang tree"
    if name.startswith("models--") and os.path.isdir(os.path.join(folder, "blobs")):
        return "a model of the Hugging Face cache"
    if not os.path.isfile(os.path.join(folder, "config.json")):
        return None
    with contextlib.suppress(OSError):
        for beside in os.listdir(folder):
            if beside in _BESIDE_CONFIG or beside.endswith(_WEIGHTS):
                return "a checkpoint"
    return None


def _sourced(launch: Path) -> Iterator[Path]:
    """What the script, and what it sources in turn, may source: of its own folder only, as
    elsewhere nothing is read."""
    script = next((Path(one) for one in _readings(str(launch)) if os.path.isfile(one)), None)
    if script is None:
        return
    waiting, seen = [script], {script}
    while waiting:
        for name in _sourced_names(waiting.pop()):
            path = script.parent / name
            if path not in seen and path.is_file():
                seen.add(path)
                waiting.append(path)
                yield path


def _sourced_names(script: Path) -> list[str]:
    try:
        with script.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_SCRIPT_BYTES)
    except (OSError, ValueError):
        return []
    # Every name in it: what stands in front of the file's own is often $(dirname "$0").
    return [name for found in _SOURCED.findall(text) for name in _NAME.findall(found)]
