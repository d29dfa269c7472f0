"""What is no failure is not taken for one; a server that was killed is not called healthy."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from log_writer import healthy

from dsv4doctor.cli import run
from dsv4doctor.diagnose.judge import Diagnosis, judge
from dsv4doctor.diagnose.reader import Source
from dsv4doctor.diagnose.scan import Scanner
from dsv4doctor.diagnose.signature import signatures
from dsv4doctor.diagnose_cli import _reading
from dsv4doctor.errors import UsageError

_AT = "[2026-11-29 14:10:00] "
_ASKED = "RuntimeError: No supported CUDA architectures found for major versions [12]."
_STATEMENT = 'self._log(f"Receive: obj={_dataclass_to_string_truncated(obj, max_length)}")'


def read(*lines: str) -> Diagnosis:
    scanner = Scanner(signatures())
    scanner.feed((healthy("0.5.23") + "".join(f"{line}\n" for line in lines)).encode())
    return judge(scanner.finish(), "log", "sm_120", ())


def found(diagnosis: Diagnosis) -> list[str]:
    return [match.signature.id for match in diagnosis.matches]


_JSON = json.dumps({"timestamp": "t", "event": "request.finished", "obj": {"text": _ASKED}})
_RAW = f"{_AT}Receive: obj=GenerateReqInput(text='why (a)"


@pytest.mark.parametrize(
    "lines",
    [
        [f"{_AT}Receive: obj=GenerateReqInput(text='it: {_ASKED}', rid='x')"],
        [f"{_AT}Receive OpenAI: obj={{'messages': [{{'content': \"{_ASKED}\"}}]}}"],
        [f"{_AT}Finish: obj=ChatCompletionRequest(m='a'), out={{'text': '{_ASKED}'}}"],
        [_AT + _JSON],
        [_JSON],
        [json.dumps({"log": f"{_AT}{_JSON}\n", "stream": "stderr", "time": "t"})],
        [_RAW, _ASKED, "Killed", "Traceback (most recent call last):", "', rid='x')"],
        [
            f"2026-11-29T14:00:00.123456789Z stderr P {_RAW}",
            f"2026-11-29T14:00:00.123456789Z stderr F {_ASKED}')",
        ],
        [f"INFO 11-29 14:00:00 [logger.py:42] Received request chat-1: prompt: '{_ASKED}', p: 1"],
    ],
    ids=["receive", "openai", "finish", "json", "bare", "docker", "newlines", "cri", "vllm"],
)
def test_what_users_wrote_is_no_evidence(lines: list[str]) -> None:
    diagnosis = read(*lines)
    assert (found(diagnosis), diagnosis.unexplained, diagnosis.exit_code) == ([], (), 0)
    after = read(*lines, f"{_AT[:-2]} TP0] {_ASKED}")
    assert found(after) == ["LOG401"]


def test_a_whole_request_hides_nothing_after_it() -> None:
    whole = f"{_AT}Receive: obj=GenerateReqInput(text='f(', rid='x')"
    assert found(read(whole, _ASKED)) == ["LOG401"]
    assert found(read(f"    {_STATEMENT}", _ASKED)) == ["LOG401"]


@pytest.mark.parametrize("size", [500, 100_000])
def test_random_bytes_are_not_text(tmp_path: Path, size: int) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(random.Random(size).randbytes(size))
    with pytest.raises(UsageError, match="not a text file"), Source(str(log)) as source:
        list(source.chunks())


def test_endless_bytes_end() -> None:
    assert run(["diagnose", "/dev/urandom"]) == 2


@pytest.mark.parametrize("kind", ["garbage", "latin-1", "cut", "ansi"])
def test_damaged_text_is_text(tmp_path: Path, kind: str) -> None:
    text = healthy("0.5.23").encode()
    log = tmp_path / "x.log"
    log.write_bytes(
        {
            "garbage": text[:2000] + random.Random(1).randbytes(len(text) // 5) + b"\n" + text,
            "latin-1": text + "Größe überschritten, né à Orléans\n".encode("latin-1") * 200,
            "cut": text + "é".encode()[:1],
            "ansi": b"".join(b"\x1b[32m" + line + b"\x1b[0m\n" for line in text.splitlines()),
        }[kind]
    )
    assert run(["diagnose", str(log)]) in (0, 3)


@pytest.mark.parametrize(
    ("line", "signature"),
    [
        ("/opt/run.sh: line 3:   12 Killed                  python3 -m sglang", "LOG512"),
        ("Killed", "LOG512"),
        ("sglang-1 exited with code 137", "LOG512"),
        ("Segmentation fault (core dumped)", "LOG513"),
        (f"{_AT}Subprocess scheduler_3 (pid=7) crashed with exit code -11.", "LOG513"),
    ],
)
def test_killed_server_is_not_healthy(line: str, signature: str) -> None:
    diagnosis = read(line)
    assert found(diagnosis)[0] == signature
    assert diagnosis.exit_code == 1


def test_slow_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "slow.log"
    log.write_text(
        f"{healthy('0.5.23')}{_AT}Using default W8A8 Block FP8 kernel config. Performance might be "
        "sub-optimal! Config file not found at /x/N=4096.json\n"
    )
    assert run(["diagnose", str(log)]) == 0
    said = capsys.readouterr()
    assert "note: Untuned block-FP8 tables [LOG108]" in said.out
    assert "Most likely root" not in said.out
    assert "a note: LOG108" in said.err


@pytest.mark.parametrize(
    "lines",
    [
        ["^CINFO:     Shutting down", "KeyboardInterrupt"],
        ["ERROR:    Traceback (most recent call last):", '  File "/x.py", line 1, in f', "    g()",
         "asyncio.exceptions.CancelledError"],
        [f"{_AT}ERROR: The input is longer than the model's context length (2 tokens > 1)."],
    ],
    ids=["ctrl-c", "uvicorn", "too long"],
)  # fmt: skip
def test_ordinary_ends(lines: list[str]) -> None:
    diagnosis = read(*lines)
    assert (diagnosis.unexplained, diagnosis.exit_code) == ((), 0)


@pytest.mark.parametrize("kind", ["same", "link", "hard link"])
def test_the_log_is_not_overwritten(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log, other = tmp_path / "g.log", tmp_path / "o.log"
    log.write_text("KeyError: 'zebra'\n")
    if kind == "link":
        other.symlink_to(log)
    elif kind == "hard link":
        other.hardlink_to(log)
    target = log if kind == "same" else other
    assert run(["diagnose", str(log), "-o", str(target)]) == 2
    assert "this is the log" in capsys.readouterr().err
    assert log.read_text() == "KeyError: 'zebra'\n"


def test_a_pipe_is_said_to_be_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "pipe" in _reading(str(pipe))
    assert _reading("-") == "reading the log"


def test_empty_name_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", ""]) == 2
    said = capsys.readouterr().err
    assert '"": no such rule' in said
    assert "explain --list" in said


_POLL = (
    '[2026-11-29 14:00:05] INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 503 Service Unavailable'
)


def _starting(*then: str) -> list[str]:
    """A start, up to its first request, with what the log says then; the doctor's signatures."""
    lines = healthy("0.5.14").partition("Uvicorn running")[0].splitlines()[:-1]
    scanner = Scanner(signatures())
    text = "\n".join(
        (
            *lines,
            "[2026-11-29 14:00:04] Shuffling FP4 expert weights (layer: model.decoder.mlp.experts)",
            "[2026-11-29 14:00:04] INFO:     Uvicorn running on http://0.0.0.0:30000",
            *then,
        )
    )
    scanner.feed(f"{text}\n".encode())
    found = judge(scanner.finish(), "log", "sm_120", ()).matches
    assert all(match.layer is None and match.role is None for match in found)
    return [match.signature.id for match in found]


@pytest.mark.parametrize("polls", [1, 100])
def test_a_server_whose_first_request_does_not_come_back_is_not_healthy(polls: int) -> None:
    ready = "[2026-11-29 14:03:00] The server is fired up and ready to roll!"
    waiting = [_POLL] * polls
    assert _starting(*waiting) == ["LOG516"]
    assert _starting(*waiting, ready) == []
    assert _starting(*waiting, ready, _POLL) == []  # it fails its health check, for another reason
    assert _starting() == []
    died = "[2026-11-29 14:03:00 TP1] Scheduler hit an exception: KeyError: 'zebra'"
    assert _starting(*waiting, died, _POLL) == []
