"""Routed experts of an MoE layer with MXFP4 weights and bf16 activations (W4A16).

For every token t, over its experts e = topk_ids[t, j] that are here:

    g, u   = x[t] W1[e]^T, x[t] W3[e]^T
    h      = silu(min(g, L)) * clamp(u, -L, L)          L = swiglu_limit, if any
    out[t] = factor * sum_j topk_weights[t, j] * h W2[e]^T

W is E2M1 times one UE8M0 scale per 32 columns.  Products run on the tensor cores with bf16
operands and float32 accumulators; a weight times its scale is exact in bf16; h and the experts'
results are rounded to bf16 once each.  `grouped_gemm.py` has the kernels, `moe_launch.py` their
configurations, `fp4.py` the decoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dsv4doctor.kernels import moe_cases, moe_compile, moe_launch
from dsv4doctor.kernels.registry import BenchCase, Check, CompileCase, KernelMeta

META = KernelMeta(
    name="moe_mxfp4",
    title="Routed experts, MXFP4 weights, bf16 activations",
    replaces=(
        "sglang.srt.layers.quantization.mxfp4_flashinfer_trtllm_moe.Mxfp4FlashinferTrtllmMoEMethod",
        "sglang.srt.layers.quantization.mxfp4_marlin_moe.Mxfp4MarlinMoEMethod",
    ),
    error_bar=1e-2,
    archs=("sm_90", "sm_120", "sm_121"),
)


def mxfp4_moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    swiglu_limit: float | None = None,
    expert_offset: int = 0,
    factor: float = 1.0,
    small_scales: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The routed experts' weighted sum for every token, bf16 [T, H].

    x: bf16 [T, H].  w13: int8 or uint8 [E, 2I, H/2], I gate rows (w1), then I up rows (w3); w2:
    [E, H, I/2]; two E2M1 codes a byte, the earlier in the low nibble.  w13_scale: uint8 or
    float8_e8m0fnu [E, 2I, H/32]; w2_scale: [E, H, I/32].  topk_ids: int32 or int64 [T, topk];
    topk_weights: float32 [T, topk].  H and I are multiples of 32; weights and scales contiguous.

    An id outside expert_offset .. expert_offset + E - 1 (-1, say) contributes nothing.  A token
    may name an expert twice.  `small_scales` is the caller's word that no scale byte is above
    128 (2.0); it saves an instruction per pair of weights.  `out`: where to write,
    [T, H], rows contiguous.

    Reads the ids on the device only and allocates by shapes, so it can be captured in a CUDA
    graph.  Raises ValueError naming the tensor that does not fit, UsageError on a GPU it has no
    configuration for.
    """
    experts = moe_launch.Experts(w13, w13_scale, w2, w2_scale, 32, small_scales=small_scales)
    return moe_launch.run_experts(
        x, experts, topk_ids, topk_weights,
        swiglu_limit=swiglu_limit, expert_offset=expert_offset, factor=factor, out=out,
    )  # fmt: skip


def compile_cases(arch: str) -> Sequence[CompileCase]:
    return moe_compile.compile_cases(32, arch)


def checks(device: str) -> Sequence[Check]:
    return moe_cases.checks(32, META.error_bar)


def bench_cases(device: str) -> Iterable[BenchCase]:
    return moe_cases.bench_cases(32, device)
