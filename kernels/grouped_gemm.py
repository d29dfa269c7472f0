"""Grouped matrix products with 4-bit expert weights, for the routed experts of an MoE layer.

A *pair* is one token with one of its `topk` experts: pair p belongs to token p // topk.  Pairs of
one expert are gathered into *tiles* of at most BLOCK_T pairs, so that a tile multiplies with one
expert's weights.  Four launches, whose shapes follow from the shapes of the inputs alone:

    route   pairs -> tiles; the tokens' columns reordered (above CHUNK pairs: counted before)
    gate/up h[p] = swiglu(x[token] W1^T, x[token] W3^T)
    down    y[p] = h[p] W2^T
    sum     out[t] = sum over the token's pairs of weight * y[p]

The weights are the left operand, [rows of W, K] x [K, pairs]: they are decoded in the registers
from which the tensor core reads its left operand, on Hopper (wgmma) and on Blackwell (mma.sync).
`fp4.py` says why columns are stored in the order (4i, 4i + 1, 4i + 2, 4i + 3); x is brought into
that order by `route`, h is written in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from dsv4doctor.kernels.fp4 import block_scale, decode_e2m1

CHUNK = 1024
"""Pairs that one program counts, where there are too many for every program to count them all."""


@dataclass(frozen=True)
class Config:
    """How one program of a grouped product is shaped."""

    block_n: int
    """Rows of W; of the gate/up product half of them are gate rows, half up rows."""
    block_t: int
    """Pairs of one tile; the same for both products of a call."""
    block_k: int
    num_warps: int
    num_stages: int
    roomy: Config | None = None
    """What to use instead where wide scales or a ragged K would make this one spill registers."""

    def fitting(self, wide: bool, k: int) -> Config:
        """This configuration, or the roomy one, for a product over `k` columns."""
        tight = wide or k % self.block_k != 0
        return self.roomy if self.roomy and tight else self


@triton.jit
def _local_expert(ids_ptr, pairs, count, offset, experts):
    """Expert of each pair in 0..experts - 1, or `experts` for one that is not here."""
    ids = tl.load(ids_ptr + pairs, mask=pairs < count, other=-1).to(tl.int32) - offset
    here = (pairs < count) & (ids >= 0) & (ids < experts)
    return tl.where(here, ids, experts)


@triton.jit
def _split_columns(x_ptr, out_ptr, row, block, quarter, stride_x, BLOCK: tl.constexpr):
    """out[row, j * quarter + i] = x[row, 4 i + j]; four bf16 are moved as one int64."""
    cols = block * BLOCK + tl.arange(0, BLOCK)
    mask = cols < quarter
    words = (x_ptr + row.to(tl.int64) * stride_x).to(tl.pointer_type(tl.int64))
    word = tl.load(words + cols, mask=mask, other=0)
    target = (out_ptr + row.to(tl.int64) * quarter * 4).to(tl.pointer_type(tl.int16))
    for j in tl.static_range(4):
        tl.store(target + j * quarter + cols, (word >> (16 * j)).to(tl.int16), mask=mask)


@triton.jit
def _wait_for_inputs(PDL: tl.constexpr):
    """Nothing before this may touch what an earlier kernel of the stream reads or writes.

    PDL: this kernel was allowed to start while the one before it is still running.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _let_next_start(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["count", "offset"])
