"""Streams, devices, names and values that no sane user gives: one line, and never a traceback."""

import json
import os
import platform
import shlex
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.hub import resolve_model
from dsv4doctor.facts.snapshot import read_snapshot
from dsv4doctor.facts.stack import read_stack
from dsv4doctor.terminal import check_writable, deliver, width
from dsv4doctor.wheels import fetch_tree


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4", experts=1)


def _shell(line: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`line` in a shell, where `$D` is dsv4doctor."""
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
        env={
            **environment,
            "DSV4DOCTOR_CACHE": str(folder / "cache"),
            "D": f"{shlex.quote(sys.executable)} -m dsv4doctor",
            **variables,
        },
    )


def _refused(done: subprocess.CompletedProcess[str], *said: str) -> None:
    """One line on standard error that says all of `said`, and exit code 2."""
    assert done.stderr.startswith("dsv4doctor: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "internal error" not in done.stderr
    for part in said:
        assert part in done.stderr
    assert done.returncode == 2


# ------------------------------------------------------------------------------ output files


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "real.txt", tmp_path / "link"
    real.write_text("old")
    link.symlink_to("real.txt")
    check_writable(str(link))
    deliver("new", str(link))
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real.txt"]


def test_a_pipe_is_written_into_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        deliver("text\n", str(pipe))
        assert os.read(reader, 100) == b"text\n"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_pipe_without_a_reader_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="a pipe that nobody reads"):
        deliver("text\n", str(pipe))
    _refused(_shell("$D kernels list -o pipe", tmp_path), "--output pipe", "nobody reads")


def test_a_full_device_as_output_file(tmp_path: Path) -> None:
    done = _shell("$D kernels list -o /dev/full", tmp_path)
    _refused(done, "--output /dev/full", "No space left on device")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_kernels_output_is_whole_or_nothing(tmp_path: Path) -> None:
    target = tmp_path / "list.json"
    target.write_text("old")
    # A limit on file sizes fails the write halfway.
    done = _shell("trap '' XFSZ; ulimit -f 1; $D kernels list --format json -o list.json", tmp_path)
    _refused(done, "--output list.json", "File too large")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["list.json"]


def test_text_that_is_no_unicode_is_escaped_in_a_file(tmp_path: Path) -> None:
    deliver(json.dumps({"flag": "a\udce9"}, ensure_ascii=False), str(tmp_path / "out.json"))
    written = (tmp_path / "out.json").read_bytes().decode("utf-8")
    assert json.loads(written) == {"flag": "a\udce9"}


# ------------------------------------------------------------------------------ standard streams


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("command", "code"),
    [("kernels list", 0), ("explain DSV102", 0), ("trace-moe --format json --arch sm_120", 2)],
)
def test_closed_streams_give_the_normal_exit_code(
    tmp_path: Path, command: str, code: int, closed: str
) -> None:
    done = _shell(f"$D {command} {closed}", tmp_path)
    assert done.returncode == code
    assert "internal error" not in done.stderr
    assert done.stderr.count("\n") == (1 if code and "2>" not in closed else 0)


def test_a_closed_stream_does_not_become_the_output_file(tmp_path: Path) -> None:
    done = _shell("$D snapshot -o box.json <&- >&- 2>&-", tmp_path)
    assert done.returncode == 0
    assert json.loads((tmp_path / "box.json").read_text())["schema"] == "dsv4doctor-snapshot/1"


@pytest.mark.parametrize(
    "command", ["kernels list", "--help", "check --help", "--version", "snapshot", "explain DSV102"]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_standard_output(tmp_path: Path, command: str, unbuffered: str) -> None:
    done = _shell(f"$D {command} >/dev/full", tmp_path, PYTHONUNBUFFERED=unbuffered)
    _refused(done, "standard output: no space left on device")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_standard_output_that_takes_a_part_only(tmp_path: Path, unbuffered: str) -> None:
    """The last block of a disk, or a limit."""
    for command in ("--help", "kernels list"):
        done = _shell(f"ulimit -f 1; $D {command} > s.txt", tmp_path, PYTHONUNBUFFERED=unbuffered)
        _refused(done, "standard output: file too large")


@pytest.mark.parametrize("command", ["kernels list", "snapshot -o box.json"])
def test_full_standard_error_changes_nothing(tmp_path: Path, command: str) -> None:
    assert _shell(f"$D {command} 2>/dev/full", tmp_path).returncode == 0


def test_an_error_as_json_into_a_full_standard_output(tmp_path: Path) -> None:
    done = _shell("$D trace-moe --format json --arch sm_120 >/dev/full", tmp_path)
    _refused(done, "no MODEL and no --launch given")


def test_ascii_output_takes_any_text(tmp_path: Path) -> None:
    done = _shell(
        "$D trace-moe --format json --arch sm_120 m\u00e9\U0001f600", tmp_path,
        PYTHONIOENCODING="ascii", LC_ALL="C.UTF-8",
    )  # fmt: skip
    assert done.returncode == 2
    assert "m\u00e9\U0001f600" in json.loads(done.stdout)["errors"][0]["message"]
    assert done.stderr.isascii()


# ------------------------------------------------------------------------------ input files


def test_a_snapshot_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = _shell("$D trace-moe --snapshot pipe --arch sm_120", tmp_path)
    _refused(done, "pipe: a pipe, socket or device where a file should be")


_SNAPSHOT: dict[str, object] = {
    "schema": "dsv4doctor-snapshot/1",
    "tool_version": "1",
    "created": "2026-01-01T00:00:00+00:00",
    "gpu": {"gpus": [], "driver": None, "unavailable": None},
    "sglang": None,
    "stack": None,
    "checkpoint": None,
    "launch": None,
    "environment": {},
}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"SGLANG\0X": "1"}, r"'SGLANG\\x00X': a NUL character"),
        ({"SGLANG_X=1": "1"}, r"environment: 'SGLANG_X=1' is no variable's name"),
        ({"SGLANG_X": "a\0b"}, r"environment\.SGLANG_X: a NUL character"),
        ({"SGLANG_X": "a\udce9"}, r"environment\.SGLANG_X: not valid Unicode text"),
    ],
)
def test_a_snapshot_with_variables_that_cannot_be(
    tmp_path: Path, environment: dict[str, str], said: str
) -> None:
    path = tmp_path / "box.json"
    path.write_text(json.dumps(_SNAPSHOT))
    assert read_snapshot(path).environment == {}
    path.write_text(json.dumps({**_SNAPSHOT, "environment": environment}))
    with pytest.raises(UsageError, match=said) as refused:
        read_snapshot(path)
    assert str(path) in refused.value.message


def test_a_snapshot_does_not_say_what_is_executed(tmp_path: Path, model: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ntouch {shlex.quote(str(tmp_path / 'executed'))}\n")
    program.chmod(0o755)
    launch = {
        "source": "serve.sh", "line": 1, "environment": {}, "model": "m", "flags": [],
        "interpreter": str(program),
    }  # fmt: skip
    (tmp_path / "box.json").write_text(json.dumps({**_SNAPSHOT, "launch": launch}))
    done = _shell(f"$D trace-moe {model} --snapshot box.json --arch sm_120", tmp_path)
    _refused(done, f"{sys.executable}: no SGLang in this interpreter")
    assert not (tmp_path / "executed").exists()


# ------------------------------------------------------------------------------ values


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e10", "1e300", "0", "-1"])
@pytest.mark.parametrize("command", ["trace-moe", "check", "diagnose log"])
def test_timeouts_that_are_none(tmp_path: Path, command: str, seconds: str) -> None:
    _refused(_shell(f"$D {command} --timeout={seconds}", tmp_path), "--timeout")


_LONG = "a" * 5000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (_LONG, "neither a folder nor in the hub cache"),
        (f"m --python {'a' * 300}", "File name too long"),
        (f"m --python {_LONG}", "File name too long"),
        ("m --python ~nouser/py", "~nouser/py: no such interpreter"),
        (f"m --sglang {_LONG}", "--sglang"),
        (f"--launch serve.sh:{'1' * 5000}", "File name too long"),
        ("--launch serve.sh:\u00b2", "serve.sh:\u00b2: No such file"),
        (f"m -o {_LONG}", "File name too long"),
    ],
)
def test_names_that_cannot_be(tmp_path: Path, model: Path, arguments: str, said: str) -> None:
    (tmp_path / "m").symlink_to(model)
    command = f"$D trace-moe --arch sm_120 {arguments.replace('~', chr(92) + '~')}"
    _refused(_shell(command, tmp_path, LC_ALL="C.UTF-8"), said)


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process cannot look into, also where it started as root."""
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield folder
    os.seteuid(user)
    folder.chmod(0o700)


def test_what_lies_in_a_locked_folder(locked: Path) -> None:
    with pytest.raises(UsageError, match=r"locked/model cannot be read \(Permission denied\)"):
        resolve_model(str(locked / "model"), {})
    with pytest.raises(UsageError, match=r"org/m: .*/locked/hub/.* cannot be read"):
        resolve_model("org/m", {"HF_HOME": str(locked)})
    with pytest.raises(UsageError, match=r"locked/python: cannot be started \(Permission denied"):
        read_stack(locked / "python")
    with pytest.raises(UsageError, match=r"locked/box.json: cannot be read \(Permission denied"):
        read_snapshot(locked / "box.json")
    with pytest.raises(UsageError, match=r"locked/out: cannot be written \(Permission denied"):
        check_writable(str(locked / "out"))


@pytest.mark.parametrize("columns", ["\u00b2", "99999999999", "-1", "0"])
def test_columns_that_are_none(tmp_path: Path, columns: str) -> None:
    done = _shell("$D kernels list", tmp_path, COLUMNS=columns, LINES=columns)
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", columns)
        assert width(is_terminal=False) in (40, 100)
        assert 40 <= width(is_terminal=True) <= 9999


@pytest.mark.parametrize("cache", ["/dev/null", "/dev/null/x", _LONG, "~nouser", "file"])
def test_caches_that_cannot_be(tmp_path: Path, model: Path, cache: str) -> None:
    (tmp_path / "file").touch()
    command = f"$D trace-moe {model} --sglang 0.5.14 --arch sm_120"
    _refused(_shell(command, tmp_path, DSV4DOCTOR_CACHE=cache), "DSV4DOCTOR_CACHE")


@pytest.mark.parametrize("cache", ["/dev/null/x", _LONG])
def test_no_release_is_fetched_into_a_cache_that_cannot_be(cache: str) -> None:
    with pytest.raises(UsageError) as refused:
        fetch_tree("0.5.14", Path(cache))
    assert refused.value.hint is not None
    assert "DSV4DOCTOR_CACHE" in refused.value.hint


def test_a_secret_in_a_bad_variable_is_not_shown(tmp_path: Path) -> None:
    for given in ("HF TOKEN=hf_SECRET", "HF_TOKEN hf_SECRET", "HF-TOKEN=hf_SECRET"):
        done = _shell(f"$D trace-moe m --arch sm_120 --env {shlex.quote(given)}", tmp_path)
        _refused(done, "--env HF")
        assert "SECRET" not in done.stderr


# ------------------------------------------------------------------------------ interpreters


def _program(folder: Path, text: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport json, os, subprocess, sys, time\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "answer",
    [
        '{"packages": {}, "sglang": None, "editable": False, "markers": {}}',
        '{"packages": {}, "sglang": None, "editable": False, "markers": {"python_version": 3}}',
        '{"packages": {"torch": 2}, "sglang": None, "editable": False, "markers": {}}',
        '{"packages": [], "sglang": 1, "editable": False, "markers": []}',
        "{}",
        "[]",
    ],
)
def test_a_probe_answered_with_other_types(tmp_path: Path, answer: str) -> None:
    program = _program(tmp_path, f"print(sys.argv[5] + json.dumps({answer}))")
    with pytest.raises(UsageError, match="not a working Python"):
        read_stack(program)


def test_a_probe_answered_with_deep_nesting(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a working Python"):
        read_stack(_program(tmp_path, "print(sys.argv[5] + '[' * 100_000)"))


def test_a_probe_answered_with_terminal_commands(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a working Python") as refused:
        read_stack(_program(tmp_path, r"print('\x1b]0;title\x07\x9b31m')"))
    assert refused.value.message.isprintable()


def test_a_child_that_holds_the_output_open_is_not_waited_for(tmp_path: Path) -> None:
    program = _program(
        tmp_path,
        "subprocess.Popen(['sleep', '20'], start_new_session=True)\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])",
    )
    started = time.monotonic()
    stack, _ = read_stack(program, deadline=15)
    assert time.monotonic() - started < 12
    assert stack.python_version == platform.python_version()


def test_a_probe_that_never_ends_is_stopped_with_its_children(tmp_path: Path) -> None:
    program = _program(
        tmp_path,
        "subprocess.Popen(['sleep', '20'], start_new_session=True)\n"
        "while True: print('x', flush=True); time.sleep(0.05)",
    )
    started = time.monotonic()
    with pytest.raises(UsageError, match="no answer within 1 s"):
        read_stack(program, deadline=1)
    assert time.monotonic() - started < 8


# ------------------------------------------------------------------------------ spoiled inputs


def test_spoiled_inputs_are_refused_soon_and_nothing_else_is_opened(tmp_path: Path) -> None:
    script = Path(__file__).parent / "benchmarks" / "fuzz_inputs.py"
    done = subprocess.run(
        [sys.executable, str(script), "300", "20261129"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("1200 inputs, ")
