"""Facts and sources and fixes -> what would be changed, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from dsv4doctor.fixes.fix import Aim, Change, Choice, Fix, Outcome, Present, Refused
from dsv4doctor.models import Facts
from dsv4doctor.patching import text
from dsv4doctor.patching.journal import Applied


class Status(str, Enum):
    PLANNED = "planned"
    """The launch needs it, and it can be put in."""
    APPLIED = "applied"
    """It is in, and the journal can take it out."""
    RENEWED = "renewed"
    """It is in, and this dsv4doctor or another choice would write it otherwise."""
    PRESENT = "present"
    """The tree does not need it: SGLang has it, or it was put in without our journal."""
    ABSENT = "absent"
    """The tree has no such path."""
    REFUSED = "refused"
    """The path has a shape that the fix does not know."""
    NOT_NEEDED = "not needed"
    """It could be put in, and the launch does not need it."""
    LEFT_OUT = "left out"
    """The launch needs it, and --only names others."""


@dataclass(frozen=True)
class Step:
    """One fix on this tree and launch."""

    fix: Fix
    status: Status
    outcome: Outcome
    why: str | None
    """Why the launch needs it, as the tree is now."""
    layers: tuple[str, ...] = ()
    """The layers that it means to change, of those traced."""
    aim: Aim | None = None
    """What those of `aimed` get; None: no method of theirs changes, or that cannot be said."""
    aimed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    steps: tuple[Step, ...]
    applied: tuple[Applied, ...]
    """The fixes that are in once it is carried out."""
    contents: Mapping[str, bytes]
    """File -> its bytes then, for every file that differs from its base."""

    def of(self, *statuses: Status) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.status in statuses)

    def missing(self, only: Sequence[str] = ()) -> tuple[Step, ...]:
        """Needed, and not in; of the fixes in `only`, where there are any."""
        steps = self.of(Status.PLANNED, Status.REFUSED)
        return tuple(s for s in steps if s.why is not None and (not only or s.fix.id in only))


@dataclass(frozen=True)
class Wish:
    """What is to be in the tree."""

    held: tuple[Applied, ...] = ()
    """In already, by the journal."""
    only: tuple[str, ...] = ()
    """Of the fixes that are needed, only these; empty: all."""
    kernel: str | None = None
    """None: what each fix was applied with, "auto" for new ones."""


def make(
    fixes: Sequence[Fix],
    bases: Mapping[str, bytes],
    current: Mapping[str, bytes],
    facts: Facts | None,
    wish: Wish,
) -> Plan:
    """The plan for a tree.

    `bases`: every file that the fixes read, without what we put in; `current`: as they are.
    Without `facts` nothing new is needed, and only what is held is composed.
    """
    texts, unreadable = _decoded(bases)
    sources = {file: one.body for file, one in texts.items()}
    held = {applied.id: applied.kernel for applied in wish.held}
    steps: list[Step] = []
    applied: list[Applied] = []
    for fix in fixes:
        why, failed = _needed(fix, facts)
        chosen = not wish.only or fix.id in wish.only
        kernel = (wish.kernel if chosen else None) or held.get(fix.id, "auto")
        failed = failed or _unreadable(fix, unreadable)
        outcome = failed or _planned(fix, sources, Choice(kernel))
        is_in = fix.id in held
        if isinstance(outcome, Change) and (is_in or (why is not None and chosen)):
            sources.update(outcome.sources)
            applied.append(Applied(fix.id, kernel))
        status = _status(outcome, is_in, why is not None, chosen)
        steps.append(Step(fix, status, outcome, why, _layers(fix, facts)))
    contents = {
        file: content
        for file, one in texts.items()
        if (content := one.encode(sources[file])) != bases[file]
    }
    differing = {file for file in bases if contents.get(file, bases[file]) != current[file]}
    without = {file for file in differing if current[file] == bases[file]}
    return Plan(_aimed(_renewed(steps, differing, without), facts), tuple(applied), contents)


def carried_out(planned: Plan) -> Plan:
    """The plan once it is done."""
    done = (Status.PLANNED, Status.RENEWED)
    steps = (
        replace(step, status=Status.APPLIED) if step.status in done else step
        for step in planned.steps
    )
    return replace(planned, steps=tuple(steps))


def aims(planned: Plan, facts: Facts) -> dict[str, tuple[Aim, tuple[str, ...]]]:
    """Fix -> what the layers of that name come out with once the plan is in.

    `facts`: the launch before, without the fixes.
    """
    steps = _aimed(planned.steps, facts)
    return {step.fix.id: (step.aim, step.aimed) for step in steps if step.aim is not None}


def _aimed(steps: Sequence[Step], facts: Facts | None) -> tuple[Step, ...]:
    """The steps that are in, or will be, with what this launch's layers get of them."""
    trace = facts.trace if facts is not None else None
    if trace is None:
        return tuple(steps)
    comes_in = (Status.PLANNED, Status.APPLIED, Status.RENEWED)
    changes = {
        step.fix.id: step.outcome
        for step in steps
        if step.status in comes_in and isinstance(step.outcome, Change)
    }
    autos = [
        change.auto
        for step in steps
        if (change := changes.get(step.fix.id)) is not None
        and change.auto is not None
        and _needed(step.fix, facts)[0] is not None
    ]

    def aimed(step: Step) -> Step:
        change = changes.get(step.fix.id)
        if change is None:
            return step
        try:
            aim = change.aim(trace, autos[0] if autos else None)
            layers = trace.of(aim.role) if aim is not None else ()
            names = tuple(layer.name for layer in layers if step.fix.changes(layer))
        except Exception:  # a fix that fails there says nothing, as in `_layers`
            return step
        return replace(step, aim=aim, aimed=names) if names else step

    return tuple(aimed(step) for step in steps)


