"""The harness of `--level full`: real ranks over gloo on the CPU, and workers that hang or fail."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4doctor.cli import run
from dsv4doctor.facts.measure import Bench, measure
from dsv4doctor.models import Arch, Gpu, GpuFacts, Measurement
from dsv4doctor.rules import communication_measured
from dsv4doctor.target import Target, measured

_PYTHON = Path(sys.executable)
_TWO = GpuFacts(tuple(Gpu(index, "board", Arch(12, 0), 1 << 30) for index in range(2)))
_ONE = GpuFacts(_TWO.gpus[:1])
_CPU = Bench("gloo", ("cpu", "cpu"), megabytes=1, seconds=120.0)


def _worker(folder: Path, text: str) -> Bench:
    path = folder / "worker.py"
    path.write_text(f"import os, sys, time, json\n{text}\n")
    return Bench(worker=path, seconds=2.0)


def test_real_ranks_and_copies() -> None:
    """With the worker itself: two processes of torch, a store in a file, gloo instead of NCCL."""
    found, note = measure(_PYTHON, os.environ, _TWO, bench=_CPU)
    assert note is None
    assert [(one.name, one.outcome) for one in found] == [
        ("all-reduce", "ok"),
        ("all-reduce without P2P", "ok"),
        ("copy to GPU", "ok"),
        ("copy from GPU", "ok"),
        ("copy between GPUs", "ok"),
    ]
    assert all(one.gigabytes_per_second for one in found)


def test_a_hang_is_a_result(tmp_path: Path) -> None:
    """Only with peer-to-peer, and only in one rank, as on the machines that do it."""
    bench = _worker(
        tmp_path,
        "if sys.argv[1] == 'copies': sys.exit(0)\n"
        "if os.environ['NCCL_P2P_DISABLE'] == '0' and sys.argv[4] == '1': time.sleep(600)\n"
        "print('torch says hello')\n"
        "print(json.dumps({'name': 'all-reduce', 'rate': 20.0 + int(sys.argv[4])}))",
    )
    started = time.monotonic()
    found, note = measure(_PYTHON, os.environ, _TWO, bench=bench)
    assert time.monotonic() - started < 30
    assert note is None
    by_name = {one.name: one for one in found}
    assert by_name["all-reduce"].outcome == "hang"
    assert by_name["all-reduce"].detail == "no answer in 2 s"
    assert by_name["all-reduce without P2P"].outcome == "ok"
    assert by_name["all-reduce without P2P"].gigabytes_per_second == 20.0
    assert by_name["copy to GPU"].outcome == "failed"
    assert by_name["copy to GPU"].detail == "it ended without a result"


def test_nothing_is_left_running(tmp_path: Path) -> None:
    """Not the workers, and not what they started."""
    bench = _worker(
        tmp_path,
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path)!r} + f'/{{child.pid}}.pid', 'w').close()\n"
        "time.sleep(600)",
    )
    measure(_PYTHON, os.environ, _ONE, bench=bench)
    (number,) = (int(path.stem) for path in tmp_path.glob("*.pid"))
    deadline = time.monotonic() + 10
    while _is_running(number) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(number)


def _is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_failure_names_its_reason_and_stops_the_other_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4doctor.facts.measure._GRACE", 0.3)
    bench = _worker(
        tmp_path,
        "if sys.argv[1] == 'copies':\n"
        "    print(json.dumps({'begun': 'copy to GPU'}))\n"
        "    print(json.dumps({'name': 'copy to GPU', 'rate': 25.0}))\n"
        "    print(json.dumps({'begun': 'copy from GPU'}), flush=True)\n"
        "    sys.exit('CUDA error: an illegal memory access was encountered')\n"
        "if sys.argv[4] == '0': sys.exit('ncclUnhandledCudaError: Call to CUDA function failed.')\n"
        "time.sleep(600)",
    )
    bench = Bench(worker=bench.worker, seconds=60.0)
    started = time.monotonic()
    found, _ = measure(_PYTHON, os.environ, _TWO, bench=bench)
    assert time.monotonic() - started < 30
    assert [(one.name, one.outcome) for one in found] == [
        ("all-reduce", "failed"),
        ("all-reduce without P2P", "failed"),
        ("copy to GPU", "ok"),
        ("copy from GPU", "failed"),
    ]
    assert found[0].detail == "ncclUnhandledCudaError: Call to CUDA function failed."
    assert "illegal memory access" in found[3].detail


def test_a_real_failure_is_told_in_its_own_words() -> None:
    """Torch's exception, and not the warning that its clean-up prints behind it."""
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "no-such-card"}
    found, note = measure(_PYTHON, variables, _TWO, bench=_CPU)
    assert note is None
    by_name = {one.name: one for one in found}
    assert by_name["all-reduce"].outcome == "failed"
    assert by_name["all-reduce"].detail.startswith("RuntimeError: ")
    assert "no-such-card" in by_name["all-reduce"].detail
    assert "\n" not in by_name["all-reduce"].detail
    assert by_name["copy to GPU"].outcome == "ok"


