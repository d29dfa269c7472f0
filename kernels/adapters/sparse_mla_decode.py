"""SGLang's `flash_mla_with_kvcache_sm120`, on our kernel.

Stands in for the function of that name in `srt/layers/attention/flash_mla_sm120.py` (0.5.14 to
0.5.16) and `kernels/ops/attention/flash_mla_sm120.py` (later).
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4doctor.kernels.sparse_mla_decode import sparse_mla_decode
from dsv4doctor.kernels.verify import require_stamp

_allowed: set[torch.device] = set()


def _rows(tensor: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """int32 [count, k] of index lists [batch, queries, k] or [batch, k]."""
    if tensor is None:
        return None
    flat = tensor.reshape(count, tensor.shape[-1])
    return flat if flat.dtype == torch.int32 else flat.int()


def _lengths(tensor: torch.Tensor | None, batch: int, queries: int) -> torch.Tensor | None:
    """[batch * queries] of lengths [batch], the same for every query of a batch row."""
    if tensor is None or queries == 1:
        return tensor
    return tensor.view(batch, 1).expand(batch, queries).reshape(-1)


def flash_mla_with_kvcache_sm120(**kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse MLA decode with SGLang's keywords.

    q [batch, queries, heads, 512] bf16; k_cache [pages, page size, 1, 584]; indices
    [batch, queries, k]; topk_length [batch] or None; attn_sink [heads] or None; head_dim_v;
    softmax_scale or None (1 / sqrt(512)); extra_k_cache, extra_indices_in_kvcache and
    extra_topk_length or None.  Other keywords are ignored, as upstream ignores them.

    Returns (out [batch, queries, heads, head_dim_v] bf16, lse [batch, heads, queries] float32).
    The LSE is the natural logarithm without the sink, as upstream's torch path returns it; its
    Triton path adds the sink.  Raises UnverifiedKernelError on a GPU where the kernel was not
    verified.
    """
    q = kwargs["q"]
    if q.device not in _allowed:
        require_stamp("sparse_mla_decode", str(q.device))
        _allowed.add(q.device)
    batch, queries, heads, dim = q.shape
    scale = kwargs.get("softmax_scale")
    sink = kwargs.get("attn_sink")
    count = batch * queries
    out, lse = sparse_mla_decode(
        q.reshape(count, heads, dim),
        kwargs["k_cache"],
        _rows(kwargs["indices"], count),
        _lengths(kwargs.get("topk_length"), batch, queries),
        extra_cache=kwargs.get("extra_k_cache"),
        extra_indices=_rows(kwargs.get("extra_indices_in_kvcache"), count),
        extra_lengths=_lengths(kwargs.get("extra_topk_length"), batch, queries),
        sink=None if sink is None else sink.float().contiguous(),
        scale=dim**-0.5 if scale is None else scale,
    )
    out = out.view(batch, queries, heads, dim)[..., : kwargs["head_dim_v"]]
    return out, lse.view(batch, queries, heads).permute(0, 2, 1)
