"""An outcome for people, and as JSON (docs/fix.schema.json)."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from dsv4doctor import __version__, jsonio
from dsv4doctor.errors import DoctorError
from dsv4doctor.fixes.fix import Change, Present, Refused
from dsv4doctor.fixes.fix import Outcome as FixOutcome
from dsv4doctor.models import Location
from dsv4doctor.patching import diff, verifying
from dsv4doctor.patching.journal import Applied
from dsv4doctor.patching.plan import Status, Step
from dsv4doctor.patching.proof import LayerChange, Proof, named
from dsv4doctor.patching.view import Outcome
from dsv4doctor.report.console import Style, printed

SCHEMA = "dsv4doctor-fix/1"
_STYLES = {
    Status.PLANNED: "bold yellow",
    Status.RENEWED: "bold yellow",
    Status.APPLIED: "bold green",
    Status.PRESENT: "green",
    Status.REFUSED: "bold red",
    Status.LEFT_OUT: "yellow",
}
_MAX_EXPECTATION_LINES = 40


def as_diff(outcome: Outcome) -> str:
    """What would be changed, for `git apply` in the tree's root."""
    return diff.unified(outcome.changes).decode("utf-8", "surrogateescape")


# ------------------------------------------------------------------------------ JSON


def as_json(outcome: Outcome) -> str:
    tree, facts = outcome.tree, outcome.facts
    return jsonio.dump(
        {
            **_head(outcome.command),
            "exit_code": outcome.exit_code,
            "said": outcome.said,
            "sglang": {"version": tree.version, "path": tree.root, "origin": tree.origin},
            "arch": facts.arch.name if facts is not None else None,
            "fixes": [_step(step, outcome) for step in outcome.plan.steps] if outcome.plan else [],
            "files": _files(outcome),
            "diff": as_diff(outcome),
            "proof": _proof(outcome.proof) if outcome.proof is not None else None,
            "journal": _journal(outcome),
            "notes": list(outcome.notes),
            "error": None,
        }
    )


def error_as_json(command: str, error: DoctorError) -> str:
    """An outcome of a run that ended before there was anything to say."""
    empty: dict[str, Any] = {
        "exit_code": error.exit_code,
        "said": error.message,
        "sglang": None,
        "arch": None,
        "fixes": [],
        "files": [],
        "diff": "",
        "proof": None,
        "journal": None,
        "notes": [],
        "error": {"message": error.message, "hint": error.hint},
    }
    return jsonio.dump({**_head(command), **empty})


def _head(command: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "tool": {"name": "dsv4doctor", "version": __version__},
        "command": command,
    }


def _step(step: Step, whole: Outcome) -> dict[str, Any]:
    outcome = step.outcome
    return {
        "id": step.fix.id,
        "title": step.fix.title,
        "rules": list(step.fix.rules),
        "status": step.status.value,
        "why": step.why,
        "summary": verifying.summary(outcome, whole.verified)
        if isinstance(outcome, Change)
        else None,
        "target": _target(step),
        "at": [jsonio.to_plain(at) for at in _places(outcome)],
        "reason": _reason(outcome),
        "refused": {
            "file": outcome.file,
            "expected": outcome.expected,
            "found": outcome.found,
        }
        if isinstance(outcome, Refused)
        else None,
        "layers": list(step.layers),
        "verified_by": step.fix.verified_by,
    }


def _target(step: Step) -> str | None:
    if step.aim is not None:
        return step.aim.target
    return step.outcome.target if isinstance(step.outcome, Change) else None


def _places(outcome: FixOutcome) -> tuple[Location, ...]:
    if isinstance(outcome, Change):
        return outcome.at
    return (outcome.at,) if isinstance(outcome, Present) else ()


def _reason(outcome: FixOutcome) -> str | None:
    if isinstance(outcome, Change):
        return None
    return outcome.how if isinstance(outcome, Present) else outcome.reason


def _files(outcome: Outcome) -> list[dict[str, Any]]:
    names = dict.fromkeys([*outcome.changes, *outcome.stands, *outcome.pristine])
    return [
        {
            "file": name,
            "changes": name in outcome.changes,
            "from_release": outcome.pristine.get(name),
            "standing": stand.standing.name.lower()
            if (stand := outcome.stands.get(name)) is not None
            else None,
        }
        for name in names
    ]


def _proof(proof: Proof) -> dict[str, Any]:
    return {
        "holds": not proof.problems,
        "problems": list(proof.problems),
        "layers": [jsonio.to_plain(change) for change in proof.changes],
        "unchanged": proof.unchanged,
    }


def _journal(outcome: Outcome) -> dict[str, Any] | None:
    journal = outcome.journal
    if journal is None:
        return None
    return {
        "applied": [jsonio.to_plain(one) for one in journal.settled.applied],
        "proved": journal.settled.proved,
        "interrupted": journal.pending.kind if journal.pending else None,
        "changed": journal.changed,
        "tool": journal.tool,
    }


# ------------------------------------------------------------------------------ console


def console(outcome: Outcome, style: Style) -> str:
    tree = outcome.tree
    parts: list[RenderableType] = [Text(f"SGLang {tree.version} in {tree.root}", style="bold")]
    if outcome.facts is not None:
        parts.append(Text(f"for {outcome.facts.arch.name} ({outcome.facts.arch_source})"))
    parts += _steps(outcome, style)
    parts += _changed(outcome)
    parts += _standing(outcome)
    if outcome.proof is not None:
        parts += [Text(), *_proved(outcome.proof)]
    if outcome.notes:
        parts += [Text(), *(Text(f"note: {note}") for note in outcome.notes)]
    return printed(parts, style)


