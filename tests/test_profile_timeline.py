"""Shares against an independent sum: a canvas with a cell for every nanosecond."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_writer import cpu_event, kernel, mark, write

from dsv4doctor.profiling import timeline
from dsv4doctor.profiling.build import read_profile, step_name
from dsv4doctor.profiling.timeline import Intervals, pieces
from dsv4doctor.profiling.types import CATEGORIES, IDLE, SHOWN

_OF = {
    "moe": "fused_moe_kernel",
    "attention": "_fwd_kernel",
    "indexer": "deep_gemm::sm90_fp8_paged_mqa_logits<1>",
    "gemm": "nvjet_tst_64x8_64x16_4x1_v_bz_TNT",
    "other": "rms_norm_kernel",
    "glue": "Memcpy DtoD (Device -> Device)",
    "unknown": "some_kernel_of_mine",
    "communication": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
}
"""A real name for every category (and one that is not)."""

_intervals = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 90), st.sampled_from(CATEGORIES)),
    min_size=1,
    max_size=40,
)
_windows = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 200)), max_size=6)
_Interval = tuple[int, int, str]


def painted(intervals: Sequence[_Interval], start: int, end: int) -> dict[str, int]:
    """Lowest claim painted first, higher ones over it, and the cells counted."""
    canvas = [IDLE] * 1000
    for category in reversed(CATEGORIES):
        for first, length, own in intervals:
            if own == category:
                canvas[first : first + length] = [category] * length
    counted = Counter(canvas[start:end])
    return {name: counted[name] for name in SHOWN}


@given(_intervals)
def test_pieces_are_what_is_painted(intervals: list[_Interval]) -> None:
    ordered = Intervals()
    for start, length, category in intervals:
        ordered.add(start, start + length, CATEGORIES.index(category))
    cut = list(pieces(ordered.in_order()))
    expected = painted(intervals, 0, 1000)
    for place, name in enumerate(CATEGORIES):
        assert sum(end - start for start, end, own in cut if own == place) == expected[name]
    assert all(one[1] <= two[0] for one, two in pairwise(cut))


@settings(max_examples=40, deadline=None)
@given(intervals=_intervals, windows=_windows, streams=st.integers(1, 3))
def test_a_whole_trace_adds_up(
    intervals: list[_Interval], windows: list[tuple[int, int]], streams: int
) -> None:
    """Through the profiler's format: shares of the GPU and of every step, to the nanosecond."""
    events = [
        kernel(_OF[category], start, length, stream=7 + number % streams)
        for number, (start, length, category) in enumerate(intervals)
    ]
    events += [
        mark(f"step[DECODE bs={number}]", start, length, 100 + number)
        for number, (start, length) in enumerate(windows)
    ]
    events.append(cpu_event("aten::mm", 0, 5000))
    with TemporaryDirectory() as folder:
        profile = read_profile(write(Path(folder) / "a.json.gz", events))
    (gpu,) = profile.gpus
    first = min(start for start, _, _ in intervals)
    last = max(start + length for start, length, _ in intervals)
    assert gpu.span_ns == last - first
    assert gpu.by_category == painted(intervals, first, last)
    assert sum(gpu.by_category.values()) == gpu.span_ns
    inside = {step.name: step for step in gpu.steps}
    for number, (start, length) in enumerate(windows):
        low, high = max(start, first), min(start + length, last)
        if low >= high:
            assert f"DECODE bs={number}" not in inside
            continue
        step = inside.pop(f"DECODE bs={number}")
        assert (step.count, step.total_ns) == (1, high - low)
        assert step.by_category == painted(intervals, low, high)
    assert not inside
    durations = Counter[str]()
    for _, length, category in intervals:
        durations[_OF[category]] += length
    assert {one.name: one.total_ns for one in gpu.kernels} == dict(durations)


def test_runs_are_merged_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_RUN", 4)
    intervals = Intervals()
    for start in (9, 3, 7, 1, 8, 2, 6, 0, 5, 4):
        intervals.add(start, start + 1, 0)
    assert [start for start, _, _ in intervals.in_order()] == list(range(10))


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("step[DECODE bs=64]", "DECODE bs=64"),
        ("step[EXTEND bs=1 toks=512]", "EXTEND bs=1 toks=512"),
        ("step[VERIFY bs=4 g_sq=16 g_sk=900 forward_id=12]", "VERIFY bs=4"),
        ("step[MIXED bs=3 c=1 g=2 c_sq=5]", "MIXED bs=3"),
        ("ProfilerStep#12", "ProfilerStep#12"),
    ],
)
def test_names_of_steps(written: str, shown: str) -> None:
    """As SGLang 0.5.12 to 0.5.23 write them, with and without detailed annotations."""
    assert step_name(written) == shown
