"""`dsv4doctor matrix` from the command line: a small real one, failures as cells, interrupts."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4doctor import matrix_run
from dsv4doctor.cli import run as command
from dsv4doctor.errors import DoctorError, UndeterminedError, UsageError
from dsv4doctor.facts.checkpoint import read_checkpoint
from dsv4doctor.facts.snapshot import take, text_of
from dsv4doctor.matrix import FlagSet
from dsv4doctor.matrix_cli import _exit_code
from dsv4doctor.matrix_plan import Asked
from dsv4doctor.matrix_plan import plan as make_plan
from dsv4doctor.matrix_run import Model, Plan, Release
from dsv4doctor.models import (
    ARCHS,
    Gpu,
    GpuFacts,
    KernelEvidence,
    Launch,
    SglangTree,
    Stack,
    Trace,
    Verdict,
)
from dsv4doctor.rules.samples import DRAFT_TRTLLM, MAIN_TRTLLM
from dsv4doctor.trace.request import TraceRequest

_HYBRID = "nvidia__DeepSeek-V4-Flash-NVFP4"
_EAGLE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"),
)
Checkpoints = Callable[..., Path]
Trees = Callable[[str], SglangTree]


@pytest.mark.wheels
def test_two_releases_on_two_gpus(
    checkpoint: Checkpoints, sglang_tree: Trees, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is known of the hybrid checkpoint: no flag set keeps main and draft on sm_120."""
    model = str(checkpoint(_HYBRID))
    arguments = ["matrix", model, "--arch", "sm_100,sm_120", "--recommend"]
    for version in ("0.5.14", "0.5.23"):
        arguments += ["--sglang", sglang_tree(version).root]
    arguments += ["--flags-set", "cutlass=--moe-runner-backend flashinfer_cutlass"]
    arguments += ["--format", "json", "--", "--tp", "4", *_EAGLE]
    assert command(arguments) == 1  # nothing works on sm_120
    said = capfd.readouterr()
    plain = json.loads(said.out)
    found = {
        (row["release"], row["arch"]): (row["main"]["verdict"], row["draft"]["verdict"])
        for row in plain["cells"]
    }
    assert found == {
        ("0.5.14", "sm_100"): ("fails", "runs"),
        ("0.5.14", "sm_120"): ("fails", "fails"),
        ("0.5.23", "sm_100"): ("runs", "runs"),
        ("0.5.23", "sm_120"): ("runs", "fails"),
    }
    reasons = {(row["release"], row["arch"]): row["draft"]["reason"] for row in plain["cells"]}
    assert "Error occurred when running GEMM!" in reasons["0.5.14", "sm_120"]
    assert "no kernels runnable on sm120" in reasons["0.5.23", "sm_120"]
    best = {row["arch"]: row["choices"] for row in plain["recommendations"]}
    assert [choice["release"] for choice in best["sm_100"]] == ["0.5.23"]
    assert best["sm_120"] == []
    patch = {row["arch"]: row["patch"] for row in plain["recommendations"]}
    assert patch["sm_100"] is None
    newest = sglang_tree("0.5.23").root
    assert patch["sm_120"].startswith(
        f"dsv4doctor fix --only FIX101 {model} --arch sm_120 --sglang "
    )
    assert f"--sglang {newest} -- --tp 4 --speculative-algorithm EAGLE" in patch["sm_120"]
    assert patch["sm_120"].endswith("--moe-runner-backend flashinfer_cutlass")
    assert f"--model-path {model} --tp 4" in best["sm_100"][0]["command"]
    assert "4 cells: SGLang 0.5.14, 0.5.23; sm_100, sm_120" in said.err


