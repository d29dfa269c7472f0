"""The whole way from a launch to findings, on real SGLang trees and full-depth checkpoints."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4doctor import audit
from dsv4doctor.asked import Options
from dsv4doctor.audit import Settings
from dsv4doctor.models import (
    Kernel,
    Outcome,
    Report,
    Role,
    RuleResult,
    Severity,
    SglangTree,
    Verdict,
)
from dsv4doctor.rules import RULES
from dsv4doctor.rules.samples import MAIN_CUTLASS, MAIN_TRTLLM, facts
from dsv4doctor.target import resolve

_EAGLE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"),
)
_TRITON = (
    *("--moe-runner-backend", "triton"),
    *("--speculative-moe-runner-backend", "triton"),
)
_HYBRID = "nvidia__DeepSeek-V4-Flash-NVFP4"
_STOCK = "deepseek-ai__DeepSeek-V4-Flash"


@pytest.fixture
def look(
    checkpoint: Callable[..., Path], sglang_tree: Callable[[str], SglangTree]
) -> Callable[..., Report]:
    """`look(version, arch, spec, *flags, **settings)`: the report of that launch."""

    def audited(version: str, arch: str, spec: str, *flags: str, **settings: bool) -> Report:
        options = Options(
            model=str(checkpoint(spec)),
            flags=("--tp", "4", *flags),
            sglang=sglang_tree(version).root,
            python=sys.executable,
            arch=arch,
        )
        return audit.audit(resolve(options), Settings(**settings))

    return audited


def _found(report: Report) -> list[tuple[str, str, Severity]]:
    return [(found.rule, found.subject, found.severity) for found in report.findings]


@pytest.mark.wheels
def test_acceptance_story(look: Callable[..., Report]) -> None:
    """0.5.14, hybrid NVFP4, both flags triton: the draft cannot run and no flag was asked."""
    report = look("0.5.14", "sm_120", _HYBRID, *_TRITON, *_EAGLE)
    assert report.facts.trace is not None
    assert len(report.facts.trace.of(Role.MAIN)) == 43
    draft = next(found for found in report.findings if found.rule == "DSV102")
    assert draft.subject == "model.decoder.mlp.experts"
    assert "Mxfp4FlashinferTrtllmMoEMethod" in draft.message
    assert "modelopt_quant.py:1389" in draft.message
    assert "trtllm_fp4_block_scale" in draft.consequence
    assert "FlashInfer 0.6.12" in draft.consequence
    evidence = "\n".join(draft.evidence)
    assert (
        "--moe-runner-backend triton and --speculative-moe-runner-backend triton were" in evidence
    )
    assert draft.remedy is not None
    # CUTLASS would drop the clamp on this release; what is recommended was traced.
    assert draft.remedy.commands
    servers = [text for text in draft.remedy.commands if text.startswith("python ")]
    assert all("--moe-runner-backend marlin" in text for text in servers)
    patches = [text for text in draft.remedy.commands if text.startswith("dsv4doctor fix ")]
    assert "--only FIX101 --only FIX103" in patches[0]
    assert "--moe-runner-backend flashinfer_cutlass" in patches[0]
    assert not any("--speculative" in text for text in servers)
    assert _found(report)[0][0] == "DSV102"
    assert audit.exit_code(report, Severity.ERROR, strict=True) == 1


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("version", "arch", "spec", "flags"),
    [
        ("0.5.17", "sm_120", _STOCK, _EAGLE),
        ("0.5.23", "sm_120", _STOCK, _EAGLE),
        ("0.5.14", "sm_100", _HYBRID, _EAGLE),
        ("0.5.23", "sm_103", _HYBRID, _EAGLE),
    ],
)
def test_what_runs_gives_no_finding(
    look: Callable[..., Report], version: str, arch: str, spec: str, flags: tuple[str, ...]
) -> None:
    report = look(version, arch, spec, *flags)
    # FlashInfer 0.6.15 of 0.5.17: that its attention may read unwritten memory is inferred only.
    inferred = [("DSV202", "sparse MLA attention", Severity.INFO)]
    assert _found(report) == (inferred if version == "0.5.17" else [])
    assert report.facts.trace is not None
    assert {layer.verdict for layer in report.facts.trace.layers} == {Verdict.RUNS}
    assert audit.exit_code(report, Severity.WARNING, strict=True) == 0


@pytest.mark.wheels
@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
def test_hybrid_without_speculation_is_about_the_main_experts_only(
    look: Callable[..., Report], version: str
) -> None:
    report = look(version, "sm_120", _HYBRID)
    experts, *others = _found(report)
    assert experts == ("DSV101", "model.layers.0-42.mlp.experts", Severity.ERROR)
    # 0.5.14 has the torch indexer and untuned Triton for dense FP8 on sm_12x, nothing better.
    old = [
        ("DSV204", "indexer", Severity.WARNING),
        ("DSV208", "dense FP8 layers", Severity.INFO),
    ]
    assert others == (old if version == "0.5.14" else [])
    finding = report.findings[0]
    assert any("auto -> flashinfer_trtllm_routed" in line for line in finding.evidence)
    assert finding.remedy is not None
    clamped = version == "0.5.23"
    said = any("flashinfer_cutlass" in text for text in finding.remedy.commands)
    assert said is clamped
    assert ("flashinfer_cutlass (drops swiglu_limit)" in finding.remedy.text) is not clamped


@pytest.mark.wheels
def test_what_sglang_raises_is_a_finding(look: Callable[..., Report]) -> None:
    report = look("0.5.23", "sm_120", _HYBRID, "--moe-runner-backend", "triton", alternatives=False)
    ((rule, subject, severity),) = _found(report)
    assert (rule, subject, severity) == (
        "DSV105",
        "model.layers.0-42.mlp.experts",
        Severity.ERROR,
    )
    assert "NotImplementedError" in report.findings[0].message
    assert "modelopt_quant.py:" in report.findings[0].message


@pytest.mark.wheels
def test_snapshot_carries_a_launch_to_another_machine(
    checkpoint: Callable[..., Path],
    sglang_tree: Callable[[str], SglangTree],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dsv4doctor.facts.snapshot import text_of

    monkeypatch.setenv("DSV4DOCTOR_CACHE", str(tmp_path / "cache"))
    here = resolve(
        Options(
            model=str(checkpoint(_HYBRID)),
            flags=("--tp", "4", *_TRITON, *_EAGLE),
            sglang=sglang_tree("0.5.14").root,
            arch="sm_120",
        )
    )
    file = tmp_path / "box.json"
    plain = json.loads(text_of(here.snapshot))
    plain["checkpoint"]["path"] = "/on/the/other/machine"
    file.write_text(json.dumps(plain))
    there = resolve(Options(snapshot=file, arch="sm_120"))
    assert there.tree.version == "0.5.14"
    settings = Settings(alternatives=False)
    first, second = audit.audit(here, settings), audit.audit(there, settings)
    assert second.facts.trace is not None
    assert first.facts.trace is not None
    assert second.facts.trace.layers == first.facts.trace.layers
    assert _found(first) == _found(second)


@pytest.mark.wheels
def test_a_draft_that_was_never_built_is_no_clean_draft(
    checkpoint: Callable[..., Path], sglang_tree: Callable[[str], SglangTree]
) -> None:
    """SGLang raises while it builds the main model, and only the draft is asked for."""
    options = Options(
        model=str(checkpoint("canada-quant__DeepSeek-V4-Flash-W4A16-FP8")),
        flags=("--tp", "4", *_EAGLE),
        sglang=sglang_tree("0.5.23").root,
        python=sys.executable,
        arch="sm_120",
    )
    settings = Settings(roles=(Role.DRAFT,), alternatives=False)
    report = audit.audit(resolve(options), settings)
    assert report.facts.trace is not None
    assert [error.phase for error in report.facts.trace.errors] == ["main"]
    assert audit.exit_code(report, Severity.ERROR, strict=False) == 1


@pytest.mark.wheels
def test_experts_built_for_another_format_than_stored_do_not_run(
    checkpoint: Callable[..., Path], sglang_tree: Callable[[str], SglangTree]
) -> None:
    """Told that the experts are FP8, SGLang builds them so, and its forward reaches a kernel:
    it never looks at the packed FP4 in the files before it loads them."""
    options = Options(
        model=str(checkpoint(_STOCK)),
        flags=("--tp", "4", "--moe-runner-backend", "triton"),
        sglang=sglang_tree("0.5.14").root,
        python=sys.executable,
        arch="sm_120",
        env=("SGLANG_DSV4_FP4_EXPERTS=0",),
    )
    report = audit.audit(resolve(options), Settings(alternatives=False))
    assert report.facts.trace is not None
    layer = report.facts.trace.layers[0]
    assert layer.kernel is not None
    assert layer.weights == "float8_e4m3fn"
    assert layer.verdict is Verdict.FAILS
    assert layer.reason == (
        "Fp8MoEMethod needs FP8 block for its float8_e4m3fn weights, stored is MXFP4"
    )
    assert _found(report)[0][0] == "DSV108"


def test_a_model_without_experts_that_nothing_stopped_is_not_determined() -> None:
    trace = facts("sm_120", [*MAIN_CUTLASS]).trace
    assert trace is not None
    both = (Role.MAIN, Role.DRAFT)
    assert audit._with_gaps(trace, both).unresolved == ()
    speculating = replace(trace, resolved_args={"speculative_algorithm": "EAGLE"})
    (said,) = audit._with_gaps(speculating, both).unresolved
    assert said.startswith("draft: ")
    empty = replace(trace, layers=())
    (said,) = audit._with_gaps(empty, both).unresolved
    assert said.startswith("main: ")
    assert audit._with_gaps(empty, (Role.DRAFT,)).unresolved == ()
    stopped = replace(empty, unresolved=("arguments: KeyError",))
    assert audit._with_gaps(stopped, both) == stopped


def _report(*results: RuleResult) -> Report:
    return Report("0", facts("sm_120", [*MAIN_CUTLASS]), results)


def test_exit_codes() -> None:
    bad = facts("sm_120", [*MAIN_TRTLLM])
    report = Report("0", bad, audit.run_rules(RULES, bad))
    assert audit.exit_code(report, Severity.ERROR, strict=False) == 1
    assert audit.exit_code(report, None, strict=False) == 0
    skip = RuleResult("DSV1", "x", Outcome.SKIP, reason="no checkpoint was read")
    assert audit.exit_code(_report(skip), Severity.ERROR, strict=False) == 0
    assert audit.exit_code(_report(skip), Severity.ERROR, strict=True) == 3
    crash = RuleResult("DSV1", "x", Outcome.CRASH, reason="KeyError")
    assert audit.exit_code(_report(crash), None, strict=False) == 3
    assert audit.exit_code(_report(), Severity.INFO, strict=True) == 0


def test_what_is_unknown_is_never_exit_code_0_when_it_matters() -> None:
    new = [replace(layer, kernel=Kernel("brand.new_moe", None)) for layer in MAIN_CUTLASS]
    unknown = Report("0", facts("sm_120", new), ())
    assert audit.exit_code(unknown, Severity.ERROR, strict=False) == 0
    assert audit.exit_code(unknown, Severity.ERROR, strict=True) == 3
    none = [replace(layer, kernel=None, reason="KeyError: 'x'") for layer in MAIN_CUTLASS]
    assert audit.exit_code(Report("0", facts("sm_120", none), ()), None, strict=False) == 3
    stopped = facts("sm_120", [], unresolved=("draft: KeyError: 'x'",))
    assert audit.exit_code(Report("0", stopped, ()), None, strict=False) == 3
    untraced = replace(stopped, trace=None, trace_failure="killed")
    assert audit.exit_code(Report("0", untraced, ()), None, strict=False) == 3
    assert audit.undetermined(Report("0", untraced, ()), strict=False) == "killed"


def test_a_warning_fails_only_when_asked() -> None:
    sample = facts("sm_120", [*MAIN_CUTLASS])
    warned = audit.run_rules(RULES, facts("sm_120", [*MAIN_TRTLLM]))[0].findings[0]
    warned = replace(warned, severity=Severity.WARNING)
    report = Report("0", sample, (RuleResult("DSV1", "x", Outcome.FINDING, (warned,)),))
    assert audit.exit_code(report, Severity.ERROR, strict=False) == 0
    assert audit.exit_code(report, Severity.WARNING, strict=False) == 1
