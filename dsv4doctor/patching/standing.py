"""How each file of a changed tree stands against the journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from dsv4doctor.errors import PatchRefusedError
from dsv4doctor.patching import disk
from dsv4doctor.patching.journal import Journal, Original, State, Store
from dsv4doctor.patching.pristine import Judge


class Standing(str, Enum):
    OURS = "as dsv4doctor wrote it"
    ORIGINAL = "the original"
    RELEASED = "as the SGLang that is installed now has it"
    """SGLang was reinstalled or upgraded since; it may be one that lacks the file."""
    CHANGED = "changed by someone else"
    MISSING = "missing"


@dataclass(frozen=True)
class Stand:
    standing: Standing
    now: disk.File | None
    left_behind: Path | None = None
    """What a killed run was about to put there."""


def stands(root: Path, journal: Journal, judge: Judge) -> dict[str, Stand]:
    """Every file that the journal knows."""
    found = {}
    for file in journal.originals:
        path = root / file
        now = disk.read(path)
        standing = _standing(journal, file, now, judge)
        found[file] = Stand(standing, now, disk.left_behind(path))
    return found


def _standing(journal: Journal, file: str, now: disk.File | None, judge: Judge) -> Standing:
    if now is None:
        return Standing.RELEASED if judge.lacks(file) else Standing.MISSING
    states = [journal.settled] + ([journal.pending.state] if journal.pending else [])
    if now.sha256 == journal.originals[file].sha256:
        return Standing.ORIGINAL
    if now.sha256 in {state.files.get(file) for state in states}:
        return Standing.OURS
    return Standing.RELEASED if judge.of(file, now.content) else Standing.CHANGED


def is_obsolete(standing: Mapping[str, Stand]) -> bool:
    """True when every file is a release's own, by its hash: nothing of ours is left.

    What is missing is no proof of that: its original may be the last copy.
    """
    return {stand.standing for stand in standing.values()} <= {Standing.ORIGINAL, Standing.RELEASED}


def obsolete(standing: Mapping[str, Stand]) -> str:
    """In words, of what `is_obsolete`."""
    if all(stand.standing is Standing.ORIGINAL for stand in standing.values()):
        return "every file that was patched is its original again: nothing of ours is left"
    return "SGLang was installed anew since it was patched: nothing of that is left"


def renewed(journal: Journal, standing: Mapping[str, Stand], judge: Judge) -> Journal:
    """`journal` with every file that somebody wrote anew as its own original, and unchanged since:
    that is what a change that fails, or is taken back, gives back."""
    originals, files = dict(journal.originals), dict(journal.settled.files)
    for name, stand in standing.items():
        now = stand.now
        if stand.standing is Standing.OURS:
            continue
        if now is None:
            originals.pop(name)
            files.pop(name, None)
            continue
        released = judge.of(name, now.content)
        originals[name] = Original(now.sha256, now.mode, now.link, released)
        files[name] = now.sha256
    return replace(journal, originals=originals, settled=replace(journal.settled, files=files))


def replaced(journal: Journal, standing: Mapping[str, Stand]) -> dict[str, Original]:
    """The originals that the journal alone has: no release's own, and another file is there."""
    return {
        name: journal.originals[name]
        for name, stand in standing.items()
        if stand.standing is Standing.RELEASED and not journal.originals[name].released
    }


def refuse_foreign(store: Store, journal: Journal, standing: Mapping[str, Stand]) -> None:
    """PatchRefusedError for a file that somebody else changed after us, with the way out."""
    for file, stand in standing.items():
        if stand.standing in (Standing.CHANGED, Standing.MISSING):
            what = "is missing" if stand.now is None else "was changed after dsv4doctor wrote it"
            version, kept = store.tree.version, store.where(journal.originals[file].sha256)
            hint = (
                f"its original is {kept}: save your own change, copy the original there and run "
                f"this again, or reinstall SGLang {version} without its dependencies"
            )
            if journal.version != version:
                hint = (
                    f"SGLang {journal.version} was patched, and {version} is there now: reinstall "
                    f"it, or to keep it as it is remove {store.path}; what the file was before is "
                    f"{kept}"
                )
            raise PatchRefusedError(f"{Path(store.tree.root) / file} {what}: left alone", hint)


def refuse_released(store: Store, journal: Journal, standing: Mapping[str, Stand]) -> None:
    """PatchRefusedError for a file of an SGLang that was installed over an interrupted change:
    what is kept is another one's, and may be the last copy."""
    for file, stand in standing.items():
        if stand.standing is Standing.RELEASED:
            version, kept = store.tree.version, store.where(journal.originals[file].sha256)
            clean = "" if is_obsolete(standing) else f"reinstall SGLang {version} and "
            raise PatchRefusedError(
                f"{Path(store.tree.root) / file}: another SGLang was installed since the run was "
                "interrupted: left alone",
                f"to keep that SGLang, {clean}remove {store.path}; to go back, copy the "
                f"original, {kept}, there and run this again",
            )


def file_in(store: Store, journal: Journal, state: State, file: str) -> disk.File:
    """What `file` is in `state`."""
    original = journal.originals[file]
    changed = state.files.get(file)
    if changed in (None, original.sha256):
        return disk.File(store.content(original.sha256), original.mode, original.link)
    return disk.File(store.content(changed), original.mode)