def _count_kernel(
    ids_ptr, counts_ptr, count, offset, experts,
    CHUNK: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts[chunk, expert]: how many pairs of the chunk go to the expert."""
    _let_next_start(PDL)
    chunk = tl.program_id(0)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = _local_expert(ids_ptr, pairs, count, offset, experts)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS))


@triton.jit(do_not_specialize=["chunks", "count", "offset", "tiles", "place_programs"])
def _route_kernel(
    ids_ptr, counts_ptr, x_ptr, split_ptr, pairs_ptr, tile_expert_ptr, tile_rows_ptr,
    chunks, count, offset, experts, tiles, place_programs, quarter, blocks, stride_x,
    BLOCK_T: tl.constexpr, CHUNK: tl.constexpr, COUNTED: tl.constexpr, OWN: tl.constexpr,
    BINS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Places OWN pairs and describes OWN tiles, or (programs behind those) reorders columns.

    COUNTED: `counts` has one row for each of `chunks`; otherwise there is one chunk, and every
    program counts it itself.
    """
    if COUNTED:
        _wait_for_inputs(PDL)
    _let_next_start(PDL)
    pid = tl.program_id(0)
    if pid >= place_programs:
        rest = pid - place_programs
        _split_columns(x_ptr, split_ptr, rest // blocks, rest % blocks, quarter, stride_x, COLUMNS)
        return
    bins = tl.arange(0, BINS)
    own = pid * OWN + tl.arange(0, OWN)
    chunk = (pid * OWN) // CHUNK
    before = tl.zeros([BINS], tl.int32)
    if not COUNTED:
        everyone = tl.arange(0, CHUNK)
        total = tl.histogram(_local_expert(ids_ptr, everyone, count, offset, experts), BINS)
    else:
        total = tl.zeros([BINS], tl.int32)
        for c in range(chunks):
            part = tl.load(counts_ptr + c * BINS + bins)
            total += part
            before += tl.where(c < chunk, part, 0)
    total = tl.where(bins < experts, total, 0)
    tiles_of = (total + BLOCK_T - 1) // BLOCK_T
    ends = tl.cumsum(tiles_of, 0)
    starts = ends - tiles_of

    # Where the own pairs go: behind the pairs of the same expert with a smaller number.
    mine = _local_expert(ids_ptr, own, count, offset, experts)
    rank = tl.zeros([OWN], tl.int32)
    for first in range(0, CHUNK, 128):
        other = chunk * CHUNK + first + tl.arange(0, 128)
        theirs = _local_expert(ids_ptr, other, count, offset, experts)
        same = (theirs[None, :] == mine[:, None]) & (other[None, :] < own[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
    is_mine = mine[:, None] == bins[None, :]
    slot = tl.sum(tl.where(is_mine, (before + starts * BLOCK_T)[None, :], 0), 1) + rank
    tl.store(pairs_ptr + slot, own, mask=mine < experts)

    expert = tl.sum((ends[None, :] <= own[:, None]).to(tl.int32), 1)
    used = own < tl.max(ends, 0)
    is_its = expert[:, None] == bins[None, :]
    left = tl.sum(tl.where(is_its, (total + starts * BLOCK_T)[None, :], 0), 1) - own * BLOCK_T
    tl.store(tile_expert_ptr + own, tl.where(used, expert, -1), mask=own < tiles)
    tl.store(tile_rows_ptr + own, tl.where(used, tl.minimum(left, BLOCK_T), 0), mask=own < tiles)


@triton.jit
def _swiglu(gate, up, limit, HAS_LIMIT: tl.constexpr):
    """silu(gate) * up; with a limit gate is clamped from above, up on both sides."""
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _product_kernel(
    x_ptr, w_ptr, scale_ptr, global_ptr, out_ptr, pairs_ptr, tile_expert_ptr, tile_rows_ptr,
    rows, k_groups, scale_units, topk, limit, unlift,
    GATED: tl.constexpr, HAS_LIMIT: tl.constexpr, E4M3: tl.constexpr, WIDE: tl.constexpr,
    HAS_GLOBAL: tl.constexpr, SCALE_ALIGN: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of pairs times BLOCK_N rows of its expert's W.

    `rows`: columns of the result.  GATED: W has 2 * rows rows, gate then up, and x is addressed
    by token.  `k_groups`: K / 32.  `scale_units`: scales of a row / SCALE_ALIGN.
    """
    PER: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    CODES: tl.constexpr = BLOCK_K // 4
    GROUP: tl.constexpr = 4 if E4M3 else 8
    SCALES: tl.constexpr = CODES // GROUP
    blocks = tl.cdiv(rows, PER)
    pid = tl.program_id(0)
    tile = pid // blocks
    block = pid % blocks
    _wait_for_inputs(PDL)
    # All three before the first is waited for; behind a tile's pairs there is anything.
    expert = tl.load(tile_expert_ptr + tile)
    valid = tl.arange(0, BLOCK_T) < tl.load(tile_rows_ptr + tile)
    pair = tl.load(pairs_ptr + tile * BLOCK_T + tl.arange(0, BLOCK_T))
    _let_next_start(PDL)
    if expert < 0:
        return
    pair = tl.where(valid, pair, 0)
    quarter = k_groups * 8
    scale_stride = scale_units * SCALE_ALIGN

    lane = tl.arange(0, BLOCK_N)
    if GATED:
        # Row r of the accumulator and row r + 8 lie in one thread: the one is gate, the other up.
        place = block * PER + (lane // 16) * 8 + lane % 8
        place = tl.minimum(place, rows - 1)
        row = 4 * (place % (rows // 4)) + place // (rows // 4) + ((lane % 16) // 8) * rows
        w_rows = 2 * rows
        source = pair // topk
    else:
        row = tl.minimum(block * PER + lane, rows - 1)
        w_rows = rows
        source = pair
    code = tl.arange(0, CODES)
    group = tl.arange(0, SCALES)
    column = tl.arange(0, BLOCK_K)
    start = expert.to(tl.int64) * w_rows
    w = w_ptr + start * quarter + row[:, None] * quarter + code[None, :]
    scale = scale_ptr + start * scale_stride + row[:, None] * scale_stride + group[None, :]
    x = x_ptr + source.to(tl.int64)[:, None] * (4 * quarter)
    x = x + ((column // CODES) * quarter + column % CODES)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for k in tl.range(0, quarter, CODES, num_stages=STAGES):
        if EVEN_K:
            codes = tl.load(w)
            byte = tl.load(scale)
            xs = tl.load(x, mask=valid[:, None], other=0.0)
        else:
            left = quarter - k
            codes = tl.load(w, mask=(code < left)[None, :], other=0)
            byte = tl.load(scale, mask=(group * GROUP < left)[None, :], other=0)
            xs = tl.load(x, mask=valid[:, None] & (column % CODES < left)[None, :], other=0.0)
        factor = block_scale(byte, E4M3, WIDE)[:, :, None]
        factor = tl.broadcast_to(factor, (BLOCK_N, SCALES, GROUP))
        factor = tl.reshape(factor, (BLOCK_N, CODES))
        acc = tl.dot(decode_e2m1(codes, factor, WIDE, ASM), tl.trans(xs), acc)
        w += CODES
        scale += SCALES
        x += CODES

    acc = acc * unlift
    place = block * PER + tl.arange(0, PER)
    if GATED:
        acc = tl.reshape(acc, (BLOCK_N // 16, 2, 8, BLOCK_T))
        gate, up = tl.split(tl.permute(acc, (0, 2, 3, 1)))
        if HAS_GLOBAL:
            gate = gate * tl.load(global_ptr + 2 * expert)
            up = up * tl.load(global_ptr + 2 * expert + 1)
        acc = tl.reshape(_swiglu(gate, up, limit, HAS_LIMIT), (PER, BLOCK_T))
    elif HAS_GLOBAL:
        acc = acc * tl.load(global_ptr + expert)
    out = out_ptr + pair.to(tl.int64)[None, :] * rows + place[:, None]
    tl.store(out, acc.to(tl.bfloat16), mask=valid[None, :] & (place < rows)[:, None])


@triton.jit
def _sum_kernel(
    y_ptr, ids_ptr, weights_ptr, out_ptr, hidden, topk, offset, experts, factor, stride_out,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = factor * sum over the token's pairs that are here of weight * y[pair].

    PAIRS: topk, rounded up to a power of two.
    """
    token = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, PAIRS)
    pair = token * topk + slot
    _wait_for_inputs(PDL)
    _let_next_start(PDL)
    expert = tl.load(ids_ptr + pair, mask=slot < topk, other=-1).to(tl.int32) - offset
    here = (expert >= 0) & (expert < experts) & (slot < topk)
    weight = tl.load(weights_ptr + pair, mask=here, other=0.0)
    y = tl.load(
        y_ptr + pair.to(tl.int64)[:, None] * hidden + cols[None, :],
        mask=here[:, None] & (cols < hidden)[None, :],
        other=0.0,
    )
    total = tl.sum(y.to(tl.float32) * weight[:, None], 0) * factor
    out = out_ptr + token.to(tl.int64) * stride_out + cols
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=cols < hidden)
