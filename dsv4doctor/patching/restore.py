"""Taking fixes out again, and what is in a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.tree import mixed
from dsv4doctor.fixes.fix import Change, Fix
from dsv4doctor.patching import disk, plan, pristine, standing, verifying
from dsv4doctor.patching.apply import recover, refuse_unwritable
from dsv4doctor.patching.journal import Journal, Store
from dsv4doctor.patching.plan import Wish
from dsv4doctor.patching.rewrite import keep_anew, refuse_lost, refuse_running, write
from dsv4doctor.patching.standing import Standing
from dsv4doctor.patching.view import Asked, Outcome, changes_of, contents_of, view

_NONE: Mapping[str, str] = MappingProxyType({})


def revert(
    store: Store, fixes: Sequence[Fix], asked: Asked, verified: Mapping[str, str] = _NONE
) -> Outcome:
    """Take back every fix, or those in `asked.only`: identical bytes, mode and links.

    `verified`: our kernels that were verified on the machine that serves, and the day.  Raises
    PatchRefusedError when someone else changed a file since.
    """
    with store.locked():
        seen = view(store, [])
        if seen.journal is None:
            aside = keep_anew(store, seen)
            if store.load() is not None:
                store.forget()
            said = "nothing of ours is in this tree"
            return Outcome("revert", store.tree, 0, said, notes=(*seen.notes, *aside))
        held = seen.held
        missing = [name for name in asked.only if name not in {one.id for one in held}]
        if missing:
            known = ", ".join(one.id for one in held)
            raise UsageError(f"--only {missing[0]}: not in this tree", f"in it: {known}")
        kept = tuple(one for one in held if asked.only and one.id not in asked.only)
        if kept:
            seen = view(store, fixes)
        planned = plan.make(fixes if kept else [], seen.bases, contents_of(seen), None, Wish(kept))
        if kept:
            refuse_lost(planned, kept)
        notes = refuse_running(store.tree, asked.force)
        changes = changes_of(seen, planned)
        refuse_unwritable(store, list(changes))
        notes += keep_anew(store, seen)
        journal = write(store, seen, planned, "revert")
    # What stays is written anew, and may now lead to a kernel of ours.
    stops = verifying.of_tree(Path(store.tree.root), fixes, verified) if kept else []
    gone = ", ".join(one.id for one in held if one not in kept)
    rest = ", ".join(one.id for one in kept)
    said = f"{gone} taken back" + (f"; still in: {rest}" if rest else ", the tree is as it was")
    return Outcome(
        "revert",
        store.tree,
        0,
        said,
        changes=changes,
        journal=journal,
        notes=(*seen.notes, *notes, *stops),
    )


def take_all_back(store: Store) -> None:
    """The tree without any fix.  Callers hold the store's lock."""
    seen = view(store, [])
    if seen.journal is not None:
        keep_anew(store, seen)
        nothing = plan.make([], seen.bases, contents_of(seen), None, Wish())
        write(store, seen, nothing, "revert")


def recover_tree(store: Store) -> Outcome:
    """Finish or take back what an interrupted run began."""
    with store.locked():
        journal = store.load()
        if journal is None or journal.pending is None:
            return Outcome("recover", store.tree, 0, "no run was interrupted", journal=journal)
        root = Path(store.tree.root)
        found = standing.stands(root, journal, pristine.judge(root))
        pending = journal.pending
        rest = recover(store, journal, found)
    how = "taken to its end" if pending.kind == "revert" else "taken back"
    return Outcome("recover", store.tree, 0, f"interrupted {pending.kind} {how}", journal=rest)


def status(store: Store, fixes: Sequence[Fix], verified: Mapping[str, str] = _NONE) -> Outcome:
    """What is in the tree, by the journal and the files themselves; `verified`: as of `revert`.

    The exit code is 1 after an interrupted run and when someone else changed a file.
    """
    root = Path(store.tree.root)
    journal, judge = store.load(), pristine.judge(root)
    if journal is None:
        elsewhere = _marked(root, fixes)
        said = "nothing of ours is in this tree"
        if elsewhere:
            said = f"{', '.join(elsewhere)} is in this tree, put there without this user's journal"
        notes = verifying.of_tree(root, fixes, verified) if elsewhere else []
        return Outcome("status", store.tree, 0, said, notes=(*mixed(root), *notes))
    found = standing.stands(root, journal, judge)
    names = {
        name: judge.of(name, store.content(kept.sha256)) for name, kept in journal.originals.items()
    }
    code, said = _said_status(journal, found)
    known = journal.settled.stops_for if journal.settled.proved else None
    return Outcome(
        "status",
        store.tree,
        code,
        said,
        pristine=names,
        journal=None if standing.is_obsolete(found) and journal.pending is None else journal,
        stands=found,
        gone=_gone(store, fixes, journal, found),
        notes=(*mixed(root), *verifying.of_tree(root, fixes, verified, known)),
    )


def _said_status(journal: Journal, found: Mapping[str, standing.Stand]) -> tuple[int, str]:
    if journal.pending is not None:
        return 1, f"an {journal.pending.kind} was interrupted: dsv4doctor fix --recover"
    if standing.is_obsolete(found):
        return 0, standing.obsolete(found)
    strange = [one.standing for one in found.values() if one.standing is not Standing.OURS]
    if {Standing.CHANGED, Standing.MISSING} & set(strange):
        return 1, f"{len(strange)} of the patched files changed since"
    if strange:
        return 1, (
            f"{len(strange)} of {len(found)} patched files written anew since, without the fixes: "
            "dsv4doctor fix --apply puts them in again, --revert takes the rest out"
        )
    ids = ", ".join(one.id for one in journal.settled.applied)
    proved = "proved by trace" if journal.settled.proved else "not proved: dsv4doctor fix --apply"
    return 0, f"{ids} in, {proved}"


def _gone(
    store: Store, fixes: Sequence[Fix], journal: Journal, found: Mapping[str, standing.Stand]
) -> dict[str, Sequence[str]] | None:
    """Fix -> the files that it belongs in and is not in; None: what is in cannot be said."""
    standings = {stand.standing for stand in found.values()}
    if journal.pending is not None or {Standing.CHANGED, Standing.MISSING} & standings:
        return None
    if standings == {Standing.OURS}:
        return {}
    seen = view(store, fixes)
    current = contents_of(seen)
    planned = plan.make(fixes, seen.bases, current, None, Wish(seen.held))
    gone: dict[str, Sequence[str]] = {}
    for step in planned.steps:
        if isinstance(step.outcome, Change):
            # Not only those of the journal: in another release it goes into others.
            files = [name for name in step.outcome.sources if current[name] == seen.bases[name]]
        else:
            files = [name for name in step.fix.files if name in seen.anew]
        gone[step.fix.id] = files
    return gone


def _marked(root: Path, fixes: Sequence[Fix]) -> list[str]:
    """The fixes whose mark is in the files that they change."""
    found = []
    for fix in fixes:
        files = (disk.read(root / name) for name in fix.files)
        if any(file is not None and fix.id.encode() in file.content for file in files):
            found.append(fix.id)
    return found
