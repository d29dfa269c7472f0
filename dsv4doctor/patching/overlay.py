"""Patched modules in a folder of their own, put in front of a tree that is not changed.

DIR/overlay.json says which modules, and the hash of the file that each was made from.
DIR/modules/ holds them as in the tree.  DIR/python/sitecustomize.py, first on PYTHONPATH, makes
every Python that inherits it import those modules from there (see `bootstrap.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsv4doctor import __version__, jsonio
from dsv4doctor.errors import PatchRefusedError, UsageError
from dsv4doctor.facts.files import read_json
from dsv4doctor.models import SglangTree
from dsv4doctor.patching import disk
from dsv4doctor.patching.proof import modules_of

FORMAT = 1
MANIFEST = "overlay.json"
_MAX_BYTES = 16 << 20
_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
# What patched code imports of us, and what that imports; pure Python, for any interpreter.
_LENT = ("dsv4doctor", "platformdirs", "pynvml")
_BLINDING, _WITH_VALUE, _LAST = "EIS", "WX", "cm"
"""Python's options of one letter: those without which there is no overlay, those that take a value,
and those behind which everything is the program's."""


@dataclass(frozen=True)
class Module:
    name: str
    """"sglang.srt.layers..."."""
    file: str
    made_from: str
    """sha256 of the tree's file."""
    sha256: str


@dataclass(frozen=True)
class Overlay:
    root: str
    """The tree that it was made from."""
    version: str
    fixes: tuple[str, ...] = ()
    modules: tuple[Module, ...] = field(default=())
    tool: str = __version__
    format: int = FORMAT
    bootstrap: str = ""
    """sha256 of its sitecustomize.py; "": this dsv4doctor's."""


def refuse_split(folder: Path) -> None:
    """UsageError for a folder that PYTHONPATH cannot name: Python would never look into it."""
    if os.pathsep in os.path.abspath(folder):
        raise UsageError(
            f"--overlay {folder}: its path has a {os.pathsep!r}, where PYTHONPATH is split",
            f"give a folder without {os.pathsep!r} in its path",
        )


def refuse_inside(folder: Path, tree: SglangTree) -> None:
    """UsageError for a folder in the tree that is to be left alone."""
    root, target = os.path.realpath(tree.root), os.path.realpath(folder)
    if target == root or target.startswith(root + os.sep):
        raise UsageError(
            f"--overlay {folder}: lies in the tree {tree.root}, which an overlay leaves alone",
            "give a folder outside of it",
        )


def refuse_target(folder: Path) -> None:
    """UsageError for a folder that holds something else, or cannot be made."""
    hint = "give a new folder, or one that an earlier --overlay made"
    refuse_split(folder)
    try:
        taken = os.path.lexists(folder) and not (folder / MANIFEST).is_file()
        if taken and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"--overlay {folder}: there is something else already", hint)
        parent = Path(os.path.abspath(folder)).parent
        if not parent.is_dir():
            raise UsageError(f"--overlay {folder}: no folder {parent}", hint)
        if not os.access(parent, os.W_OK):
            raise UsageError(f"--overlay {folder}: {parent} cannot be written", hint)
    except (OSError, ValueError) as error:
        raise UsageError(f"--overlay {folder}: {error}", hint) from error


