"""Float32 reference of the indexer logits, and random inputs to try them on."""

from __future__ import annotations

import math

import torch

PAGE_TOKENS, HEAD_DIM = 64, 128


def indexer_logits(q, cache, weights, lengths, page_table, width):
    """Same contract as the kernel's launch function; row by row, -inf from the length on."""
    rows = q.shape[0]
    flat = cache.view(torch.uint8).reshape(cache.shape[0], -1)
    out = torch.full((rows, width), -math.inf, dtype=torch.float32, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        length = max(0, min(length, width, page_table.shape[1] * PAGE_TOKENS))
        if length == 0:
            continue
        pages = flat[page_table[row, : math.ceil(length / PAGE_TOKENS)].long()]
        keys = pages[:, : PAGE_TOKENS * HEAD_DIM].contiguous().view(torch.float8_e4m3fn)
        scales = pages[:, PAGE_TOKENS * HEAD_DIM :].contiguous().view(torch.float32)
        product = keys.float().view(-1, HEAD_DIM) @ q[row].float().T
        score = (product.relu() * weights[row].float()).sum(1) * scales.flatten()
        out[row, :length] = score[:length]
    return out


def random_inputs(
    rows: int, heads: int, width: int, lengths: list[int], pool: int, device: str, seed: int = 0
):
    """(q, cache, weights, lengths, page_table, width) with `pool` pages of random keys.

    Pages of the table past a row's length are numbers far outside the cache.
    """
    gen = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=gen, device=device)

    q = (normal(rows, heads, HEAD_DIM) * 4).to(torch.float8_e4m3fn)
    cache = torch.empty((pool, PAGE_TOKENS * (HEAD_DIM + 4)), dtype=torch.uint8, device=device)
    keys = cache[:, : PAGE_TOKENS * HEAD_DIM]
    for start in range(0, pool, 8192):
        part = keys[start : start + 8192]
        part.copy_((normal(*part.shape) * 32).to(torch.float8_e4m3fn).view(torch.uint8))
    scales = torch.rand((pool, PAGE_TOKENS), generator=gen, device=device) + 0.01
    cache[:, PAGE_TOKENS * HEAD_DIM :] = scales.view(torch.uint8)
    weights = normal(rows, heads)
    count = torch.tensor(lengths, dtype=torch.int32, device=device)
    pages = math.ceil(width / PAGE_TOKENS)
    table = torch.randint(pool, (rows, pages), generator=gen, device=device, dtype=torch.int32)
    used = torch.arange(pages, device=device) * PAGE_TOKENS < count[:, None]
    table = torch.where(used, table, 1 << 30)
    return q, cache.view(pool, PAGE_TOKENS, 1, HEAD_DIM + 4), weights, count, table, width
