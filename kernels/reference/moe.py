"""The routed experts in float32, in plain torch: what the kernels are checked against."""

from __future__ import annotations

import torch

from dsv4doctor.kernels.fp4 import E2M1_VALUES


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """int8/uint8 [..., K/2], low nibble first -> float32 [..., K]."""
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=codes.device)
    byte = codes.view(torch.uint8).long()
    return torch.stack((table[byte & 15], table[byte >> 4]), dim=-1).flatten(-2)


def ue8m0_values(byte: torch.Tensor) -> torch.Tensor:
    """uint8 or float8_e8m0fnu -> float32: 2^(byte - 127), NaN for 255."""
    byte = byte.view(torch.uint8)
    value = torch.exp2(byte.double() - 127)
    return torch.where(byte == 255, float("nan"), value).float()


def e4m3_values(byte: torch.Tensor) -> torch.Tensor:
    """uint8 or float8_e4m3fn -> float32, by the definition of the format."""
    byte = byte.view(torch.uint8).int()
    exponent, mantissa = (byte >> 3) & 15, (byte & 7).double()
    normal = torch.ldexp(1 + mantissa / 8, exponent - 7)
    value = torch.where(exponent == 0, mantissa / 512, normal)
    value = torch.where((byte & 127) == 127, float("nan"), value)
    return torch.where(byte >= 128, -value, value).float()


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [..., K/2] and float32 scales [..., K/group] -> float32 [..., K]."""
    values = e2m1_values(codes)
    group = values.shape[-1] // scales.shape[-1]
    return values * scales.repeat_interleave(group, dim=-1)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """silu(gate) * up; with a limit, gate is clamped from above and up on both sides."""
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    return torch.nn.functional.silu(gate) * up


def experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    swiglu_limit: float | None = None,
    expert_offset: int = 0,
    factor: float = 1.0,
) -> torch.Tensor:
    """float32 weights w13 [E, 2I, H] (gate rows, then up rows), w2 [E, H, I] -> float32 [T, H].

    Ids outside expert_offset .. expert_offset + E - 1 contribute nothing.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    xs = x.float()
    for index in range(w13.shape[0]):
        token, slot = torch.where(topk_ids == index + expert_offset)
        if not len(token):
            continue
        gate, up = (xs[token] @ w13[index].T).chunk(2, dim=-1)
        y = swiglu(gate, up, swiglu_limit) @ w2[index].T
        out.index_add_(0, token, y * topk_weights[token, slot].float()[:, None])
    return out * factor
