"""Our own kernels run where they were verified, and are promised nowhere else."""

import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from patching_trees import insisting, job, part_of

from dsv4doctor import target
from dsv4doctor.cli import run
from dsv4doctor.evidence.grounds import Grounds
from dsv4doctor.evidence.stamped import verified_here
from dsv4doctor.fixes import ALL
from dsv4doctor.kernels import stamps
from dsv4doctor.kernels.verify import Checked, record
from dsv4doctor.models import (
    ARCHS,
    ArgChange,
    Gpu,
    GpuFacts,
    Kernel,
    Launch,
    SglangTree,
    Snapshot,
    Stack,
    Verdict,
)
from dsv4doctor.patching import verifying, work
from dsv4doctor.patching.render import as_json, console
from dsv4doctor.report.console import Style
from dsv4doctor.rules.samples import DRAFT_CUTLASS, DRAFT_TRTLLM, MAIN_TRTLLM, facts
from dsv4doctor.verdicts import judge, judge_kernel

NAME = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
PLATFORM = stamps.Platform(NAME, "12.0", "580.65", "2.11.0+cu130", "3.6.0")
GOOD = (Checked("moe_mxfp4", "one", 0.001, 0.01, 0.1),)
ONE = Gpu(0, NAME, ARCHS["sm_120"], 96 << 30)
HERE = Snapshot(
    "0",
    "",
    GpuFacts((ONE, replace(ONE, index=1)), "580.65"),
    SglangTree("/site", "0.5.23", "installed"),
    Stack(sys.executable, "3.12.3", ()),
    None,
    Launch("command line", None, {}, "model", ()),
    {},
)


@pytest.fixture(autouse=True)
def _verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stamp of this machine, and a Python with torch and Triton."""
    monkeypatch.setenv(stamps.STATE_VARIABLE, str(tmp_path / "state"))
    site = tmp_path / "site"
    for name, file, version in (
        ("torch", "version.py", "2.11.0+cu130"),
        ("triton", "__init__.py", "3.6.0"),
    ):
        (site / name).mkdir(parents=True)
        (site / name / file).write_text(f"import os\n__version__ = '{version}'\n")
    found = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        if not (site / name).is_dir():
            return found(name, package)
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(site / name)]
        return spec

    monkeypatch.setattr(importlib.util, "find_spec", find)
    path = record("moe_mxfp4", GOOD, PLATFORM)
    assert path is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), "made": "2026-11-29T20:00:00Z"}))


def test_a_kernel_with_a_stamp_of_this_machine_runs() -> None:
    verified = verified_here(HERE, "NVML")
    assert verified == {"moe_mxfp4": "2026-11-29"}
    grounds = Grounds(verified=verified)
    symbol = Kernel("triton:dsv4doctor.kernels.grouped_gemm._product_kernel", None)
    ours = replace(DRAFT_CUTLASS, quant_method="Dsv4DoctorMxfp4MoEMethod", kernel=symbol)
    judged = judge(ours, ARCHS["sm_120"], grounds=grounds)
    assert judged.verdict is Verdict.RUNS
    assert "verified on this machine on 2026-11-29" in judged.reason
    assert judge(ours, ARCHS["sm_120"]).verdict is Verdict.UNKNOWN
    patched = facts("sm_120", [ours])
    assert patched.trace is not None
    verified_trace = replace(patched.trace, layers=(judged,))
    assert verifying.of_trace(replace(patched, trace=verified_trace)) == []
    assert verifying.stops_for(verified_trace) == ("moe_mxfp4",)
    other = "triton:dsv4doctor.kernels.indexer_logits._logits_kernel"
    verdict, reason = judge_kernel(other, ARCHS["sm_120"], grounds=grounds)
    assert verdict is Verdict.UNKNOWN
    assert "kernels verify --only indexer_logits" in reason


@pytest.mark.wheels
def test_a_plan_says_what_was_verified_here_already(
    sglang_tree: Callable[[str], SglangTree], tmp_path: Path
) -> None:
    files = dict.fromkeys(file for fix in ALL for file in fix.files)
    tree = part_of(sglang_tree("0.5.18"), tmp_path / "tree", files)
    hybrid = facts("sm_120", [*MAIN_TRTLLM, DRAFT_TRTLLM])
    assert hybrid.trace is not None
    routed = "flashinfer_trtllm_routed"
    trace = replace(
        hybrid.trace,
        resolved_args={"moe_runner_backend": routed},
        arg_changes=(ArgChange("moe_runner_backend", "auto", routed, None),),
    )

    def said(source: str) -> tuple[str, list[str]]:
        found = replace(hybrid, snapshot=HERE, arch_source=source, trace=trace)
        options: dict[str, object] = {"before": found, "kernel": "triton"}
        outcome = work.make_plan(job(tree, tmp_path / "state", ALL, **options))
        plain = json.loads(as_json(outcome))
        asked = [one for one in outcome.notes if "dsv4doctor's own kernel" in one]
        summaries = [one["summary"] for one in plain["fixes"] if one["status"] == "planned"]
        shown = " ".join(console(outcome, Style(10_000)).split())
        assert all(" ".join(text.split()) in shown for text in [*asked, *summaries])
        return "\n".join(summaries), asked

    until = "until `dsv4doctor kernels verify --only moe_nvfp4` was run on the serving machine"
    summaries, notes = said("--arch")
    assert f"The server stops while it builds the model {until}." in summaries
    assert "Until `dsv4doctor kernels verify --only dense_glue` on the serving" in summaries
    assert len(notes) == 2
    assert all("the server stops while it builds the model until" in note for note in notes)
    assert record("moe_nvfp4", (replace(GOOD[0], kernel="moe_nvfp4"),), PLATFORM)
    summaries, notes = said("NVML")
    assert "stops" not in summaries
    assert summaries.count("The kernel was verified on this machine on 20") == 1
    assert "Until `dsv4doctor kernels verify --only dense_glue`" in summaries  # that one was not
    assert len(notes) == 2
    assert all("verified on this machine on 20" in note for note in notes)


def _gpus(*gpus: Gpu, driver: str | None = "580.65", unavailable: str | None = None) -> Snapshot:
    return replace(HERE, gpu=GpuFacts(gpus, driver, unavailable))


@pytest.mark.wheels
def test_a_tree_that_is_served_here_says_what_was_verified(
    sglang_tree: Callable[[str], SglangTree],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--status and --revert --only, which need no launch."""
    files = dict.fromkeys(file for fix in ALL for file in fix.files)
    tree = part_of(sglang_tree("0.5.18"), tmp_path / "tree", files)
    installed = replace(tree, origin="installed")
    monkeypatch.setattr(target, "read_stack", lambda *_: (HERE.stack, installed))
    monkeypatch.setattr(target, "read_gpus", lambda: HERE.gpu)
    state = tmp_path / "state"  # where the stamps are
    monkeypatch.setattr(target, "named_tree", lambda *_: tree)

    def said(*arguments: str) -> str:
        run(["fix", *arguments])
        found = capsys.readouterr()
        return " ".join(f"{found.out} {found.err}".split())

    ours = "routed experts that go to dsv4doctor's own kernel:"
    until = f"{ours} the server stops while it builds the model until"
    here = f"{ours} verified on this machine on 20"
    for is_verified in (False, True):
        work.apply(job(tree, state, insisting(), only=("FIX102", "FIX103")))
        if is_verified:
            assert record("moe_nvfp4", (replace(GOOD[0], kernel="moe_nvfp4"),), PLATFORM)
        expected = here if is_verified else until
        reverted = said("--revert", "--only", "FIX103")
        assert expected in reverted
        assert "still in: FIX102" in reverted
        state_file = job(tree, state, ALL).store.path
        kept = state_file.read_bytes()
        state_file.unlink()  # as after `git apply`: whatever is in the files counts
        assert expected in said("--status")
        assert until in said("--status", "--sglang", tree.root)  # of another Python, or none
        assert until in said("--status", "--env", "HOME=/srv")
        state_file.write_bytes(kept)
        run(["fix", "--revert"])
        capsys.readouterr()


