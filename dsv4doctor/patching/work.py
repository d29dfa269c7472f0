"""What fixes change: planned, applied with proof, or written into an overlay."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4doctor.audit import Settings
from dsv4doctor.errors import PatchRefusedError
from dsv4doctor.evidence.stamped import verified_here
from dsv4doctor.fixes.fix import Fix
from dsv4doctor.models import Facts, SglangTree
from dsv4doctor.patching import overlay, plan, shadow, verifying
from dsv4doctor.patching.apply import refuse_unwritable
from dsv4doctor.patching.journal import Journal, Store
from dsv4doctor.patching.plan import Plan, Status, Wish
from dsv4doctor.patching.proof import Progress, Proof, facts_of, prove
from dsv4doctor.patching.restore import take_all_back
from dsv4doctor.patching.rewrite import (
    keep_anew,
    refuse_cached,
    refuse_lost,
    refuse_running,
    undo,
    write,
)
from dsv4doctor.patching.view import (
    Asked,
    Outcome,
    View,
    changes_of,
    contents_of,
    pristine_of,
    view,
)
from dsv4doctor.target import Target

_TAKEN = (Status.PLANNED, Status.APPLIED, Status.RENEWED)


@dataclass(frozen=True)
class Job:
    """A launch on a tree, and what is wanted of the fixes."""

    store: Store
    fixes: Sequence[Fix]
    target: Target
    asked: Asked
    settings: Settings
    progress: Progress | None = None

    @property
    def tree(self) -> SglangTree:
        return self.store.tree

    def facts(self, tree: SglangTree, files: Iterable[str] = ()) -> Facts:
        """The launch on `tree`, the modules of `files` imported or compiled on the way."""
        return facts_of(self.target, tree, self.settings, files, self.progress)


@dataclass(frozen=True)
class Draft:
    """A plan, the facts that it is made on, and its outcome as long as nothing is done."""

    plan: Plan
    facts: Facts
    outcome: Outcome


# ------------------------------------------------------------------------------ plan


def make_plan(job: Job, command: str = "plan") -> Outcome:
    """What would be done, and what is missing; nothing is written.

    The exit code is 4 when a fix that is needed is refused, and 3 when the trace stopped short; of
    `command` "check" it is 1 when a fix is missing for whatever reason.
    """
    draft = _draft(job, view(job.store, job.fixes), command)
    return _noted(draft.outcome, _asked_for(draft))


def _asked_for(draft: Draft) -> list[str]:
    return verifying.of_plan(draft.plan, draft.facts, draft.outcome.verified)


def _noted(outcome: Outcome, notes: Iterable[str]) -> Outcome:
    return replace(outcome, notes=(*outcome.notes, *notes))


def _draft(job: Job, seen: View, command: str) -> Draft:
    facts = job.facts(job.tree)
    wish = Wish(seen.held, job.asked.only, job.asked.kernel)
    planned = plan.make(job.fixes, seen.bases, contents_of(seen), facts, wish)
    changes = changes_of(seen, planned)
    stopped = facts.trace.unresolved if facts.trace is not None else ("there is no trace",)
    if command == "check" and planned.missing(job.asked.only):
        code = 1
    elif any(_counts(step, seen, job.asked) for step in planned.of(Status.REFUSED)):
        code = 4
    else:
        code = 3 if stopped else 0
    outcome = Outcome(
        command,
        job.tree,
        code,
        _said(planned, command),
        planned,
        facts,
        changes,
        pristine_of(seen, list(changes)),
        journal=seen.journal,
        verified=verified_here(facts.snapshot, facts.arch_source),
        notes=(
            *seen.notes,
            *(f"the trace stopped short: {text}" for text in stopped),
            *verifying.left_open(planned, facts),
        ),
    )
    return Draft(planned, facts, outcome)


def _counts(step: plan.Step, seen: View, asked: Asked) -> bool:
    """Whether a refused fix is one that was to go, or to stay, in."""
    is_in = step.fix.id in {one.id for one in seen.held}
    return is_in or (step.why is not None and (not asked.only or step.fix.id in asked.only))


def _said(planned: Plan, command: str) -> str:
    refused = [step for step in planned.of(Status.REFUSED) if step.why is not None]
    counts = {
        "missing" if command == "check" else "to put in": len(planned.of(Status.PLANNED)),
        "to renew": len(planned.of(Status.RENEWED)),
        "in": len(planned.of(Status.APPLIED)),
        "refused": len(refused),
        "left out by --only": len(planned.of(Status.LEFT_OUT)),
    }
    parts = [f"{count} {what}" for what, count in counts.items() if count]
    return f"fixes: {', '.join(parts)}" if parts else "no fix is needed"


# ------------------------------------------------------------------------------ apply


def apply(job: Job) -> Outcome:
    """Put in what the launch needs, prove it, and take it back when it does not hold.

    Raises PatchRefusedError with the tree as it was.  The exit code is 4 too when the proof failed
    or one of the needed fixes was refused.
    """
    refuse_cached(job.tree)
    with job.store.locked():
        seen = view(job.store, job.fixes)
        draft = _draft(job, seen, "apply")
        refuse_lost(draft.plan, seen.held)
        unproved = seen.journal is not None and not seen.journal.settled.proved
        if not draft.outcome.changes and not unproved:
            outcome = replace(draft.outcome, said=f"nothing to do: {draft.outcome.said}")
            aside = keep_anew(job.store, seen)
            journal, said = _note_down(job.store, seen.journal, draft.facts)
            said += _asked_for(draft)
            return _noted(replace(outcome, journal=journal), (*aside, *said))
        notes = refuse_running(job.tree, job.asked.force)
        refuse_unwritable(job.store, list(draft.outcome.changes))
        notes += keep_anew(job.store, seen)
        outcome = replace(draft.outcome, notes=(*draft.outcome.notes, *notes))
        return _apply(job, seen, replace(draft, outcome=outcome), unproved)


def _apply(job: Job, seen: View, draft: Draft, unproved: bool) -> Outcome:
    planned, before = draft.plan, draft.facts
    if seen.journal is not None:
        # What was put in before is part of what has to be shown, and may change along.
        before = _facts_without(job, seen.bases)
    taken = [step.fix for step in planned.of(*_TAKEN)]
    done = write(job.store, seen, planned, "apply")
    try:
        aims = plan.aims(planned, before)
        proof, after = prove(before, taken, lambda: job.facts(job.tree, planned.contents), aims)
    except BaseException:
        undo(job.store, seen, done)
        raise
    if proof.problems:
        try:
            take_all_back(job.store) if unproved else undo(job.store, seen, done)
        except PatchRefusedError as error:
            said = f"the proof failed ({proof.problems[0]}), and {error.message}"
            raise PatchRefusedError(said, error.hint) from error
        now = "without any fix" if unproved else "as it was"
        said = f"taken back, the tree is {now}: the proof failed"
        return replace(draft.outcome, exit_code=4, said=said, proof=proof, journal=None)
    notes = [*draft.outcome.notes, *_needed_next(planned, after)]
    notes += verifying.of_trace(after)
    done, unsaid = _note_down(job.store, done, after)
    notes += unsaid
    count = len(draft.outcome.changes)
    ids = ", ".join(fix.id for fix in taken) or "no fix"
    said = f"{ids} in, {count} file{'s' if count != 1 else ''} changed, proved by trace"
    return replace(
        draft.outcome,
        said=said,
        plan=plan.carried_out(planned),
        proof=proof,
        journal=done,
        notes=tuple(notes),
    )


def _note_down(
    store: Store, journal: Journal | None, after: Facts | None
) -> tuple[Journal | None, list[str]]:
    """The journal with the proof, and with what this launch's server stops for too."""
    if journal is None or after is None or after.trace is None:
        return journal, []
    known = journal.settled.stops_for
    if known is not None:
        known = tuple(sorted({*known, *verifying.stops_for(after.trace)}))
    proved = replace(journal, settled=replace(journal.settled, proved=True, stops_for=known))
    try:
        if proved != journal:
            store.save(proved)
    except OSError as error:
        return proved, [f"{store.path}: the proof could not be noted ({error.strerror})"]
    return proved, []


