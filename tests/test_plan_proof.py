"""Plans held against real SGLang releases: parsed by their own parsers, traced, made to run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from planning import boxed, standing

from dsv4doctor.cli import run
from dsv4doctor.errors import UsageError
from dsv4doctor.facts.snapshot import take, text_of
from dsv4doctor.launch import read_script
from dsv4doctor.models import (
    Alternative,
    HostFacts,
    Outcome,
    Remedy,
    Role,
    RuleResult,
    Severity,
    SglangTree,
)
from dsv4doctor.planning import prove as proving
from dsv4doctor.planning.build import Ask, plan
from dsv4doctor.planning.prove import Proof, prove
from dsv4doctor.planning.settings import with_flags
from dsv4doctor.rules.pd_pair import pair as sample

FLASH = "deepseek-ai__DeepSeek-V4-Flash"
HYBRID = "nvidia__DeepSeek-V4-Flash-NVFP4"
Builder = Callable[..., Path]
Trees = Callable[[str], SglangTree]


@pytest.fixture(scope="module")
def proved(checkpoint: Builder, sglang_tree: Trees) -> Callable[[str, str, Ask], Proof]:
    def work(name: str, version: str, ask: Ask) -> Proof:
        on = standing(checkpoint(name, experts=1), sglang_tree(version), ask)
        return prove(plan(ask, on), on, 300)

    return work


def test_what_does_not_run_is_replaced(proved: Callable[[str, str, Ask], Proof]) -> None:
    """SGLang would take kernels for SM100 alone."""
    proof = proved(HYBRID, "0.5.23", Ask(False, gpus="0-3"))
    assert proof.exit_code == 0
    (server,) = proof.plan.servers
    (backend,) = (flag for flag in server.flags if flag.name == "--moe-runner-backend")
    assert backend.why.startswith("traced:")
    (report,) = proof.reports
    assert report.facts.trace is not None
    assert not report.facts.trace.errors
    verdicts = {layer.verdict.value for layer in report.facts.trace.of(Role.MAIN)}
    assert verdicts <= {"runs", "fallback"}
    assert any(patch.startswith("FIX102, ") for patch in proof.plan.patches)


def test_prefill_of_a_torch_indexer_fits(proved: Callable[[str, str, Ask], Proof]) -> None:
    """8,192 new tokens at once would take 289 GiB at the context that is asked for."""
    proof = proved(HYBRID, "0.5.14", Ask(False, gpus="0-3"))
    (server,) = proof.plan.servers
    flags = {flag.name: flag for flag in server.flags}
    assert flags["--chunked-prefill-size"].values == ("1024",)
    assert "for the indexer's torch operations" in flags["--mem-fraction-static"].why
    assert (proof.exit_code, flags["--moe-runner-backend"].values) == (0, ("marlin",))
    assert len([note for note in proof.plan.notes if "modelopt_quant.py:2022" in note]) == 1


def test_a_switch_that_another_hot_path_needs_is_set(
    proved: Callable[[str, str, Ask], Proof],
) -> None:
    """SGLang would read prompts with a kernel for SM90 and SM100 alone."""
    proof = proved(FLASH, "0.5.15.post1", Ask(False, gpus="0-3"))
    assert proof.exit_code == 0
    shared = {one.name: one.values for one in proof.plan.shared}
    assert shared["SGLANG_OPT_FLASHMLA_SPARSE_PREFILL"] == ("0",)
    assert not any(finding.severity is Severity.ERROR for finding in proof.findings)


def test_the_other_side_changes_alike(checkpoint: Builder, sglang_tree: Trees) -> None:
    ask = Ask(True, speculative="auto")
    on = standing(checkpoint(FLASH, experts=1), sglang_tree("0.5.23"), ask)
    prefill, decode = plan(ask, on).servers
    words = prefill.words
    plain = words[: words.index("--speculative-algorithm")]
    changed = with_flags(decode, words, (*plain, "--moe-runner-backend", "marlin"), "why")
    assert not any(flag.name.startswith("--speculative") for flag in changed.flags)
    assert changed.words[-2:] == ("--moe-runner-backend", "marlin")
    kept = [flag for flag in decode.flags if not flag.name.startswith("--speculative")]
    assert list(changed.flags[:-1]) == kept


def test_a_flag_that_the_release_does_not_know(checkpoint: Builder, sglang_tree: Trees) -> None:
    ask = Ask(False, gpus="0-3", flags=("--gpu-memory-utilization", "0.9"))
    on = standing(checkpoint(FLASH, experts=1), sglang_tree("0.5.23"), ask)
    with pytest.raises(UsageError, match="does not take these flags") as raised:
        prove(plan(ask, on), on, 300)
    assert "--mem-fraction-static" in str(raised.value.hint)


# ------------------------------------------------------------------------------ command line


@pytest.fixture(scope="module")
def box(checkpoint: Builder, sglang_tree: Trees, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of a machine with two nodes of four GPUs."""
    on = standing(checkpoint(FLASH, experts=1), sglang_tree("0.5.23"), Ask(True))
    base = on.target.snapshot
    taken = take(
        gpu=boxed(),
        sglang=base.sglang,
        stack=None,
        checkpoint=base.checkpoint,
        launch=replace(on.target.launch, flags=("--tp", "8")),
        environment={},
        host=HostFacts(may_set_memory_policy=True, numa_nodes=(0, 1)),
    )
    file = tmp_path_factory.mktemp("snapshot") / "box.json"
    file.write_text(text_of(taken))
    return file


