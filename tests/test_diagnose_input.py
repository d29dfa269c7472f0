"""Reading logs: containers, encodings, endless lines, hostile content, the launch in them."""

from __future__ import annotations

import gzip
import random
import time
import tracemalloc
from pathlib import Path

import pytest
from log_writer import ARGUMENTS_0514, ARGUMENTS_0523, healthy, traffic

from dsv4doctor.diagnose import reader
from dsv4doctor.diagnose.args import LoggedLaunch, logged_launch, parse_arguments
from dsv4doctor.diagnose.evidence import evidence
from dsv4doctor.diagnose.judge import Diagnosis, judge
from dsv4doctor.diagnose.lines import Line, Stripper, rank_number
from dsv4doctor.diagnose.render import as_json, console
from dsv4doctor.diagnose.run import diagnose
from dsv4doctor.diagnose.scan import Scanner
from dsv4doctor.diagnose.signature import signatures
from dsv4doctor.errors import UsageError
from dsv4doctor.models import SglangTree

_NVCC = "nvcc fatal   : Unsupported gpu architecture 'compute_120a'"


def ids(diagnosis: Diagnosis) -> list[str]:
    return [match.signature.id for match in diagnosis.matches]


# ------------------------------------------------------------------------------ lines


@pytest.mark.parametrize(
    ("raw", "text", "rank"),
    [
        ("[2026-11-29 14:00:00 TP3 EP1] x y", "x y", "TP3 EP1"),
        ("[2026-11-29 14:00:00.123 DP0 PP1 ATTN_CP0 MOE_DP1 TP12 EP3] x y", "x y", None),
        ("[2026-11-29 14:00:00] x y", "x y", None),
        ("\x1b[32m[2026-11-29 14:00:00 TP0]\x1b[0m x y", "x y", "TP0"),
        ("2026-11-29T14:00:00.123456789Z stdout F [2026-11-29 14:00:00 TP1] x y", "x y", "TP1"),
        ('{"log":"[2026-11-29 14:00:00 TP2] x y\\n","stream":"stderr","time":"t"}', "x y", "TP2"),
        ('{"MESSAGE":"[rank3]: x y","_PID":"3"}', "x y", "rank3"),
        ("Nov 29 14:00:00 box python3[311]: [2026-11-29 14:00:00 TP0] x y", "x y", "TP0"),
        ("2026-11-29T14:00:00+0000 box sglang[7]: x y", "x y", None),
        ("sglang-1  | [2026-11-29 14:00:00 TP0] x y", "x y", "TP0"),
        ("[pod/sglang-0/main] [2026-11-29 14:00:00 TP0] x y", "x y", "TP0"),
        ("(EngineCore_DP0 pid=77) x y", "EngineCore_DP0", "EngineCore_DP0"),
        ('  File "/a/b.py", line 3, in f', '  File "/a/b.py", line 3, in f', None),
        (
            "warmup:  30%|##  | 496/1638 [00:00<00:00, 24891.7it/s][2026-05-20 02:29:31 TP3] x y",
            "x y",
            "TP3",
        ),
        ("50%|#####     |\r100%|##########| x y", "100%|##########| x y", None),
    ],
)
def test_line(raw: str, text: str, rank: str | None) -> None:
    line = Stripper().lines(raw.encode(), 7)[-1]
    if "pid=77" in raw:
        text = "x y"
    assert line.text == text
    assert line.number == 7
    if "ATTN_CP" in raw:
        rank = "DP0 PP1 ATTN_CP0 MOE_DP1 TP12 EP3"
        assert rank_number(line.rank) == "12"
    assert line.rank == rank


def test_parts_of_a_split_line_are_joined() -> None:
    stripper = Stripper()
    assert stripper.lines(b"2026-11-29T14:00:00.1234567Z stderr P nvcc fatal   : Unsupp", 1) == []
    joined = stripper.lines(
        b"2026-11-29T14:00:00.1234568Z stderr F orted gpu architecture 'compute_120a'", 2
    )
    assert joined == [Line(2, _NVCC, "2026-11-29T14:00:00.1234568Z")] or joined[0].text == _NVCC


# ------------------------------------------------------------------------------ files


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["\n", ""])
def test_line_numbers(tmp_path: Path, ending: str, last: str) -> None:
    log = tmp_path / "server.log"
    log.write_bytes((ending.join(["a", "", "b", _NVCC]) + last).encode())
    diagnosis = diagnose(str(log))
    assert (ids(diagnosis), diagnosis.matches[0].line.number, diagnosis.lines) == (["LOG403"], 4, 4)