def _facts_without(job: Job, bases: Mapping[str, bytes]) -> Facts:
    """The facts of the tree without what we put in."""
    with tempfile.TemporaryDirectory(prefix="dsv4doctor-") as scratch:
        return job.facts(shadow.build(job.tree, bases, Path(scratch) / "tree"))


def _needed_next(planned: Plan, after: Facts | None) -> list[str]:
    """What is only seen to be needed now that the launch gets further."""
    if after is None:
        return []
    known = {Status.PLANNED, Status.APPLIED, Status.RENEWED, Status.LEFT_OUT, Status.REFUSED}
    return [
        f"the launch now needs {step.fix.id} too ({why}): run this again"
        for step in planned.steps
        if step.status not in known and (why := step.fix.needed(after)) is not None
    ]


# ------------------------------------------------------------------------------ overlay


def write_overlay(job: Job, folder: Path) -> Outcome:
    """The patched modules in `folder`, proved before it is written; the tree is left alone."""
    overlay.refuse_target(folder)
    overlay.refuse_inside(folder, job.tree)
    seen = view(job.store, job.fixes)
    seen = replace(seen, bases=contents_of(seen), journal=None)
    draft = _draft(job, seen, "overlay")
    contents = draft.plan.contents
    new = [step.fix for step in draft.plan.of(Status.PLANNED)]
    proof: Proof | None = None
    after: Facts | None = draft.facts
    if contents:
        with tempfile.TemporaryDirectory(prefix="dsv4doctor-") as scratch:
            patched = shadow.build(job.tree, contents, Path(scratch) / "tree")
            aims = plan.aims(draft.plan, draft.facts)
            proof, after = prove(draft.facts, new, lambda: job.facts(patched, contents), aims)
        if proof.problems:
            said = f"the proof failed: {folder} is not written"
            return replace(draft.outcome, exit_code=4, said=said, proof=proof)
    overlay.write(folder, job.tree, [fix.id for fix in new], seen.bases, contents)
    proved = ", proved by trace" if proof else ", with nothing in it: no fix is to be put in"
    start = shlex.join(["dsv4doctor", "run", "--overlay", str(folder), "--", "COMMAND"])
    said = f"{folder} written{proved}; start with: {start}"
    return _noted(replace(draft.outcome, said=said, proof=proof), verifying.of_trace(after))
