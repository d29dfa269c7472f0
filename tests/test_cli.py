"""The command line as a user meets it: exit codes, streams, files, bad input."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from dsv4doctor import __version__
from dsv4doctor.cli import run
from dsv4doctor.models import SglangTree

ROOT = Path(__file__).parent.parent
_STORY = (
    *("--tp", "4", "--moe-runner-backend", "triton"),
    *("--speculative-moe-runner-backend", "triton", "--speculative-algorithm", "EAGLE"),
    *("--speculative-num-steps", "1", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "2"),
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """This process's, with a cache of its own and nothing of ours set."""
    ours = ("DSV4DOCTOR_", "CI", "NO_COLOR")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    cache = str(tmp_path_factory.mktemp("cache"))
    return {**kept, "DSV4DOCTOR_CACHE": cache, "COLUMNS": "100"}


@pytest.fixture
def in_process(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return lambda *arguments: run([str(argument) for argument in arguments])


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4", experts=2)


@pytest.fixture
def tree(sglang_tree: Callable[[str], SglangTree]) -> str:
    return sglang_tree("0.5.14").root


def _start(environment: dict[str, str], *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dsv4doctor", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # A background job of a script is started with interrupts ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _one_line(text: str) -> str:
    assert text.count("\n") == 1, text
    assert text.startswith("dsv4doctor: ")
    assert "Traceback" not in text
    return text


# ------------------------------------------------------------------------------ what works


@pytest.mark.parametrize(
    "arguments",
    [
        ("-h",),
        ("check", "-h"),
        ("trace-moe", "--help"),
        ("plan", "-h"),
        ("kernels", "--help"),
        *(("kernels", name, "--help") for name in ("list", "compile", "verify", "bench")),
    ],
)
def test_help_has_examples(
    in_process: Callable[..., int], arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_process(*arguments) == 0
    assert "Examples:\n" in capsys.readouterr().out


def test_help_imports_nothing_heavy(environment: dict[str, str]) -> None:
    code = (
        "import sys; from dsv4doctor.cli import run; run(['--help'])\n"
        "print(sorted({'rich', 'cattrs', 'libcst', 'torch', 'pynvml'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_check_imports_what_it_needs_only(environment: dict[str, str]) -> None:
    """A repeated trace is mostly imports."""
    code = (
        "import sys; from dsv4doctor import checking; checking.write(None, {})\n"
        "print(sorted({'yaml', 'libcst', 'dsv4doctor.report.html'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_version(in_process: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process("--version") == 0
    assert __version__ in capsys.readouterr().out


def test_no_command_shows_the_help(
    in_process: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_process() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Commands:" in captured.err


@pytest.mark.wheels
def test_story_from_a_script(
    environment: dict[str, str], model: Path, tree: str, tmp_path: Path
) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(
        "#!/bin/bash\nexport SGLANG_LOG_LEVEL=info\n"
        f"exec numactl -N 0 python -m sglang.launch_server --model-path {model} \\\n"
        f"  {' '.join(_STORY)} --api-key sk-1\n"
    )
    common = ("--launch", script, "--arch", "sm_120", "--sglang", tree)
    process = _start(environment, "check", *common)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert re.search(r"error DSV102 +model\.decoder\.mlp\.experts", out)
    assert "modelopt_quant.py:1389" in out
    assert "triton were not" in " ".join(out.split())
    assert "why wrong output: it runs without the model's SwiGLU clamp" in " ".join(out.split())
    assert "\x1b" not in out
    assert "sk-1" not in out + err
    assert re.fullmatch(r"dsv4doctor: 2 errors, 2 warnings, 1 info in [\d.]+ s\n", err)

    output = tmp_path / "report.json"
    process = _start(environment, "check", *common, "--format", "json", "-o", output)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (1, "")
    assert "trace from the cache" in err
    plain = json.loads(output.read_text())
    schema = json.loads((ROOT / "docs" / "report.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(plain)
    assert plain["arch"] == "sm_120"
    assert plain["sglang"] == {"version": "0.5.14", "path": tree, "origin": "folder"}
    assert plain["resolved_args"]["speculative_moe_runner_backend"] == "triton"
    assert len(plain["layers"]) == 44
    assert plain["layers"][-1]["flags_consulted"] == []
    assert plain["layers"][0]["reason"].startswith("wrong output: it runs without")
    assert plain["cached"] is True
    assert "sk-1" not in output.read_text()

    pairs = zip(_STORY[::2], _STORY[1::2], strict=True)
    config = tmp_path / "srv.yaml"
    config.write_text("".join(f"{flag[2:]}: {value}\n" for flag, value in pairs))
    script.write_text(
        f"numactl -N 0 python -m sglang.launch_server --model-path {model} --config {config}\n"
    )
    process = _start(environment, "check", *common, "--format", "json", "-o", output)
    process.communicate(timeout=300)
    configured = json.loads(output.read_text())
    for one, other in zip(plain["findings"], configured["findings"], strict=True):
        for key in ("rule", "subject", "message"):
            assert one[key] == other[key]
    script.write_text(
        f"python -m sglang.launch_server --model-path {model} \\\n  {' '.join(_STORY)}\n"
    )

    process = _start(environment, "trace-moe", "--draft", "--why", *common)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "model.decoder.mlp.experts" in out
    assert "model.layers" not in out.partition("Decision path")[0]
    assert "modelopt_quant.py:1383  self.is_fp4_experts  yes" in out

    process = _start(environment, "check", *common, "--fail-on", "never")
    process.communicate(timeout=300)
    assert process.returncode == 0


@pytest.mark.wheels
def test_on_a_terminal_there_is_colour_unless_it_is_not_wanted(
    environment: dict[str, str], model: Path, tree: str
) -> None:
    arguments = ["trace-moe", str(model), "--arch", "sm_100", "--sglang", tree, "--main"]

    def shown(extra: dict[str, str], watched: str = "stdout") -> str:
        leader, follower = pty.openpty()
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, watched: follower}
        process = subprocess.Popen(
            [sys.executable, "-m", "dsv4doctor", *arguments, "--", "--tp", "4"],
            **streams,
            env={**environment, "TERM": "xterm", **extra},
        )
        os.close(follower)
        text = b""
        while select.select([leader], [], [], 120)[0]:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # how Linux says that the other side has closed
                break
            if not chunk:
                break
            text += chunk
        os.close(leader)
        assert process.wait(60) == 0
        return text.decode()

    assert "\x1b[32mruns" in shown({})
    assert "\x1b[32mruns" in shown({"NO_COLOR": ""})  # as no-color.org has it
    for plain in ({"NO_COLOR": "1"}, {"CI": "true"}, {"TERM": "dumb"}):
        assert "\x1b" not in shown(plain)
    assert "reading the facts" in shown({}, "stderr")  # the spinner
    for plain in ({"CI": "true"}, {"TERM": "dumb"}):
        assert re.fullmatch(r"dsv4doctor: [^\r\n]*\r\n", shown(plain, "stderr"))


@pytest.mark.wheels
def test_environment_gives_defaults(
    in_process: Callable[..., int],
    model: Path,
    tree: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DSV4DOCTOR_ARCH", "sm_100")
    monkeypatch.setenv("DSV4DOCTOR_SGLANG", tree)
    monkeypatch.setenv("DSV4DOCTOR_FORMAT", "json")
    assert in_process("trace-moe", model, "--main", "--", "--tp", "4") == 0
    assert json.loads(capsys.readouterr().out)["arch"] == "sm_100"


# ------------------------------------------------------------------------------ bad input


def _config(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(text) and None


def _index(shard: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        plain = json.loads(path.read_text())
        first = next(iter(plain["weight_map"]))
        plain["weight_map"][first] = shard
        path.write_text(json.dumps(plain))

    return damage


def _header(length: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        shard = min(folder.glob("*.safetensors"))
        with shard.open("r+b") as file:
            file.write(length.to_bytes(8, "little"))

    return damage


_DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "empty": (_config(""), "config.json: empty"),
    "truncated": (_config('{"architectures": ['), "config.json: not JSON"),
    "text": (_config("hello"), "config.json: not JSON"),
    "list": (_config("[1]"), "config.json: should be an object"),
    "wrong type": (_config('{"architectures": 3}'), "config.json"),
    "architecture": (_config('{"architectures": ["LlamaForCausalLM"]}'), "LlamaForCausalLM"),
    "absent shard": (_index("model-99999-of-99999.safetensors"), "model-99999"),
    "path outside": (_index("../../etc/passwd"), "../../etc/passwd"),
    "header too long": (_header(1 << 40), ".safetensors"),
    "header lies": (_header(16), ".safetensors"),
}


@pytest.mark.parametrize("name", _DAMAGES)
def test_damaged_checkpoint(
    in_process: Callable[..., int],
    model: Path,
    copy_checkpoint: Callable[[Path, Path], Path],
    tmp_path: Path,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage, said = _DAMAGES[name]
    folder = copy_checkpoint(model, tmp_path / "model")
    damage(folder)
    output = tmp_path / "out"
    assert in_process("check", folder, "--arch", "sm_120", "-o", output) == 2
    assert said in _one_line(capsys.readouterr().err)
    assert not output.exists()


_SCRIPTS = {
    "echo hello\n": "no SGLang command",
    "python -m vllm.entrypoints.openai.api_server --model x\n": "vLLM",
    "\x00\x01\x02": "binary",
    "": "the file is empty",
}


@pytest.mark.parametrize("text", _SCRIPTS, ids=["none", "other engine", "binary", "empty"])
def test_bad_script(
    in_process: Callable[..., int], tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(text)
    assert in_process("check", "--launch", script, "--arch", "sm_120") == 2
    said = _one_line(capsys.readouterr().err)
    assert str(script) in said
    assert _SCRIPTS[text] in said


def test_script_with_several_commands(
    in_process: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "serve.sh"
    launch = "python -m sglang.launch_server --model-path"
    script.write_text(f"{launch} first/model\n{launch} second/model\n")
    assert in_process("check", "--launch", script, "--arch", "sm_120") == 2
    assert "2 SGLang commands" in _one_line(capsys.readouterr().err)
    assert in_process("check", "--launch", f"{script}:2", "--arch", "sm_120") == 2
    assert "second/model" in _one_line(capsys.readouterr().err)


_USAGE: dict[str, tuple[tuple[str, ...], str]] = {
    "no model": (("check", "--arch", "sm_120"), "no MODEL and no --launch given"),
    "absent model": (("check", "no-such/model", "--arch", "sm_120"), "no-such/model"),
    "arch": (("check", "m", "--arch", "sm_999"), "--arch"),
    "flag without --": (("check", "m", "--tp", "4"), "go after `--`"),
    "two models": (("check", "a", "b"), "unexpected extra argument"),
    "env": (("check", "m", "--env", "FOO", "--arch", "sm_120"), "--env FOO"),
    "absent script": (("check", "--launch", "absent.sh"), "absent.sh"),
    "absent snapshot": (("check", "--snapshot", "absent.json"), "absent.json"),
    "output folder": (("check", "m", "-o", "/no/such/folder/x"), "/no/such/folder"),
    "timeout": (("check", "m", "--timeout", "0"), "--timeout"),
    "command": (("chekc",), "chekc"),
    "model twice": (("check", "a", "--arch", "sm_120", "--", "--model-path", "b"), "MODEL is a"),
}


@pytest.mark.parametrize("name", _USAGE)
def test_wrong_usage(
    in_process: Callable[..., int], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, said = _USAGE[name]
    assert in_process(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in _one_line(captured.err)


_TOOLS: dict[str, tuple[tuple[str, ...], str]] = {
    "interpreter without sglang": ((), "no SGLang in this interpreter"),
    "interpreter": (("--python", "/no/such/python"), "/no/such/python: no such interpreter"),
    "not a python": (("--python", "/bin/ls"), "/bin/ls: not a working Python"),
    "tree": (("--sglang", "/"), "/: no sglang/srt"),
    "version": (("--sglang", "new"), "--sglang new"),
}


@pytest.mark.parametrize("name", _TOOLS)
def test_bad_environment(
    in_process: Callable[..., int], model: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, said = _TOOLS[name]
    assert in_process("check", model, "--arch", "sm_120", *arguments) == 2
    assert said in _one_line(capsys.readouterr().err)


def test_no_gpu_asks_for_the_architecture(
    in_process: Callable[..., int],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from dsv4doctor import target
    from dsv4doctor.models import GpuFacts

    monkeypatch.setattr(target, "read_gpus", lambda: GpuFacts((), unavailable="no NVIDIA driver"))
    assert in_process("check", model) == 2
    said = _one_line(capsys.readouterr().err)
    assert "no GPU on this machine (no NVIDIA driver)" in said
    assert "--arch sm_90|sm_100" in said


@pytest.mark.wheels
def test_flag_that_sglang_does_not_know(
    in_process: Callable[..., int],
    model: Path,
    tree: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    arguments = ("check", model, "--arch", "sm_120", "--sglang", tree, "-o", output)
    assert in_process(*arguments, "--", "--bogus-flag", "3") == 2
    assert "--bogus-flag" in _one_line(capsys.readouterr().err)
    assert not output.exists()


@pytest.mark.wheels
def test_error_as_json(
    in_process: Callable[..., int], model: Path, tree: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("check", model, "--arch", "sm_120", "--sglang", tree, "--format", "json")
    assert in_process(*arguments, "--", "--bogus-flag", "3") == 2
    captured = capsys.readouterr()
    plain = json.loads(captured.out)
    schema = json.loads((ROOT / "docs" / "report.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(plain)
    assert [error["kind"] for error in plain["errors"]] == ["usage"]
    assert "--bogus-flag" in plain["errors"][0]["message"]
    _one_line(captured.err)


@pytest.mark.wheels
def test_worker_that_does_not_finish(
    in_process: Callable[..., int],
    model: Path,
    tree: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    arguments = ("check", model, "--arch", "sm_120", "--sglang", tree, "-o", output)
    assert in_process(*arguments, "--no-cache", "--timeout", "0.2", "--", "--tp", "4") == 3
    assert "--timeout" in _one_line(capsys.readouterr().err)
    assert not output.exists()


# ------------------------------------------------------------------------------ interruptions


def _interpreter_that_hangs(folder: Path) -> Path:
    """Answers our probe like a real Python, and hangs when it is to run the worker."""
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\ncase "$2" in -c) exec {sys.executable} "$@";; esac\nexec sleep 600\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.wheels
def test_interrupt_ends_the_worker_too(
    environment: dict[str, str], model: Path, tree: str, tmp_path: Path
) -> None:
    python = _interpreter_that_hangs(tmp_path)
    output = tmp_path / "out"
    process = _start(
        environment, "check", model, "--arch", "sm_120", "--sglang", tree, "--python", python,
        "-o", output, "--", "--tp", "4",
    )  # fmt: skip
    worker = _child_of(process.pid, "sleep")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "dsv4doctor: interrupted\n")
    assert not output.exists()
    assert not Path(f"/proc/{worker}").exists()


def _child_of(parent: int, name: str) -> int:
    """The child process running `name`, once there is one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text().strip() == name:
                return int(child)
        time.sleep(0.05)
    raise AssertionError(f"no {name} below {parent}")


@pytest.mark.wheels
def test_worker_that_is_killed(
    environment: dict[str, str], model: Path, tree: str, tmp_path: Path
) -> None:
    python = _interpreter_that_hangs(tmp_path)
    process = _start(
        environment, "check", model, "--arch", "sm_120", "--sglang", tree, "--python", python,
        "--", "--tp", "4",
    )  # fmt: skip
    os.kill(_child_of(process.pid, "sleep"), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (3, "")
    assert "killed by SIGKILL" in _one_line(err)


@pytest.mark.wheels
def test_reader_that_goes_away(environment: dict[str, str], model: Path, tree: str) -> None:
    process = _start(
        environment, "check", model, "--arch", "sm_100", "--sglang", tree, "--", "--tp", "4"
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 141


def test_internal_error_is_one_line(
    in_process: Callable[..., int],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from dsv4doctor import target

    def broken(options: object, download: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(target, "resolve", broken)
    assert in_process("check", model) == 3
    said = _one_line(capsys.readouterr().err)
    assert "internal error (ZeroDivisionError: of ours)" in said
    assert "--debug" in said
    assert in_process("check", model, "--debug") == 3
    assert "Traceback" in capsys.readouterr().err
