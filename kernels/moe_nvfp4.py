"""Routed experts of an MoE layer with NVFP4 weights and bf16 activations (W4A16).

As `moe_mxfp4.py`, with weights that are E2M1 times one FP8 E4M3 scale per 16 columns times one
float32 scale per expert (for gate and up separately); the latter multiplies the accumulator.  A
checkpoint's input scales are for activations in FP4 and have no part in this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dsv4doctor.kernels import moe_cases, moe_compile, moe_launch
from dsv4doctor.kernels.registry import BenchCase, Check, CompileCase, KernelMeta

META = KernelMeta(
    name="moe_nvfp4",
    title="Routed experts, NVFP4 weights, bf16 activations",
    replaces=("sglang.srt.layers.quantization.modelopt_quant.ModelOptNvFp4FusedMoEMethod",),
    error_bar=1e-2,
    archs=("sm_90", "sm_120", "sm_121"),
)


def nvfp4_moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_global: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_global: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    swiglu_limit: float | None = None,
    expert_offset: int = 0,
    factor: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The routed experts' weighted sum for every token, bf16 [T, H].

    As `moe_mxfp4.mxfp4_moe`, except: w13_scale: uint8 or float8_e4m3fn [E, 2I, H/16]; w2_scale:
    [E, H, I/16]; w13_global: float32 [E, 2], of the gate and of the up rows; w2_global: float32
    [E].
    """
    experts = moe_launch.Experts(w13, w13_scale, w2, w2_scale, 16, w13_global, w2_global)
    return moe_launch.run_experts(
        x, experts, topk_ids, topk_weights,
        swiglu_limit=swiglu_limit, expert_offset=expert_offset, factor=factor, out=out,
    )  # fmt: skip


def compile_cases(arch: str) -> Sequence[CompileCase]:
    return moe_compile.compile_cases(16, arch)


def checks(device: str) -> Sequence[Check]:
    return moe_cases.checks(16, META.error_bar)


def bench_cases(device: str) -> Iterable[BenchCase]:
    return moe_cases.bench_cases(16, device)
