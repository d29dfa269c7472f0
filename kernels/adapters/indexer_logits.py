"""SGLang's `fp8_paged_mqa_logits_torch_sm120`, on our kernel.

Stands in for the function of that name in `srt/layers/attention/dsv4/indexer.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4doctor.kernels.indexer_logits import indexer_logits
from dsv4doctor.kernels.verify import require_stamp

_allowed: set[torch.device] = set()


def fp8_paged_mqa_logits_torch_sm120(
    q_fp8: torch.Tensor,
    kvcache_fp8: torch.Tensor,
    weight: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    deep_gemm_metadata: Any,
    max_seq_len: int,
    clean_logits: bool = True,
) -> torch.Tensor:
    """Logits float32 [batch, max_seq_len], -inf from each row's length on, in a new tensor.

    q_fp8 [batch, 1, heads, 128] E4M3; kvcache_fp8 [pages, 64, 1, 132] bytes; weight
    [batch, heads]; seq_lens [batch] or [batch, 1]; page_table [batch, pages] int32.
    `deep_gemm_metadata` and `clean_logits` change nothing: the tail is -inf either way, as
    upstream's is.  Raises UnverifiedKernelError on a GPU where the kernel was not verified.
    """
    if q_fp8.device not in _allowed:
        require_stamp("indexer_logits", str(q_fp8.device))
        _allowed.add(q_fp8.device)
    batch = q_fp8.shape[0]
    table = page_table if page_table.dtype == torch.int32 else page_table.int()
    return indexer_logits(
        q_fp8[:, 0], kvcache_fp8, weight, seq_lens.reshape(batch), table, max_seq_len
    )