@pytest.mark.wheels
def test_a_launch_whose_attention_dies_is_not_recommended(
    checkpoint: Checkpoints, sglang_tree: Trees, capfd: pytest.CaptureFixture[str]
) -> None:
    """0.5.15.post1 sends sparse prefill on sm_120 to a kernel that exists for sm_90 and sm_100,
    and decode to one that its FlashInfer has not got."""
    arguments = ["matrix", str(checkpoint(_HYBRID)), "--arch", "sm_120", "--recommend"]
    arguments += ["--sglang", sglang_tree("0.5.15.post1").root, "--format", "json"]
    arguments += ["--flags-set", "marlin=--moe-runner-backend marlin", "--", "--tp", "4"]
    assert command(arguments) == 1
    plain = json.loads(capfd.readouterr().out)
    [cell], [advice] = plain["cells"], plain["recommendations"]
    assert cell["works"]
    assert cell["path_problem"].startswith("main sparse-mla-decode: ")
    assert advice["choices"] == []
    assert f"SGLang 0.5.15.post1 ({cell['path_problem']})" in advice["caveat"]


@pytest.mark.wheels
@pytest.mark.parametrize("version", ["0.5.12.post1", "0.5.14"])
def test_attention_that_the_trace_does_not_promise_is_named(
    version: str, checkpoint: Checkpoints, sglang_tree: Trees, capfd: pytest.CaptureFixture[str]
) -> None:
    """0.5.12.post1 imports flash_mla, which nothing here has and SGLang does not require."""
    model = str(checkpoint("deepseek-ai__DeepSeek-V4-Flash"))
    arguments = ["matrix", model, "--arch", "sm_90", "--recommend", "--format", "json"]
    arguments += ["--sglang", sglang_tree(version).root]
    arguments += ["--flags-set", "marlin=--moe-runner-backend marlin"]
    assert command(arguments) == 0
    [advice] = json.loads(capfd.readouterr().out)["recommendations"]
    assert len(advice["choices"]) == 1
    said = f"Not known to run on SGLang {version}: main sparse-mla-decode: flash_mla is not"
    assert (said in advice["caveat"]) == (version == "0.5.12.post1")


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("version", "flags", "rule"),
    [
        ("0.5.19", (), "DSV202"),
        ("0.5.16", ("--speculative-algorithm", "DSPARK"), "DSV201"),
        ("0.5.23", (), None),
    ],
)
def test_what_check_calls_an_error_is_not_recommended(
    checkpoint: Checkpoints,
    sglang_tree: Trees,
    capfd: pytest.CaptureFixture[str],
    version: str,
    flags: tuple[str, ...],
    rule: str | None,
) -> None:
    """Kernels that exist, and answers that are garbage, or a shape that the kernel has not got."""
    model = str(checkpoint("deepseek-ai__DeepSeek-V4-Flash-0731"))
    arguments = ["matrix", model, "--arch", "sm_120", "--recommend", "--format", "json"]
    arguments += ["--sglang", sglang_tree(version).root, "--flags-set", "given="]
    variable = "SGLANG_SM120_FLASHMLA_BACKEND"
    for triton in ((), ("--env", f"{variable}=triton")):
        found = command([*arguments, *triton, "--", "--tp", "4", *flags])
        plain = json.loads(capfd.readouterr().out)
        [cell], [advice] = plain["cells"], plain["recommendations"]
        assert cell["works"]
        if rule is None or triton:
            assert (found, cell["path_problem"]) == (0, None)
            assert [one["flag_set"] for one in advice["choices"]] == ["given"]
        else:
            assert found == 1
            assert cell["path_problem"].startswith(f"{rule}: ")
            assert f"Export {variable}=triton" in advice["caveat"]
            assert advice["choices"] == []


@pytest.mark.wheels
def test_no_fix_is_printed_for_a_launch_that_check_calls_an_error(
    checkpoint: Checkpoints, sglang_tree: Trees, capfd: pytest.CaptureFixture[str]
) -> None:
    """FIX101 knows the draft of 0.5.19, whose attention then corrupts every longer prompt."""
    arguments = ["matrix", str(checkpoint(_HYBRID)), "--arch", "sm_120", "--recommend"]
    arguments += ["--sglang", sglang_tree("0.5.19").root, "--format", "json"]
    arguments += ["--flags-set", "cutlass=--moe-runner-backend flashinfer_cutlass"]
    variable = "SGLANG_SM120_FLASHMLA_BACKEND=triton"
    for triton in ((), ("--env", variable)):
        assert command([*arguments, *triton, "--", "--tp", "4", *_EAGLE]) == 1
        plain = json.loads(capfd.readouterr().out)
        [cell], [advice] = plain["cells"], plain["recommendations"]
        assert not cell["works"]
        if triton:
            assert cell["path_problem"] is None
            assert f"--env {variable} -- --tp 4" in advice["patch"]
        else:
            assert advice["patch"] is None
            assert "DSV202: " in advice["caveat"]
            assert f"Export {variable}" in advice["caveat"]


