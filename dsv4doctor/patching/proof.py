"""Whether a changed tree resolves to what was planned, and to nothing else: by tracing it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from dsv4doctor.audit import Settings, audit
from dsv4doctor.errors import DoctorError
from dsv4doctor.fixes.fix import Aim, Fix
from dsv4doctor.models import Facts, HotPath, Layer, SglangTree, Trace, Verdict
from dsv4doctor.target import Target

Progress = Callable[[str], None]
Aims = Mapping[str, tuple[Aim, tuple[str, ...]]]
"""Fix -> what the layers of that name are to come out with (`plan.aims`)."""


@dataclass(frozen=True)
class LayerChange:
    """A layer or hot path that came out otherwise than before, or was meant to."""

    name: str
    role: str
    before: str | None
    """Quant method and runner, kernel and verdict; None: it was not built."""
    after: str | None
    fixes: tuple[str, ...]
    """The fixes that mean to change it; empty: none does."""


@dataclass(frozen=True)
class Proof:
    changes: tuple[LayerChange, ...]
    problems: tuple[str, ...]
    """Empty: it holds."""
    unchanged: int = 0
    """Layers and hot paths that came out as before."""


def modules_of(files: Iterable[str]) -> tuple[str, ...]:
    """The module names of a tree's Python files, sorted."""
    names = (file.removesuffix(".py").removesuffix("/__init__") for file in files)
    return tuple(sorted(name.replace("/", ".") for name in names))


def facts_of(
    target: Target,
    tree: SglangTree,
    settings: Settings,
    files: Iterable[str] = (),
    progress: Progress | None = None,
) -> Facts:
    """The facts of `target` on `tree`, every module of `files` imported or compiled on the way.

    Raises UndeterminedError when one does not import.
    """
    chosen = replace(settings, alternatives=False, modules=modules_of(files))
    return audit(replace(target, tree=tree), chosen, progress).facts


def prove(
    before: Facts,
    fixes: Sequence[Fix],
    trace_again: Callable[[], Facts],
    aims: Aims = MappingProxyType({}),
) -> tuple[Proof, Facts | None]:
    """The comparison with what `trace_again` gives; its facts, where there are any."""
    try:
        facts = trace_again()
    except DoctorError as error:
        return Proof((), (f"the changed tree could not be traced: {error.message}",)), None
    if facts.trace is None:
        return Proof((), (f"the changed tree gave no trace: {facts.trace_failure}",)), facts
    return compare(before, facts, fixes, aims), facts


def compare(
    before: Facts, now: Facts, fixes: Sequence[Fix], aims: Aims = MappingProxyType({})
) -> Proof:
    """The trace in `now` against that in `before`: what `fixes` mean to change, and all the rest.

    A layer or path that was not built before may appear where its model stopped with an error.
    A fix that this launch does not need may still lie in the tree, and has nothing to show.
    Where neither trace came as far as a layer or path, nothing is shown at all.
    """
    old, after = before.trace, now.trace
    assert after is not None
    failed = {error.phase.split()[0] for error in _errors(old)}
    changes: list[LayerChange] = []
    wrong: list[tuple[str, str, str]] = []
    pairs = _pairs(old, after, fixes)
    for pair in pairs:
        if pair.was == pair.now and not pair.meant:
            continue
        if pair.now is None:
            wrong.append((pair.role, pair.name, "is no longer built"))
        elif pair.was != pair.now and not pair.meant and (pair.was or pair.role not in failed):
            wrong.append((pair.role, pair.name, "changed, and no fix means to change it"))
        elif pair.was is not None and (worse := _worse(pair.was, pair.now)):
            wrong.append((pair.role, pair.name, worse))
        before_it, after_it = (end.shown if end else None for end in (pair.was, pair.now))
        changes.append(LayerChange(pair.name, pair.role, before_it, after_it, pair.meant))
    problems = [*_gathered(wrong), *_new_errors(old, after), *_missed(after, aims)]
    if not pairs:
        problems.append(_nothing_built(after))
    for fix in fixes:
        if _is_needed(fix, before):
            problems += [f"{fix.id}: {text}" for text in _verified(fix, before, now)]
    return Proof(tuple(changes), tuple(dict.fromkeys(problems)), len(pairs) - len(changes))


@dataclass(frozen=True)
class _Seen:
    """What counts of a layer or path; lines move when a file is patched, and do not count."""

    shown: str
    kernel: str | None
    error: str | None
    verdict: Verdict


def _worse(was: _Seen, now: _Seen) -> str | None:
    """What no fix may do to what it means to change."""
    if was.kernel is not None and now.kernel is None:
        return "reaches no kernel any more"
    if was != now and now.verdict is Verdict.FAILS:
        return f"changed, and fails: {now.shown}"
    return None


