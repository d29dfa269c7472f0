"""The SGLang that was asked for, and the interpreter around it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from packaging.version import InvalidVersion, Version

from dsv4doctor.asked import Options
from dsv4doctor.errors import UsageError
from dsv4doctor.facts.files import shown
from dsv4doctor.facts.stack import against, read_stack
from dsv4doctor.facts.tree import read_tree
from dsv4doctor.models import Launch, SglangTree, Snapshot, Stack
from dsv4doctor.wheels import default_cache, fetch_tree

Download = Callable[[int, "int | None"], None]


def interpreter_of(options: Options, launch: Launch | None, notes: list[str]) -> Path:
    if options.python is not None:
        return Path(os.path.expanduser(options.python))
    is_saved = options.snapshot is not None and options.launch is None
    # A file from elsewhere does not say what is run here.
    if launch is not None and launch.interpreter is not None and not is_saved:
        named = Path(os.path.expanduser(launch.interpreter))
        if os.path.isfile(named):
            return named
        notes.append(f"{named}, the Python of {launch.source}, is not on this machine")
    return Path(sys.executable)


def sglang_of(
    options: Options,
    saved: Snapshot | None,
    interpreter: Path,
    variables: Mapping[str, str],
    download: Download | None,
) -> tuple[SglangTree, Stack]:
    """The tree to trace, and the packages around it against what it pins."""
    named = options.sglang
    if named is None and saved is not None and saved.sglang is not None:
        named = _same_tree(saved.sglang) or saved.sglang.version
    if named is not None:
        tree = named_tree(named, interpreter, download)
        stack, _ = read_stack(interpreter, variables, against=tree)
        if saved is not None and saved.stack is not None:
            same = saved.sglang is not None and saved.sglang.version == tree.version
            stack = saved.stack if same else against(saved.stack, tree)
        return tree, stack
    stack, installed = read_stack(interpreter, variables)
    return required(installed, interpreter), stack


def required(installed: SglangTree | None, interpreter: Path) -> SglangTree:
    if installed is None:
        raise UsageError(
            f"{interpreter}: no SGLang in this interpreter",
            "give the serving environment's with --python, or a release with --sglang 0.5.23",
        )
    return installed


def _same_tree(saved: SglangTree) -> str | None:
    """A snapshot's SGLang where it is a release in our own cache.

    No other folder that the file names: what lies there would be imported.
    """
    root = Path(saved.root)
    return saved.root if root.is_relative_to(default_cache() / "sglang") and root.is_dir() else None


def named_tree(named: str, interpreter: Path, download: Download | None) -> SglangTree:
    path = Path(os.path.expanduser(named))
    if os.sep not in named and not os.path.exists(path):
        try:
            Version(named)
        except InvalidVersion as error:
            raise UsageError(
                f"--sglang {shown(named)}: neither a folder nor a version",
                "write it like --sglang 0.5.23, or give a folder",
            ) from error
        return fetch_tree(named, default_cache(), download, sys.executable)
    return read_tree(path)
