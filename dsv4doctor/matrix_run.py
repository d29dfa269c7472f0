"""Traces every cell of a matrix: releases side by side, one worker a release and GPU."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from dsv4doctor.errors import DoctorError, UndeterminedError
from dsv4doctor.evidence.grounds import Grounds, grounds
from dsv4doctor.evidence.wheel import of_release
from dsv4doctor.facts.callsite import call_texts
from dsv4doctor.matrix import Cell, FlagSet, Key, Matrix, cell
from dsv4doctor.matrix_fix import fixes_for
from dsv4doctor.matrix_rules import Beside
from dsv4doctor.models import Arch, Checkpoint, Gpu, Launch, SglangTree, Stack, Trace
from dsv4doctor.trace.request import TraceRequest
from dsv4doctor.trace.session import trace_launches
from dsv4doctor.wheels import default_cache

_PATIENCE_SECONDS = 15.0
"""How long an interrupted run waits for its workers to end."""
_STARTED = "resolving arguments"
"""The phase with which a worker starts each launch."""


@dataclass(frozen=True)
class Release:
    """A column of work: an SGLang tree, or why there is none."""

    name: str
    tree: SglangTree | None
    problem: DoctorError | None = None


@dataclass(frozen=True)
class Model:
    name: str
    path: Path
    checkpoint: Checkpoint
    given: str = ""
    """As the user named it."""


@dataclass(frozen=True)
class Plan:
    releases: tuple[Release, ...]
    archs: tuple[Arch, ...]
    models: tuple[Model, ...]
    flag_sets: tuple[FlagSet, ...]
    interpreter: Path
    stack: Stack | None
    environment: dict[str, str] = field(default_factory=dict)
    """The machine's variables."""
    given: dict[str, str] = field(default_factory=dict)
    """The launch's own."""
    wrappers: tuple[str, ...] = ()
    """What stands in front of the launch, where one was read."""
    gpu: Gpu | None = None
    """The GPU to simulate where it has the cell's architecture; else a typical one."""
    gpu_count: int | None = None
    jobs: int = 1
    timeout: float = 300.0
    use_cache: bool = True
    with_paths: bool = False
    """Look at the hot paths beside the experts too."""
    read_flashinfer: bool = False
    """Read the FlashInfer that each release pins where the interpreter has another or none."""

    @property
    def size(self) -> int:
        sides = (self.releases, self.archs, self.models, self.flag_sets)
        total = 1
        for side in sides:
            total *= len(side)
        return total


class Watcher(Protocol):
    """Told of what goes on, from several threads but one at a time."""

    def begun(self, done: int, total: int, text: str) -> None:
        """`done` of `total` launches are begun or over; `text` names the latest."""


@dataclass(frozen=True)
class _Task:
    release: Release
    arch: Arch


class _Stopped(Exception):
    """The run was interrupted."""


def run(plan: Plan, watcher: Watcher | None = None) -> Matrix:
    """The matrix of `plan`; an interrupt gives what is there, marked as interrupted.

    Whatever fails of a release or a launch is the verdict of its cells, with the reason.
    """
    work = _Work(plan, watcher)
    interrupted = False
    try:
        work.start()
        work.wait()
    except KeyboardInterrupt:
        interrupted = True
        work.stop()
    order = {key: place for place, key in enumerate(_keys(plan))}
    cells = sorted(work.cells, key=lambda one: order[one.key])
    return Matrix(
        tuple(release.name for release in plan.releases),
        plan.archs,
        tuple(model.name for model in plan.models),
        plan.flag_sets,
        tuple(cells),
        tuple(dict.fromkeys(work.notes)),
        interrupted,
    )


def _keys(plan: Plan) -> Iterator[Key]:
    for model in plan.models:
        for flag_set in plan.flag_sets:
            for release in plan.releases:
                for arch in plan.archs:
                    yield Key(release.name, arch, model.name, flag_set.name)


