"""Facts for the rules' examples: what real traces gave, with three main layers instead of 43."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4doctor.models import (
    ARCHS,
    Checkpoint,
    ExpertLayer,
    Facts,
    GpuFacts,
    Kernel,
    Launch,
    Layer,
    Location,
    Role,
    SglangError,
    SglangTree,
    Snapshot,
    StoredFormat,
    Trace,
    Verdict,
)
from dsv4doctor.verdicts import judge

_QUANTIZATION = "sglang/srt/layers/quantization"
_RUNNERS = "sglang/srt/layers/moe/moe_runner"
_TREE = SglangTree("tree", "0.5.14", "wheel")
_CUTLASS = "flashinfer.fused_moe.cutlass_fused_moe"

CALL_WITHOUT_CLAMP = "flashinfer_cutlass_fused_moe(output=symm_output, input=x)"
CALL_WITH_CLAMP = "flashinfer_cutlass_fused_moe(output=out, input=x, swiglu_limit=limit)"
_MXFP4_CALL = "flashinfer_cutlass_fused_moe(swiglu_limit=limit, use_mxfp8_act_scaling=True)"


def _layer(
    name: str,
    stored: StoredFormat,
    method: str,
    runner: str | None,
    consulted: tuple[str, ...],
    decided: tuple[str, int, str],
    kernel: Kernel,
) -> Layer:
    file, line, source = decided
    return Layer(
        name=name,
        role=Role.DRAFT if "decoder" in name else Role.MAIN,
        stored_format=stored,
        quant_method=method,
        runner_backend=runner,
        decided_at=Location(f"{_QUANTIZATION}/{file}", line, "get_quant_method", source),
        flags_consulted=consulted,
        kernel=kernel,
        verdict=Verdict.UNKNOWN,
        reason="",
    )


_MAIN_NAMES = tuple(f"model.layers.{index}.mlp.experts" for index in range(3))
_DRAFT_NAME = "model.decoder.mlp.experts"

MAIN_TRTLLM = tuple(
    _layer(
        name,
        StoredFormat.NVFP4,
        "ModelOptNvFp4FusedMoEMethod",
        "flashinfer_trtllm_routed",
        ("moe_runner_backend",),
        ("modelopt_quant.py", 1381, "return ModelOptNvFp4FusedMoEMethod(self.nvfp4_config)"),
        Kernel(
            "flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe",
            Location(f"{_RUNNERS}/flashinfer_trtllm.py", 790),
        ),
    )
    for name in _MAIN_NAMES
)
"""Hybrid NVFP4, no backend flag, SGLang 0.5.14."""

MAIN_NVFP4_CUTLASS = tuple(
    _layer(
        name,
        StoredFormat.NVFP4,
        "ModelOptNvFp4FusedMoEMethod",
        "flashinfer_cutlass",
        ("moe_runner_backend",),
        ("modelopt_quant.py", 1381, "return ModelOptNvFp4FusedMoEMethod(self.nvfp4_config)"),
        Kernel(_CUTLASS, Location(f"{_QUANTIZATION}/modelopt_quant.py", 2512)),
    )
    for name in _MAIN_NAMES
)
"""Hybrid NVFP4 with --moe-runner-backend flashinfer_cutlass."""

DRAFT_TRTLLM = _layer(
    _DRAFT_NAME,
    StoredFormat.MXFP4,
    "Mxfp4FlashinferTrtllmMoEMethod",
    None,
    (),
    (
        "modelopt_quant.py",
        1389,
        "return Mxfp4FlashinferTrtllmMoEMethod(Fp8MoEMethod(self), prefix=prefix)",
    ),
    Kernel(
        "flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe",
        Location(f"{_QUANTIZATION}/mxfp4_flashinfer_trtllm_moe.py", 408),
    ),
)
"""The NextN layer of a hybrid NVFP4 checkpoint, any flags."""


def _cutlass(name: str, consulted: tuple[str, ...]) -> Layer:
    return _layer(
        name,
        StoredFormat.MXFP4,
        "Mxfp4FlashinferCutlassMoEMethod",
        "flashinfer_mxfp4",
        consulted,
        ("fp8.py", 461, "return Mxfp4FlashinferCutlassMoEMethod(fp8_method, prefix=prefix)"),
        Kernel(_CUTLASS, Location(f"{_RUNNERS}/flashinfer_cutlass.py", 367)),
    )


MAIN_CUTLASS = tuple(_cutlass(name, ("moe_runner_backend",)) for name in _MAIN_NAMES)
"""Stock MXFP4 on sm_120, SGLang 0.5.16 and newer."""
DRAFT_CUTLASS = _cutlass(_DRAFT_NAME, ("speculative_moe_runner_backend", "moe_runner_backend"))


def checkpoint(
    main: StoredFormat,
    draft: StoredFormat,
    declared_main: StoredFormat | None,
    declared_draft: StoredFormat | None,
    swiglu_limit: float | None = 10.0,
) -> Checkpoint:
    layers = [ExpertLayer(f"layers.{i}.ffn.experts", Role.MAIN, i, main, 256, "") for i in range(3)]
    layers.append(ExpertLayer("mtp.0.ffn.experts", Role.DRAFT, 0, draft, 256, ""))
    config = {"model_type": "deepseek_v4", "swiglu_limit": swiglu_limit}
    return Checkpoint(
        path="checkpoint",
        name="DeepSeek-V4-Flash-NVFP4",
        architectures=("DeepseekV4ForCausalLM",),
        config=config,
        text_config=config,
        hf_quant_config=None,
        declared_main=declared_main,
        declared_draft=declared_draft,
        layers=tuple(layers),
        draft_stages=1,
        tensors=(),
        tensor_count=0,
        payload_bytes=0,
        shard_count=1,
        content_key="0" * 64,
    )


def facts(
    arch: str,
    layers: Sequence[Layer],
    *,
    flags: tuple[str, ...] = (),
    errors: tuple[SglangError, ...] = (),
    unresolved: tuple[str, ...] = (),
    checkpoint: Checkpoint | None = None,
    swiglu_limit: float | None = 10.0,
    call: str | None = None,
) -> Facts:
    """Facts of a launch that resolved to `layers` on `arch`; `call` is the kernel call's source."""
    texts = {
        f"{layer.kernel.call_site.file}:{layer.kernel.call_site.line}": text
        for layer in layers
        if layer.kernel and layer.kernel.call_site and (text := call or _call_of(layer)) is not None
    }
    judged = tuple(judge(layer, ARCHS[arch], _text(layer, texts)) for layer in layers)
    trace = Trace(_TREE, ARCHS[arch], {}, (), {}, judged, errors, (), (), {}, unresolved=unresolved)
    stored = checkpoint or _as_declared(swiglu_limit)
    launch = Launch("command line", None, {}, "model", flags)
    snapshot = Snapshot("0", "", GpuFacts(()), _TREE, None, stored, launch, {})
    return Facts(snapshot, ARCHS[arch], "--arch", trace, call_texts=texts)


def _call_of(layer: Layer) -> str | None:
    return _MXFP4_CALL if layer.quant_method == "Mxfp4FlashinferCutlassMoEMethod" else None


def _text(layer: Layer, texts: dict[str, str]) -> str:
    site = layer.kernel.call_site if layer.kernel else None
    return texts.get(f"{site.file}:{site.line}", "") if site else ""


def _as_declared(swiglu_limit: float | None) -> Checkpoint:
    nvfp4, mxfp4 = StoredFormat.NVFP4, StoredFormat.MXFP4
    return checkpoint(nvfp4, mxfp4, nvfp4, mxfp4, swiglu_limit)
