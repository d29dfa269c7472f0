"""Facts for the rules' examples: what real traces gave, with three main layers instead of 43."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dsv4doctor.models import (
    ARCHS,
    Checkpoint,
    ExpertLayer,
    Facts,
    Gpu,
    GpuFacts,
    HostFacts,
    Kernel,
    Launch,
    Layer,
    Location,
    Package,
    Role,
    SglangError,
    SglangTree,
    Snapshot,
    Stack,
    StoredFormat,
    Trace,
    TreeFeatures,
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
    config = {
        "model_type": "deepseek_v4",
        "swiglu_limit": swiglu_limit,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "max_position_embeddings": 1 << 20,
    }
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


SOURCES = TreeFeatures(
    environment_defaults={
        "SGLANG_SM120_FLASHMLA_BACKEND": "flashinfer",
        "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "False",
        "SGLANG_OPT_USE_TILELANG_INDEXER": "False",
        "SGLANG_OPT_FP8_WO_A_GEMM": "True",
        "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "True",
        "SGLANG_DSV4_FP4_EXPERTS": "True",
        "SGLANG_DSV4_COMPRESS_STATE_DTYPE": "float32",
    },
    sparse_mla_file="sglang/kernels/ops/attention/flash_mla_sm120.py",
    split_scratch=Location("sglang/kernels/ops/attention/flash_mla_sm120.py", 511),
    torch_indexer=Location("sglang/srt/layers/attention/dsv4/indexer.py", 188),
    torch_indexer_bytes=2,
    probes_experts=Location("sglang/srt/configs/deepseek_v4.py", 13),
    mooncake_sends_state=True,
    mxfp8_dense=Location("sglang/srt/layers/quantization/fp8_utils.py", 900),
    engram_over_ranks=True,
)
"""SGLang 0.5.23."""

SM120_ENVIRONMENT: dict[str, tuple[str | None, str]] = {
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": (None, "True"),
    "SGLANG_OPT_USE_TILELANG_INDEXER": (None, "True"),
    "SGLANG_OPT_FP8_WO_A_GEMM": (None, "False"),
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": (None, "False"),
}
"""What SGLang 0.5.16 and newer set on sm_12x where the user has not."""


def scene(
    arch: str = "sm_120",
    *,
    flags: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    overwritten: dict[str, tuple[str | None, str]] | None = None,
    resolved: dict[str, Any] | None = None,
    features: TreeFeatures = SOURCES,
    packages: tuple[Package, ...] = (),
    origin: str = "installed",
    version: str = "0.5.23",
    model: str = "deepseek_v4",
    layers: Sequence[Layer] = (),
    errors: tuple[SglangError, ...] = (),
    checkpoint: Checkpoint | None = None,
    host: HostFacts | None = None,
    gpus: tuple[Gpu, ...] = (),
    path: str = "model",
) -> Facts:
    """Facts of a launch that traced without trouble, for rules that are not about experts."""
    base = facts(arch, layers, flags=flags, errors=errors, checkpoint=checkpoint)
    assert base.trace is not None
    assert base.snapshot.checkpoint is not None
    assert base.snapshot.launch is not None
    stored = base.snapshot.checkpoint
    stored = replace(stored, config={**stored.config, "model_type": model})
    launch = replace(base.snapshot.launch, environment=environment or {}, model=path)
    tree = SglangTree("tree", version, origin)
    return replace(
        base,
        trace=replace(
            base.trace,
            sglang=tree,
            resolved_args=resolved or {},
            environment_overwritten=SM120_ENVIRONMENT if overwritten is None else overwritten,
        ),
        snapshot=replace(
            base.snapshot,
            sglang=tree,
            checkpoint=stored,
            launch=launch,
            stack=Stack("python", "3.12.3", packages),
            host=host,
            gpu=GpuFacts(gpus),
        ),
        features=features,
    )


def flashinfer(version: str) -> tuple[Package, ...]:
    return (Package("flashinfer-python", version, f"=={version}", True),)


def gpus(count: int, arch: str = "sm_120", **facts: Any) -> tuple[Gpu, ...]:
    name = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    return tuple(
        Gpu(index, name, ARCHS[arch], 95 << 30, f"00000000:{index + 1:02X}:00.0", **facts)
        for index in range(count)
    )


def _call_of(layer: Layer) -> str | None:
    return _MXFP4_CALL if layer.quant_method == "Mxfp4FlashinferCutlassMoEMethod" else None


def _text(layer: Layer, texts: dict[str, str]) -> str:
    site = layer.kernel.call_site if layer.kernel else None
    return texts.get(f"{site.file}:{site.line}", "") if site else ""


def _as_declared(swiglu_limit: float | None) -> Checkpoint:
    nvfp4, mxfp4 = StoredFormat.NVFP4, StoredFormat.MXFP4
    return checkpoint(nvfp4, mxfp4, nvfp4, mxfp4, swiglu_limit)
