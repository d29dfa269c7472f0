"""The routed experts with MXFP4 weights, in float32."""

from __future__ import annotations

from typing import Any

import torch

from dsv4doctor.kernels.reference import moe


def mxfp4_moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """The float32 result of `dsv4doctor.kernels.moe_mxfp4.mxfp4_moe`, [T, H]."""
    return moe.experts(
        x,
        moe.dequantise(w13, moe.ue8m0_values(w13_scale)),
        moe.dequantise(w2, moe.ue8m0_values(w2_scale)),
        topk_ids,
        topk_weights,
        **options,
    )
