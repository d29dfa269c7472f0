"""The Triton kernels of the sparse MLA decode; `sparse_mla_decode.py` has the mathematics."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scale_value(byte):
    """UE8M0 -> float32: 2^(byte - 127), exact down to 2^-127; 255 is NaN."""
    bits = byte.to(tl.int32) << 23
    bits = tl.where(byte == 0, 0x00400000, bits)
    bits = tl.where(byte == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _row_addresses(index, page_size, page_bytes):
    """Byte offsets of a cache row's data and of its scales."""
    page = index // page_size
    slot = index - page * page_size
    start = page.to(tl.int64) * page_bytes
    data = start + slot * 576
    scales = start + page_size * 576 + slot * 8
    return tl.multiple_of(data, 16), tl.multiple_of(scales, 8)


@triton.jit
def _load_codes(kv_ptr, data, valid, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    cols = FIRST + tl.arange(0, WIDTH)
    return tl.load(kv_ptr + (data[:, None] + cols[None, :]), mask=valid[:, None], other=0)


@triton.jit
def _dequantise(codes, scales, FIRST: tl.constexpr):
    """E4M3 codes [rows, width] of the columns from FIRST on, times their scales, in bf16."""
    ROWS: tl.constexpr = codes.shape[0]
    GROUPS: tl.constexpr = codes.shape[1] // 64
    shift = (FIRST // 64 + tl.arange(0, GROUPS)) * 8
    byte = (scales[:, None] >> shift[None, :].to(tl.int64)) & 255
    value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    value = tl.reshape(value, (ROWS, GROUPS, 64)) * _scale_value(byte)[:, :, None]
    return tl.reshape(value, (ROWS, GROUPS * 64)).to(tl.bfloat16)


@triton.jit
def _load_scales(kv_ptr, scales, valid):
    """The 8 scale bytes of each row in one word."""
    words = kv_ptr.to(tl.pointer_type(tl.int64))
    return tl.load(words + scales // 8, mask=valid, other=0)


@triton.jit
def _load_rotary(kv_ptr, data, valid):
    halves = kv_ptr.to(tl.pointer_type(tl.bfloat16))
    cols = 224 + tl.arange(0, 64)
    offs = tl.multiple_of(data // 2, 8)
    return tl.load(halves + (offs[:, None] + cols[None, :]), mask=valid[:, None], other=0.0)


@triton.jit
def _load_q(
    q_ptr, row, heads, mask_h, stride_n, stride_h, FIRST: tl.constexpr, WIDTH: tl.constexpr
):
    cols = FIRST + tl.arange(0, WIDTH)
    base = q_ptr + row.to(tl.int64) * stride_n
    return tl.load(
        base + heads[:, None] * stride_h + cols[None, :], mask=mask_h[:, None], other=0.0
    )


@triton.jit
def _store(ptr, start, heads, mask_h, value, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    cols = FIRST + tl.arange(0, WIDTH)
    offs = start + heads[:, None] * 512 + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask_h[:, None])


@triton.jit
def decode_kernel(
    q_ptr, kv_ptr, idx_ptr, len_ptr, xlen_ptr, sink_ptr, out_ptr, lse_ptr,
    scale_log2, num_heads, topk, xtopk,
    page_size, page_bytes, xpage_size, xpage_bytes, xdelta, xidx_delta,
    stride_qn, stride_qh, stride_in, stride_xn, splits,
    HAS_LEN: tl.constexpr, HAS_XLEN: tl.constexpr, HAS_EXTRA: tl.constexpr,
    HAS_SINK: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One query row, one group of heads, one share of the tiles.

    `xdelta`: bytes from the first cache to the second; `xidx_delta`: int32 elements from the
    first index list to the second.  SPLIT: `out` and `lse` are the partial
    results, [row, split, head, ...], normalised within the share and without the sink.
    """
    groups = tl.cdiv(num_heads, BLOCK_H)
    pid = tl.program_id(0)
    group = pid % groups
    split = (pid // groups) % splits
    row = pid // (groups * splits)
    heads = group * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = heads < num_heads

    count = topk
    if HAS_LEN:
        count = tl.minimum(tl.load(len_ptr + row).to(tl.int32), topk)
    tiles = tl.cdiv(tl.maximum(count, 0), BLOCK_T)
    total = tiles
    xcount = 0
    if HAS_EXTRA:
        xcount = xtopk
        if HAS_XLEN:
            xcount = tl.minimum(tl.load(xlen_ptr + row).to(tl.int32), xtopk)
        total = tiles + tl.cdiv(tl.maximum(xcount, 0), BLOCK_T)
    first = split * total // splits
    last = (split + 1) * total // splits

    qa = _load_q(q_ptr, row, heads, mask_h, stride_qn, stride_qh, 0, 128)
    qb = _load_q(q_ptr, row, heads, mask_h, stride_qn, stride_qh, 128, 128)
    qc = _load_q(q_ptr, row, heads, mask_h, stride_qn, stride_qh, 256, 128)
    qd = _load_q(q_ptr, row, heads, mask_h, stride_qn, stride_qh, 384, 64)
    qr = _load_q(q_ptr, row, heads, mask_h, stride_qn, stride_qh, 448, 64)
    acca = tl.zeros([BLOCK_H, 128], tl.float32)
    accb = tl.zeros([BLOCK_H, 128], tl.float32)
    accc = tl.zeros([BLOCK_H, 128], tl.float32)
    accd = tl.zeros([BLOCK_H, 64], tl.float32)
    accr = tl.zeros([BLOCK_H, 64], tl.float32)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_H], tl.float32)
    idx_row = row.to(tl.int64) * stride_in
    xidx_row = xidx_delta + row.to(tl.int64) * stride_xn - tiles * BLOCK_T
    limit = tiles * BLOCK_T + xcount

    for tile in range(first, last):
        here = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        # A tile lies in one list, so everything that depends on the list is a scalar.
        is_extra = tile >= tiles
        idx_at = tl.where(is_extra, xidx_row, idx_row)
        psize = tl.where(is_extra, xpage_size, page_size)
        pbytes = tl.where(is_extra, xpage_bytes, page_bytes)
        delta = tl.where(is_extra, xdelta, 0)
        inside = here < tl.where(is_extra, limit, count)
        index = tl.load(idx_ptr + idx_at + here, mask=inside, other=-1)
        valid = index >= 0
        data, scale_at = _row_addresses(tl.maximum(index, 0), psize, pbytes)
        data = tl.multiple_of(data + delta, 16)
        scale_at = tl.multiple_of(scale_at + delta, 8)

        scales = _load_scales(kv_ptr, scale_at, valid)
        kr = _load_rotary(kv_ptr, data, valid)
        score = tl.dot(qr, kr.T)
        ka = _dequantise(_load_codes(kv_ptr, data, valid, 0, 128), scales, 0)
        score = tl.dot(qa, ka.T, score)
        kb = _dequantise(_load_codes(kv_ptr, data, valid, 128, 128), scales, 128)
        score = tl.dot(qb, kb.T, score)
        kc = _dequantise(_load_codes(kv_ptr, data, valid, 256, 128), scales, 256)
        score = tl.dot(qc, kc.T, score)
        kd = _dequantise(_load_codes(kv_ptr, data, valid, 384, 64), scales, 384)
        score = tl.dot(qd, kd.T, score)
        score = tl.where(valid[None, :], score * scale_log2, float("-inf"))

        new_top = tl.maximum(top, tl.max(score, 1))
        # A head that has seen nothing yet keeps -inf: subtract 0 there, not -inf from -inf.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.math.exp2(top - base)
        weight = tl.math.exp2(score - base[:, None])
        mass = mass * shrink + tl.sum(weight, 1)
        top = new_top
        weight = weight.to(tl.bfloat16)
        acca = tl.dot(weight, ka, acca * shrink[:, None])
        accb = tl.dot(weight, kb, accb * shrink[:, None])
        accc = tl.dot(weight, kc, accc * shrink[:, None])
        accd = tl.dot(weight, kd, accd * shrink[:, None])
        accr = tl.dot(weight, kr, accr * shrink[:, None])

    base = tl.where(top == float("-inf"), 0.0, top)
    lse = (base + tl.math.log2(mass)) * 0.6931471805599453
    whole = mass
    if HAS_SINK and not SPLIT:
        sink = tl.load(sink_ptr + heads, mask=mask_h, other=float("-inf"))
        whole = mass + tl.math.exp2(sink * 1.4426950408889634 - base)
    # Nothing seen: the output is 0, whatever the sink.
    inverse = tl.where(mass == 0.0, 0.0, 1.0 / whole)[:, None]
    slot = (row.to(tl.int64) * splits + split) * num_heads
    _store(out_ptr, slot * 512, heads, mask_h, acca * inverse, 0, 128)
    _store(out_ptr, slot * 512, heads, mask_h, accb * inverse, 128, 128)
    _store(out_ptr, slot * 512, heads, mask_h, accc * inverse, 256, 128)
    _store(out_ptr, slot * 512, heads, mask_h, accd * inverse, 384, 64)
    _store(out_ptr, slot * 512, heads, mask_h, accr * inverse, 448, 64)
    tl.store(lse_ptr + slot + heads, lse, mask=mask_h)


@triton.jit
def merge_kernel(
    part_ptr, part_lse_ptr, sink_ptr, out_ptr, lse_ptr, num_heads, splits,
    HAS_SINK: tl.constexpr, SPLITS_PAD: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds up the shares of one (row, head), weighted by their exp(lse)."""
    pair = tl.program_id(0)
    row = (pair // num_heads).to(tl.int64)
    head = pair % num_heads
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    share = tl.arange(0, SPLITS_PAD)
    slot = (row * splits + share) * num_heads + head
    part_lse = tl.load(part_lse_ptr + slot, mask=share < splits, other=float("-inf"))
    # A NaN in any share has to reach the result: a maximum alone would drop it.
    top = tl.max(part_lse, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.math.exp2((part_lse - base) * 1.4426950408889634)
    mass = tl.sum(weight, 0)
    whole = mass
    if HAS_SINK:
        whole = mass + tl.math.exp2((tl.load(sink_ptr + head) - base) * 1.4426950408889634)
    part = tl.load(
        part_ptr + slot[:, None] * 512 + cols[None, :], mask=(share < splits)[:, None], other=0.0
    )
    out = tl.sum(part.to(tl.float32) * weight[:, None], 0)
    out = tl.where(mass == 0.0, 0.0, out / whole)
    tl.store(out_ptr + pair.to(tl.int64) * 512 + cols, out.to(out_ptr.dtype.element_ty))
    tl.store(lse_ptr + pair, base + tl.math.log(mass), mask=tl.program_id(1) == 0)


@triton.jit
def dequantise_kernel(
    kv_ptr, idx_ptr, out_ptr, count, page_size, page_bytes, BLOCK_T: tl.constexpr
):
    here = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    index = tl.load(idx_ptr + here, mask=here < count, other=-1)
    valid = index >= 0
    data, scale_at = _row_addresses(tl.maximum(index, 0), page_size, page_bytes)
    scales = _load_scales(kv_ptr, scale_at, valid)
    ka = _dequantise(_load_codes(kv_ptr, data, valid, 0, 128), scales, 0)
    kb = _dequantise(_load_codes(kv_ptr, data, valid, 128, 128), scales, 128)
    kc = _dequantise(_load_codes(kv_ptr, data, valid, 256, 128), scales, 256)
    kd = _dequantise(_load_codes(kv_ptr, data, valid, 384, 64), scales, 384)
    kr = _load_rotary(kv_ptr, data, valid)
    inside = here < count
    _store(out_ptr, 0, here, inside, ka, 0, 128)
    _store(out_ptr, 0, here, inside, kb, 128, 128)
    _store(out_ptr, 0, here, inside, kc, 256, 128)
    _store(out_ptr, 0, here, inside, kd, 384, 64)
    _store(out_ptr, 0, here, inside, kr, 448, 64)
