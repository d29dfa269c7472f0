"""Which kernels exist for which GPU."""

from dataclasses import replace

import pytest

from dsv4doctor.errors import cut
from dsv4doctor.evidence.grounds import Grounds
from dsv4doctor.folding import fold
from dsv4doctor.models import ARCHS, Arch, Kernel, Layer, SglangError, StoredFormat, Verdict
from dsv4doctor.rules.samples import (
    CALL_WITH_CLAMP,
    CALL_WITHOUT_CLAMP,
    DRAFT_TRTLLM,
    MAIN_CUTLASS,
    MAIN_NVFP4_CUTLASS,
    MAIN_TRTLLM,
)
from dsv4doctor.trace.protocol import artefact
from dsv4doctor.verdicts import drops_clamp, judge, judge_kernel, known_kernels, raised

_R, _F, _U = Verdict.RUNS, Verdict.FAILS, Verdict.UNKNOWN
_S = Verdict.FALLBACK


def _reaching(symbol: str, layer: Layer = MAIN_TRTLLM[0]) -> Layer:
    return replace(layer, kernel=Kernel(symbol, None))


_TRTLLM = "flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe"


@pytest.mark.parametrize(
    ("symbol", "verdicts"),
    [
        (_TRTLLM, [_F, _R, _R, _F, _F]),
        ("torch.ops.sglang.cutlass_fp4_group_mm", [_F, _R, _R, _R, _R]),
        # Only sm_90 has nothing faster for 4-bit weights than 16-bit arithmetic.
        ("jit:moe_wna16_marlin.bf16_t.false.false.moe_wna16_marlin_gemm", [_R, _S, _S, _S, _S]),
        ("triton:sglang.x.mxfp4_moe_sm120_triton._mxfp4_slot_gemv_kernel", [_F, _F, _F, _S, _S]),
        ("triton:sglang.kernels.ops.moe.fused_moe_triton_kernels.fused_moe_kernel", [_R] * 5),
        # The first kernel of DeepGEMM's path: what it is about comes later.
        (
            "triton:sglang.kernels.ops.moe.ep_moe_kernels.fused_moe_dispatch_index_triton_kernel",
            [_U] * 5,
        ),
        ("deep_gemm.fp8_m_grouped_gemm_nt_masked", [_U] * 5),
        ("something.entirely_new", [_U] * 5),
    ],
)
def test_verdict_by_architecture(symbol: str, verdicts: list[Verdict]) -> None:
    assert [judge(_reaching(symbol), arch).verdict for arch in ARCHS.values()] == verdicts


def test_cutlass_moe_depends_on_the_method_and_on_how_it_is_called() -> None:
    def verdicts(layer: Layer, call: str) -> list[Verdict]:
        return [judge(layer, arch, call).verdict for arch in ARCHS.values()]

    nvfp4, mxfp4 = MAIN_NVFP4_CUTLASS[0], MAIN_CUTLASS[0]
    assert verdicts(nvfp4, CALL_WITHOUT_CLAMP) == [_F, _R, _R, _R, _R]
    assert verdicts(mxfp4, "moe(use_mxfp8_act_scaling=flag)") == [_R, _F, _F, _R, _R]
    # The SM90-only form of older releases must not pass for the SM120 one.
    assert verdicts(mxfp4, "moe(use_w4_group_scaling=True)") == [_R, _F, _F, _F, _F]
    assert verdicts(mxfp4, "") == [_U] * 5


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("0.6.12", _F), ("0.6.13", _F), ("0.6.14", _R), ("0.7.2", _R), ("odd", _U), (None, _U)],
)
def test_a_kernel_that_the_flashinfer_at_hand_has_not_got_fails(
    version: str | None, verdict: Verdict
) -> None:
    """SGLang 0.5.15.post1 pins FlashInfer 0.6.12 and imports what 0.6.14 brought."""
    symbol = "flashinfer.mla._sparse_mla_sm120.sparse_mla_sm120_decode_dsv4"
    found, reason = judge_kernel(symbol, ARCHS["sm_120"], Grounds(flashinfer=version))
    assert found is verdict
    expected = "No module named 'flashinfer.mla._sparse_mla_sm120'"
    assert (expected in reason) is (verdict is _F)


def test_an_exception_of_sglang_fails_whatever_the_kernel() -> None:
    error = SglangError(
        "main weights", "RuntimeError", "MXFP4 Marlin requires SM90 or SM120.", None
    )
    layer = judge(replace(MAIN_CUTLASS[0], error=error), ARCHS["sm_100"])
    assert layer.verdict is Verdict.FAILS
    assert layer.reason == "SGLang raises RuntimeError: MXFP4 Marlin requires SM90 or SM120."


