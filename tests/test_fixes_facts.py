"""Who needs a fix, which layers it changes, and what its proof says."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4doctor import fixes
from dsv4doctor.fixes import edit
from dsv4doctor.models import (
    ARCHS,
    ArgChange,
    Facts,
    HotPath,
    Kernel,
    Layer,
    Location,
    Role,
    SglangError,
    Verdict,
)
from dsv4doctor.rules import layer_unknown
from dsv4doctor.rules.samples import (
    CALL_WITH_CLAMP,
    CALL_WITHOUT_CLAMP,
    DRAFT_CUTLASS,
    DRAFT_TRTLLM,
    MAIN_CUTLASS,
    MAIN_NVFP4_CUTLASS,
    MAIN_TRTLLM,
    facts,
    scene,
)
from dsv4doctor.trace.worker import ourselves
from dsv4doctor.verdicts import judge

BY_ID = {fix.id: fix for fix in fixes.ALL}
AUTO = ArgChange("moe_runner_backend", "auto", "flashinfer_trtllm_routed", Location("hook.py", 1))


def hybrid(arch: str) -> Facts:
    """The hybrid checkpoint with EAGLE and no backend flag."""
    found = facts(arch, [*MAIN_TRTLLM, DRAFT_TRTLLM])
    assert found.trace is not None
    return replace(found, trace=replace(found.trace, arg_changes=(AUTO,)))


def with_paths(found: Facts, *paths: HotPath) -> Facts:
    assert found.trace is not None
    return replace(found, trace=replace(found.trace, paths=paths))


def path(name: str, symbol: str, detail: str = "") -> HotPath:
    kernel = Kernel(symbol, None)
    return HotPath(name, Role.MAIN, (), None, kernel, None, (), Verdict.UNKNOWN, "", detail)


def test_ids_and_files_are_as_the_planner_expects() -> None:
    assert sorted(BY_ID) == [f"FIX10{n}" for n in range(1, 8)]
    for fix in fixes.ALL:
        assert fix.examples
        assert {type(fix.plan(e.before, e.choice)) for e in fix.examples} >= {
            e.outcome for e in fix.examples
        }
        for example in fix.examples:
            assert set(example.before) <= set(fix.files)


@pytest.mark.parametrize(
    ("arch", "needed"),
    [("sm_120", True), ("sm_121", True), ("sm_90", True), ("sm_100", False), ("sm_103", False)],
)
def test_the_draft_needs_fix101_where_its_kernel_is_missing(arch: str, needed: bool) -> None:
    assert bool(BY_ID["FIX101"].needed(hybrid(arch))) is needed


def test_a_draft_that_runs_needs_nothing() -> None:
    assert BY_ID["FIX101"].needed(facts("sm_120", [*MAIN_CUTLASS, DRAFT_CUTLASS])) is None


def test_fix101_proves_every_draft_layer() -> None:
    before = hybrid("sm_120")
    fix = BY_ID["FIX101"]
    [draft] = [
        layer for layer in (before.trace.layers if before.trace else ()) if fix.changes(layer)
    ]
    assert draft.role is Role.DRAFT
    after = facts("sm_120", [*MAIN_TRTLLM, DRAFT_CUTLASS]).trace
    assert after is not None
    assert before.trace is not None
    assert fix.verify(before, after) == ()
    assert fix.verify(before, before.trace) == (
        f"{draft.name} still gets Mxfp4FlashinferTrtllmMoEMethod",
    )
    broken = replace(DRAFT_CUTLASS, error=SglangError("draft weights", "ValueError", "no", None))
    assert fix.verify(before, replace(after, layers=(broken,))) == (
        f"{draft.name}: ValueError: no",
    )
    lost = replace(DRAFT_CUTLASS, kernel=None, reason="why")
    assert fix.verify(before, replace(after, layers=(lost,))) == (
        f"{draft.name} reaches no kernel: why",
    )


def test_fix102_is_for_auto_on_sm12x() -> None:
    fix = BY_ID["FIX102"]
    assert fix.needed(hybrid("sm_120")) is not None
    assert fix.needed(hybrid("sm_100")) is None
    asked_for = facts("sm_120", [*MAIN_TRTLLM])  # no change of an argument: the user chose it
    assert fix.needed(asked_for) is None
    before = hybrid("sm_120")
    after = facts("sm_120", [*MAIN_NVFP4_CUTLASS]).trace
    assert after is not None
    assert before.trace is not None
    assert fix.verify(before, after) == ()
    assert len(fix.verify(before, before.trace)) == len(MAIN_TRTLLM)


def test_fix103_where_the_clamp_is_dropped_or_would_be() -> None:
    needed = BY_ID["FIX103"].needed
    dropped = facts("sm_120", [*MAIN_NVFP4_CUTLASS], call=CALL_WITHOUT_CLAMP)
    assert "does not reach the kernel" in str(needed(dropped))
    assert needed(facts("sm_120", [*MAIN_NVFP4_CUTLASS], call=CALL_WITH_CLAMP)) is None
    assert needed(replace(dropped, trace=None)) is None
    assert needed(hybrid("sm_120")) is not None  # FIX102 moves these to the call in question
    assert needed(hybrid("sm_100")) is None
    assert needed(facts("sm_120", [*MAIN_TRTLLM], swiglu_limit=None)) is None


@pytest.mark.parametrize(
    ("fix", "name", "before", "after"),
    [
        (
            "FIX104",
            "indexer-decode",
            "sglang.srt.layers.attention.dsv4.indexer.fp8_paged_mqa_logits_torch_sm120",
            "triton:dsv4doctor.kernels.indexer_logits._logits_kernel",
        ),
        (
            "FIX105",
            "sparse-mla-decode",
            "triton:sglang.kernels.ops.attention.flash_mla_sm120_triton._tiled_kernel",
            "triton:dsv4doctor.kernels.mla_kernels.decode_kernel",
        ),
    ],
)
def test_hot_paths_decide_and_prove(fix: str, name: str, before: str, after: str) -> None:
    slow, fast = path(name, before), path(name, after)
    needed, verify = BY_ID[fix].needed, BY_ID[fix].verify
    assert needed(with_paths(scene(), slow)) is not None
    assert needed(with_paths(scene(), fast)) is None
    assert needed(with_paths(scene("sm_100"), slow)) is None
    found = with_paths(scene(), slow)
    assert found.trace is not None
    assert verify(found, found.trace) == (f"{name} still reaches {before}",)
    assert verify(found, replace(found.trace, paths=(fast,))) == ()


def test_without_hot_paths_the_environment_decides() -> None:
    torch = "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"
    indexer, sparse = BY_ID["FIX104"].needed, BY_ID["FIX105"].needed
    assert indexer(scene(overwritten={torch: (None, "True")})) is not None
    tilelang = {"SGLANG_OPT_USE_TILELANG_INDEXER": (None, "True")}
    assert indexer(scene(overwritten={torch: (None, "True"), **tilelang})) is None
    assert sparse(scene()) is None  # FlashInfer by default
    assert sparse(scene(environment={"SGLANG_SM120_FLASHMLA_BACKEND": "triton"})) is not None


def test_fix106_by_the_torch_part_of_the_mixing() -> None:
    fix = BY_ID["FIX106"]
    detail = "in part plain torch: hc_pre_torch_impl"
    slow = with_paths(scene(), path("mhc-pre", "tilelang:hc_split_sinkhorn_kernel", detail))
    assert fix.needed(slow) is not None
    assert slow.trace is not None
    assert fix.verify(slow, slow.trace) == ("mhc-pre still goes through torch operations",)
    fast = path("mhc-pre", "triton:dsv4doctor.kernels.dense_glue._mix_kernel")
    assert fix.verify(slow, replace(slow.trace, paths=(fast,))) == ()
    assert fix.needed(with_paths(scene(), fast)) is None


def test_fix107_for_what_the_launch_sets() -> None:
    fix, name = BY_ID["FIX107"], "SGLANG_OPT_USE_TOPK_V2"
    overruled = scene(environment={name: "1"}, overwritten={name: ("1", "False")})
    assert name in str(fix.needed(overruled))
    assert overruled.trace is not None
    assert fix.verify(overruled, overruled.trace) == (f"{name} is still overruled",)
    kept = replace(overruled.trace, environment_overwritten={})
    assert fix.verify(overruled, kept) == ()
    assert fix.needed(scene(overwritten={name: (None, "False")})) is None


def test_without_dsv4doctor_the_patched_line_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dsv4doctor.kernels.adapters.gone", None)
    with pytest.raises(RuntimeError, match="pip install dsv4doctor") as caught:
        exec(edit.from_ours("FIX101", "gone", "name"), {})
    assert "\n" not in str(caught.value)
    assert "dsv4doctor fix --revert" in str(caught.value)


@pytest.mark.parametrize(
    ("layer", "method", "kernel"),
    [
        (DRAFT_CUTLASS, "Dsv4DoctorMxfp4MoEMethod", "moe_mxfp4"),
        (MAIN_TRTLLM[0], "Dsv4DoctorModelOptNvFp4MoEMethod", "moe_nvfp4"),
    ],
)
def test_our_experts_are_no_promise_without_a_stamp(layer: Layer, method: str, kernel: str) -> None:
    """A trace asks for no stamp; without one the serving machine's server stops."""
    symbol = Kernel("triton:dsv4doctor.kernels.grouped_gemm._product_kernel", None)
    ours = replace(layer, quant_method=method, kernel=symbol, error=None)
    judged = judge(ours, ARCHS["sm_120"])
    assert judged.verdict is Verdict.UNKNOWN
    assert f"kernels verify --only {kernel}" in judged.reason
    assert judge(ours, ARCHS["sm_100"]).verdict is Verdict.FAILS