@pytest.mark.parametrize(
    ("snapshot", "source"),
    [
        pytest.param(HERE, "--arch", id="--arch, of the same GPU"),
        pytest.param(HERE, "snapshot", id="a snapshot"),
        pytest.param(_gpus(replace(ONE, name="NVIDIA RTX 5090")), "NVML", id="another GPU"),
        pytest.param(_gpus(replace(ONE, arch=ARCHS["sm_121"])), "NVML", id="another capability"),
        pytest.param(_gpus(ONE, replace(ONE, name="NVIDIA RTX 5090")), "NVML", id="two kinds"),
        pytest.param(_gpus(ONE, driver="590.10"), "NVML", id="another driver"),
        pytest.param(_gpus(ONE, unavailable="GPU 1: no answer"), "NVML", id="a GPU unread"),
        pytest.param(
            replace(HERE, sglang=SglangTree("/a", "0.5.14", "wheel")), "NVML", id="a release"
        ),
        pytest.param(
            replace(HERE, stack=Stack("/other/bin/python", "3.12.3", ())), "NVML", id="a Python"
        ),
        pytest.param(
            replace(HERE, launch=Launch("s.sh", 1, {"HOME": "/srv"}, "m", ())), "NVML", id="a home"
        ),
    ],
)
def test_elsewhere_it_stays_unknown(snapshot: Snapshot, source: str) -> None:
    assert verified_here(snapshot, source) == {}


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path: path.unlink(), id="taken away"),
        pytest.param(lambda path: path.write_text("{"), id="damaged"),
        pytest.param(
            lambda path: path.write_text(path.read_text().replace('"source": "', '"source": "0')),
            id="of another source",
        ),
        pytest.param(
            lambda path: path.write_text(path.read_text().replace("+cu130", "+cu126")),
            id="of another torch",
        ),
    ],
)
def test_a_stamp_that_does_not_count_promises_nothing(spoil: Callable[[Path], None]) -> None:
    spoil(stamps.path_of("moe_mxfp4", PLATFORM))
    assert verified_here(HERE, "NVML") == {}


def test_no_torch_and_no_folder_are_no_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(stamps.STATE_VARIABLE, "~no-such-user/state")
    assert verified_here(HERE, "NVML") == {}
    (tmp_path / "site" / "torch" / "version.py").unlink()
    assert verified_here(HERE, "NVML") == {}
