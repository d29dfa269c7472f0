"""FlashInfer's CUTLASS fused MoE for sm_12x, where the installed FlashInfer has it.

A well-kept library goes before our own kernels where it works.  SGLang reaches it for MXFP4 on
sm_12x in its newest releases only, and for NVFP4 it drops `swiglu_limit` in older ones; these two
functions do neither.  They quantise activations (to MXFP8 and NVFP4), which ours do not.

FlashInfer wants w13 as [up; gate] and block scales interleaved in tiles of 128 rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


def refusal(kind: str, function: Callable[..., Any] | None = None) -> str:
    """Why the installed FlashInfer cannot compute `kind`, "mxfp4" or "nvfp4"; "" if it can.

    Decided by what `cutlass_fused_moe` takes; `function` is that function, for tests.
    """
    if function is None:
        try:
            from flashinfer.fused_moe import cutlass_fused_moe as function
        except ImportError as error:
            return f"no flashinfer.fused_moe.cutlass_fused_moe here ({error})"
    needed = ["swiglu_limit", "quant_scales", "input_sf", "output"]
    if kind == "mxfp4":
        needed.append("use_mxfp8_act_scaling")
    missing = [name for name in needed if name not in inspect.signature(function).parameters]
    return f"its cutlass_fused_moe takes no {', '.join(missing)}" if missing else ""


def _swiglu(limit: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), in FlashInfer's three tensors."""
    if limit is None:
        return {}
    ones, zeros = torch.ones_like(limit), torch.zeros_like(limit)
    return {"swiglu_alpha": ones, "swiglu_beta": zeros, "swiglu_limit": limit}


def interleave_scales(scale: torch.Tensor) -> torch.Tensor:
    """A block scale [E, rows, K/group] in FlashInfer's order, written back over itself.

    Rows must be a multiple of 128 and the last dimension of 4, or the order needs padding: that
    raises ValueError.
    """
    if scale.shape[1] % 128 or scale.shape[2] % 4:
        raise ValueError(f"scales {tuple(scale.shape)}: FlashInfer's order would need padding")
    from flashinfer import block_scale_interleave

    raw = scale.view(torch.uint8)
    raw.copy_(block_scale_interleave(raw).reshape_as(raw))
    return scale


def mxfp4_cutlass_moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    ones: torch.Tensor,
    limit: torch.Tensor | None,
    **placement: int,
) -> torch.Tensor:
    """MXFP4 weights with MXFP8 activations, bf16 [T, H].

    Shapes as `moe_mxfp4.mxfp4_moe`, with w13 as [up; gate] and scales of `interleave_scales`.
    ones: float32 [E].  limit: float32 [E], swiglu_limit for each expert, or None.  placement:
    tp_size, tp_rank, ep_size, ep_rank; with ep_size > 1 the ids are global.
    """
    from flashinfer import mxfp8_quantize
    from flashinfer.fused_moe import cutlass_fused_moe

    out = torch.empty_like(x)
    codes, input_scale = mxfp8_quantize(x, is_sf_swizzled_layout=True, alignment=32)
    cutlass_fused_moe(
        input=codes,
        token_selected_experts=topk_ids.int(),
        token_final_scales=topk_weights,
        fc1_expert_weights=w13.view(torch.int64),
        fc2_expert_weights=w2.view(torch.int64),
        output_dtype=torch.bfloat16,
        quant_scales=[w13_scale.view(torch.int32), ones, w2_scale.view(torch.int32), ones],
        input_sf=input_scale,
        **_swiglu(limit),
        use_mxfp8_act_scaling=True,
        output=out,
        **placement,
    )
    return out


def nvfp4_cutlass_moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    quant_scales: list[torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    limit: torch.Tensor | None,
    **placement: int,
) -> torch.Tensor:
    """NVFP4 weights with NVFP4 activations, bf16 [T, H].

    w13: uint8 [E, 2I, H/2] as [up; gate]; w2: uint8 [E, H, I/2].  quant_scales: as SGLang's
    ModelOpt method keeps them on the layer: w13_input_scale_quant, w13_blockscale_swizzled,
    g1_alphas, w2_input_scale_quant, w2_blockscale_swizzled, g2_alphas.  limit, placement: as
    above.
    """
    from flashinfer.fused_moe import cutlass_fused_moe

    first, w13_scale, g1, second, w2_scale, g2 = quant_scales
    out = torch.empty_like(x)
    cutlass_fused_moe(
        input=x,
        token_selected_experts=topk_ids.int(),
        token_final_scales=topk_weights,
        fc1_expert_weights=w13.view(torch.int64),
        fc2_expert_weights=w2.view(torch.int64),
        output_dtype=torch.bfloat16,
        quant_scales=[
            first, w13_scale.view(torch.int32), g1, second, w2_scale.view(torch.int32), g2,
        ],
        input_sf=None,
        **_swiglu(limit),
        output=out,
        **placement,
    )  # fmt: skip
    return out
