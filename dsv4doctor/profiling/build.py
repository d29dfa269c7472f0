"""From the events of a trace to the profile of its GPUs."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsv4doctor.errors import UsageError
from dsv4doctor.profiling.categories import Row, category_of
from dsv4doctor.profiling.reader import Progress, TraceFile
from dsv4doctor.profiling.timeline import Intervals, Windows, pieces
from dsv4doctor.profiling.types import CATEGORIES, IDLE, Gpu, Kernel, Profile, Step

_STEP = re.compile(r"step\[([^\]]*)\]?|(ProfilerStep#\d+)")
_RANK_LABEL = re.compile(r"\[([^\]]+)\]")
_RANK_IN_NAME = re.compile(r"(?:^|[-_.])((?:TP|DP|PP|EP)-\d+(?:-(?:TP|DP|PP|EP)-\d+)*)")
_FILES = (".json", ".json.gz")
_TRACES = (".trace.json", ".trace.json.gz")
_MERGED = "merged-"
"""What SGLang's merge_profiles begins a file with that holds every rank's events again."""
_PLACE = {name: place for place, name in enumerate(CATEGORIES)}
_LATEST = 1 << 62
_NUMBER = re.compile("[0-9]{1,9}")
_HINT = "profile with the GPU's activities: SGLang's /start_profile records them by default"


def read_profile(path: str, progress: Progress | None = None) -> Profile:
    """The profile of one trace, or of all traces in a folder (one rank each).

    Raises UsageError naming the file that is no trace or holds no GPU events.
    """
    started = time.monotonic()
    files = trace_files(path)
    gpus: list[Gpu] = []
    notes: list[str] = _several_of_a_rank(files)
    total = 0
    for file in files:
        trace = TraceFile(file, progress)
        found, own = _gpus_of(trace, several=len(files) > 1)
        prefix = f"{os.path.basename(file)}: " if len(files) > 1 else ""
        notes += [prefix + note for note in own]
        gpus += found
        total += trace.bytes_read
    if not gpus:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise UsageError(f"{path}: no GPU events{why}", _HINT)
    return Profile(path, tuple(gpus), total, time.monotonic() - started, tuple(notes))


def trace_files(path: str) -> list[str]:
    """The traces that `path` names: itself, or those in the folder; UsageError without one."""
    if not os.path.isdir(path):
        return [path]
    try:
        names = sorted(name for name in os.listdir(path) if name.endswith(_FILES))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})", "give a trace") from error
    if not names:
        raise UsageError(f"{path}: no trace in this folder", "give a .trace.json or .trace.json.gz")
    # SGLang's profiler leaves its server_args.json beside the traces
    names = [name for name in names if name.endswith(_TRACES)] or names
    names = [name for name in names if not name.startswith(_MERGED)] or names
    return [str(Path(path) / name) for name in names]


def _several_of_a_rank(files: Sequence[str]) -> list[str]:
    """A note for each rank with more than one of `files`, as SGLang writes with stages apart."""
    found = (_RANK_IN_NAME.search(os.path.basename(file)) for file in files)
    counts = Counter(rank.group(1) for rank in found if rank is not None)
    return [
        f"{rank} has {count} traces in this folder, and is shown as so many GPUs: give one of them"
        for rank, count in counts.items()
        if count > 1
    ]


def _gpus_of(trace: TraceFile, several: bool) -> tuple[list[Gpu], list[str]]:
    devices: dict[tuple[str, str], _Device] = {}
    known: dict[tuple[Any, Any], _Device] = {}
    unusable = 0
    for event in trace.events():
        try:
            start, end = _times(event)
            arguments = event.get("args")
            number = arguments.get("device") if isinstance(arguments, dict) else None
            device = known.get((event.get("pid"), number))
            if device is None:
                device = devices.setdefault(_place(event.get("pid"), number), _Device())
                known[event.get("pid"), number] = device
        except (KeyError, TypeError, ValueError, OverflowError):
            unusable += 1
            continue
        device.add(event, start, end)
    notes = list(trace.notes)
    if unusable:
        notes.append(f"{unusable} GPU events without a time were left out")
    own = _RANK_IN_NAME.search(os.path.basename(trace.path))
    rank = own.group(1) if own else f"rank {trace.rank}" if trace.rank is not None else ""
    busy = {key: device for key, device in devices.items() if device.intervals.count}
    gpus = [
        device.gpu(_name(key, rank, several or len(busy) > 1), _model(trace, key[1]))
        for key, device in sorted(busy.items(), key=lambda one: _sortable(one[0]))
    ]
    if gpus and trace.steps_on_cpu and not any(gpu.steps for gpu in gpus):
        notes.append("steps are marked on the CPU's side only: nothing is shown by step")
    return gpus, notes


def _times(event: dict[str, Any]) -> tuple[int, int]:
    """Start and end in ns."""
    start = round(float(event["ts"]) * 1000)
    end = start + round(float(event.get("dur", 0)) * 1000)
    if not -_LATEST < start <= end < _LATEST:
        raise ValueError
    return start, end


def _place(process: Any, number: Any) -> tuple[str, str]:
    """The process's label, which SGLang writes when it merges ranks, and the GPU."""
    text = str(process)
    label = _RANK_LABEL.match(text)
    device = text[label.end() if label else 0 :].strip() if number is None else str(number)
    return (label.group(1) if label else "", device)