def test_no_kernel_keeps_the_reason_of_the_trace() -> None:
    layer = replace(DRAFT_TRTLLM, kernel=None, reason="KeyError: 'x' (raised in y.py)")
    assert judge(layer, ARCHS["sm_100"]).verdict is Verdict.UNKNOWN
    assert judge(layer, ARCHS["sm_100"]).reason == "KeyError: 'x' (raised in y.py)"


def test_a_method_for_another_stored_format_fails() -> None:
    layer = replace(MAIN_CUTLASS[0], stored_format=StoredFormat.NVFP4)
    judged = judge(layer, ARCHS["sm_120"], "moe(use_mxfp8_act_scaling=flag)")
    assert judged.verdict is Verdict.FAILS
    assert judged.reason == "Mxfp4FlashinferCutlassMoEMethod needs MXFP4, stored is NVFP4"
    unknown = replace(layer, kernel=Kernel("brand.new_moe", None))
    assert judge(unknown, ARCHS["sm_120"]).verdict is Verdict.FAILS


@pytest.mark.parametrize(
    ("method", "weights", "runs_with"),
    [
        ("Fp8MoEMethod", "float8_e4m3fn", {StoredFormat.FP8_BLOCK}),
        ("UnquantizedFusedMoEMethod", "bfloat16", {StoredFormat.BF16}),
        ("Fp8MoEMethod", "int8", {StoredFormat.MXFP4, StoredFormat.NVFP4}),
        ("BrandNewMoEMethod", "float64", {*StoredFormat} - {StoredFormat.MISSING}),
    ],
)
def test_weights_that_the_stored_ones_do_not_go_into_fail(
    method: str, weights: str, runs_with: set[StoredFormat]
) -> None:
    layer = replace(
        _reaching("triton:sglang.x.fused_moe_kernel"), quant_method=method, weights=weights
    )
    for stored in {*StoredFormat} - {StoredFormat.MISSING, StoredFormat.OTHER}:
        judged = judge(replace(layer, stored_format=stored), ARCHS["sm_120"])
        assert judged.verdict is (Verdict.RUNS if stored in runs_with else Verdict.FAILS)


@pytest.mark.parametrize(
    "kernel",
    [
        "flashinfer.fused_moe.trtllm_fp8_block_scale_routed_moe",
        "torch.ops.sglang.trtllm_fp8_block_scale_routed_moe_out_wrapper",
    ],
)
@pytest.mark.parametrize(
    ("weights", "stored", "verdict"),
    [
        ("float8_e4m3fn", StoredFormat.FP8_BLOCK, _R),
        ("bfloat16", StoredFormat.BF16, _R),  # made FP8 once they are loaded
        ("int8", StoredFormat.MXFP4, _F),
        ("int8", StoredFormat.FP8_BLOCK, _F),
    ],
)
def test_an_fp8_kernel_takes_no_packed_fp4(
    kernel: str, weights: str, stored: StoredFormat, verdict: Verdict
) -> None:
    """`--moe-runner-backend flashinfer_trtllm` on MXFP4 experts: FlashInfer refuses them."""
    layer = replace(
        _reaching(kernel), quant_method="Fp8MoEMethod", weights=weights, stored_format=stored
    )
    assert [judge(layer, arch).verdict for arch in ARCHS.values()] == [_F, verdict, verdict, _F, _F]
    if stored is StoredFormat.MXFP4:
        judged = judge(layer, ARCHS["sm_100"])
        name = kernel.rpartition(".")[2]
        assert judged.reason == f"{name} needs FP8 block or BF16, stored is MXFP4"


@pytest.mark.parametrize(
    "kernel",
    [
        "flashinfer.fused_moe.trtllm_fp4_block_scale_moe",
        "torch.ops.sglang.trtllm_fp8_block_scale_moe_out_wrapper",
    ],
)
def test_a_kernel_that_routes_by_a_sigmoid_is_wrong_for_deepseek_v4(kernel: str) -> None:
    layer = replace(_reaching(kernel), stored_format=StoredFormat.FP8_BLOCK, quant_method="X")
    assert [judge(layer, arch).verdict for arch in ARCHS.values()] == [_F] * 5
    assert "gives wrong output" in judge(layer, ARCHS["sm_100"]).reason
    assert "sqrtsoftplus" in judge(layer, ARCHS["sm_103"]).reason
    assert "exists for sm_100 and sm_103 only" in judge(layer, ARCHS["sm_120"]).reason


@pytest.mark.parametrize("stored", [StoredFormat.FP8_BLOCK, StoredFormat.BF16])
@pytest.mark.parametrize("packed", [StoredFormat.MXFP4, StoredFormat.NVFP4])
def test_online_nvfp4_is_made_from_numbers_and_not_from_packed_fp4(
    stored: StoredFormat, packed: StoredFormat
) -> None:
    layer = replace(
        MAIN_TRTLLM[0], quant_method="ModelOptNvFp4OnlineFusedMoEMethod", weights="uint8"
    )
    assert judge(replace(layer, stored_format=stored), ARCHS["sm_100"]).verdict is Verdict.RUNS
    assert judge(replace(layer, stored_format=packed), ARCHS["sm_100"]).verdict is Verdict.FAILS


