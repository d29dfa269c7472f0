"""What dsv4doctor did to a tree, kept in the user's state folder.

One folder a tree, named after the tree's real path: `journal.json`, and the bytes of every file
before and after under their sha256.  A change is written down as pending before the first file of
the tree is touched, and settled after the last: whenever a run dies, the journal still tells every
file's two contents.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from dsv4doctor import __version__, jsonio
from dsv4doctor.errors import PatchRefusedError, UsageError
from dsv4doctor.facts.files import read_json
from dsv4doctor.models import SglangTree
from dsv4doctor.patching import disk
from dsv4doctor.state import STATE_VARIABLE

FORMAT = 1
_MAX_BYTES = 16 << 20
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Applied:
    """A fix, and what it was asked to use."""

    id: str
    kernel: str = "auto"


@dataclass(frozen=True)
class State:
    """A tree as we left it or mean to leave it."""

    applied: tuple[Applied, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    """File -> sha256, for files that differ from their original."""
    proved: bool = False
    """A trace has shown that it does what was planned."""
    stops_for: tuple[str, ...] | None = None
    """Our kernels that routed experts go to in the launches that were traced; None: not known."""


@dataclass(frozen=True)
class Original:
    """A file before the first change; its bytes are kept under the hash."""

    sha256: str
    mode: int
    link: str | None = None
    released: bool | None = None
    """Whether the release (or the checkout's HEAD) of that time had these bytes; None: unknown."""


@dataclass(frozen=True)
class Pending:
    """A change that has begun."""

    kind: str
    """"apply" or "revert"."""
    state: State


@dataclass(frozen=True)
class Journal:
    root: str
    version: str
    """SGLang's, when the first file was changed."""
    originals: dict[str, Original] = field(default_factory=dict)
    settled: State = State()
    pending: Pending | None = None
    tool: str = __version__
    changed: str = ""
    """When, ISO 8601, UTC."""
    format: int = FORMAT


def _is_inside(name: str) -> bool:
    """Whether a file's name is one in a tree: below sglang/, without a way out of it."""
    parts = name.split("/")
    odd = {"", ".", ".."} & set(parts) or not _is_path(name)
    return parts[0] == "sglang" and len(parts) > 1 and not odd


def _is_path(text: str) -> bool:
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


class Store:
    """The journal of one tree and the bytes that it names."""

    def __init__(self, state: Path, tree: SglangTree) -> None:
        self.tree = tree
        self.sglang = Path(os.path.realpath(os.path.join(tree.root, "sglang")))
        name = hashlib.sha256(os.fsencode(self.sglang)).hexdigest()[:24]
        self.folder = state.absolute() / "trees" / name
        self.path = self.folder / "journal.json"

    def load(self) -> Journal | None:
        """None: nothing of this tree was ever changed, or all of it was taken back.

        Raises UsageError for a journal that cannot be read.
        """
        hint = (
            f"reinstall SGLang {self.tree.version} without its dependencies, "
            f"then remove {self.folder}"
        )
        try:
            os.close(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except (FileNotFoundError, NotADirectoryError):
            if not os.path.lexists(self.path):
                return None
        except PermissionError as error:
            raise UsageError(
                f"{self.path}: cannot be read ({error.strerror})",
                f"run it as the user who patched the tree, or set {STATE_VARIABLE} to a folder "
                "that can",
            ) from error
        except OSError:
            pass  # reading it says why
        plain = read_json(self.path, _MAX_BYTES, hint)
        journal = jsonio.from_plain(plain, Journal, str(self.path))
        if journal.format != FORMAT:
            raise UsageError(
                f"{self.path}: of another dsv4doctor ({journal.tool})",
                f"take the change back with dsv4doctor {journal.tool}",
            )
        self._refuse_damaged(journal)
        return journal

    def _refuse_damaged(self, journal: Journal) -> None:
        """UsageError for one that no change leaves behind: what it stands for is not known, and
        nothing is written, or dropped, on its word."""
        states = [journal.settled] + ([journal.pending.state] if journal.pending else [])
        files = {name for state in states for name in state.files}
        outside = [name for name in {*journal.originals, *files} if not _is_inside(name)]
        lost = sorted(files - set(journal.originals))
        links = [one.link for one in journal.originals.values() if one.link is not None]
        hashes = {one.sha256 for one in journal.originals.values()}
        hashes |= {name for state in states for name in state.files.values()}
        unknown = [name for name in hashes if not _SHA256.fullmatch(name)]
        if outside:
            wrong = f"names {min(outside)!a}, outside the tree"
        elif lost:
            wrong = f"has no original of {lost[0]}"
        elif not journal.originals:
            wrong = "names no file"
        elif unknown:
            wrong = f"names {min(unknown)!a}, no sha256"
        elif not all(_is_path(link) for link in links):
            wrong = "names a link to no path"
        else:
            return
        raise UsageError(
            f"{self.path}: damaged: it {wrong}",
            f"the originals are kept in {self.folder / 'bytes'}; put the journal right, or "
            f"reinstall SGLang {self.tree.version} without its dependencies",
        )

    def save(self, journal: Journal) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        plain = {**jsonio.to_plain(journal), "changed": now, "tool": __version__}
        self._prepare()
        # Bytes of a path that are no UTF-8, as JSON has them.
        content = jsonio.dump(plain).encode("utf-8", "backslashreplace")
        disk.write(self.path, disk.File(content, 0o600))

    def forget(self) -> None:
        """There is nothing left to take back."""
        disk.discard(self.path)
        disk.flush_folder(self.folder)
        shutil.rmtree(self.folder / "bytes", ignore_errors=True)

    def keep(self, content: bytes) -> str:
        """Keep the bytes; gives their sha256."""
        name = disk.sha256(content)
        target = self._bytes(name)
        if not target.is_file() or disk.sha256(target.read_bytes()) != name:
            self._prepare()
            disk.write(target, disk.File(content, 0o600))
        return name

    def set_aside(self, name: str) -> Path:
        """The bytes `name` in a file of their own that no change drops."""
        target = self.folder / "replaced" / name
        content = self.content(name)
        if not target.is_file() or target.read_bytes() != content:
            os.makedirs(target.parent, mode=0o700, exist_ok=True)
            disk.write(target, disk.File(content, 0o600))
        return target

    def prune(self, journal: Journal) -> None:
        """Drop bytes that the journal no longer names."""
        named = {original.sha256 for original in journal.originals.values()}
        named |= set(journal.settled.files.values())
        with contextlib.suppress(OSError):
            for path in (self.folder / "bytes").iterdir():
                if path.name not in named:
                    os.unlink(path)

    def content(self, name: str) -> bytes:
        """The bytes kept under the sha256 `name`; PatchRefusedError when they are not whole."""
        try:
            content = self._bytes(name).read_bytes()
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
        else:
            if disk.sha256(content) == name:
                return content
            reason = "damaged"
        raise PatchRefusedError(
            f"{self._bytes(name)}: {reason}",
            f"reinstall SGLang {self.tree.version} without its dependencies",
        )

    def where(self, name: str) -> Path:
        """The file that holds the bytes `name`."""
        return self._bytes(name)

    def _bytes(self, name: str) -> Path:
        return self.folder / "bytes" / name

    def _prepare(self) -> None:
        os.makedirs(self.folder / "bytes", mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes this tree meanwhile; PatchRefusedError when somebody does.

        The tree's own folder is locked too, for other users with a state folder of their own.
        """
        with contextlib.ExitStack() as held:
            self._lock(held, str(self.folder / "lock"), os.O_RDWR | os.O_CREAT)
            self._lock(held, str(self.sglang), os.O_RDONLY)
            yield

    def _lock(self, held: contextlib.ExitStack, path: str, flags: int) -> None:
        try:
            if flags & os.O_CREAT:
                self._prepare()
            handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if not flags & os.O_CREAT:
                return
            raise UsageError(
                f"{path}: cannot be written ({error.strerror})",
                f"set {STATE_VARIABLE} to a folder that can",
            ) from error
        held.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PatchRefusedError(
                f"{self.tree.root}: another dsv4doctor is changing this tree",
                "run it again when that one is done",
            ) from error
        except OSError:
            return  # a file system without locks
