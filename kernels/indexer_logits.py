"""Indexer logits: paged FP8 multi-query scores, at a cost that follows the tokens that are there.

For every query row b and cached token t < lengths[b]:

    logits[b, t] = k_scale[t] * sum_h weights[b, h] * max(0, <q[b, h], k[t]>)

and -inf from lengths[b] on.  A page of the cache holds 64 tokens: 64 x 128 FP8 E4M3 keys, then
64 float32 scales (8448 bytes).  The tokens of all rows form one list of tiles that is dealt
evenly to a fixed number of programs; each finds its share from the lengths on the device, so
neither the context limit nor one long row among short ones costs anything.  The products of FP8
operands are taken by the FP8 tensor cores, with float32 accumulation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsv4doctor.errors import UsageError
from dsv4doctor.kernels.registry import BenchCase, Check, CompileCase, KernelMeta

META = KernelMeta(
    name="indexer_logits",
    title="Indexer logits over the paged FP8 key cache",
    replaces=("sglang.srt.layers.attention.dsv4.indexer.fp8_paged_mqa_logits_torch_sm120",),
    error_bar=1e-2,
    archs=("sm_90", "sm_120", "sm_121"),
)

PAGE_TOKENS = 64
HEAD_DIM = 128
PAGE_BYTES = PAGE_TOKENS * (HEAD_DIM + 4)
MAX_ROWS = 4096
"""Query rows of one launch: every program adds up the lengths of all of them."""


@dataclass(frozen=True)
class Config:
    """How one program of the logits kernel is shaped."""

    block_t: int
    """Tokens of one step."""
    num_warps: int
    num_stages: int
    programs_per_sm: int


@triton.jit
def _logits_kernel(
    q_ptr, kv_ptr, w_ptr, len_ptr, table_ptr, out_ptr, filled_ptr,
    rows, limit, stride_qb, stride_qh, stride_wb, stride_tb, stride_ob,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, ROWS_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, NOTE_FILLED: tl.constexpr,
):  # fmt: skip
    """This program's share of all tiles; `limit`: tokens that a row can have at most.

    NOTE_FILLED: program 0 writes the lengths to `filled`, how far each output row holds scores.
    """
    each = tl.arange(0, ROWS_PAD)
    lengths = tl.load(len_ptr + each, mask=each < rows, other=0).to(tl.int32)
    lengths = tl.minimum(tl.maximum(lengths, 0), limit)
    if NOTE_FILLED and tl.program_id(0) == 0:
        tl.store(filled_ptr + each, lengths, mask=each < rows)
    tiles = (lengths + BLOCK_T - 1) // BLOCK_T
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0).to(tl.int64)
    pid = tl.program_id(0)
    first = (pid * total // tl.num_programs(0)).to(tl.int32)
    last = ((pid + 1) * total // tl.num_programs(0)).to(tl.int32)
    row = tl.sum(((ends <= first) & (each < rows)).to(tl.int32), 0)
    row_start = tl.sum(tl.where(each < row, tiles, 0), 0)

    heads = tl.arange(0, HEADS_PAD)
    mask_h = heads < HEADS
    dims = tl.arange(0, 128)
    scales_ptr = kv_ptr.to(tl.pointer_type(tl.float32))
    while first < last:
        length = tl.minimum(tl.maximum(tl.load(len_ptr + row).to(tl.int32), 0), limit)
        row_tiles = (length + BLOCK_T - 1) // BLOCK_T
        q_at = row.to(tl.int64) * stride_qb + heads[:, None] * stride_qh + dims[None, :]
        q = tl.load(q_ptr + q_at, mask=mask_h[:, None], other=0).to(tl.float8e4nv, bitcast=True)
        weight = tl.load(w_ptr + row * stride_wb + heads, mask=mask_h, other=0.0).to(tl.float32)
        table_row = table_ptr + row.to(tl.int64) * stride_tb
        out_row = out_ptr + row.to(tl.int64) * stride_ob
        stop = tl.minimum(row_tiles, last - row_start)
        for tile in range(first - row_start, stop):
            token = tile * BLOCK_T + tl.arange(0, BLOCK_T)
            there = token < length
            page = tl.load(table_row + token // 64, mask=there, other=0)
            start = tl.maximum(page, 0).to(tl.int64) * 8448
            slot = token % 64
            key_at = tl.multiple_of(start + slot * 128, 16)
            codes = tl.load(
                kv_ptr + (key_at[:, None] + dims[None, :]), mask=there[:, None], other=0
            )
            scale = tl.load(scales_ptr + (start // 4 + 2048 + slot), mask=there, other=0.0)
            product = tl.dot(codes.to(tl.float8e4nv, bitcast=True), q.T)
            product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
            score = tl.sum(product * weight[None, :], 1) * scale
            tl.store(out_row + token, score, mask=there)
        row_start += row_tiles
        first = row_start
        row += 1


@triton.jit
def _fill_kernel(
    len_ptr, upto_ptr, out_ptr, limit, width, stride_ob,
    HAS_UPTO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """-inf from a row's length to `upto` (one for each row, or the width)."""
    row = tl.program_id(0)
    length = tl.minimum(tl.maximum(tl.load(len_ptr + row).to(tl.int32), 0), limit)
    upto = width
    if HAS_UPTO:
        upto = tl.load(upto_ptr + row)
    out_row = out_ptr + row.to(tl.int64) * stride_ob
    # The block in which the row's own scores end, then whole blocks without a mask (wide stores),
    # then what is left.
    first = length // BLOCK
    whole = tl.maximum(upto // BLOCK, first + 1)
    each = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        at = first * BLOCK + each
        tl.store(out_row + at, float("-inf"), mask=(at >= length) & (at < upto))
        at = whole * BLOCK + each
        tl.store(out_row + at, float("-inf"), mask=at < upto)
    infinite = tl.full([BLOCK], float("-inf"), tl.float32)
    for block in range(first + 1 + tl.program_id(1), whole, tl.num_programs(1)):
        tl.store(out_row + block * BLOCK + each, infinite)


# Per compute capability major; both are spill-free.  H200, 2026-11-29, 64 rows of 64 heads, all of
# 131072 tokens / 512 tokens there: 324 / 5.5 us as below, 386 / 4.5 with two programs per SM, 380 /
# 4.9 with 4 stages, 387 / 7.2 with 64 tokens a step and 8 stages.  Half of the stages go to the
# page numbers that the key addresses need.  sm_12x has no machine here.
CONFIGS: dict[int, Config] = {
    9: Config(block_t=128, num_warps=4, num_stages=5, programs_per_sm=3),
    12: Config(block_t=64, num_warps=4, num_stages=5, programs_per_sm=3),
}
_FILL_BLOCK = 4096


def config_for(major: int) -> Config:
    """The configuration for compute capability `major`; UsageError if none was made for it."""
    if major not in CONFIGS:
        raise UsageError(f"indexer_logits: no configuration for compute capability {major}.x")
    return CONFIGS[major]


@functools.cache
def _device(index: int | None) -> tuple[int, int]:
    """Compute capability major and number of multiprocessors; (12, 2) for the CPU interpreter."""
    if index is None:
        return 12, 2
    found = torch.cuda.get_device_properties(index)
    return found.major, found.multi_processor_count


@dataclass(frozen=True)
class LogitsBuffer:
    """A logits buffer that is kept from call to call and whose tail stays -inf.

    `logits`: float32 [rows, width]; `filled`: int32 [rows], how far each row holds scores.  A
    call restores -inf only where the previous call had scores, so its cost follows the tokens
    and not the width.  The next call overwrites what the last one returned.
    """

    logits: torch.Tensor
    filled: torch.Tensor

    @staticmethod
    def empty(rows: int, width: int, device: torch.device | str) -> LogitsBuffer:
        """A buffer for up to `rows` query rows and a context limit of `width` tokens."""
        logits = torch.full((rows, width), float("-inf"), dtype=torch.float32, device=device)
        return LogitsBuffer(logits, torch.zeros(rows, dtype=torch.int32, device=device))


def _check(q, cache, weights, lengths, page_table) -> None:
    """Raises ValueError for what `indexer_logits` does not take."""
    rows, heads, dim = q.shape
    if dim != HEAD_DIM or q.element_size() != 1 or q.stride(2) != 1:
        raise ValueError(f"q: want FP8 [rows, heads, 128], got {q.dtype} {tuple(q.shape)}")
    if not 1 <= heads <= 128:
        raise ValueError(f"q: want 1 to 128 heads, got {heads}")
    page = cache.shape[1:].numel() if cache.ndim > 1 else 0
    if cache.element_size() != 1 or page != PAGE_BYTES or not cache[0].is_contiguous():
        raise ValueError(f"cache: want pages of 8448 bytes, got {cache.dtype} {tuple(cache.shape)}")
    if cache.stride(0) != PAGE_BYTES or cache.data_ptr() % 16:
        raise ValueError("cache: want pages one after the other from a multiple of 16 bytes")
    if weights.shape != (rows, heads) or lengths.shape != (rows,):
        raise ValueError(
            f"weights, lengths: want [{rows}, {heads}] and [{rows}], "
            f"got {tuple(weights.shape)} and {tuple(lengths.shape)}"
        )
    if page_table.dtype != torch.int32 or page_table.shape[0] != rows or page_table.ndim != 2:
        raise ValueError(f"page_table: want int32 [{rows}, pages], got {tuple(page_table.shape)}")


def indexer_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    width: int,
    *,
    out: torch.Tensor | LogitsBuffer | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Scores of the cached tokens for each query row, float32 [rows, width].

    q: float8_e4m3fn [rows, heads, 128], up to 128 heads.  cache: bytes [pages, 64, 1, 132] or
    [pages, 8448].  weights: [rows, heads].  lengths: integers [rows], tokens that are there.
    page_table: int32 [rows, pages]; entries past a row's length are not read.  width: the context
    limit in tokens.  A row's length counts up to min(width, 64 * pages of the table).

    The tail of a row, from its length on:
    - `out` a LogitsBuffer: -inf, restored only where the previous call wrote scores;
    - else -inf, written to the end of the row each time, whose cost grows with the width.

    `out` a tensor is written and returned.  Safe to capture in a CUDA graph and to replay with
    other contents.  Raises ValueError for shapes or types that it does not take.
    """
    _check(q, cache, weights, lengths, page_table)
    rows, heads, _ = q.shape
    filled = None
    if isinstance(out, LogitsBuffer):
        filled, out = out.filled[:rows], out.logits[:rows]
    if out is None:
        out = torch.empty((rows, width), dtype=torch.float32, device=q.device)
    if out.shape != (rows, width) or out.dtype != torch.float32 or out.stride(1) != 1:
        raise ValueError(f"out: want float32 [{rows}, {width}], got {tuple(out.shape)}")
    if lengths.stride(0) != 1:
        lengths = lengths.contiguous()
    if weights.stride(1) != 1:
        weights = weights.contiguous()
    if page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    major, sms = _device(q.device.index if q.is_cuda else None)
    config = config or config_for(major)
    limit = min(width, page_table.shape[1] * PAGE_TOKENS)
    if rows:
        _fill_kernel[(rows, max(1, 8 * sms // rows))](
            lengths, filled if filled is not None else lengths, out, limit, width, out.stride(0),
            HAS_UPTO=filled is not None, BLOCK=_FILL_BLOCK, num_warps=8,
        )  # fmt: skip
    q, cache = q.view(torch.uint8), cache.view(torch.uint8)
    for start in range(0, rows, MAX_ROWS):
        part = slice(start, min(rows, start + MAX_ROWS))
        count = part.stop - part.start
        _logits_kernel[(sms * config.programs_per_sm,)](
            q[part], cache, weights[part], lengths[part], page_table[part], out[part],
            filled[part] if filled is not None else lengths, count, limit,
            q.stride(0), q.stride(1), weights.stride(0), page_table.stride(0), out.stride(0),
            HEADS=heads, HEADS_PAD=max(16, triton.next_power_of_2(heads)),
            ROWS_PAD=max(16, triton.next_power_of_2(count)), BLOCK_T=config.block_t,
            NOTE_FILLED=filled is not None,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out


_SIGNATURE = {
    "q_ptr": "*u8", "kv_ptr": "*u8", "w_ptr": "*fp32", "len_ptr": "*i32", "table_ptr": "*i32",
    "out_ptr": "*fp32", "filled_ptr": "*i32", "upto_ptr": "*i32",
}  # fmt: skip
_ALIGNED = ("q_ptr", "kv_ptr", "w_ptr", "len_ptr", "out_ptr", "stride_qb", "stride_qh", "stride_wb")


def compile_cases(arch: str) -> Sequence[CompileCase]:
    """The logits kernel for 32 to 128 heads, 64 and 4096 rows; the tail fill both ways."""
    config = config_for(9 if arch == "sm_90" else 12)
    cases = []
    for heads, rows in ((64, 64), (64, MAX_ROWS), (32, 64), (128, MAX_ROWS)):
        constexprs = {
            "HEADS": heads, "HEADS_PAD": heads, "ROWS_PAD": rows, "BLOCK_T": config.block_t,
            "NOTE_FILLED": True,
        }  # fmt: skip
        name = f"logits {heads} heads, {rows} rows, T{config.block_t} S{config.num_stages}"
        cases.append(_compile_case(name, _logits_kernel, constexprs, config))
    for upto in (False, True):
        constexprs = {"HAS_UPTO": upto, "BLOCK": _FILL_BLOCK}
        plain = Config(_FILL_BLOCK, 8, 3, 1)
        name = f"fill {'to the previous lengths' if upto else 'all'}"
        cases.append(_compile_case(name, _fill_kernel, constexprs, plain))
    return cases


def _compile_case(name, kernel, constexprs, config) -> CompileCase:
    arguments = [each for each in kernel.arg_names if each not in constexprs]
    signature = {each: _SIGNATURE.get(each, "i32") for each in arguments}
    aligned = tuple(each for each in (*_ALIGNED, "stride_ob") if each in arguments)
    return CompileCase(
        name, kernel, signature, constexprs, config.num_warps, config.num_stages, aligned
    )


def checks(device: str) -> Sequence[Check]:
    """Lengths from 0 to a million tokens, both head counts, and the kept buffer."""
    from dsv4doctor.kernels import indexer_cases

    return indexer_cases.checks(META.error_bar)


def bench_cases(device: str) -> Iterable[BenchCase]:
    """Context limits from 8K to 1M tokens, few and all of them there."""
    from dsv4doctor.kernels import indexer_cases

    return indexer_cases.bench_cases(device)
