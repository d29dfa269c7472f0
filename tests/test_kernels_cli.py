"""`dsv4doctor kernels ...` as a user meets it, with the small kernel file as the only kernel."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dsv4doctor.cli import run
from dsv4doctor.errors import UndeterminedError, UsageError
from dsv4doctor.kernels import bench, catalog, registry, stamps, verify
from dsv4doctor.kernels_cli import kernels_group

DATA = Path(__file__).parent / "data"
HERE = stamps.Platform("NVIDIA RTX PRO 6000", "12.0", "580.65", "2.9.1", "3.5.1")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(kernels_group, arguments)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Only the small kernel is registered, and a GPU seems to be there."""
    monkeypatch.setattr(catalog, "OPERATIONS", ("tiny_kernels",))
    monkeypatch.setattr(catalog, "FOLDER", DATA)
    for function in (catalog.meta, catalog.source_hash, catalog.source_files):
        monkeypatch.setattr(function, "__defaults__", (DATA,))
    monkeypatch.setattr(verify.record, "__defaults__", (False, DATA))
    monkeypatch.syspath_prepend(str(DATA))
    monkeypatch.setattr(registry, "load", importlib.import_module)
    monkeypatch.setattr(stamps, "current_platform", lambda device="cuda": HERE)
    monkeypatch.setenv(stamps.STATE_VARIABLE, str(tmp_path / "state"))
    yield
    sys.modules.pop("tiny_kernels", None)


def test_list_names_every_kernel_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torch", "triton"):
        monkeypatch.setitem(sys.modules, package, None)
    plain = invoke("list")
    assert plain.exit_code == 0
    listed = json.loads(invoke("list", "--format", "json").stdout)
    assert [meta["name"] for meta in listed] == list(registry.OPERATIONS)
    for meta in listed:
        assert meta["name"] in plain.stdout
        assert meta["title"]
        assert 0 < meta["error_bar"] <= 1e-2
        assert {"sm_120", "sm_121"} <= set(meta["archs"]) <= set(registry.ARCHS)


@pytest.mark.usefixtures("tiny")
def test_verify_stamps_what_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = invoke("verify", "--quick")
    assert passed.exit_code == 0
    assert "product" in passed.stdout
    assert "product, slow" not in passed.stdout
    assert stamps.stale("tiny_kernels", HERE, DATA) is None
    monkeypatch.setenv("TINY_KERNELS_ERROR", "0.5")
    failed = invoke("verify", "--format", "json")
    assert failed.exit_code == 1
    assert "NOT verified" in failed.stderr
    written = json.loads(failed.stdout)
    assert [row["passed"] for row in written["rows"]] == [False, False]
    assert written["stamps"] == {"tiny_kernels": None}
    assert stamps.stale("tiny_kernels", HERE, DATA) is not None


@pytest.mark.usefixtures("tiny")
def test_nothing_verified_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "offered", lambda name, arch: False)
    done = invoke("verify", "--format", "json")
    assert done.exit_code == 3
    assert "tiny_kernels: not offered on sm_120" in done.stderr
    assert json.loads(done.stdout)["stamps"] == {}


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_no_gpu_is_one_clear_line(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = invoke(command).exception
    assert isinstance(error, UndeterminedError)
    assert error.exit_code == 3
    assert "no NVIDIA GPU" in error.message


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("verify",), 3, "no NVIDIA GPU that torch can use"),
        (("compile", "--arch", "sm_1"), 2, "--arch sm_1: unknown sm_1"),
        (("compile", "--only", "nobody"), 2, "--only nobody: no such kernel"),
    ],
)
def test_the_program_says_it_in_a_line_and_exits(
    arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsv4doctor", "kernels", *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    error = invoke("verify", "--device", "cuda:2").exception
    assert isinstance(error, UsageError)
    assert "torch sees 2" in error.message


def test_the_interpreter_proves_nothing_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    error = invoke("verify").exception
    assert isinstance(error, UsageError)
    assert error.message == "TRITON_INTERPRET is set: no kernel runs on the GPU"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify", "--only", "nobody"), "--only nobody"),
        (("verify", "--device", "tpu"), "--device tpu"),
        (("compile", "--arch", "sm_1"), "--arch sm_1"),
        (("bench", "--sglang", "no-such-folder"), "no-such-folder"),
        (("list", "--output", "no-such-folder/file"), "--output no-such-folder/file"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], said: str) -> None:
    error = invoke(*arguments).exception
    assert isinstance(error, UsageError)
    assert said in error.message


@pytest.mark.usefixtures("tiny")
def test_bench_prints_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "measure_rates", lambda device: bench.Rates(1e12, 1e14))
    monkeypatch.setattr(
        bench.run_cases, "__defaults__", ("cuda", lambda calls, graph: float(calls[0]()))
    )
    done = invoke("bench", "--output", str(tmp_path / "results.json"))
    assert done.exit_code == 0
    assert "torch.mm 40.0 (4.0x)" in done.stdout
    row = json.loads((tmp_path / "results.json").read_text())["rows"][0]
    assert (row["ours_us"], row["of_floor"]) == (10.0, pytest.approx(1.0))


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    error = invoke("bench", "--plot", "out.png").exception
    assert isinstance(error, UsageError)
    assert "dsv4doctor[bench]" in str(error.hint)


@pytest.mark.parametrize("columns", ["60", "80", "120", "200"])
def test_no_path_or_number_is_broken(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert run(["kernels", "list"]) == 0
    words = capsys.readouterr().out.split()
    for meta in map(catalog.meta, catalog.select(())):
        assert {meta.name, *meta.replaces, f"{meta.error_bar:g}"} <= set(words)