class _Work:
    def __init__(self, plan: Plan, watcher: Watcher | None) -> None:
        self.plan = plan
        self.watcher = watcher
        self.cells: list[Cell] = []
        self.notes: list[str] = []
        self.begun = 0
        self.lock = threading.Lock()
        self.stopped = threading.Event()
        self.grounds: dict[str, Grounds] = {}
        self.beside: dict[str, Beside] = {}
        self.tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        for release in plan.releases:
            for arch in plan.archs:
                self.tasks.put(_Task(release, arch))
        count = min(max(1, plan.jobs), self.tasks.qsize())
        # Daemons: a second interrupt ends the process at once, and the workers with it.
        # Python 3.11's `ast` counts its depth for all threads together, and fails on it.
        self.parsing = threading.Lock()
        self.threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(count)]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def wait(self) -> None:
        for thread in self.threads:
            while thread.is_alive():
                thread.join(0.2)  # in steps: an interrupt has to get through

    def stop(self) -> None:
        self.stopped.set()
        end = time.monotonic() + _PATIENCE_SECONDS
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _serve(self) -> None:
        while not self.stopped.is_set():
            try:
                task = self.tasks.get_nowait()
            except queue.Empty:
                return
            with contextlib.suppress(_Stopped):
                found = self._cells(task)
                with self.lock:
                    self.cells += found

    def _cells(self, task: _Task) -> list[Cell]:
        keys = [
            (model, flag_set, Key(task.release.name, task.arch, model.name, flag_set.name))
            for model in self.plan.models
            for flag_set in self.plan.flag_sets
        ]
        tree = task.release.tree
        if tree is None:
            problem = task.release.problem or UndeterminedError("there is no such SGLang")
            self._note(len(keys), task)
            return [_failed(key, problem) for _, _, key in keys]
        try:
            outcomes = self._traced(task, tree, [(model, flags) for model, flags, _ in keys])
            with self.parsing:
                stand_on = self._grounds(tree)
                return [
                    self._held_against_rules(
                        self._cell(key, model, tree, outcome, stand_on), model, flags, tree, outcome
                    )
                    for (model, flags, key), outcome in zip(keys, outcomes, strict=True)
                ]
        except _Stopped:
            raise
        except DoctorError as error:
            return [_failed(key, error) for _, _, key in keys]
        except Exception as error:  # one release must not take the others along
            message = f"internal error ({type(error).__name__}: {error})"
            return [_failed(key, UndeterminedError(message)) for _, _, key in keys]

    def _traced(
        self, task: _Task, tree: SglangTree, launches: Sequence[tuple[Model, FlagSet]]
    ) -> list[Trace | DoctorError]:
        plan = self.plan
        gpu = plan.gpu if plan.gpu is not None and plan.gpu.arch == task.arch else None
        requests = [
            TraceRequest(
                tree=tree,
                interpreter=plan.interpreter,
                arch=task.arch,
                checkpoint=model.checkpoint,
                model_path=model.path,
                launch=_launch(plan, model, flag_set),
                environment=plan.environment,
                gpu=gpu,
                gpu_count=plan.gpu_count if gpu is not None else None,
                elsewhere=gpu is None,
                with_paths=plan.with_paths,
            )
            for model, flag_set in launches
        ]
        begun = 0

        def progress(phase: str) -> None:
            nonlocal begun
            if self.stopped.is_set():
                raise _Stopped
            if phase == _STARTED and begun < len(requests):
                begun += 1
                self._note(1, task)

        try:
            return trace_launches(
                requests,
                use_cache=plan.use_cache,
                timeout=plan.timeout * max(1, len(requests)),
                progress=progress,
            )
        finally:
            self._note(len(requests) - begun, task)

    def _note(self, count: int, task: _Task) -> None:
        with self.lock:
            self.begun += count
            if self.watcher is not None:
                text = f"SGLang {task.release.name}, {task.arch.name}"
                self.watcher.begun(self.begun, self.plan.size, text)

    def _cell(
        self,
        key: Key,
        model: Model,
        tree: SglangTree,
        outcome: Trace | DoctorError,
        stand_on: Grounds,
    ) -> Cell:
        layers = outcome.layers if isinstance(outcome, Trace) else ()
        return cell(
            key,
            outcome,
            call_texts(Path(tree.root), layers),
            grounds=stand_on,
            has_clamp=bool(model.checkpoint.text_config.get("swiglu_limit")),
        )

    def _held_against_rules(
        self, made: Cell, model: Model, flags: FlagSet, tree: SglangTree, outcome: object
    ) -> Cell:
        """`made` with what the rules call an error, where it may be recommended, as it is or
        with fixes."""
        may_be = made.works or bool(fixes_for(made))
        looked_at = self.plan.with_paths and made.path_problem is None
        if not (may_be and looked_at and isinstance(outcome, Trace)):
            return made
        beside = self.beside.get(tree.root)
        if beside is None:
            beside = self.beside[tree.root] = Beside(tree, self.plan.stack)
        launch = _launch(self.plan, model, flags)
        problem = beside.error(outcome, model.checkpoint, launch, self.plan.environment)
        return replace(made, path_problem=problem)

    def _grounds(self, tree: SglangTree) -> Grounds:
        with self.lock:
            known = self.grounds.get(tree.root)
        if known is None:
            known = self._read_grounds(tree)
            with self.lock:
                self.grounds[tree.root] = known
        return known

    def _read_grounds(self, tree: SglangTree) -> Grounds:
        found = grounds(self.plan.stack, tree)
        if not (self.plan.read_flashinfer and found.missing and found.flashinfer):
            return found
        try:
            read = of_release(found.flashinfer, default_cache())
        except DoctorError as error:
            with self.lock:
                self.notes.append(error.message)
            return found
        return Grounds(read, found.flashinfer, missing="")


def _launch(plan: Plan, model: Model, flag_set: FlagSet) -> Launch:
    launch = Launch("command line", None, plan.given, str(model.path), flag_set.flags)
    return replace(launch, wrappers=plan.wrappers)


def _failed(key: Key, problem: DoctorError) -> Cell:
    return cell(key, UndeterminedError(problem.message), {}, grounds=None, has_clamp=False)


def cores() -> int:
    """The CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
