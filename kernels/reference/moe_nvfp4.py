"""The routed experts with NVFP4 weights, in float32."""

from __future__ import annotations

from typing import Any

import torch

from dsv4doctor.kernels.reference import moe


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
    **options: Any,
) -> torch.Tensor:
    """The float32 result of `dsv4doctor.kernels.moe_nvfp4.nvfp4_moe`, [T, H]."""
    rows = w13.shape[1] // 2
    halves = w13_global.repeat_interleave(rows, dim=1)[:, :, None]
    return moe.experts(
        x,
        moe.dequantise(w13, moe.e4m3_values(w13_scale)) * halves,
        moe.dequantise(w2, moe.e4m3_values(w2_scale)) * w2_global[:, None, None],
        topk_ids,
        topk_weights,
        **options,
    )