def test_a_borrowed_environment_is_lent_dsv4doctor_and_nothing_else(tmp_path: Path) -> None:
    finder = ourselves.Finder(str(tmp_path))
    spec = finder.find_spec("dsv4doctor")
    assert spec.origin == str(tmp_path / "__init__.py")
    assert spec.submodule_search_locations == [str(tmp_path)]
    assert finder.find_spec("dsv4doctor.kernels") is None
    assert finder.find_spec("torch") is None


def test_line_endings_and_odd_indentation_are_kept() -> None:
    """A method under an `if`, indented by eight, in a file with CRLF."""
    lines = ("if x:", "        class A:", "                def f(self):", " " * 24 + "a = 1", "")
    text = "\r\n".join(lines)
    sources = {"a.py": text}
    piece = edit.find_piece(sources, "a.py", "A.f")
    assert piece is not None
    [line] = piece.find(edit.m.SimpleStatementLine())
    new = edit.with_piece(
        sources, piece, piece.replaced([(line, edit.put_after("b = 2\n", piece.newline))])
    )
    assert new == text + "                        b = 2\r\n"


def test_the_verifying_command_is_the_remedy_of_our_own_kernel() -> None:
    said = "it serves after `dsv4doctor kernels verify --only moe_mxfp4` on the serving machine"
    ours = replace(DRAFT_CUTLASS, verdict=Verdict.UNKNOWN, reason=said)
    base = facts("sm_120", [ours])
    assert base.trace is not None
    known = replace(base, trace=replace(base.trace, layers=(ours,)))
    [found] = layer_unknown.check(known)
    assert found.remedy is not None
    assert found.remedy.commands == ("dsv4doctor kernels verify --only moe_mxfp4",)
