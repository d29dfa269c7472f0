"""Trees, caches and workers that are not as they should be."""

import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tracing import changed_tree, request

from dsv4doctor.errors import UndeterminedError, UsageError
from dsv4doctor.facts.tree import read_tree
from dsv4doctor.models import SglangTree
from dsv4doctor.trace import cache, process
from dsv4doctor.trace.session import trace_launch

pytestmark = pytest.mark.wheels

Tree = Callable[[str], SglangTree]
Checkpoint = Callable[..., Path]


@pytest.fixture
def model(checkpoint: Checkpoint) -> Path:
    return checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4", experts=1)


def test_a_tree_without_metadata_is_dispatched_the_same(
    sglang_tree: Tree, model: Path, tmp_path: Path
) -> None:
    """A link to the bare `sglang` folder: nothing tells what it requires."""
    real = sglang_tree("0.5.14")
    (tmp_path / "sglang").symlink_to(Path(real.root) / "sglang")
    bare = trace_launch(request(read_tree(tmp_path), model), use_cache=False)
    whole = trace_launch(request(real, model), use_cache=False)
    assert bare.layers == whole.layers
    assert any("requires" in text for text in bare.leniencies)


def test_triton_is_never_interpreted(sglang_tree: Tree, model: Path) -> None:
    """A variable of the caller's shell that would run kernels on tensors without data."""
    real = sglang_tree("0.5.14")
    plain = trace_launch(request(real, model), use_cache=False)
    interpreted = replace(request(real, model), environment={"TRITON_INTERPRET": "1"})
    assert trace_launch(interpreted, use_cache=False).layers == plain.layers
    assert all(layer.kernel is not None for layer in plain.layers)


def test_a_link_back_into_the_tree_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "a.py").write_text("")
    (tmp_path / "sglang" / "self").symlink_to(".")
    assert cache.content_hash(tmp_path / "sglang")


def test_a_tree_that_cannot_be_read_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "loop.py").symlink_to("loop.py")
    tree = SglangTree(str(tmp_path), "0.5.14", "folder")
    with pytest.raises(UsageError, match=r"sglang/loop\.py: cannot be read"):
        trace_launch(request(tree, model))


def test_an_unusable_cache_is_no_reason_to_fail(
    sglang_tree: Tree, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = sglang_tree("0.5.14")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSV4DOCTOR_CACHE", str(tmp_path / "file" / "cache"))
    assert trace_launch(request(tree, model)).layers


def test_a_full_disk_keeps_no_compiled_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 would keep them cut short, and fail on them ever after."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(0))
    assert process._bytecode_folder() is None


def test_a_compiled_module_that_was_cut_short_is_not_kept(tmp_path: Path) -> None:
    """A quota, or the disk's last blocks."""
    (tmp_path / "large.py").write_text("value = 7\n" + "def f(): return 'text'\n" * 2000)
    program = (
        "import resource, sys\n"
        "from dsv4doctor.trace.worker import lean\n"
        "lean.keep_whole_bytecode_only()\n"
        "sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1] + '/kept'\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "limits = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), limits[1]))\n"
        "import large\n"
        "print(large.value)\n"
    )
    for size, kept in ((4096, []), (1 << 24, ["large"])):
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path, str(size)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "7\n"
        found = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
        assert [path.name.partition(".")[0] for path in found] == kept


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_a_child_that_keeps_the_pipe_does_not_hold_us_up(
    sglang_tree: Tree, model: Path, tmp_path: Path
) -> None:
    lines = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    time.sleep(30)\n"
        "    os._exit(0)\n"
    )
    tree = changed_tree(sglang_tree("0.5.14"), tmp_path / "tree", "srt/server_args.py", lines)
    started = time.monotonic()
    assert trace_launch(request(tree, model), use_cache=False).layers
    assert time.monotonic() - started < 25


@pytest.mark.parametrize("said", ["hello", "[1]", '{"event": "result"}'])
def test_a_worker_that_says_something_else(
    said: str, sglang_tree: Tree, model: Path, tmp_path: Path
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "fd = json.load(open(sys.argv[2]))['events_fd']\n"
        f"os.write(fd, {said.encode()!r} + b'\\n')\n"
    )
    interpreter.chmod(0o755)
    odd = replace(request(sglang_tree("0.5.14"), model), interpreter=interpreter)
    with pytest.raises(UndeterminedError, match="no event"):
        trace_launch(odd, use_cache=False)


def test_a_worker_that_closes_its_pipe_and_lives_on(
    sglang_tree: Tree, model: Path, tmp_path: Path
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(
        f"#!{sys.executable}\nimport os, time\nos.closerange(3, 100)\ntime.sleep(60)\n"
    )
    interpreter.chmod(0o755)
    odd = replace(request(sglang_tree("0.5.14"), model), interpreter=interpreter)
    started = time.monotonic()
    with pytest.raises(UndeterminedError, match="did not finish in time"):
        trace_launch(odd, use_cache=False, timeout=2)
    assert time.monotonic() - started < 30


def test_a_signal_while_the_worker_starts_ends_it_too(
    sglang_tree: Tree, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nexec sleep 600\n")
    interpreter.chmod(0o755)
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(process.subprocess, "Popen", Popen)
    odd = replace(request(sglang_tree("0.5.14"), model), interpreter=interpreter)
    with pytest.raises(SystemExit) as ended:
        trace_launch(odd, use_cache=False, timeout=30)
    assert ended.value.code == 128 + signal.SIGTERM
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_the_last_words_of_a_worker_that_says_a_lot(
    sglang_tree: Tree, model: Path, tmp_path: Path
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nhead -c 50000000 /dev/zero >&2\necho >&2\necho bye >&2\n")
    interpreter.chmod(0o755)
    odd = replace(request(sglang_tree("0.5.14"), model), interpreter=interpreter)
    tracemalloc.start()
    try:
        with pytest.raises(UndeterminedError) as raised:
            trace_launch(odd, use_cache=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert raised.value.hint == "its last words: bye"
    assert peak < 20_000_000


def test_a_terminated_run_leaves_no_worker_and_no_folder(
    sglang_tree: Tree, model: Path, tmp_path: Path
) -> None:
    tree = changed_tree(
        sglang_tree("0.5.14"),
        tmp_path / "tree",
        "srt/server_args.py",
        "import time; time.sleep(60)",
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "dsv4doctor", "trace-moe", str(model), "--no-cache"]
    process = subprocess.Popen(
        [*command, "--arch", "sm_120", "--sglang", tree.root, "--", "--tp", "4"],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 30
    while not list(scratch.glob("dsv4doctor-*/request.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert list(scratch.iterdir()) == []
    assert not [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(scratch).encode() in _read(path)
    ]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_shared_memory_is_not_written(sglang_tree: Tree, model: Path, tmp_path: Path) -> None:
    target = Path("/dev/shm/dsv4doctor-test")
    line = f"open('{target}', 'w').write('x')"
    tree = changed_tree(sglang_tree("0.5.14"), tmp_path / "tree", "srt/server_args.py", line)
    with pytest.raises(UndeterminedError, match="not allowed"):
        trace_launch(request(tree, model), use_cache=False)
    assert not target.exists()
