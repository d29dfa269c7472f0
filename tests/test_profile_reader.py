"""GPU events out of a trace's text: against the standard parser, and for files that are broken."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_writer import cpu_event, document, event, flow, kernel, mark, write

from dsv4doctor.errors import UsageError
from dsv4doctor.profiling import reader
from dsv4doctor.profiling.reader import TraceFile

_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "Kernel", "Memcpy")
_names = st.text(
    st.sampled_from('{}[],:" \\/abé\n\u2028"cat": "kernel"') | st.characters(codec="utf-8"),
    max_size=30,
)
_values = st.recursive(
    st.integers(-9, 9) | _names | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def _event(draw: st.DrawFn) -> dict[str, Any]:
    """An event with its members in any order, its text as nasty as JSON allows."""
    members = {
        "ph": "X",
        "cat": draw(st.sampled_from((*_GPU, "cpu_op", "python_function", "ac2g"))),
        "name": draw(_names),
        "args": draw(st.dictionaries(_names, _values, max_size=3)),
    }
    return {key: members[key] for key in draw(st.permutations(list(members)))}


@settings(max_examples=100, deadline=None)
@given(
    events=st.lists(_event(), max_size=8),
    block=st.sampled_from((7, 64, 1 << 20)),
    indent=st.sampled_from((None, 2)),
    ascii_only=st.booleans(),
)
def test_as_the_standard_parser(
    events: list[dict[str, Any]], block: int, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(
        {"schemaVersion": 1, "traceEvents": events, "traceName": "x"},
        indent=indent,
        ensure_ascii=ascii_only,
    )
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(reader, "BLOCK", block)
        path = Path(folder) / "a.json"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        trace = TraceFile(str(path))
        found = list(trace.events())
    assert found == [one for one in json.loads(text)["traceEvents"] if one["cat"] in _GPU]
    assert trace.notes == []


def _read(path: Path) -> tuple[list[str], list[str]]:
    trace = TraceFile(str(path))
    return [one["name"] for one in trace.events()], trace.notes


_EVENTS = [
    cpu_event("aten::mm", 0, 5000),
    flow(10),
    kernel("nvjet_tst_64x8", 100, 50),
    cpu_event("ProfilerStep#3", 0, 9000, "user_annotation"),
    mark("ProfilerStep#3", 90, 500, 1),
    kernel("Memcpy HtoD (Pinned -> Device)", 200, 50),
    cpu_event("aten::add", 300, 5000),
]
_FOUND = ["nvjet_tst_64x8", "ProfilerStep#3", "Memcpy HtoD (Pinned -> Device)"]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a"])
def test_plain_and_packed(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, _EVENTS)
    assert _read(tmp_path / name) == (_FOUND, [])


def test_facts_of_the_head(tmp_path: Path) -> None:
    trace = TraceFile(write(tmp_path / "a.json", _EVENTS, rank=3, gpu="NVIDIA B200"))
    assert len(list(trace.events())) == 3
    assert (trace.rank, trace.gpu_names, trace.steps_on_cpu) == (3, {0: "NVIDIA B200"}, True)


def test_the_array_alone_is_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[\n" + ",\n".join(_EVENTS) + "\n]")
    assert _read(path) == (_FOUND, [])


@pytest.mark.parametrize("lost", [3, 60, 400, 900])
def test_a_file_that_stops_early_gives_what_is_there(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "a.json"
    text = document(_EVENTS)
    end = text.rindex("]")
    path.write_text(text[: end - lost])
    names, notes = _read(path)
    assert names == _FOUND[: len(names)]
    assert notes == ["the file ends in the middle of its events: it is not complete"]


def test_a_file_that_stops_right_behind_a_gpu_event(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    text = document(_EVENTS[:3])
    path.write_text(text[: text.rindex("}", 0, text.rindex("]")) + 1])
    assert _read(path) == (
        ["nvjet_tst_64x8"],
        ["the file ends in the middle of its events: it is not complete"],
    )


def test_a_packed_file_that_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    many = [kernel(f"kernel_{number}", 100 * number, 50) for number in range(3000)]
    packed = gzip.compress(document(many).encode())
    path.write_bytes(packed[: len(packed) // 2])
    names, notes = _read(path)
    assert 0 < len(names) < 3000
    assert names == [f"kernel_{number}" for number in range(len(names))]
    assert notes == [
        "the .gz file is cut off: what is there is counted",
        "the file ends in the middle of its events: it is not complete",
    ]


@pytest.mark.parametrize("behind", [b"not gzip", b"\x1f\x8b\x08"])
def test_what_stands_before_the_damage_is_counted(tmp_path: Path, behind: bytes) -> None:
    """Small files too, which are read at once."""
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(document(_EVENTS).encode()) + behind)
    names, (note,) = _read(path)
    assert names == _FOUND
    assert "what" in note


def test_a_member_further_in_makes_no_gpu_event(tmp_path: Path) -> None:
    inner = event("cpu_op", "x", 0, 7, 0, 5, '"cat": "kernel"').replace(
        '    "cat": "cpu_op",\n', ""
    )
    twice = _EVENTS[2].replace('"cat": "kernel"', '"cat": "kernel", "cat": 5')
    path = tmp_path / "a.json"
    path.write_text(document([inner, twice, *_EVENTS]))
    assert _read(path) == (_FOUND, [])


@pytest.mark.parametrize(
    ("old", "new", "rank", "names"),
    [
        ('"rank": 3', '"rank": ' + "9" * 5000, None, {0: "NVIDIA H200"}),
        ('"id": 0', '"id": 1e999', 3, {}),
        ('"id": 0', '"id": "²"', 3, {}),
    ],
)
def test_odd_numbers_in_the_head(
    tmp_path: Path, old: str, new: str, rank: int | None, names: dict[int, str]
) -> None:
    path = tmp_path / "a.json"
    path.write_text(document(_EVENTS, rank=3).replace(old, new))
    trace = TraceFile(str(path))
    assert len(list(trace.events())) == 3
    assert (trace.rank, trace.gpu_names) == (rank, names)


def test_what_is_wrong_elsewhere_does_no_harm(tmp_path: Path) -> None:
    """Old profilers wrote Windows paths and NaN as they came."""
    broken = event("cpu_op", "x", 1, 1, 0, 5, r'"path": "C:\users\x", "value": nan, "n": Infinity')
    path = tmp_path / "a.json"
    path.write_text(document([broken, *_EVENTS, broken, _EVENTS[0]]))
    assert _read(path) == (_FOUND, [])


def test_a_broken_gpu_event_is_left_out_and_counted(tmp_path: Path) -> None:
    broken = event("kernel", "x", 0, 7, 0, 5, r'"path": "C:\users"')
    path = tmp_path / "a.json"
    path.write_text(document([broken, *_EVENTS]))
    assert _read(path) == (_FOUND, ["1 GPU events are no JSON and were left out"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"PK\x03\x04 not json", "not a torch-profiler trace"),
        (b'{"layers": []}', "not a torch-profiler trace"),
        (b"[1, 2, 3]", "not a torch-profiler trace"),
        (b"[]", "not a torch-profiler trace"),
        (gzip.compress(b"plain text", mtime=0), "not a torch-profiler trace"),
        (b"\x1f\x8bnot gzip at all", "damaged before its first event"),
        (b"\x1f\x8b", "cut off or damaged before"),
        (gzip.compress(document(_EVENTS).encode(), mtime=0)[:30], "cut off or damaged before"),
    ],
    ids=[
        "empty",
        "blank",
        "zip",
        "other-json",
        "numbers",
        "no-events",
        "gzip-of-text",
        "gzip-in-name-only",
        "gzip-magic-alone",
        "gzip-cut-off",
    ],
)
def test_no_trace(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said) as raised:
        list(TraceFile(str(path)).events())
    assert str(path) in raised.value.message


def test_memory_stays_small(tmp_path: Path) -> None:
    """However far apart the GPU events are, no more than a few blocks are held."""
    filler = cpu_event("x" * 5000, 0, 1)
    events = [_EVENTS[2], *([filler] * 4000), _EVENTS[5]]
    path = Path(write(tmp_path / "a.json", events))
    assert path.stat().st_size > 4 * reader.BLOCK
    import tracemalloc

    tracemalloc.start()
    names, _ = _read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert names == [_FOUND[0], _FOUND[2]]
    assert peak < 8 * reader.BLOCK
