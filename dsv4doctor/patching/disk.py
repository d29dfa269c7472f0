"""Files of a tree as they are, and written so that a reader sees the old one or the new one.

Nothing is ever written in place: package managers hard-link or symlink site-packages to their
cache, and a write in place would change every other environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".dsv4doctor-new"
"""Of a file that is being written; one that is found later was left by a killed run."""


@dataclass(frozen=True)
class File:
    """A file's content and what else has to come back with it."""

    content: bytes
    mode: int = 0o644
    link: str | None = None
    """Where it points, for a symbolic link; `content` is then what it points at."""
    owner: tuple[int, int] | None = None

    @property
    def sha256(self) -> str:
        return sha256(self.content)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read(path: Path) -> File | None:
    """The file at `path`; None: there is none, or it is no regular file.

    Raises OSError for one that is there and cannot be read.
    """
    try:
        at = os.lstat(path)
        link = os.readlink(path) if stat.S_ISLNK(at.st_mode) else None
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        return None
    with os.fdopen(handle, "rb") as source:
        mode = stat.S_IMODE(status.st_mode)
        owner = (status.st_uid, status.st_gid)
        return File(source.read(), mode, link, owner)


def stage(path: Path, file: File) -> Path:
    """`file` on disk beside `path`, complete and flushed, under the name that it gives back."""
    scratch = path.with_name(f".{path.name}{SUFFIX}")
    discard(scratch)
    if file.link is not None:
        os.symlink(file.link, scratch)
        return scratch
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(scratch, flags, 0o600)
    try:
        left = memoryview(file.content)
        while left:
            left = left[os.write(handle, left) :]
        if file.owner is not None and file.owner != (os.geteuid(), os.getegid()):
            with contextlib.suppress(PermissionError):  # only root may give files away
                os.fchown(handle, *file.owner)
        os.fchmod(handle, file.mode)
        os.fsync(handle)
    finally:
        os.close(handle)
    return scratch


def publish(scratch: Path, path: Path) -> None:
    """Give a staged file its name, in one step that outlives a power cut."""
    os.replace(scratch, path)
    flush_folder(path.parent)


def write(path: Path, file: File) -> None:
    publish(stage(path, file), path)


def discard(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def left_behind(path: Path) -> Path | None:
    """The staged file of a run that was killed while it wrote `path`."""
    scratch = path.with_name(f".{path.name}{SUFFIX}")
    return scratch if os.path.lexists(scratch) else None


def forget_bytecode(path: Path) -> None:
    """Remove what Python compiled from the source file at `path`, whichever Python it was."""
    folder = path.parent / "__pycache__"
    stem = path.name.removesuffix(".py") + "."
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        names = []
    for name in names:
        if name.startswith(stem) and name.endswith(".pyc"):
            discard(folder / name)
    discard(path.with_suffix(".pyc"))