@dataclass(frozen=True)
class _Pair:
    role: str
    name: str
    was: _Seen | None
    now: _Seen | None
    meant: tuple[str, ...]
    """The fixes that mean to change it."""


def _pairs(old: Trace | None, new: Trace, fixes: Sequence[Fix]) -> list[_Pair]:
    """The layers and paths of both traces, in order."""
    was, now = _things(old), _things(new)
    pairs = []
    for role, name in {**was, **now}:
        one, other = was.get((role, name)), now.get((role, name))
        meant = tuple(fix.id for fix in fixes if one is not None and _means(fix, one))
        pairs.append(_Pair(role, name, _seen(one), _seen(other), meant))
    return pairs


def _things(trace: Trace | None) -> dict[tuple[str, str], Layer | HotPath]:
    if trace is None:
        return {}
    found: dict[tuple[str, str], Layer | HotPath] = {}
    for layer in trace.layers:
        found[layer.role.value, layer.name] = layer
    for path in trace.paths:
        where = f" of {path.layers[0]}" if path.layers else ""
        found[path.role.value, path.name + where] = path
    return found


def _means(fix: Fix, thing: Layer | HotPath) -> bool:
    return fix.changes(thing) if isinstance(thing, Layer) else fix.changes_path(thing)


def _seen(thing: Layer | HotPath | None) -> _Seen | None:
    if thing is None:
        return None
    if isinstance(thing, Layer):
        choice = f"{thing.quant_method}" + (f"/{thing.runner_backend}" * bool(thing.runner_backend))
    else:
        choice = thing.choice or "unknown"
    kernel = thing.kernel.symbol if thing.kernel else None
    error = f"{thing.error.type}: {thing.error.message}" if thing.error else None
    called = kernel.rpartition(".")[2] if kernel else "no kernel"
    return _Seen(f"{choice}, {called}: {thing.verdict.value}", kernel, error, thing.verdict)


def named(names: Sequence[str]) -> str:
    """Many names as the first and the last."""
    many = len(names) > 3
    return f"{names[0]} ... {names[-1]} ({len(names)})" if many else ", ".join(names)


def _gathered(wrong: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """(role, name, what is wrong) each, as one sentence for those that share role and wrong."""
    groups: dict[tuple[str, str], list[str]] = {}
    for role, name, what in wrong:
        groups.setdefault((role, what), []).append(name)
    for (role, what), names in groups.items():
        yield f"{role} {named(names)} {what}"


def _is_needed(fix: Fix, before: Facts) -> bool:
    try:
        return fix.needed(before) is not None
    except Exception:
        return True  # then its check says what is wrong


def _missed(after: Trace, aims: Aims) -> Iterator[str]:
    """Layers that came out with another method or runner than the plan said."""
    for fix, (aim, names) in aims.items():
        wrong = []
        for layer in after.of(aim.role):
            runner = layer.runner_backend if aim.runner is not None else None
            came_out = (layer.quant_method, runner)
            # A method may call its kernel itself, as of some releases for CUTLASS: without a runner
            # the fix's own check, which knows the kernel, has to do.
            wanted = (aim.method, aim.runner if runner is not None else None)
            as_said = layer.error is not None or came_out == wanted
            if layer.name in names and not as_said:
                got = "/".join(filter(None, came_out)) or "no method"
                wrong.append((aim.role.value, layer.name, f"gets {got}"))
        planned = "/".join(filter(None, (aim.method, aim.runner)))
        yield from (f"{fix}: {text}, planned was {planned}" for text in _gathered(wrong))


def _nothing_built(after: Trace) -> str:
    stopped = _errors(after)
    why = f" ({stopped[0].phase}: {stopped[0].text.splitlines()[0][:200]})" if stopped else ""
    return f"nothing was built: not proved{why}"


def _verified(fix: Fix, before: Facts, after: Facts) -> tuple[str, ...]:
    try:
        return fix.verify(before, after)
    except Exception as error:
        return (f"its check failed: {type(error).__name__}: {error}",)


def _errors(trace: Trace | None) -> list[_Error]:
    if trace is None:
        return []
    raised = [_Error(one.phase, f"{one.type}: {one.message}") for one in trace.errors]
    stopped = [_Error(*_split(text)) for text in trace.unresolved]
    return raised + stopped


@dataclass(frozen=True)
class _Error:
    phase: str
    text: str


def _split(text: str) -> tuple[str, str]:
    phase, _, message = text.partition(": ")
    return phase, message


def _new_errors(before: Trace | None, after: Trace) -> list[str]:
    known = set(_errors(before))
    return [
        f"{error.phase} now stops with {error.text.splitlines()[0][:200]}"
        for error in _errors(after)
        if error not in known
    ]