@pytest.mark.parametrize("stored", [None, StoredFormat.MISSING])
def test_experts_that_are_not_stored_are_never_said_to_run(stored: StoredFormat | None) -> None:
    layer = replace(DRAFT_TRTLLM, stored_format=stored)
    judged = judge(layer, ARCHS["sm_100"])
    assert judged.verdict is Verdict.UNKNOWN
    assert judged.reason == "the checkpoint holds no tensors of these experts"
    assert judge(layer, ARCHS["sm_120"]).verdict is Verdict.FAILS


def test_experts_in_no_known_format_are_never_said_to_run() -> None:
    layer = replace(DRAFT_TRTLLM, stored_format=StoredFormat.OTHER)
    judged = judge(layer, ARCHS["sm_100"])
    assert judged.verdict is Verdict.UNKNOWN
    assert "no one format that is known here" in judged.reason
    assert judge(layer, ARCHS["sm_120"]).verdict is Verdict.FAILS


@pytest.mark.parametrize("arch", [Arch(11, 0), Arch(13, 0), Arch(8, 9)])
def test_a_gpu_that_nobody_looked_at_is_unknown(arch: Arch) -> None:
    """ "From 8.0 on" was said of the GPUs that there were."""
    layer = _reaching("triton:sglang.x.fused_moe_kernel")
    judged = judge(layer, arch)
    assert judged.verdict is Verdict.UNKNOWN
    assert arch.name in judged.reason


@pytest.mark.parametrize("module", ["indexer_logits", "mla_kernels", "dense_glue"])
def test_our_own_kernels_are_promised_to_nobody_who_has_not_verified_them(module: str) -> None:
    """Without the stamp of the serving machine SGLang's own path serves, or the server stops."""
    symbol = f"triton:dsv4doctor.kernels.{module}._kernel"
    verdict, reason = judge_kernel(symbol, ARCHS["sm_120"])
    assert verdict is Verdict.UNKNOWN
    assert "`dsv4doctor kernels verify --only " in reason
    assert judge_kernel(symbol, ARCHS["sm_100"])[0] is Verdict.FAILS
    ours = "triton:dsv4doctor.kernels.grouped_gemm._product_kernel"
    experts = replace(_reaching(ours, MAIN_CUTLASS[0]), quant_method="Dsv4DoctorMxfp4MoEMethod")
    assert judge(experts, ARCHS["sm_120"]).verdict is Verdict.UNKNOWN


def test_clamp_is_dropped_only_where_that_is_proved() -> None:
    layer = MAIN_NVFP4_CUTLASS[0]
    assert drops_clamp(layer, CALL_WITHOUT_CLAMP)
    assert not drops_clamp(layer, CALL_WITH_CLAMP)
    assert not drops_clamp(layer, "")
    assert drops_clamp(_reaching("torch.ops.sglang.cutlass_fp4_group_mm"), "")
    assert not drops_clamp(_reaching(_TRTLLM), CALL_WITHOUT_CLAMP)


def test_every_row_is_cited() -> None:
    assert all(row.sources and row.name for row in known_kernels())
    assert all(row.archs or row.minimum for row in known_kernels())


def test_only_identical_neighbours_fold() -> None:
    odd = replace(MAIN_TRTLLM[1], runner_backend="marlin")
    ranges = fold([MAIN_TRTLLM[0], odd, MAIN_TRTLLM[2], DRAFT_TRTLLM])
    assert [item.name for item in ranges] == [
        "model.layers.0.mlp.experts",
        "model.layers.1.mlp.experts",
        "model.layers.2.mlp.experts",
        "model.decoder.mlp.experts",
    ]
    (whole,) = fold(MAIN_TRTLLM)
    assert (whole.name, whole.count) == ("model.layers.0-2.mlp.experts", 3)
    gap = fold([MAIN_TRTLLM[0], MAIN_TRTLLM[2]])
    assert [item.count for item in gap] == [1, 1]


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ("as it is", 8, "as it is"),
        ("up to a word", 9, "up to a..."),
        ("up to a word", 7, "up to a..."),
        ("one sentence. another", 15, "one sentence..."),
        ("a/path/without/any/space", 10, "a/path/wit..."),
    ],
)
def test_long_texts_are_cut_between_words(text: str, most: int, expected: str) -> None:
    assert cut(text, most) == expected


def test_what_stopped_a_trace_is_cut_between_words() -> None:
    error = {"type": "ValueError", "message": "word " * 100, "innermost": "/lib/torch.py"}
    assert artefact(error).startswith(f"ValueError: {'word ' * 39}word... (raised in torch.py")
    raising = SglangError("main", "ValueError", "word " * 100, None)
    assert raised(raising).endswith(" word word...")