def test_which_gpus_are_measured(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    bench = _worker(
        tmp_path,
        f"open({str(seen)!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'] + ' ' + sys.argv[2])\n"
        "print(json.dumps({'begun': 'copy to GPU'}))\n"
        "print(json.dumps({'name': 'copy to GPU', 'rate': 25.0}))",
    )
    many = GpuFacts(tuple(Gpu(index, "b", Arch(12, 0), 1) for index in range(4)))
    for said, expected in (("3", "3 cuda:0"), ("2,3", "2,3 cuda:0,cuda:1"), ("", "0,1 ")):
        measure(_PYTHON, {**os.environ, "CUDA_VISIBLE_DEVICES": said}, many, bench=bench)
        assert seen.read_text().startswith(expected)


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        ("print(json.dumps({'unavailable': 'torch sees no GPU'})); sys.exit(3)", "sees no GPU"),
        ("sys.exit(3)", "torch cannot be used"),
    ],
)
def test_nothing_measured_is_said(tmp_path: Path, worker: str, said: str) -> None:
    found, note = measure(_PYTHON, os.environ, _TWO, bench=_worker(tmp_path, worker))
    assert found == ()
    assert note is not None
    assert said in note


def test_no_gpu_and_no_interpreter(tmp_path: Path) -> None:
    found, note = measure(_PYTHON, os.environ, GpuFacts(()))
    assert (found, note) == ((), "--level full: nothing was measured, no GPU on this machine")
    found, note = measure(tmp_path / "python", os.environ, _TWO)
    assert found == ()
    assert note is not None
    assert "cannot be started" in note


def test_a_snapshot_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--level", "full", "--snapshot", str(tmp_path / "box.json")]) == 2
    assert "--level full and a snapshot" in capsys.readouterr().err


def test_what_was_measured_is_a_fact_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the target to the rule: a launch with its own NCCL variables, and what came of them."""
    example = next(one for one in communication_measured.EXAMPLES if one.expect)
    snapshot, trace = example.facts.snapshot, example.facts.trace
    assert snapshot.host is not None
    assert snapshot.launch is not None
    assert snapshot.checkpoint is not None
    assert trace is not None
    asked: list[str] = []

    def hangs(
        interpreter: Path, variables: dict[str, str], *_: object
    ) -> tuple[tuple[Measurement, ...], str | None]:
        asked.append(variables["NCCL_IB_DISABLE"])
        return (Measurement("all-reduce", "hang", None, "no answer in 60 s"),), "a note"

    monkeypatch.setattr("dsv4doctor.target.measure", hangs)
    target = Target(
        snapshot=replace(snapshot, host=replace(snapshot.host, measured=())),
        arch=example.facts.arch,
        arch_source="NVML",
        tree=trace.sglang,
        interpreter=_PYTHON,
        checkpoint=snapshot.checkpoint,
        model_path=Path("model"),
        launch=replace(snapshot.launch, environment={"NCCL_IB_DISABLE": "1"}),
        environment={},
    )
    after = measured(target)
    assert (asked, after.notes) == (["1"], ("a note",))
    facts = replace(example.facts, snapshot=replace(after.snapshot, launch=target.launch))
    (finding,) = communication_measured.check(facts)
    assert (finding.severity.value, finding.subject) == ("error", "all-reduce")
    assert "no answer in 60 s" in finding.evidence
    assert finding.remedy is not None
    assert finding.remedy.text.startswith("Measure again without NCCL_IB_DISABLE; ")