def test_gz_utf16_and_invalid_bytes(tmp_path: Path) -> None:
    packed = tmp_path / "server.log.gz"
    packed.write_bytes(gzip.compress(f"\n{_NVCC}\n".encode()))
    assert ids(diagnose(str(packed))) == ["LOG403"]
    cut = tmp_path / "cut.log.gz"
    filler = bytes(random.Random(1).choices(range(97, 122), k=200_000))
    cut.write_bytes(gzip.compress(f"{_NVCC}\n".encode() + filler)[:-3000])
    diagnosis = diagnose(str(cut))
    assert ids(diagnosis) == ["LOG403"]
    assert "cut off" in diagnosis.notes[0]
    wide = tmp_path / "windows.log"
    wide.write_bytes(f"{_NVCC}\r\n".encode("utf-16"))
    assert ids(diagnose(str(wide))) == ["LOG403"]
    dirty = tmp_path / "dirty.log"
    dirty.write_bytes(b"ok \xff\xc3\x28\n" + _NVCC.encode() + b" \x80\n")
    assert ids(diagnose(str(dirty))) == ["LOG403"]


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "binary", "not gz", "nul name"])
def test_unreadable(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x.gz" if kind == "not gz" else "x.log")
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes({"empty": b"", "binary": bytes(5000), "not gz": b"plain"}.get(kind, b"x"))
    name = f"{path}\0" if kind == "nul name" else str(path)
    with pytest.raises(UsageError) as raised:
        diagnose(name)
    assert raised.value.hint
    assert "x." in raised.value.message


def test_endless_line_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    with log.open("wb") as file:
        file.write(b"start " + b"Error " * 2_000_000 + b"\n")
        file.write(_NVCC.encode() + b"\n")
    tracemalloc.start()
    diagnosis = diagnose(str(log))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert diagnosis.matches[0].line.number == 2
    assert peak < 24 * reader.BLOCK


def test_memory_does_not_follow_the_log(tmp_path: Path) -> None:
    log = tmp_path / "big.log"
    failing = (
        "[2026-11-29 14:00:00 TP0] Check failed: Unsupported Error in x: ZeroDivisionError: x\n"
    )
    block = "".join(f"{line}\n" for line in traffic(4000, seed=3)) + failing * 200
    peaks = []
    for blocks in (4, 16):
        log.write_text(healthy("0.5.23") + block * blocks + _NVCC)
        tracemalloc.start()
        assert "LOG403" in ids(diagnose(str(log)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.5


# ------------------------------------------------------------------------------ the launch


def launch_of(*texts: str) -> LoggedLaunch:
    found = logged_launch([Line(number, text) for number, text in enumerate(texts, 1)], "log")
    assert found is not None
    return found


def test_arguments_of_both_generations() -> None:
    old = launch_of(ARGUMENTS_0514)
    assert old.launch.model == "/models/DeepSeek-V4-Flash-NVFP4"
    flags = old.launch.flags
    assert flags[flags.index("--moe-runner-backend") + 1] == "triton"
    assert flags[flags.index("--fp8-gemm-backend") + 1] == "auto"
    assert "--trust-remote-code" in flags
    assert "--json-model-override-args" not in flags
    assert old.values["custom_sigquit_handler"] is None
    new = launch_of(ARGUMENTS_0523)
    assert new.launch.model == "deepseek-ai/DeepSeek-V4-Flash"
    assert new.values["cuda_graph_config"] == {"decode": {"bs": [1, 2, 4]}}
    assert "--speculative-algorithm" not in new.launch.flags


@pytest.mark.parametrize("arguments", [ARGUMENTS_0514, ARGUMENTS_0523])
def test_damaged_arguments_give_what_is_left(arguments: str) -> None:
    cut = launch_of(arguments[: arguments.index("tp_size") + 12])
    assert cut.launch.model is not None
    assert cut.launch.notes
    object_inside = arguments.replace("'fp8_e4m3'", "<KvDtype.FP8: 1>")
    values, note = parse_arguments(object_inside)
    assert note is not None
    assert "kv_cache_dtype" not in values
    assert "moe_runner_backend" in values


def test_arguments_are_data(tmp_path: Path) -> None:
    bait = tmp_path / "bait"
    code = f"__import__('pathlib').Path({str(bait)!r}).touch()"
    parse_arguments(f"server_args=ServerArgs(model_path={code}, tp_size=2)")
    parse_arguments(f"server_args={{'model_path': {code}, 'tp_size': 2}}")
    assert not bait.exists()


def test_command_wins_over_resolved_arguments() -> None:
    found = launch_of(
        "+ python3 -m sglang.launch_server --model-path /m/V4 --tp 8 --moe-runner-backend auto",
        ARGUMENTS_0514,
    )
    assert found.is_command
    assert found.launch.flags == ("--tp", "8", "--moe-runner-backend", "auto")
    assert found.values["moe_runner_backend"] == "triton"
    served = launch_of("exec sglang serve /m/V4 --tp 4")
    assert (served.launch.model, served.launch.flags) == ("/m/V4", ("--tp", "4"))


def test_sentence_about_the_command_is_no_command() -> None:
    line = "'python -m sglang.launch_server' is deprecated, use `sglang serve --help`"
    assert logged_launch([Line(1, line)], "log") is None


def test_the_example_in_a_warning_is_no_command() -> None:
    """What SGLang's launch_server.py prints first, as a server on an H200 logged it."""
    said = "'python -m sglang.launch_server' is still supported, but 'sglang serve' is the"
    found = launch_of(
        f"/site/sglang/launch_server.py:55: UserWarning: {said} recommended entrypoint.",
        "  Example: sglang serve --model-path <model> [options]",
        "  warnings.warn(",
        ARGUMENTS_0514,
    )
    assert not found.is_command
    assert found.launch.model == "/models/DeepSeek-V4-Flash-NVFP4"


def test_restart_after_the_failure_is_not_the_launch() -> None:
    scanner = Scanner(signatures())
    scanner.feed(f"{ARGUMENTS_0514}\n{_NVCC}\nRuntimeError: x\n{ARGUMENTS_0523}\n".encode())
    launch = judge(scanner.finish(), "log", None, ()).launch
    assert launch is not None
    assert launch.launch.model == "/models/DeepSeek-V4-Flash-NVFP4"


# ------------------------------------------------------------------------------ evidence


def test_frames_are_mapped_into_the_tree(tmp_path: Path) -> None:
    file = tmp_path / "tree" / "sglang" / "srt" / "layers" / "moe.py"
    file.parent.mkdir(parents=True)
    file.write_text("a = 1\nb = 2\nout = kernel(\n")
    (tmp_path / "secret.py").write_text("password = 1\n")
    frames = "".join(
        f'  File "{name}", line {line}, in apply\n    {source}\n'
        for name, line, source in [
            ("/opt/sglang/srt/layers/moe.py", 3, "out = kernel("),
            ("/opt/sglang/srt/layers/moe.py", 1, "out = kernel("),
            ("/opt/sglang/srt/layers/moe.py", 2, "gone()"),
            ("/opt/sglang/../secret.py", 1, "password = 1"),
            ("/opt/other/x.py", 1, "y"),
        ]
    )
    scanner = Scanner(signatures())
    text = f"Traceback (most recent call last):\n{frames}AssertionError: Hidden size mismatch\n"
    scanner.feed(text.encode())
    match = judge(scanner.finish(), "log", None, ()).matches[0]
    shown = evidence(match, SglangTree(str(tmp_path / "tree"), "0.5.23", "folder"))
    assert [(item.location.file, item.location.line, item.location.source) for item in shown] == [
        ("sglang/srt/layers/moe.py", 3, "out = kernel("),
        ("sglang/srt/layers/moe.py", 3, "out = kernel("),
        ("sglang/srt/layers/moe.py", 2, "b = 2"),
    ]
    assert "line 1 in the log" in shown[1].note
    assert "gone()" in shown[2].note


# ------------------------------------------------------------------------------ hostile logs

_PIECES = (
    b"\x1b[", b"\r", b"\0", b"\xff", b'{"log":"', b"Traceback (most recent call last)",
    b'  File "../../etc/passwd", line 9, in x', b"server_args=ServerArgs(", b"(" * 300, b"'",
    b"\\", b"[" * 200, b"No supported CUDA architectures found for major versions [",
    b"10, " * 200, b"a" * 5000, b" " * 3000, b"aa='\\'" * 2000, b"\n",
    b"python -m sglang.launch_server ",
)  # fmt: skip


def test_mutated_logs_neither_crash_nor_hang() -> None:
    """As many as fit in ten seconds; the longest of them well under two."""
    draw = random.Random(20261129)
    known = signatures()
    seeds = [example.text.encode() for entry in known for example in entry.examples]
    seeds += [healthy("0.5.14")[:3000].encode(), healthy("0.5.23")[:3000].encode()]
    until = time.monotonic() + 10
    count = 0
    while time.monotonic() < until and count < 4000:
        data = _mutated(draw, seeds)
        started = time.process_time()
        scanner = Scanner(known)
        scanner.feed(data + b"\n")
        diagnosis = judge(scanner.finish(), "log", None, ())
        as_json(diagnosis, None, None)
        if count % 40 == 0:
            console(diagnosis, None, 80, color=False)
        assert time.process_time() - started < 2, data[:200]
        count += 1
    assert count > 100


def _mutated(draw: random.Random, seeds: list[bytes]) -> bytes:
    data = bytearray(draw.choice(seeds) + draw.choice(seeds))
    for _ in range(draw.randrange(1, 12)):
        at = draw.randrange(len(data))
        kind = draw.randrange(5)
        if kind == 0:
            data[at] = draw.randrange(256)
        elif kind == 1:
            data[at:at] = draw.choice(_PIECES)
        elif kind == 2 and len(data) > 200:
            del data[at : at + draw.randrange(60)]
        elif kind == 3:
            start = draw.randrange(len(data))
            data[at:at] = data[start : start + draw.randrange(400)]
        else:
            data[at:at] = data[at : at + 30] * draw.randrange(1, 50)
    return bytes(data)


def test_a_gz_from_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    for content in (gzip.compress(f"{_NVCC}\n".encode()), f"{_NVCC}\n".encode()):
        log.write_bytes(content)
        with log.open() as piped:
            monkeypatch.setattr("sys.stdin", piped)
            assert ids(diagnose("-")) == ["LOG403"]