def _name(key: tuple[str, str], rank: str, several: bool) -> str:
    label = key[0] or (rank if several else "")
    return f"{label}, GPU {key[1]}" if label else f"GPU {key[1]}"


def _sortable(key: tuple[str, str]) -> tuple[str, int, str]:
    return key[0], int(key[1]) if _NUMBER.fullmatch(key[1]) else -1, key[1]


def _model(trace: TraceFile, device: str) -> str | None:
    return trace.gpu_names.get(int(device)) if _NUMBER.fullmatch(device) else None


class _Device:
    """What adds up while a trace is read."""

    def __init__(self) -> None:
        self.intervals = Intervals()
        self._rows: dict[str, tuple[Row, list[int]]] = {}
        self._marks: dict[tuple[str, Any], list[int]] = {}
        self._first = _LATEST
        self._last = -_LATEST

    def add(self, event: dict[str, Any], start: int, end: int) -> None:
        name = str(event.get("name", ""))
        if event["cat"].startswith("gpu_user"):
            self._mark(name, event, start, end)
            return
        known = self._rows.get(name)
        if known is None:
            known = self._rows[name] = (category_of(name), [0, 0])
        known[1][0] += 1
        known[1][1] += end - start
        if start < self._first:
            self._first = start
        if end > self._last:
            self._last = end
        self.intervals.add(start, end, _PLACE[known[0].category])

    def _mark(self, name: str, event: dict[str, Any], start: int, end: int) -> None:
        """One annotation spans several streams: it has one id on all of them."""
        found = _STEP.match(name)
        if found is None:
            return
        arguments = event.get("args")
        number = arguments.get("External id") if isinstance(arguments, dict) else None
        mark = self._marks.setdefault((name, start if number is None else number), [start, end])
        mark[0] = min(mark[0], start)
        mark[1] = max(mark[1], end)

    def gpu(self, name: str, model: str | None) -> Gpu:
        windows = Windows(self._windows())
        totals = [0] * len(CATEGORIES)
        for start, end, category in pieces(self.intervals.in_order()):
            totals[category] += end - start
            windows.add(start, end, category)
        span = self._last - self._first
        return Gpu(
            name=name,
            model=model,
            events=self.intervals.count,
            span_ns=span,
            by_category=_with_idle(totals, span),
            kernels=self._kernels(),
            steps=tuple(
                Step(step, row[0], row[1], _with_idle(row[2:], row[1]))
                for step, row in windows.names.items()
            ),
            outside_steps_ns=span - windows.covered if windows.names else 0,
        )

    def _windows(self) -> list[tuple[int, int, str]]:
        """The steps, within the time of the kernels; SGLang's own marks before the profiler's."""
        own = any(name.startswith("step[") for name, _ in self._marks)
        return [
            (max(start, self._first), min(end, self._last), step_name(name))
            for (name, _), (start, end) in self._marks.items()
            if name.startswith("step[") == own and min(end, self._last) > max(start, self._first)
        ]

    def _kernels(self) -> tuple[Kernel, ...]:
        kernels = [
            Kernel(name, row.category, row.id or None, count, total, row.fp32, row.family)
            for name, (row, (count, total)) in self._rows.items()
        ]
        return tuple(sorted(kernels, key=lambda one: (-one.total_ns, one.name)))


def step_name(mark: str) -> str:
    """ "DECODE bs=8" for "step[DECODE bs=8 g_sq=8 forward_id=12]"; others as they are."""
    found = _STEP.match(mark)
    if found is None or found.group(1) is None:
        return mark
    words = found.group(1).split()
    return " ".join(words[:1] + [word for word in words[1:] if word.startswith(("bs=", "toks="))])


def _with_idle(by_place: Sequence[int], whole: int) -> dict[str, int]:
    shares = dict(zip(CATEGORIES, by_place, strict=True))
    return {**shares, IDLE: whole - sum(by_place)}
