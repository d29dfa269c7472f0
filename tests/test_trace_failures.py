"""What a trace may not do, and how it ends when it cannot."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tracing import EAGLE, changed_tree, request

from dsv4doctor.errors import UndeterminedError, UsageError
from dsv4doctor.models import Role, SglangTree
from dsv4doctor.trace import process
from dsv4doctor.trace.session import trace_launch

pytestmark = pytest.mark.wheels

Tree = Callable[[str], SglangTree]
Checkpoint = Callable[..., Path]
SERVER_ARGS = "srt/server_args.py"


@pytest.fixture
def model(checkpoint: Checkpoint) -> Path:
    return checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4", experts=2)


@pytest.fixture
def hostile(sglang_tree: Tree, tmp_path: Path) -> Callable[[str], SglangTree]:
    """A real tree that runs the given lines when it is imported."""
    return lambda lines: changed_tree(sglang_tree("0.5.14"), tmp_path / "tree", SERVER_ARGS, lines)


@pytest.mark.parametrize("flags", [("--no-such-flag",), ("--moe-runner-backend", "warp")])
def test_a_flag_sglang_does_not_know(
    flags: tuple[str, ...], sglang_tree: Tree, model: Path
) -> None:
    with pytest.raises(UsageError) as raised:
        trace_launch(request(sglang_tree("0.5.14"), model, flags), use_cache=False)
    assert flags[-1] in raised.value.message
    assert "0.5.14" in raised.value.message
    assert "\n" not in raised.value.message
    assert len(raised.value.message) < 500


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("open('{target}', 'w').write('x')", "not allowed"),
        ("import os; os.mkdir('{target}')", "not allowed"),
        ("import os, tempfile; os.rename(tempfile.mkdtemp(), '{target}')", "not allowed"),
        ("import os, tempfile; os.symlink(tempfile.mkdtemp(), '{target}')", "not allowed"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "network"),
        ("import socket; socket.gethostbyname('localhost')", "network"),
        ("import os; os.system('true')", "not started"),
        ("import subprocess; subprocess.run(['true'])", "not started"),
    ],
)
def test_what_the_traced_code_may_not_do(
    line: str, said: str, hostile: Callable[[str], SglangTree], model: Path, tmp_path: Path
) -> None:
    target = tmp_path / "written"
    with pytest.raises(UndeterminedError, match=said):
        trace_launch(request(hostile(line.format(target=target)), model), use_cache=False)
    assert not target.exists()


def test_a_remove_outside_is_refused(
    hostile: Callable[[str], SglangTree], model: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    with pytest.raises(UndeterminedError, match="not allowed"):
        trace_launch(
            request(hostile(f"import os; os.remove('{precious}')"), model), use_cache=False
        )
    assert precious.exists()


def test_a_hang_ends_at_the_deadline(hostile: Callable[[str], SglangTree], model: Path) -> None:
    started = time.monotonic()
    with pytest.raises(UndeterminedError, match="did not finish in time") as raised:
        trace_launch(
            request(hostile("import time; time.sleep(600)"), model), use_cache=False, timeout=4
        )
    assert time.monotonic() - started < 15
    assert raised.value.hint is not None
    assert "--timeout" in raised.value.hint


def test_a_killed_worker_says_how(hostile: Callable[[str], SglangTree], model: Path) -> None:
    tree = hostile("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(UndeterminedError, match="SIGKILL"):
        trace_launch(request(tree, model), use_cache=False)


def test_a_killed_launch_says_how(hostile: Callable[[str], SglangTree], model: Path) -> None:
    lines = "import os\nServerArgs.add_cli_args = lambda parser: os.kill(os.getpid(), 9)\n"
    with pytest.raises(UndeterminedError, match="SIGKILL"):
        trace_launch(request(hostile(lines), model), use_cache=False)


def test_an_early_exit_is_no_answer(hostile: Callable[[str], SglangTree], model: Path) -> None:
    with pytest.raises(UndeterminedError, match="exit code 7"):
        trace_launch(request(hostile("import os; os._exit(7)"), model), use_cache=False)


def test_memory_is_limited(
    hostile: Callable[[str], SglangTree], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MEMORY_LIMIT_BYTES", 2 << 30)
    with pytest.raises(UndeterminedError, match="MemoryError"):
        trace_launch(request(hostile("hoard = bytearray(4 << 30)"), model), use_cache=False)


def test_what_sglang_prints_is_not_taken_for_an_answer(
    hostile: Callable[[str], SglangTree], model: Path
) -> None:
    tree = hostile("import os\nprint('{}' * 1000)\nos.write(1, b'{\"event\": \"result\"}\\n')")
    trace = trace_launch(request(tree, model), use_cache=False)
    assert len(trace.of(Role.DRAFT)) == 1


def test_an_error_outside_sglang_is_unknown(
    hostile: Callable[[str], SglangTree], model: Path
) -> None:
    """torch raising inside a model's construction may be the trace's own doing."""
    lines = (
        "import torch\n"
        "from sglang.srt.configs import model_config\n"
        "def _broken(*args, **kwargs):\n"
        "    return torch.empty(2, device='cpu').view(3)\n"
        "model_config.ModelConfig.from_server_args = staticmethod(_broken)\n"
    )
    trace = trace_launch(request(hostile(lines), model), use_cache=False)
    assert trace.layers == ()
    assert trace.errors == () or all("view" not in error.message for error in trace.errors)
    assert trace.unresolved or trace.errors


def test_interpreters_that_are_none(sglang_tree: Tree, model: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    asked = request(sglang_tree("0.5.14"), model)
    with pytest.raises(UsageError, match="cannot be started"):
        trace_launch(replace(asked, interpreter=tmp_path / "python"), use_cache=False)
    with pytest.raises(UndeterminedError, match="worker ended"):
        trace_launch(replace(asked, interpreter=Path("/bin/false")), use_cache=False)


def test_an_interpreter_without_torch(sglang_tree: Tree, model: Path, tmp_path: Path) -> None:
    import sys
    from dataclasses import replace

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    bare = replace(request(sglang_tree("0.5.14"), model), interpreter=tmp_path / "venv/bin/python")
    with pytest.raises(UndeterminedError, match="No module named") as raised:
        trace_launch(bare, use_cache=False)
    assert raised.value.hint is not None
    assert "--python" in raised.value.hint


def test_the_checkpoint_never_runs_code(
    sglang_tree: Tree, model: Path, copy_checkpoint: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    """A config that points at its own Python, under --trust-remote-code."""
    import json

    folder = copy_checkpoint(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config"}
    config["model_type"] = "evil"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("open('ran', 'w')\nclass Config: ...\n")
    trace = trace_launch(
        request(sglang_tree("0.5.14"), folder, (*EAGLE, "--trust-remote-code")), use_cache=False
    )
    assert trace.layers == ()
    assert any("never runs" in text for text in trace.unresolved)
