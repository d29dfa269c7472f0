"""The places where SGLang multiplies in float32, on our kernels."""

from __future__ import annotations

import torch

from dsv4doctor.kernels.dense_glue import bmm_nt, hc_mix
from dsv4doctor.kernels.verify import require_stamp

_allowed: set[torch.device] = set()


def _check(device: torch.device) -> None:
    if device not in _allowed:
        require_stamp("dense_glue", str(device))
        _allowed.add(device)


def hc_pre_torch_impl(
    x: torch.Tensor, hc_fn: torch.Tensor, rms_norm_eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inner function of that name in `DeepseekV4DecoderLayer.hc_pre`.

    x [tokens, streams, hidden] bf16.  Returns (x [tokens, streams * hidden] bf16, mixes
    [tokens, 1, mixes] float32).  Upstream returns x in float32; what follows multiplies it with
    a float32 tensor, which widens it all the same, without the pass over memory.
    """
    _check(x.device)
    flat = x.flatten(1)
    return flat, hc_mix(flat, hc_fn, rms_norm_eps).unsqueeze(1)


def indexer_bmm(keys: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """`torch.bmm(keys, q.transpose(1, 2))` of the indexer's torch paths, float32.

    keys [batch, tokens, 128] and q [batch, heads, 128] hold values that came from FP8, which
    bf16 represents exactly: only the order of summation differs from the float32 path.
    """
    _check(keys.device)
    return bmm_nt(keys, q)
