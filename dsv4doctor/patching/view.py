"""A tree's files with and without what dsv4doctor put in, and what every command gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsv4doctor.errors import PatchRefusedError, UsageError
from dsv4doctor.facts.tree import mixed
from dsv4doctor.fixes.fix import Fix
from dsv4doctor.models import Facts, SglangTree
from dsv4doctor.patching import disk, pristine, standing
from dsv4doctor.patching.journal import Applied, Journal, Original, Store
from dsv4doctor.patching.plan import Plan
from dsv4doctor.patching.proof import Proof
from dsv4doctor.patching.standing import Standing


@dataclass(frozen=True)
class Asked:
    """What the user wants of the fixes."""

    only: tuple[str, ...] = ()
    kernel: str | None = None
    force: bool = False
    """Also while a server uses the tree."""


@dataclass(frozen=True)
class View:
    """A tree's files, with and without what the journal says we put in."""

    files: Mapping[str, disk.File]
    """As they are."""
    bases: Mapping[str, bytes]
    journal: Journal | None
    """Of the files as they are, so that one which somebody wrote anew is its own original; None:
    nothing of ours is there."""
    judge: pristine.Judge
    anew: frozenset[str] = frozenset()
    """The files of the journal that somebody wrote anew."""
    replaced: Mapping[str, Original] = field(default_factory=dict)
    """Their originals before, where no release has them."""
    notes: tuple[str, ...] = ()

    @property
    def held(self) -> tuple[Applied, ...]:
        return self.journal.settled.applied if self.journal is not None else ()


@dataclass(frozen=True)
class Outcome:
    """What a command has to say."""

    command: str
    tree: SglangTree
    exit_code: int
    said: str
    """In one line."""
    plan: Plan | None = None
    facts: Facts | None = None
    changes: Mapping[str, tuple[bytes, bytes]] = field(default_factory=dict)
    """File -> (its bytes before, its bytes after), planned or done."""
    pristine: Mapping[str, bool | None] = field(default_factory=dict)
    """Whether what a change starts from is the release's own."""
    proof: Proof | None = None
    journal: Journal | None = None
    stands: Mapping[str, standing.Stand] = field(default_factory=dict)
    verified: Mapping[str, str] = field(default_factory=dict)
    """Our kernels that were verified on the machine of this launch, and the day."""
    gone: Mapping[str, Sequence[str]] | None = None
    """Fix -> the files that it belongs in and is not in; None: not known."""
    notes: tuple[str, ...] = ()


def view(store: Store, fixes: Sequence[Fix]) -> View:
    """The files that `fixes` read and those that the journal knows.

    Raises PatchRefusedError after an interrupted run, and when someone else changed a file.
    """
    root = Path(store.tree.root)
    journal, judge = store.load(), pristine.judge(root)
    notes = mixed(root)
    found: Mapping[str, standing.Stand] = {}
    replaced: Mapping[str, Original] = {}
    if journal is not None:
        _refuse_interrupted(journal, root)
        found = standing.stands(root, journal, judge)
        replaced = standing.replaced(journal, found)
        if standing.is_obsolete(found):
            journal, notes, found = None, (*notes, standing.obsolete(found)), {}
        else:
            standing.refuse_foreign(store, journal, found)
            journal = standing.renewed(journal, found, judge)
    files: dict[str, disk.File] = {}
    for name in dict.fromkeys([*(name for fix in fixes for name in fix.files), *found]):
        try:
            now = disk.read(root / name)
        except OSError as error:
            raise UsageError(
                f"{root / name}: cannot be read ({error.strerror})",
                "run it as the user who serves",
            ) from error
        if now is not None:
            files[name] = now
    bases = {name: now.content for name, now in files.items()}
    anew = frozenset(n for n, stand in found.items() if stand.standing is not Standing.OURS)
    if journal is not None:
        for name in found.keys() - anew:
            bases[name] = store.content(journal.originals[name].sha256)
    return View(files, bases, journal, judge, anew & files.keys(), replaced, notes)


def _refuse_interrupted(journal: Journal, root: Path) -> None:
    if journal.pending is not None:
        raise PatchRefusedError(
            f"{root}: an earlier run was interrupted while it changed files ({journal.changed})",
            "first: dsv4doctor fix --recover, with the same --sglang or --python",
        )


def contents_of(seen: View) -> dict[str, bytes]:
    return {name: now.content for name, now in seen.files.items()}


def changes_of(seen: View, planned: Plan) -> dict[str, tuple[bytes, bytes]]:
    pairs = {
        name: (now.content, planned.contents.get(name, seen.bases[name]))
        for name, now in seen.files.items()
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def pristine_of(seen: View, names: Sequence[str]) -> dict[str, bool | None]:
    return {name: seen.judge.of(name, seen.bases[name]) for name in names}
