"""Changes a tree's files, all or none, and takes an interrupted change back or to its end.

Callers hold the store's lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4doctor.errors import PatchRefusedError
from dsv4doctor.patching import disk
from dsv4doctor.patching.journal import Journal, Original, Pending, State, Store
from dsv4doctor.patching.standing import Stand, file_in, refuse_foreign, refuse_released

_OVERLAY = "or leave the tree alone and use --overlay DIR"
_HINTS = {
    errno.ENOSPC: "make room there and run it again",
    errno.EDQUOT: "make room there and run it again",
    errno.EROFS: f"run it where the tree can be written, {_OVERLAY}",
    errno.EACCES: f"run it as the user who owns the tree, {_OVERLAY}",
    errno.EPERM: f"run it as the user who owns the tree, {_OVERLAY}",
}


@dataclass(frozen=True)
class Write:
    file: str
    """Relative to the tree's root."""
    now: disk.File
    """What the plan was made on."""
    new: disk.File
    released: bool | None = None
    """Whether `now` is the release's own, of a file that is changed for the first time."""


def refuse_unwritable(store: Store, files: Sequence[str]) -> None:
    """PatchRefusedError for a file that cannot be replaced, or does not lie in the tree."""
    for file in files:
        path = Path(store.tree.root) / file
        folder = Path(os.path.realpath(path.parent))
        if not (folder / path.name).is_relative_to(store.sglang):
            raise PatchRefusedError(
                f"{path}: lies in {folder}, outside the tree, through a link",
                "give the tree that holds the files themselves with --sglang",
            )
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PatchRefusedError(
                f"{folder}: cannot be written", f"run it as the user who owns the tree, {_OVERLAY}"
            )


def carry_out(
    store: Store, journal: Journal, after: State, kind: str, writes: Sequence[Write]
) -> Journal | None:
    """The tree in the state `after`; gives the new journal, None when nothing is left to undo.

    Raises PatchRefusedError when a file is no longer what the plan was made on, and when one
    cannot be written: the tree is then as it was.
    """
    root = Path(store.tree.root)
    for write in writes:
        now = disk.read(root / write.file)
        if now is None or now.sha256 != write.now.sha256:
            raise PatchRefusedError(
                f"{root / write.file}: changed since the plan was made", "run it again"
            )
    try:
        begun = _write_down(store, journal, after, kind, writes)
    except OSError as error:
        with contextlib.suppress(OSError):  # it may have got there before it failed
            _settle(store, journal, journal.settled)
        raise unwritable(error, store.folder) from error
    try:
        staged = [(disk.stage(root / write.file, write.new), write) for write in writes]
        for scratch, write in staged:
            _put(scratch, root / write.file)
        return _settle(store, begun, after)
    except BaseException as error:
        _take_back(store, begun, writes)
        if isinstance(error, OSError):
            raise unwritable(error, root) from error
        raise


def recover(store: Store, journal: Journal, standing: Mapping[str, Stand]) -> Journal | None:
    """An interrupted change taken back; an interrupted way back taken to its end.

    Raises PatchRefusedError, with nothing touched, when a file is neither's.
    """
    pending = journal.pending
    if pending is None:
        return journal
    refuse_foreign(store, journal, standing)
    refuse_released(store, journal, standing)
    target = pending.state if pending.kind == "revert" else journal.settled
    refuse_unwritable(store, list(journal.originals))
    root = Path(store.tree.root)
    try:
        for file, stand in standing.items():
            if stand.left_behind is not None:
                disk.discard(stand.left_behind)
            wanted = file_in(store, journal, target, file)
            if stand.now is not None and not _same(stand.now, wanted):
                _put(disk.stage(root / file, replace(wanted, owner=stand.now.owner)), root / file)
        return _settle(store, journal, target)
    except OSError as error:
        raise unwritable(error, root) from error


def _same(now: disk.File, wanted: disk.File) -> bool:
    return (now.sha256, now.link, now.mode) == (wanted.sha256, wanted.link, wanted.mode)


def _write_down(
    store: Store, journal: Journal, after: State, kind: str, writes: Sequence[Write]
) -> Journal:
    """The journal with the change pending and every content kept."""
    originals = dict(journal.originals)
    for write in writes:
        store.keep(write.now.content)
        store.keep(write.new.content)
        if write.file not in originals:
            now = write.now
            originals[write.file] = Original(now.sha256, now.mode, now.link, write.released)
    begun = replace(journal, originals=originals, pending=Pending(kind, after))
    store.save(begun)
    return begun


def _put(scratch: Path, path: Path) -> None:
    # Before, because a run killed in between must not leave compiled code that Python would still
    # take; after, because a Python may have compiled the old source meanwhile.
    disk.forget_bytecode(path)
    disk.publish(scratch, path)
    disk.forget_bytecode(path)


def _settle(store: Store, journal: Journal, state: State) -> Journal | None:
    if not state.files:
        store.forget()
        return None
    originals = {file: kept for file, kept in journal.originals.items() if file in state.files}
    settled = replace(journal, originals=originals, settled=state, pending=None)
    store.save(settled)
    store.prune(settled)
    return settled


def _take_back(store: Store, begun: Journal, writes: Sequence[Write]) -> None:
    """The tree and journal as before `begun`; PatchRefusedError when that fails too."""
    root = Path(store.tree.root)
    try:
        for write in writes:
            path = root / write.file
            scratch = disk.left_behind(path)
            if scratch is not None:
                disk.discard(scratch)
            now = disk.read(path)
            if now is not None and now.sha256 not in (write.now.sha256, write.new.sha256):
                raise PatchRefusedError(
                    f"{path} was changed by someone else meanwhile: left alone",
                    "dsv4doctor fix --recover says how to go on",
                )
            if now is None or not _same(now, write.now):
                _put(disk.stage(path, write.now), path)
        _settle(store, begun, begun.settled)
    except OSError as error:
        raise PatchRefusedError(
            f"{root}: could not be changed, and not be put back either ({error.strerror})",
            "dsv4doctor fix --recover puts it back, once its disk can be written",
        ) from error


def unwritable(error: OSError, place: Path) -> PatchRefusedError:
    """What to raise for an error of the disk that left the tree as it was."""
    named = error.filename or place
    with contextlib.suppress(TypeError):
        named = os.fsdecode(named)
    reason = error.strerror or str(error)
    return PatchRefusedError(
        f"{named}: cannot be written ({reason}); the tree is as it was",
        _HINTS.get(error.errno or 0, "run it again, or look at the disk"),
    )
