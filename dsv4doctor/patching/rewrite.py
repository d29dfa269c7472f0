"""From one state of a tree to another, and what has to hold before.

Callers hold the store's lock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dsv4doctor.errors import PatchRefusedError
from dsv4doctor.fixes.fix import Change, Refused
from dsv4doctor.models import SglangTree
from dsv4doctor.patching import disk
from dsv4doctor.patching.apply import Write, carry_out, unwritable
from dsv4doctor.patching.journal import Applied, Journal, Original, State, Store
from dsv4doctor.patching.plan import Plan
from dsv4doctor.patching.running import users_of
from dsv4doctor.patching.view import View, changes_of
from dsv4doctor.wheels import default_cache


def refuse_cached(tree: SglangTree) -> None:
    """PatchRefusedError for a release in our own cache: no server runs from it."""
    cache = os.path.realpath(default_cache())
    if os.path.realpath(tree.root).startswith(cache + os.sep):
        raise PatchRefusedError(
            f"SGLang {tree.version} in {tree.root} is dsv4doctor's own copy of the release",
            "give the tree that serves with --python or --sglang FOLDER, or use --diff, --overlay",
        )


def refuse_lost(planned: Plan, held: Sequence[Applied]) -> None:
    outcomes = {step.fix.id: step.outcome for step in planned.steps}
    for one in held:
        outcome = outcomes.get(one.id)
        if not isinstance(outcome, Change):
            reason = "this dsv4doctor would not put it in again"
            if isinstance(outcome, Refused):
                reason = outcome.reason
            raise PatchRefusedError(
                f"{one.id} is in, and would be lost: {reason}",
                "give another --kernel, or take everything back first: dsv4doctor fix --revert",
            )


def refuse_running(tree: SglangTree, force: bool) -> tuple[str, ...]:
    """PatchRefusedError while SGLang runs from the tree; with `force` a note."""
    users = users_of(Path(tree.root))
    if not users:
        return ()
    first = f"process {users[0].pid} ({users[0].command})"
    more = f" and {len(users) - 1} more" if len(users) > 1 else ""
    if force:
        return (f"{first}{more} runs from this tree: it takes the change when it is started anew",)
    raise PatchRefusedError(
        f"{tree.root}: {first}{more} runs from this tree", "stop it first, or give --force"
    )


def keep_anew(store: Store, seen: View) -> tuple[str, ...]:
    """Keep the files that somebody wrote anew, and apart from them what the journal alone has of
    them.  Gives notes that say where.

    Nothing that names them, or drops what they replaced, may be saved before.
    """
    try:
        _keep_anew(store, seen)
        return tuple(_set_aside(store, *one) for one in seen.replaced.items())
    except OSError as error:
        raise unwritable(error, store.folder) from error


def _keep_anew(store: Store, seen: View) -> None:
    for name in seen.anew:
        store.keep(seen.files[name].content)


def _set_aside(store: Store, name: str, original: Original) -> str:
    try:
        where = store.set_aside(original.sha256)
    except PatchRefusedError as error:
        return f"what {name} was before it was installed anew is lost: {error.message}"
    return (
        f"{name} was installed anew; what it was before, with changes that are no release's, is "
        f"kept in {where}"
    )


def write(store: Store, seen: View, planned: Plan, kind: str) -> Journal | None:
    """The tree as `planned` says; gives the new journal."""
    journal = seen.journal or Journal(store.tree.root, store.tree.version)
    journal = replace(journal, version=store.tree.version)
    files = {name: disk.sha256(content) for name, content in planned.contents.items()}
    known = seen.journal.settled.stops_for if seen.journal is not None else ()
    after = State(planned.applied, files, stops_for=known)
    writes = []
    for name, (_, content) in changes_of(seen, planned).items():
        now = seen.files[name]
        original = journal.originals.get(name)
        mode = original.mode if original is not None else now.mode
        link = original.link if original is not None and name not in files else None
        new = disk.File(content, mode, link, owner=now.owner)
        released = seen.judge.of(name, now.content) if original is None else None
        writes.append(Write(name, now, new, released))
    return carry_out(store, journal, after, kind, writes)


def undo(store: Store, seen: View, done: Journal | None) -> None:
    """The tree as it was seen, from what `done` left.

    Raises PatchRefusedError, with nothing touched, for a file of ours that someone else changed or
    removed meanwhile; what is not ours is not looked after.
    """
    before = seen.journal.settled if seen.journal is not None else State()
    journal = done or Journal(store.tree.root, store.tree.version)
    if seen.journal is not None:
        journal = replace(journal, originals={**seen.journal.originals, **journal.originals})
        _keep_anew(store, seen)
    writes = []
    for name, old in seen.files.items():
        written = journal.settled.files.get(name) or disk.sha256(seen.bases[name])
        now = disk.read(Path(store.tree.root) / name)
        if now is None and name in journal.originals:
            raise _not_ours(store, journal, name, "is missing")
        if now is None or old.sha256 in (written, now.sha256):
            continue
        if now.sha256 != written:
            raise _not_ours(store, journal, name, "was changed by someone else meanwhile")
        writes.append(Write(name, now, old))
    carry_out(store, journal, before, "revert", writes)


def _not_ours(store: Store, journal: Journal, name: str, what: str) -> PatchRefusedError:
    original = journal.originals.get(name)
    hint = "look at it, then run dsv4doctor fix --apply again"
    if original is not None:
        hint = (
            f"its original is {store.where(original.sha256)}: save any other change, copy it "
            "there, then run dsv4doctor fix --revert"
        )
    path = os.path.join(store.tree.root, name)
    return PatchRefusedError(f"{path} {what}: nothing is taken back", hint)