def write(
    folder: Path,
    tree: SglangTree,
    fixes: Sequence[str],
    before: Mapping[str, bytes],
    after: Mapping[str, bytes],
) -> Overlay:
    """The overlay `folder`, whole or not at all; one that was there is replaced.

    `after`: file -> patched bytes; `before` has what each was made from.
    """
    modules = tuple(
        Module(modules_of([file])[0], file, disk.sha256(before[file]), disk.sha256(content))
        for file, content in sorted(after.items())
    )
    bootstrap = disk.sha256(_BOOTSTRAP.read_bytes())
    overlay = Overlay(tree.root, tree.version, tuple(fixes), modules, bootstrap=bootstrap)
    target = Path(os.path.abspath(folder))
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _fill(scratch, overlay, after)
            _publish(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise UsageError(
            f"--overlay {folder}: cannot be written ({error.strerror})", "give another folder"
        ) from error
    return overlay


def _fill(scratch: Path, overlay: Overlay, after: Mapping[str, bytes]) -> None:
    for file, content in after.items():
        path = scratch / "modules" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.write(path, disk.File(content))
    (scratch / "python").mkdir()
    disk.write(scratch / "python" / "sitecustomize.py", disk.File(_BOOTSTRAP.read_bytes()))
    manifest = jsonio.dump(jsonio.to_plain(overlay)).encode("utf-8", "backslashreplace")
    disk.write(scratch / MANIFEST, disk.File(manifest))
    os.chmod(scratch, 0o755)


def _publish(scratch: Path, target: Path) -> None:
    old = None
    if os.path.lexists(target):
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        os.rename(target, old)
    try:
        os.rename(scratch, target)
    except OSError:
        if old is not None:
            with contextlib.suppress(OSError):
                os.rename(old, target)
        raise
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def read(folder: Path) -> Overlay:
    """The overlay in `folder`; UsageError when there is none that can be used."""
    hint = "make one with: dsv4doctor fix --overlay DIR ..."
    refuse_split(folder)
    path = folder / MANIFEST
    if not os.path.lexists(path):
        raise UsageError(f"--overlay {folder}: no overlay ({MANIFEST} is missing)", hint)
    plain = read_json(path, _MAX_BYTES, hint, f"--overlay {folder}: {MANIFEST}")
    overlay = jsonio.from_plain(plain, Overlay, str(path))
    if overlay.format != FORMAT:
        raise UsageError(f"--overlay {folder}: of another dsv4doctor ({overlay.tool})", hint)
    for module in overlay.modules:
        file = disk.read(folder / "modules" / module.file)
        if file is None or file.sha256 != module.sha256:
            raise UsageError(f"--overlay {folder}: {module.file} is not as it was written", hint)
    _refuse_other_start(folder, overlay, hint)
    return overlay


def _refuse_other_start(folder: Path, overlay: Overlay, hint: str) -> None:
    """UsageError where Python would start without the overlay, and say nothing."""
    name = "sitecustomize.py"
    file = disk.read(folder / "python" / name)
    wanted = overlay.bootstrap or disk.sha256(_BOOTSTRAP.read_bytes())
    if file is None or file.sha256 != wanted:
        raise UsageError(f"--overlay {folder}: python/{name} is not as it was written", hint)
    # A package or an extension of that name would come before it.
    for other in sorted(os.listdir(folder / "python")):
        if other not in (name, "__pycache__"):
            raise UsageError(f"--overlay {folder}: python/{other} is not of the overlay", hint)


def refuse_outdated(folder: Path, overlay: Overlay) -> None:
    """PatchRefusedError when the tree, where it is on this machine, has changed since."""
    if not os.path.isdir(os.path.join(overlay.root, "sglang")):
        return  # made elsewhere: every Python checks the tree that it imports from
    for module in overlay.modules:
        path = Path(overlay.root) / module.file
        now = disk.read(path)
        if now is None or now.sha256 != module.made_from:
            raise PatchRefusedError(
                f"{path}: no longer what the overlay {folder} was made from",
                "make it again: dsv4doctor fix --overlay DIR ...",
            )


def environment(folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base` so that every Python started with it takes the overlay's modules."""
    first = str(Path(os.path.abspath(folder)) / "python")
    later = [entry for entry in base.get("PYTHONPATH", "").split(os.pathsep) if entry != first]
    path = os.pathsep.join([first, *later]) if base.get("PYTHONPATH") else first
    specs = (importlib.util.find_spec(name) for name in _LENT)
    files = (spec.origin for spec in specs if spec is not None and spec.origin is not None)
    return {**base, "PYTHONPATH": path, "DSV4DOCTOR_MODULES": os.pathsep.join(files)}


def refuse_blind(command: Sequence[str]) -> None:
    """UsageError for a Python that is told to ignore PYTHONPATH, or to start without `site`."""
    own = command[1:] if "python" in os.path.basename(command[0]) else ()
    for words in (_interpreter_options(command[0]), own):
        word = _blinding(words)
        if word is not None:
            raise UsageError(
                f"{command[0]} {word} ignores PYTHONPATH, and with it the overlay",
                f"leave {word} out, or start it as python -m ...",
            )


def _blinding(words: Sequence[str]) -> str | None:
    """The first of Python's options in `words` with which it does not find an overlay."""
    left = iter(words)
    for word in left:
        if not word.startswith("-") or word.startswith("--"):
            return None
        for letter in word[1:]:
            if letter in _BLINDING:
                return word
            if letter in _LAST:
                return None
            if letter in _WITH_VALUE:
                if word.endswith(letter):
                    next(left, None)
                break
    return None


def _interpreter_options(program: str) -> list[str]:
    """What a script's first line gives its Python, e.g. "-sE" in "#!/usr/bin/python3 -sE"."""
    path = shutil.which(program)
    try:
        with open(path or program, "rb") as file:
            first = file.readline(500).decode("utf-8", "replace").split()
    except (OSError, ValueError):
        return []
    is_python = first and first[0].startswith("#!") and "python" in os.path.basename(first[0])
    return first[1:] if is_python else []


def start(command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Become `command`; UsageError when it cannot be started."""
    try:
        os.execvpe(command[0], list(command), dict(variables))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{command[0]}: cannot be started ({reason})",
            "write the command after `--`: dsv4doctor run --overlay DIR -- python -m ...",
        ) from error
