"""Float32 reference of the sparse MLA decode, and random caches to try it on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ROW_BYTES, SCALE_BYTES, NOPE, DIM = 576, 8, 448, 512


def e4m3_value(codes: torch.Tensor) -> torch.Tensor:
    """float32 of E4M3 codes (uint8), from the format's definition; 0x7f and 0xff are NaN."""
    code = codes.to(torch.int32)
    exponent, mantissa = (code >> 3) & 15, (code & 7).float()
    normal = torch.ldexp(1 + mantissa / 8, exponent - 7)
    value = torch.where(exponent == 0, mantissa * 2.0**-9, normal)
    value = torch.where((code & 127) == 127, math.nan, value)
    return torch.where(code >= 128, -value, value)


def ue8m0_value(codes: torch.Tensor) -> torch.Tensor:
    """float32 of UE8M0 codes (uint8): 2^(code - 127); 255 is NaN."""
    power = codes.cpu().to(torch.int32) - 127
    wide = torch.ldexp(torch.ones(power.shape, dtype=torch.float64), power)
    return torch.where(codes.cpu() == 255, math.nan, wide).float().to(codes.device)


def page_bytes(page_size: int) -> int:
    """Bytes of a page: rows and scales, padded to a multiple of 576."""
    return math.ceil(page_size * (ROW_BYTES + SCALE_BYTES) / ROW_BYTES) * ROW_BYTES


def pack(codes: torch.Tensor, scales: torch.Tensor, rotary: torch.Tensor, page_size: int):
    """A cache [pages, page size, 1, 584] (uint8 view) that holds the given rows.

    codes: uint8 [rows, 448]; scales: uint8 [rows, 7]; rotary: bf16 [rows, 64]; the number of
    rows is a multiple of the page size.  Padding bytes are 0xff (NaN if ever read as data).
    """
    pages = codes.shape[0] // page_size
    size = page_bytes(page_size)
    raw = torch.full((pages, size), 0xFF, dtype=torch.uint8, device=codes.device)
    data = raw[:, : page_size * ROW_BYTES].view(pages, page_size, ROW_BYTES)
    data[..., :NOPE] = codes.view(pages, page_size, NOPE)
    data[..., NOPE:] = rotary.contiguous().view(torch.uint8).view(pages, page_size, 128)
    tail = raw[:, page_size * ROW_BYTES : page_size * (ROW_BYTES + SCALE_BYTES)]
    tail.view(pages, page_size, SCALE_BYTES)[..., :7] = scales.view(pages, page_size, 7)
    return raw.as_strided((pages, page_size, 1, 584), (size, 584, 584, 1))


def rows_of(cache: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """float32 [..., 512] of the named cache rows, rounded to bf16; a negative number gives 0."""
    pages, page_size = cache.shape[:2]
    raw = cache.view(torch.uint8) if cache.dtype != torch.uint8 else cache
    raw = raw.as_strided((pages, raw.stride(0)), (raw.stride(0), 1))
    safe = indices.clamp(min=0).long()
    page, slot = safe // page_size, safe % page_size
    row = slot[..., None] * ROW_BYTES + torch.arange(ROW_BYTES, device=raw.device)
    data = raw[page[..., None], row]
    at = page_size * ROW_BYTES + slot[..., None] * SCALE_BYTES + torch.arange(7, device=raw.device)
    scales = ue8m0_value(raw[page[..., None], at])
    nope = e4m3_value(data[..., :NOPE]).unflatten(-1, (7, 64)) * scales[..., None]
    rotary = data[..., NOPE:].contiguous().view(torch.bfloat16).float()
    both = torch.cat([nope.flatten(-2).bfloat16().float(), rotary], -1)
    return torch.where((indices >= 0)[..., None], both, 0.0)


def _listed(cache, indices, lengths):
    """(rows [n, k, 512], which of them count [n, k])."""
    counts = indices >= 0
    if lengths is not None:
        place = torch.arange(indices.shape[1], device=indices.device)
        counts = counts & (place < lengths[:, None])
    return rows_of(cache, torch.where(counts, indices, -1)), counts


def sparse_mla_decode(
    q, cache, indices, lengths=None, *, extra_cache=None, extra_indices=None,
    extra_lengths=None, sink=None, scale=DIM**-0.5,
):  # fmt: skip
    """Same contract as the kernel's launch function; float32 output and LSE."""
    kv, counts = _listed(cache, indices, lengths)
    if extra_cache is not None:
        xkv, xcounts = _listed(extra_cache, extra_indices, extra_lengths)
        kv, counts = torch.cat([kv, xkv], 1), torch.cat([counts, xcounts], 1)
    score = torch.einsum("nhd,nkd->nhk", q.float(), kv) * scale
    score = torch.where(counts[:, None], score, -math.inf)
    lse = torch.logsumexp(score, -1)
    whole = lse if sink is None else torch.logaddexp(lse, sink.float())
    weight = torch.exp(score - torch.where(lse == -math.inf, math.inf, whole)[..., None])
    return torch.einsum("nhk,nkd->nhd", weight, kv), lse


@dataclass(frozen=True)
class Case:
    """Arguments of `sparse_mla_decode`, positional and by name."""

    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, torch.Tensor]


def random_cache(rows: int, page_size: int, device: str, generator: torch.Generator):
    """A cache of `rows` rows (rounded up to whole pages) with scales of many sizes."""
    rows = math.ceil(rows / page_size) * page_size
    value = torch.randn((rows, NOPE), generator=generator, device=device)
    codes = (value * 8).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.randint(121, 126, (rows, 7), generator=generator, device=device)
    rotary = torch.randn((rows, 64), generator=generator, device=device).bfloat16()
    return pack(codes, scales.to(torch.uint8), rotary, page_size)


def random_case(
    rows: int, heads: int, topk: int, extra_topk: int = 0, page_size: int = 128,
    extra_page_size: int = 64, pool: int = 4096, full: bool = False, device: str = "cpu",
    seed: int = 0,
) -> Case:  # fmt: skip
    """Random arguments; unless `full`, with short and empty lists, -1 and repeated indices."""
    gen = torch.Generator(device).manual_seed(seed)

    def integers(low, high, shape):
        return torch.randint(low, high, shape, generator=gen, device=device, dtype=torch.int32)

    def lists(count):
        index = integers(0, pool, (rows, count))
        if full:
            return index, torch.full((rows,), count, dtype=torch.int32, device=device)
        index[:, ::7] = -1
        index[:, 1::5] = index[:, :1].clamp(min=3)
        lengths = integers(0, count + 1, (rows,))
        lengths[0] = 0
        return index, lengths

    q = torch.randn((rows, heads, DIM), generator=gen, device=device).bfloat16()
    index, lengths = lists(topk)
    kwargs = {"sink": torch.randn((heads,), generator=gen, device=device)}
    if extra_topk:
        xindex, xlengths = lists(extra_topk)
        extra = random_cache(pool, extra_page_size, device, gen)
        kwargs |= {"extra_cache": extra, "extra_indices": xindex, "extra_lengths": xlengths}
    return Case((q, random_cache(pool, page_size, device, gen), index, lengths), kwargs)