def _decoded(bases: Mapping[str, bytes]) -> tuple[dict[str, text.Text], dict[str, str]]:
    """The texts, and why a file has none."""
    texts: dict[str, text.Text] = {}
    unreadable: dict[str, str] = {}
    for file, content in bases.items():
        try:
            texts[file] = text.decode(content)
        except text.NotText as error:
            unreadable[file] = str(error)
    return texts, unreadable


def _unreadable(fix: Fix, unreadable: Mapping[str, str]) -> Refused | None:
    for file in fix.files:
        if file in unreadable:
            return Refused(file, "Python source in UTF-8", "other bytes", unreadable[file])
    return None


def _needed(fix: Fix, facts: Facts | None) -> tuple[str | None, Refused | None]:
    if facts is None:
        return None, None
    try:
        return fix.needed(facts), None
    except Exception as error:
        return None, _broken(fix, error)


def _planned(fix: Fix, sources: Mapping[str, str], choice: Choice) -> Outcome:
    """What the fix says; one that fails, or writes what is no Python, is refused."""
    own = {file: sources[file] for file in fix.files if file in sources}
    try:
        outcome = fix.plan(own, choice)
        if isinstance(outcome, Change):
            for file, body in outcome.sources.items():
                if file not in own:
                    raise ValueError(f"it writes {file}, which it does not name")
                compile(body, file, "exec", dont_inherit=True)
        return outcome
    except Exception as error:
        return _broken(fix, error)


def _broken(fix: Fix, error: Exception) -> Refused:
    return Refused(fix.files[0], "", "", f"{fix.id} itself failed: {type(error).__name__}: {error}")


def _status(outcome: Outcome, is_in: bool, is_needed: bool, chosen: bool) -> Status:
    if isinstance(outcome, Refused):
        return Status.REFUSED
    if isinstance(outcome, Change):
        if is_in:
            return Status.APPLIED
        if not is_needed:
            return Status.NOT_NEEDED
        return Status.PLANNED if chosen else Status.LEFT_OUT
    return Status.PRESENT if isinstance(outcome, Present) else Status.ABSENT


def _renewed(steps: Sequence[Step], differing: set[str], without: set[str]) -> tuple[Step, ...]:
    """Steps that are in, marked where what is in is not what would be written now.

    `without`: the files that someone wrote anew, without what they had of ours.
    """
    steps = [
        replace(step, status=Status.PLANNED)
        if step.status is Status.APPLIED and without.intersection(_files(step))
        else step
        for step in steps
    ]
    new = {file for step in steps if step.status is Status.PLANNED for file in _files(step)}
    written = {file for step in steps for file in _files(step)}

    def marked(step: Step) -> Step:
        files = {*_files(step), *(set(step.fix.files) - written)}
        as_written = not files & (differing - new)
        if step.status is not Status.APPLIED or as_written:
            return step
        return replace(step, status=Status.RENEWED)

    return tuple(marked(step) for step in steps)


def _files(step: Step) -> tuple[str, ...]:
    return tuple(step.outcome.sources) if isinstance(step.outcome, Change) else ()


def _layers(fix: Fix, facts: Facts | None) -> tuple[str, ...]:
    if facts is None or facts.trace is None:
        return ()
    try:
        layers = [layer.name for layer in facts.trace.layers if fix.changes(layer)]
        paths = [path.name for path in facts.trace.paths if fix.changes_path(path)]
        return (*layers, *paths)
    except Exception:
        return ()
