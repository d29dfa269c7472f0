"""Sparse MLA decode on DeepSeek-V4's paged FP8 cache.

For every query row n and head h, over the cache rows j that the row's index lists name:

    s[j]   = scale * <q[n, h], kv[j]>
    lse    = log(sum_j exp(s[j]))
    out    = sum_j exp(s[j]) * kv[j] / (sum_j exp(s[j]) + exp(sink[h]))

One row of the cache is key and value at once: 448 FP8 E4M3 values with one UE8M0 scale per 64
(its value is 2^(byte - 127), 255 is NaN), then 64 bf16 values (the rotary part).  A page holds
`page_size` rows of 576 bytes, then 8 bytes of scales per row (7 and a pad byte), then padding:

    page + 576 * r          448 bytes E4M3, 128 bytes bf16
    page + 576 * page_size + 8 * r          7 scale bytes, 1 unused

One program takes up to 64 heads of one query row, so that a cache row is fetched once for all of
them, and goes through the tiles of both index lists (sliding window, then compressed) in one
loop.  With few query rows the tiles are dealt to several programs whose results a second kernel
merges.  The number of programs follows from shapes alone; the lengths are read on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import triton

from dsv4doctor.errors import UsageError
from dsv4doctor.kernels.mla_kernels import decode_kernel, dequantise_kernel, merge_kernel
from dsv4doctor.kernels.registry import BenchCase, Check, CompileCase, KernelMeta

META = KernelMeta(
    name="sparse_mla_decode",
    title="Sparse MLA decode on the paged FP8 cache",
    replaces=(
        "sglang.srt.layers.attention.flash_mla_sm120.flash_mla_with_kvcache_sm120",
        "sglang.kernels.ops.attention.flash_mla_sm120.flash_mla_with_kvcache_sm120",
    ),
    error_bar=1e-2,
    archs=("sm_90", "sm_120", "sm_121"),
)

HEAD_DIM = 512
ROW_BYTES = 576
SCALE_BYTES = 8


@dataclass(frozen=True)
class Config:
    """How one program of the decode kernel is shaped."""

    block_h: int
    """Heads of one program."""
    block_t: int
    """Cache rows of one step."""
    num_warps: int
    num_stages: int
    min_splits: int = 1
    """2: only the form that leaves its result to the merge is offered, the other one spills."""


# Per compute capability major, by rising number of heads; the first that has room for all heads
# is taken.  H200, 2026-11-29, 128 + 512 cache rows, merge included, microseconds:
#                      (16,32,4,2) (16,32,8,2) (16,16,4,2) (32,32,8,2) (64,32,8,2) (64,64,8,2)
#   64 rows, 64 heads         97         178         150         107        58.5        43.7
#   64 rows, 16 heads       32.8        50.4        44.6
#   1 row,   64 heads        8.5         8.6         9.3        10.1        10.7        12.1
# (64,64,8,2) spills 5 registers, outside the tile loop.  sm_12x, for which there was no
# machine, takes the spill-free programs under its 101376 bytes of shared memory that read a
# cache row for the most heads; two of its 16-head programs of 4 warps would not fit on an SM.
CONFIGS: dict[int, tuple[Config, ...]] = {
    9: (Config(16, 32, 4, 2), Config(64, 64, 8, 2)),
    12: (Config(16, 32, 8, 2), Config(32, 32, 8, 2, min_splits=2)),
}


def config_for(num_heads: int, rows: int, major: int, sms: int) -> Config:
    """The configuration for `rows` query rows of `num_heads` local heads.

    With few rows the first is taken whatever the heads: more, smaller programs fill the GPU
    (one row of 64 heads: 8.2 us against 10.5).  Raises UsageError for a GPU that none was made
    for.
    """
    if major not in CONFIGS:
        raise UsageError(f"sparse_mla_decode: no configuration for compute capability {major}.x")
    offered = CONFIGS[major]
    if rows * 32 <= sms:
        return offered[0]
    return next((each for each in offered if num_heads <= each.block_h), offered[-1])


@functools.cache
def _device(index: int | None) -> tuple[int, int]:
    """Compute capability major and number of multiprocessors; (12, 4) for the CPU interpreter."""
    if index is None:
        return 12, 4
    found = torch.cuda.get_device_properties(index)
    return found.major, found.multi_processor_count


def _device_of(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.is_cuda:
        return _device(None)
    return _device(tensor.device.index)


def split_count(rows: int, config: Config, num_heads: int, tiles: int, sms: int) -> int:
    """Programs per (row, head group): as many as run at once, at least one tile each."""
    groups = triton.cdiv(num_heads, config.block_h)
    at_once = sms * (8 // config.num_warps)
    return max(config.min_splits, min(tiles, at_once // (rows * groups), 64))


@dataclass(frozen=True)
class _Rows:
    """A cache and the lists of its rows, checked."""

    cache: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor | None
    page_size: int
    page_bytes: int


def _check_cache(name: str, cache: torch.Tensor) -> tuple[int, int]:
    """(page size, bytes between pages) of a paged cache view."""
    is_row = cache.ndim > 2 and cache.shape[2:].numel() == ROW_BYTES + SCALE_BYTES
    if cache.element_size() != 1 or not is_row:
        got = f"{cache.dtype} {tuple(cache.shape)}"
        raise ValueError(f"{name}: want [pages, page size, ..., 584] of bytes, got {got}")
    page_size, page_bytes = cache.shape[1], cache.stride(0)
    if page_bytes < page_size * (ROW_BYTES + SCALE_BYTES) or page_bytes % 16:
        raise ValueError(f"{name}: {page_bytes} bytes a page of {page_size} rows")
    if cache.data_ptr() % 16:
        raise ValueError(f"{name}: does not start at a multiple of 16 bytes")
    return page_size, page_bytes


def _check_rows(
    prefix: str,
    cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    rows: int,
) -> _Rows:
    page_size, page_bytes = _check_cache(f"{prefix}cache", cache)
    if indices.dtype != torch.int32 or indices.ndim != 2 or indices.shape[0] != rows:
        raise ValueError(
            f"{prefix}indices: want int32 [{rows}, k], got {indices.dtype} {tuple(indices.shape)}"
        )
    if lengths is not None:
        if lengths.shape != (rows,):
            raise ValueError(f"{prefix}lengths: want [{rows}], got {tuple(lengths.shape)}")
        lengths = lengths.contiguous()
    if indices.stride(1) != 1:
        indices = indices.contiguous()
    return _Rows(cache.view(torch.uint8), indices, lengths, page_size, page_bytes)


def _check_q(q: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """q with rows that start at multiples of 16 bytes."""
    _, num_heads, dim = q.shape
    if dim != HEAD_DIM or q.dtype != torch.bfloat16 or q.stride(2) != 1:
        raise ValueError(f"q: want contiguous bf16 [..., 512], got {q.dtype} {tuple(q.shape)}")
    if sink is not None and (sink.shape != (num_heads,) or sink.dtype != torch.float32):
        raise ValueError(f"sink: want float32 [{num_heads}], got {sink.dtype} {tuple(sink.shape)}")
    if q.data_ptr() % 16 or q.stride(0) % 8 or q.stride(1) % 8:
        return q.clone(memory_format=torch.contiguous_format)
    return q


def sparse_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float = HEAD_DIM**-0.5,
    config: Config | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query row over the cache rows that its index lists name.

    q: bf16 [rows, heads, 512], last dimension contiguous.  cache: uint8 or float8_e4m3fn
    [pages, page size, 1, 584], a view whose stride(0) is the bytes between pages; any page size.
    indices: int32 [rows, k], numbers of cache rows (page * page size + slot), negative = none;
    a row named twice counts twice.  lengths: integers [rows], how many of the k count; none = k.
    The extra cache, indices and lengths are a second list of the same form, with its own page
    size.  sink: float32 [heads], adds exp(sink) to the denominator.  scale multiplies q.k.

    Returns the output, bf16 [rows, heads, 512], and the natural-log LSE without the sink,
    float32 [rows, heads]; a query row without cache rows gives 0 and -inf.  Safe to capture in a
    CUDA graph and to replay with other contents of any tensor.  Raises ValueError for shapes or
    types that it does not take.
    """
    q = _check_q(q, sink)
    rows, num_heads, _ = q.shape
    main = _check_rows("", cache, indices, lengths, rows)
    extra = None
    if extra_cache is not None and extra_indices is not None:
        extra = _check_rows("extra_", extra_cache, extra_indices, extra_lengths, rows)
    out = torch.empty((rows, num_heads, HEAD_DIM), dtype=torch.bfloat16, device=q.device)
    lse = torch.empty((rows, num_heads), dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse
    major, sms = _device_of(q)
    config = config or config_for(num_heads, rows, major, sms)
    if splits is None:
        lists = (main,) if extra is None else (main, extra)
        tiles = sum(triton.cdiv(each.indices.shape[1], config.block_t) for each in lists)
        splits = split_count(rows, config, num_heads, tiles, sms)
    if splits == 1:
        _decode(q, main, extra, sink, scale, config, 1, out, lse)
        return out, lse
    part = torch.empty((rows, splits, num_heads, HEAD_DIM), dtype=out.dtype, device=q.device)
    part_lse = torch.empty((rows, splits, num_heads), dtype=torch.float32, device=q.device)
    _decode(q, main, extra, sink, scale, config, splits, part, part_lse)
    # Measured at 4096 heads in all: 3.8 us with one program each, 11 to 22 us in quarters.
    block_d = HEAD_DIM if rows * num_heads >= 4 * sms else 128
    merge_kernel[(rows * num_heads, HEAD_DIM // block_d)](
        part, part_lse, sink if sink is not None else lse, out, lse, num_heads, splits,
        HAS_SINK=sink is not None, SPLITS_PAD=triton.next_power_of_2(splits),
        BLOCK_D=block_d, num_warps=2 if block_d == HEAD_DIM else 1,
    )  # fmt: skip
    return out, lse


def _decode(
    q: torch.Tensor, main: _Rows, extra: _Rows | None, sink: torch.Tensor | None, scale: float,
    config: Config, splits: int, out: torch.Tensor, lse: torch.Tensor,
) -> None:  # fmt: skip
    """Launches the decode kernel; an argument that is not there is stood in for by `lse`."""
    rows, num_heads, _ = q.shape
    other = extra or main
    decode_kernel[(rows * triton.cdiv(num_heads, config.block_h) * splits,)](
        q, main.cache, main.indices,
        lse if main.lengths is None else main.lengths,
        lse if other.lengths is None else other.lengths,
        lse if sink is None else sink, out, lse,
        scale * 1.4426950408889634, num_heads, main.indices.shape[1], other.indices.shape[1],
        main.page_size, main.page_bytes, other.page_size, other.page_bytes,
        other.cache.data_ptr() - main.cache.data_ptr(),
        (other.indices.data_ptr() - main.indices.data_ptr()) // 4,
        q.stride(0), q.stride(1), main.indices.stride(0), other.indices.stride(0), splits,
        HAS_LEN=main.lengths is not None,
        HAS_XLEN=extra is not None and extra.lengths is not None,
        HAS_EXTRA=extra is not None, HAS_SINK=sink is not None, SPLIT=splits > 1,
        BLOCK_H=config.block_h, BLOCK_T=config.block_t,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def dequantise_rows(cache: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The named cache rows in bf16, [k, 512], by the very code that the decode kernel uses.

    indices: int32 [k]; a negative one gives zeros.
    """
    page_size, page_bytes = _check_cache("cache", cache)
    out = torch.empty((indices.shape[0], HEAD_DIM), dtype=torch.bfloat16, device=cache.device)
    dequantise_kernel[(triton.cdiv(indices.shape[0], 16),)](
        cache.view(torch.uint8), indices, out, indices.shape[0], page_size, page_bytes, BLOCK_T=16
    )
    return out


def compile_cases(arch: str) -> Sequence[CompileCase]:
    """The decode kernel with everything on, with and without split, and the merge."""
    from dsv4doctor.kernels import mla_cases

    return mla_cases.compile_cases(arch)


def checks(device: str) -> Sequence[Check]:
    """Decode of all codes, and the shapes that are served."""
    from dsv4doctor.kernels import mla_cases

    return mla_cases.checks(META.error_bar)


def bench_cases(device: str) -> Iterable[BenchCase]:
    """Batches 1 to 64 with 128 sliding-window and 512 compressed rows, 16 and 64 heads."""
    from dsv4doctor.kernels import mla_cases

    return mla_cases.bench_cases(device)
