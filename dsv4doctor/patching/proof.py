"""Whether a changed tree resolves to what was planned, and to nothing else: by tracing it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dsv4doctor.audit import Settings, audit
from dsv4doctor.errors import DoctorError
from dsv4doctor.fixes.fix import Fix
from dsv4doctor.models import Facts, Layer, SglangTree, Trace
from dsv4doctor.target import Target

Progress = Callable[[str], None]


@dataclass(frozen=True)
class LayerChange:
    """A layer that came out otherwise than before, or was meant to."""

    name: str
    role: str
    before: str | None
    """Quant method, runner, kernel and verdict; None: the layer was not built."""
    after: str | None
    fixes: tuple[str, ...]
    """The fixes that mean to change it; empty: none does."""


@dataclass(frozen=True)
class Proof:
    changes: tuple[LayerChange, ...]
    problems: tuple[str, ...]
    """Empty: it holds."""
    unchanged: int = 0
    """Layers that came out as before."""


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
) -> tuple[Proof, Facts | None]:
    """The comparison with what `trace_again` gives; its facts, where there are any."""
    try:
        facts = trace_again()
    except DoctorError as error:
        return Proof((), (f"the changed tree could not be traced: {error.message}",)), None
    if facts.trace is None:
        return Proof((), (f"the changed tree gave no trace: {facts.trace_failure}",)), facts
    return compare(before, facts.trace, fixes), facts


def compare(before: Facts, after: Trace, fixes: Sequence[Fix]) -> Proof:
    """`after` against the trace in `before`: what `fixes` mean to change, and all the rest."""
    old = before.trace.layers if before.trace is not None else ()
    pairs = _paired(old, after.layers)
    failed_before = {error.phase.split()[0] for error in _errors(before.trace)}
    changes: list[LayerChange] = []
    problems: list[str] = []
    for name, (was, now) in pairs.items():
        meant = tuple(fix.id for fix in fixes if was is not None and fix.changes(was))
        role = (was or now or old[0]).role.value
        if _essence(was) == _essence(now):
            if not meant:
                continue
        elif not meant and not (was is None and role in failed_before):
            problems.append(f"{name} changed, and no fix means to change it")
        changes.append(LayerChange(name, role, _shown(was), _shown(now), meant))
        if now is None:
            problems.append(f"{name} is no longer built")
    problems += _new_errors(before.trace, after)
    for fix in fixes:
        problems += [f"{fix.id}: {text}" for text in _verified(fix, before, after)]
    return Proof(tuple(changes), tuple(dict.fromkeys(problems)), len(pairs) - len(changes))


def _verified(fix: Fix, before: Facts, after: Trace) -> tuple[str, ...]:
    try:
        return fix.verify(before, after)
    except Exception as error:
        return (f"its check failed: {type(error).__name__}: {error}",)


def _paired(
    old: Sequence[Layer], new: Sequence[Layer]
) -> dict[str, tuple[Layer | None, Layer | None]]:
    """Layers by role and name, in order."""
    was = {(layer.role, layer.name): layer for layer in old}
    now = {(layer.role, layer.name): layer for layer in new}
    return {f"{key[0].value} {key[1]}": (was.get(key), now.get(key)) for key in {**was, **now}}


def _essence(layer: Layer | None) -> object:
    """What counts as a change; lines move when a file is patched, and do not."""
    if layer is None:
        return None
    error = (layer.error.type, layer.error.message) if layer.error else None
    kernel = layer.kernel.symbol if layer.kernel else None
    return (layer.quant_method, layer.runner_backend, kernel, layer.verdict, error)


def _shown(layer: Layer | None) -> str | None:
    if layer is None:
        return None
    runner = f"/{layer.runner_backend}" if layer.runner_backend else ""
    kernel = layer.kernel.symbol.rpartition(".")[2] if layer.kernel else "no kernel"
    return f"{layer.quant_method}{runner}, {kernel}: {layer.verdict.value}"


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