def test_from_a_snapshot_to_scripts(
    box: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deploy"
    words = ["plan", "pd", "--snapshot", str(box), "--out", str(out), "--explain"]
    assert run(words) == 0
    said = capsys.readouterr()
    assert "prefill: GPU 0, 1, 2, 3, NUMA node 0" in said.out
    assert "  --tp-size 4\n      all 4 GPUs hold one copy of the model\n" in said.out
    assert said.err.rstrip().endswith("written; sound")
    launch = read_script(out / "decode.sh", {})
    assert launch.numa_nodes == (1,)
    assert json.loads((out / "grafana-dashboard.json").read_text())["panels"]
    assert run(words) == 2
    assert "already there" in capsys.readouterr().err
    assert run([*words, "--force", "--kind", "compose"]) == 0
    assert (out / "compose.yaml").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--arch", "sm_120"], "no GPU to plan for"),
        (["--arch", "sm_120", "--gpus", "0-3"], "--gpu-memory"),
        (["--gpus", "0-"], "--gpus 0-: 0- is no GPU"),
        (["--arch", "sm_120", "--gpus", "0-2", "--gpu-memory", "95"], "3 GPUs"),
        (["--arch", "sm_120", "--gpus", "0", "--gpu-memory", "95"], "1 GPU: prefill and decode"),
        (["--env", "x"], "--env x"),
        (["--out", ""], "--out: no folder"),
        (
            ["--arch", "sm_120", "--kind", "systemd", "--gpus", "0-1", "--gpu-memory", "95"],
            "Python",
        ),
        (["--context", "12"], "--context"),
        (["--arch", "sm_120", "--gpus", "0-1", "--gpu-memory", "95", "--", "--tp", "8"], "--tp"),
    ],
)
def test_one_clear_line(
    words: list[str],
    said: str,
    checkpoint: Builder,
    sglang_tree: Trees,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, tree = checkpoint(FLASH, experts=1), sglang_tree("0.5.23")
    place = ["--sglang", tree.root, "--out", str(tmp_path / "out")]
    assert run(["plan", "pd", str(model), *place, *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(["plan", "single", "m", "--out", str(tmp_path / "file" / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err


# ------------------------------------------------------------------------------ what is taken over


def test_a_variable_stays_only_where_it_helps(
    checkpoint: Builder, sglang_tree: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedies of two findings name a variable each; one of them cures its finding."""
    ask = Ask(True)
    on = standing(checkpoint(FLASH, experts=1), sglang_tree("0.5.23"), ask)
    seen: list[set[str]] = []

    def audits(current, ground, timeout, progress):  # type: ignore[no-untyped-def]
        names = {one.name for one in current.shared}
        seen.append(names)
        other = "From a later release on it is the default (SGLANG_OPT_FP8_WO_A_GEMM=1)."
        findings = [_finding("DSV901", other)]
        findings += [_finding("DSV900", "Export SGLANG_OPT_USE_TILELANG_INDEXER=1.")]
        if "SGLANG_SM120_FLASHMLA_BACKEND" not in names:
            findings.append(_finding("DSV201", "Export SGLANG_SM120_FLASHMLA_BACKEND=triton."))
        return tuple(_report(current, ground, server, findings) for server in current.servers)

    monkeypatch.setattr(proving, "_audits", audits)
    proof = prove(plan(ask, on), on, 300)
    names = [one.name for one in proof.plan.shared]
    assert names == ["CUDA_DEVICE_ORDER", "SGLANG_SM120_FLASHMLA_BACKEND"]
    assert proof.plan.shared[1].values == ("triton",)
    assert any("SGLANG_OPT_USE_TILELANG_INDEXER" in one for one in seen)


def test_graphs_are_capped_where_a_finding_asks(
    checkpoint: Builder, sglang_tree: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Ask(True)
    on = standing(checkpoint(FLASH, experts=1), sglang_tree("0.5.23"), ask)

    def audits(current, ground, timeout, progress):  # type: ignore[no-untyped-def]
        return tuple(
            _report(
                current, ground, server, [_finding("DSV602", "cap with --cuda-graph-max-bs 8.")]
            )
            for server in current.servers
        )

    monkeypatch.setattr(proving, "_audits", audits)
    prefill, decode = prove(plan(ask, on), on, 300).plan.servers
    (graphs,) = (flag for flag in decode.flags if flag.name == "--cuda-graph-max-bs-decode")
    assert graphs.values == ("8",)
    assert graphs.why.startswith("DSV602: ")
    assert "--cuda-graph-max-bs-decode" not in prefill.words


def test_an_error_makes_a_plan_unsound(
    checkpoint: Builder, sglang_tree: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Ask(True)
    on = standing(checkpoint(FLASH, experts=1), sglang_tree("0.5.23"), ask)

    def audits(current, ground, timeout, progress):  # type: ignore[no-untyped-def]
        wrong = [_finding("DSV101", "no way", Severity.ERROR)]
        other = Alternative("--moe-runner-backend x", ("x",), "the trace failed")
        reports = [_report(current, ground, server, wrong) for server in current.servers]
        return tuple(
            replace(report, facts=replace(report.facts, alternatives=(other,)))
            for report in reports
        )

    monkeypatch.setattr(proving, "_audits", audits)
    proof = prove(plan(ask, on), on, 300)
    assert proof.exit_code == 1
    assert proof.plan.problems[0].startswith("prefill: DSV101 ")


def _finding(rule, remedy, severity=Severity.WARNING):  # type: ignore[no-untyped-def]
    from dsv4doctor.models import Finding

    return Finding(rule, severity, "x", f"{rule} is wrong.", "It is.", (), (), Remedy(remedy))


def _report(current, ground, server, findings):  # type: ignore[no-untyped-def]
    from dsv4doctor.models import Facts, Report, Trace

    target = proving.target_of(current, server, ground.target)
    base = sample().trace
    assert base is not None
    trace = replace(base, sglang=target.tree)
    assert isinstance(trace, Trace)
    facts = Facts(target.snapshot, target.arch, "--arch", trace)
    found = (RuleResult("DSV900", "t", Outcome.FINDING, tuple(findings)),)
    return Report("0", facts, found)