# ------------------------------------------------------------------------------ failures


@pytest.fixture
def plan(checkpoint: Checkpoints, tmp_path: Path) -> Plan:
    """Two releases whose trees are empty folders, on two GPUs."""
    path = checkpoint(_HYBRID, experts=1)
    releases = []
    for name in ("1.0", "2.0"):
        folder = tmp_path / name
        folder.mkdir()
        releases.append(Release(name, SglangTree(str(folder), name, "folder")))
    return Plan(
        releases=tuple(releases),
        archs=(ARCHS["sm_100"], ARCHS["sm_120"]),
        models=(Model("hybrid", path, read_checkpoint(path)),),
        flag_sets=(FlagSet("as given", ()),),
        interpreter=Path(sys.executable),
        stack=None,
        jobs=3,
    )


def _traced(request: TraceRequest) -> Trace:
    layers = (*MAIN_TRTLLM, DRAFT_TRTLLM)
    return Trace(request.tree, request.arch, {}, (), {}, layers, (), (), (), {})


def test_one_release_that_fails_leaves_the_others(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launches(requests: Sequence[TraceRequest], **_: object) -> list[Trace | DoctorError]:
        if requests[0].tree.version == "1.0" and requests[0].arch == ARCHS["sm_100"]:
            raise RuntimeError("our own mistake")
        if requests[0].tree.version == "1.0":
            return [UndeterminedError("the trace worker was killed by SIGKILL") for _ in requests]
        return [_traced(request) for request in requests]

    monkeypatch.setattr(matrix_run, "trace_launches", launches)
    steps: list[int] = []

    class Watcher:
        def begun(self, done: int, total: int, text: str) -> None:
            assert total == 4
            steps.append(done)

    found = matrix_run.run(plan, Watcher())
    assert [(one.key.release, one.key.arch.name, one.verdict) for one in found.cells] == [
        ("1.0", "sm_100", Verdict.UNKNOWN),
        ("1.0", "sm_120", Verdict.UNKNOWN),
        ("2.0", "sm_100", Verdict.RUNS),
        ("2.0", "sm_120", Verdict.FAILS),
    ]
    assert found.cells[0].main.reason == "internal error (RuntimeError: our own mistake)"
    assert "killed by SIGKILL" in found.cells[1].main.reason
    assert max(steps) == 4
    assert not found.interrupted


def test_a_trace_that_stopped_short_is_no_answer(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same exit code as of `check`: 3, though every launch was traced."""

    def short(request: TraceRequest) -> Trace:
        return replace(_traced(request), layers=(), unresolved=("main: KeyError: 'x'",))

    for launched, code in ((_traced, 0), (short, 3)):
        monkeypatch.setattr(
            matrix_run,
            "trace_launches",
            lambda requests, launched=launched, **_: [launched(one) for one in requests],
        )
        assert _exit_code(matrix_run.run(plan), ()) == code


def test_a_release_that_could_not_be_fetched(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        matrix_run, "trace_launches", lambda requests, **_: [_traced(r) for r in requests]
    )
    gone = Release("3.0", None, UndeterminedError("the index cannot be reached"))
    found = matrix_run.run(_with(plan, gone))
    assert [one.traced for one in found.cells] == [True, True, True, True, False, False]
    assert found.cells[-1].main.reason == "the index cannot be reached"


def _with(plan: Plan, release: Release) -> Plan:
    return replace(plan, releases=(*plan.releases, release))


def test_an_interrupt_keeps_what_is_there(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()

    def launches(
        requests: Sequence[TraceRequest], progress: Callable[[str], None], **_: object
    ) -> list[Trace | DoctorError]:
        if requests[0].tree.version == "2.0":
            waiting.set()
            while True:  # ends when the run tells it to
                time.sleep(0.01)
                progress("resolving arguments")
        return [_traced(request) for request in requests]

    monkeypatch.setattr(matrix_run, "trace_launches", launches)

    def interrupt() -> None:
        waiting.wait(10)
        time.sleep(0.3)
        signal.raise_signal(signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        found = matrix_run.run(plan)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert found.interrupted
    assert [one.key.release for one in found.cells] == ["1.0", "1.0"]


@pytest.mark.wheels
def test_interrupted_command_prints_the_table_and_leaves_no_worker(
    checkpoint: Checkpoints, sglang_tree: Trees, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    arguments = [sys.executable, "-m", "dsv4doctor", "matrix", str(checkpoint(_HYBRID))]
    arguments += ["--sglang", sglang_tree("0.5.14").root, "--arch", "sm_90", "--no-cache"]
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
        # A background job of a script is started with interrupts ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not list(scratch.glob("dsv4doctor-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Interrupted: this is what there was." in out
    assert "1 not reached" in err
    assert "Traceback" not in err
    assert list(scratch.iterdir()) == []


# ------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "sm_120"], "no MODEL given"),
        (["--launch", "/nowhere.sh", "--arch", "all"], "/nowhere.sh"),
        (["--snapshot", "/nowhere.json"], "/nowhere.json"),
        (["MODEL", "--arch", "sm_75"], "--arch sm_75: not known"),
        (["MODEL", "--arch", ","], "--arch: nothing in the list"),
        (["MODEL", "--arch", "all", "--env", "x"], "--env x...: not KEY=VALUE"),
        (["/nowhere", "--arch", "all"], "/nowhere"),
        (["MODEL", "--arch", "all", "--flags-set", "x"], "--flags-set x: not NAME=FLAGS"),
        (["MODEL", "--arch", "all", "--flags-set", "x='"], "--flags-set x: No closing quotation"),
        (
            ["MODEL", "--arch", "all", "--flags-set", "x=", "--flags-set", "x="],
            "--flags-set x: given twice",
        ),
        (
            ["MODEL", "--arch", "all", "--", "--model-path", "y"],
            "--model-path among SGLang's flags",
        ),
        (["MODEL", "--arch", "all"], "no SGLang release in the cache"),
        (["MODEL", "--arch", "all", "--sglang", "new"], "--sglang new: neither a folder nor"),
        (["MODEL", "--arch", "all", "--sglang", "/nowhere"], "/nowhere"),
        (["MODEL", "--arch", "all", "--sglang", "installed"], "no SGLang in this interpreter"),
        (["MODEL", "--arch", "all", "--python", "/nowhere/python"], "/nowhere/python"),
        (["MODEL", "--arch", "all", "--jobs", "0"], "0 is not in the range"),
        (["MODEL", "--arch", "all", "-o", "/nowhere/x"], "no folder /nowhere"),
        (["MODEL", "--tp", "4"], "No such option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    said: str,
    checkpoint: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = str(checkpoint(_HYBRID, experts=1))
    monkeypatch.setenv("DSV4DOCTOR_CACHE", str(tmp_path))
    words = [model if word == "MODEL" else word for word in arguments]
    assert command(["matrix", *words]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert said in lines[-1]
    assert len(lines) == 1


def test_a_release_of_several_that_does_not_exist(
    checkpoint: Checkpoints, small_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4DOCTOR_CACHE", str(tmp_path / "cache"))
    model = checkpoint(_HYBRID, experts=1)
    both = f"no-release,{small_tree}"
    script = str(_script(tmp_path, model))
    for asked in (
        Asked(models=(str(model),), sglang=both, arch="sm_120"),
        Asked(launch=script, sglang=both, arch="sm_120"),
    ):
        gone, there = make_plan(asked).releases
        assert (gone.name, gone.tree, there.name) == ("no-release", None, "9.9.9")
        assert "no-release" in str(gone.problem)
    with pytest.raises(UsageError, match="no-release"):
        make_plan(Asked(models=(str(model),), sglang="no-release,other", arch="sm_120"))


# ------------------------------------------------------------------------- a launch there is


def _script(folder: Path, model: Path) -> Path:
    path = folder / "serve.sh"
    path.write_text(
        f"export SGLANG_X=1\npython -m sglang.launch_server --model-path {model} --tp 4\n"
    )
    return path


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """A folder that reads as an SGLang with DeepSeek-V4."""
    package = tmp_path / "tree" / "sglang"
    (package / "srt" / "models").mkdir(parents=True)
    for name in ("__init__.py", "srt/__init__.py", "srt/models/deepseek_v4.py"):
        (package / name).touch()
    (package / "version.py").write_text('__version__ = "9.9.9"\n')
    return package.parent


def test_a_script_gives_model_flags_and_variables(
    checkpoint: Checkpoints, small_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4DOCTOR_CACHE", str(tmp_path / "cache"))
    model = checkpoint(_HYBRID, experts=1)
    asked = Asked(
        launch=str(_script(tmp_path, model)),
        sglang=str(small_tree),
        arch="sm_120,sm_90",
        flag_sets=("more=--dp 2",),
        env=("SGLANG_Y=2",),
        jobs=1,
    )
    made = make_plan(asked)
    assert [release.name for release in made.releases] == ["9.9.9"]
    assert [arch.name for arch in made.archs] == ["sm_120", "sm_90"]
    assert made.models[0].given == str(model)
    assert made.flag_sets == (FlagSet("more", ("--tp", "4", "--dp", "2")),)
    assert made.given == {"SGLANG_X": "1", "SGLANG_Y": "2"}


def test_the_sglang_that_a_script_has_on_its_path(
    checkpoint: Checkpoints, small_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4DOCTOR_CACHE", str(tmp_path / "cache"))
    script = _script(tmp_path, checkpoint(_HYBRID, experts=1))
    script.write_text(f"export PYTHONPATH={small_tree}\n{script.read_text()}")
    made = make_plan(Asked(launch=str(script), arch="sm_120"))
    assert [release.name for release in made.releases] == ["9.9.9"]


def test_an_old_sglang_in_the_interpreter_is_not_in_the_way(
    checkpoint: Checkpoints, small_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One from before DeepSeek-V4, where other releases are named."""
    monkeypatch.setenv("DSV4DOCTOR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "old" / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "old" / "sglang" / "version.py").write_text('__version__ = "0.4.9"\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "old"))
    model = checkpoint(_HYBRID, experts=1)
    named = {"sglang": str(small_tree), "arch": "sm_120"}
    for asked in (
        Asked(models=(str(model),), **named),
        Asked(launch=str(_script(tmp_path, model)), **named),
    ):
        assert [release.name for release in make_plan(asked).releases] == ["9.9.9"]
    with pytest.raises(UsageError, match=r"SGLang 0\.4\.9"):
        make_plan(Asked(models=(str(model),), arch="sm_120"))


def test_a_snapshot_gives_the_gpu_the_packages_and_the_launch(
    checkpoint: Checkpoints, small_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4DOCTOR_CACHE", str(tmp_path / "cache"))
    model = checkpoint(_HYBRID, experts=1)
    gpu = Gpu(0, "NVIDIA GB10", ARCHS["sm_121"], 119 << 30)
    evidence = KernelEvidence("0.7.2")
    saved = take(
        gpu=GpuFacts((gpu,)),
        sglang=SglangTree("/elsewhere", "9.9.9", "installed"),
        stack=Stack("python", "3.12", (), evidence),
        checkpoint=read_checkpoint(model),
        launch=Launch("serve.sh", 3, {}, "org/model", ("--tp", "8"), wrappers=("docker",)),
        environment={},
    )
    box = tmp_path / "box.json"
    box.write_text(text_of(saved))
    made = make_plan(Asked(snapshot=str(box), sglang=str(small_tree), recommend=True))
    assert made.archs == (ARCHS["sm_121"],)
    assert made.gpu == gpu
    assert made.stack is not None
    assert made.stack.evidence == evidence
    assert made.models[0].given == "org/model"
    assert made.flag_sets[0] == FlagSet("as given", ("--tp", "8"))
    assert len(made.flag_sets) > 3
    assert matrix_run._launch(made, made.models[0], made.flag_sets[1]).in_container