def _steps(outcome: Outcome, style: Style) -> Iterator[RenderableType]:
    if outcome.plan is None:
        return
    for step in outcome.plan.steps:
        unasked = step.status in (Status.NOT_NEEDED, Status.ABSENT, Status.PRESENT)
        if (unasked or step.status is Status.REFUSED) and not step.why and not style.verbose:
            continue
        yield Text()
        yield from _one(step, outcome)
    quiet = [step.fix.id for step in outcome.plan.steps if not step.why]
    hidden = [
        step.fix.id
        for step in outcome.plan.steps
        if step.fix.id in quiet and step.status not in (Status.APPLIED, Status.RENEWED)
    ]
    if hidden and not style.verbose:
        yield Text()
        yield Text(f"not needed by this launch: {', '.join(hidden)} (--verbose shows them)")


def _one(step: Step, whole: Outcome) -> Iterator[RenderableType]:
    head = Text()
    head.append(f"{step.fix.id} ")
    head.append(step.status.value, style=_STYLES.get(step.status, ""))
    head.append(f"  {step.fix.title}")
    yield head
    outcome = step.outcome
    if step.why:
        yield _indented(f"why: {step.why}")
    if isinstance(outcome, Change):
        yield _indented(f"change: {verifying.summary(outcome, whole.verified)}")
    elif (reason := _reason(outcome)) is not None:
        yield _indented(reason)
    for at in _places(outcome):
        source = f"  {at.source.strip()}" if at.source else ""
        yield _indented(f"at {at.file}:{at.line}{source}")
    if isinstance(outcome, Refused) and (outcome.expected or outcome.found):
        yield _indented(f"in {outcome.file}, expected (-) and found (+):")
        yield Padding(Text(_expectation(outcome)), (0, 0, 0, 4))
    if isinstance(outcome, Change) and step.layers:
        yield from (_indented(line) for line in _layers(step, outcome))


def _layers(step: Step, change: Change) -> Iterator[str]:
    """The layers that the fix means to change, and what they get."""
    if step.aim is None:
        target = f" to {change.target}" if change.target else ""
        yield f"layers{target}: {named(step.layers)}"
        return
    method = "/".join(filter(None, (step.aim.method, step.aim.runner)))
    yield f"layers to {step.aim.target} ({method}): {named(step.aimed)}"
    others = [name for name in step.layers if name not in step.aimed]
    if others:
        yield f"other layers: {named(others)}"


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 2))


def _expectation(refused: Refused) -> str:
    lines = difflib.unified_diff(
        refused.expected.splitlines(), refused.found.splitlines(), lineterm="", n=2
    )
    shown = [line for line in lines if not line.startswith(("---", "+++"))]
    more = len(shown) - _MAX_EXPECTATION_LINES
    return "\n".join(shown[:_MAX_EXPECTATION_LINES] + ([f"... {more} more"] if more > 0 else []))


def _changed(outcome: Outcome) -> Iterator[RenderableType]:
    if not outcome.changes:
        return
    origins = {True: "", False: " (not as the release has it)", None: ""}
    yield Text()
    for name, (before, after) in outcome.changes.items():
        plus, minus = _counted(before, after)
        origin = origins[outcome.pristine.get(name)]
        yield Text(f"{name}: +{plus} -{minus}{origin}")


def _counted(before: bytes, after: bytes) -> tuple[int, int]:
    lines = diff.unified({"f": (before, after)}).split(b"\n")[2:]
    plus = sum(line.startswith(b"+") for line in lines)
    return plus, sum(line.startswith(b"-") for line in lines)


def _standing(outcome: Outcome) -> Iterator[RenderableType]:
    for name, stand in outcome.stands.items():
        yield Text(f"{name}: {stand.standing.value}")
    if outcome.command == "status" and outcome.journal is not None:
        for one in outcome.journal.settled.applied:
            yield Text(_said_of(one, outcome))


def _said_of(one: Applied, outcome: Outcome) -> str:
    """Of a fix of the journal, whether it is in still."""
    at = outcome.journal.changed if outcome.journal is not None else ""
    if outcome.gone is None:
        return f"{one.id} was put in, kernel {one.kernel}, {at}"
    if gone := outcome.gone.get(one.id):
        return f"{one.id} not in {', '.join(gone)}"
    return f"{one.id} in, kernel {one.kernel}, since {at}"


def _proved(proof: Proof) -> Iterator[RenderableType]:
    holds = "traced again: as planned" if not proof.problems else "traced again: not as planned"
    yield Text(holds, style="bold green" if not proof.problems else "bold red")
    for problem in proof.problems:
        yield _indented(problem)
    for names, change in _folded(proof.changes):
        yield _indented(f"{change.role} {named(names)} ({', '.join(change.fixes) or 'no fix'})")
        yield Padding(Text(f"before: {change.before or 'not built'}"), (0, 0, 0, 4))
        yield Padding(Text(f"after:  {change.after or 'not built'}"), (0, 0, 0, 4))
    if proof.unchanged:
        yield _indented(f"{proof.unchanged} other layers and paths came out as before")


def _folded(changes: Sequence[LayerChange]) -> list[tuple[list[str], LayerChange]]:
    """Layers that changed in the same way, together."""
    groups: dict[tuple[Any, ...], tuple[list[str], LayerChange]] = {}
    for change in changes:
        key = (change.role, change.before, change.after, change.fixes)
        names = groups.setdefault(key, ([], change))[0]
        names.append(change.name)
    return list(groups.values())
