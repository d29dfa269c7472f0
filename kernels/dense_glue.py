"""Small float32 products of the model, on bf16 tensor cores.

Two operations:

    hc_mix:  x @ fn.T * rsqrt(mean(x^2) + eps)     the linear part of mHC's pre mixing
    bmm_nt:  a[b] @ b[b].T                         the indexer's score product

A float32 operand is split into bf16 terms, w = w1 + w2 + w3 with w1 = bf16(w), w2 = bf16(w - w1)
and so on, and the products are accumulated in float32.  With one term a float32 operand is known
to 2^-9, with two to 2^-17, with three to 2^-25; an operand that is bf16 or FP8 is exact with one.
`hc_mix`'s x is bf16, so two terms bring its error to the rounding of the accumulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl

from dsv4doctor.kernels.registry import BenchCase, Check, CompileCase, KernelMeta

META = KernelMeta(
    name="dense_glue",
    title="mHC pre linear and indexer bmm on bf16 tensor cores",
    replaces=("sglang.srt.models.deepseek_v4.DeepseekV4DecoderLayer.hc_pre",),
    error_bar=1e-4,
    archs=("sm_90", "sm_120", "sm_121"),
)


@triton.jit
def _mix_kernel(
    x_ptr, w_ptr, part_ptr, square_ptr, rows, slice_k, stride_x, stride_w,
    MIX: tl.constexpr, MIX_PAD: tl.constexpr, TERMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Products and sums of squares over one slice of K."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, MIX_PAD)
    part = tl.program_id(1)
    mask_m, mask_n = m < rows, n < MIX
    acc = tl.zeros([BLOCK_M, MIX_PAD], tl.float32)
    square = tl.zeros([BLOCK_M], tl.float32)
    x_row = x_ptr + m.to(tl.int64)[:, None] * stride_x
    for start in range(part * slice_k, (part + 1) * slice_k, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_row + k[None, :], mask=mask_m[:, None], other=0.0)
        w = tl.load(w_ptr + n[:, None] * stride_w + k[None, :], mask=mask_n[:, None], other=0.0)
        for _ in tl.static_range(TERMS):
            term = w.to(tl.bfloat16)
            acc = tl.dot(x, term.T, acc)
            w -= term.to(tl.float32)
        wide = x.to(tl.float32)
        square += tl.sum(wide * wide, 1)
    at = (part.to(tl.int64) * rows + m) * MIX_PAD
    tl.store(part_ptr + at[:, None] + n[None, :], acc, mask=mask_m[:, None])
    tl.store(square_ptr + part * rows + m, square, mask=mask_m)


@triton.jit
def _mix_merge_kernel(
    part_ptr, square_ptr, out_ptr, rows, inverse_k, eps,
    MIX: tl.constexpr, MIX_PAD: tl.constexpr, SLICES: tl.constexpr, SLICES_PAD: tl.constexpr,
):  # fmt: skip
    """Adds the slices of one row, always in the same order, and scales."""
    row = tl.program_id(0)
    n = tl.arange(0, MIX_PAD)
    each = tl.arange(0, SLICES_PAD)
    there = each < SLICES
    at = (each.to(tl.int64) * rows + row) * MIX_PAD
    part = tl.load(part_ptr + at[:, None] + n[None, :], mask=there[:, None], other=0.0)
    square = tl.sum(tl.load(square_ptr + each * rows + row, mask=there, other=0.0), 0)
    mean = square * inverse_k + eps
    tl.store(out_ptr + row * MIX + n, tl.sum(part, 0) * (1.0 / tl.sqrt_rn(mean)), mask=n < MIX)


@triton.jit
def _bmm_kernel(
    a_ptr, b_ptr, out_ptr, rows, cols, depth,
    stride_ab, stride_am, stride_bb, stride_bn, stride_ob, stride_om,
    TERMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of one product.  TERMS 3: both operands in two terms, the three larger products."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch = tl.program_id(2).to(tl.int64)
    a_row = a_ptr + batch * stride_ab + m.to(tl.int64)[:, None] * stride_am
    b_row = b_ptr + batch * stride_bb + n.to(tl.int64)[:, None] * stride_bn
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        mask_k = (k < depth)[None, :]
        a = tl.load(a_row + k[None, :], mask=(m < rows)[:, None] & mask_k, other=0.0)
        b = tl.load(b_row + k[None, :], mask=(n < cols)[:, None] & mask_k, other=0.0)
        a1, b1 = a.to(tl.bfloat16), b.to(tl.bfloat16)
        acc = tl.dot(a1, b1.T, acc)
        if TERMS == 3:
            a2 = (a.to(tl.float32) - a1.to(tl.float32)).to(tl.bfloat16)
            b2 = (b.to(tl.float32) - b1.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(a1, b2.T, acc)
            acc = tl.dot(a2, b1.T, acc)
    at = out_ptr + batch * stride_ob + m.to(tl.int64)[:, None] * stride_om + n[None, :]
    tl.store(at, acc, mask=(m < rows)[:, None] & (n < cols)[None, :])


# Rows of one program: 32 from 512 rows on, for half the reads of fn.  Never 64: that would be
# another instruction on sm_90 and other bits for the same row.
_MIX_BLOCK_M = (16, 32)
_MIX_MANY_ROWS = 512
_MIX_BLOCK_K = 128
_MIX_SLICES = (64, 56, 40, 32, 16, 8, 4, 2, 1)
_BMM_BLOCKS = (64, 64, 64)


def _slices(depth: int) -> int:
    """Slices of K.  Follows from K alone, so that a row's bits do not depend on the batch."""
    blocks = depth // _MIX_BLOCK_K
    return next(count for count in _MIX_SLICES if blocks % count == 0)


def hc_mix(x: torch.Tensor, fn: torch.Tensor, eps: float, terms: int = 2) -> torch.Tensor:
    """x @ fn.T * rsqrt(mean(x^2) + eps), float32 [rows, mixes].

    x: bf16 [rows, K]; fn: float32 [mixes, K], at most 64 mixes; K a multiple of 128; terms: bf16
    terms of fn, 1 to 3.  Against the same in float64: 2e-3 with one term, under 1e-5 with two,
    under 2e-6 with three (relative, of the norm).  A row's result has the same bits in every
    batch.  Safe to capture.  Raises ValueError for what it does not take.
    """
    if x.dtype != torch.bfloat16 or x.ndim != 2 or x.stride(1) != 1:
        raise ValueError(f"x: want bf16 [rows, K], got {x.dtype} {tuple(x.shape)}")
    rows, depth = x.shape
    mixes = fn.shape[0]
    if fn.dtype != torch.float32 or fn.shape[1:] != (depth,) or fn.stride(1) != 1:
        raise ValueError(f"fn: want float32 [mixes, {depth}], got {fn.dtype} {tuple(fn.shape)}")
    if depth % _MIX_BLOCK_K or not 1 <= mixes <= 64 or terms not in (1, 2, 3):
        raise ValueError(f"K {depth}, mixes {mixes}, terms {terms}: see the contract")
    out = torch.empty((rows, mixes), dtype=torch.float32, device=x.device)
    if rows == 0:
        return out
    slices, pad = _slices(depth), max(16, triton.next_power_of_2(mixes))
    part = torch.empty((slices, rows, pad), dtype=torch.float32, device=x.device)
    square = torch.empty((slices, rows), dtype=torch.float32, device=x.device)
    block_m = _MIX_BLOCK_M[rows >= _MIX_MANY_ROWS]
    _mix_kernel[(triton.cdiv(rows, block_m), slices)](
        x, fn, part, square, rows, depth // slices, x.stride(0), fn.stride(0),
        MIX=mixes, MIX_PAD=pad, TERMS=terms, BLOCK_M=block_m, BLOCK_K=_MIX_BLOCK_K,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    _mix_merge_kernel[(rows,)](
        part, square, out, rows, 1.0 / depth, eps,
        MIX=mixes, MIX_PAD=pad, SLICES=slices, SLICES_PAD=triton.next_power_of_2(slices),
        num_warps=2,
    )  # fmt: skip
    return out


def bmm_nt(a: torch.Tensor, b: torch.Tensor, terms: int = 1) -> torch.Tensor:
    """a[i] @ b[i].T for every i, float32 [batch, M, N].

    a: [batch, M, K] and b: [batch, N, K], float32 or bf16, last dimension contiguous, any sizes.
    terms 1: operands rounded to bf16 (exact for values that came from FP8 or bf16; else relative
    error about 3e-3); terms 3: operands in two bf16 terms each, relative error under 2e-5.  Safe
    to capture.  Raises ValueError for what it does not take.
    """
    if a.ndim != 3 or b.ndim != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[2]:
        raise ValueError(f"a {tuple(a.shape)}, b {tuple(b.shape)}: want [B, M, K] and [B, N, K]")
    wanted = (torch.float32, torch.bfloat16)
    if a.dtype not in wanted or b.dtype not in wanted or terms not in (1, 3):
        raise ValueError(f"{a.dtype}, {b.dtype}, terms {terms}: see the contract")
    if a.stride(2) != 1 or b.stride(2) != 1:
        a, b = a.contiguous(), b.contiguous()
    batch, rows, depth = a.shape
    cols = b.shape[1]
    out = torch.empty((batch, rows, cols), dtype=torch.float32, device=a.device)
    if out.numel() == 0:
        return out
    block_m, block_n, block_k = _BMM_BLOCKS
    _bmm_kernel[(triton.cdiv(rows, block_m), triton.cdiv(cols, block_n), batch)](
        a, b, out, rows, cols, depth, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
        out.stride(0), out.stride(1), TERMS=terms,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def compile_cases(arch: str) -> Sequence[CompileCase]:
    """Both operations with each number of terms."""
    cases = []
    types = {"x_ptr": "*bf16", "w_ptr": "*fp32", "part_ptr": "*fp32", "square_ptr": "*fp32"}
    aligned = (*types, "slice_k", "stride_x", "stride_w")
    for block_m in _MIX_BLOCK_M:
        for terms in (1, 2, 3):
            constexprs = {
                "MIX": 24, "MIX_PAD": 32, "TERMS": terms, "BLOCK_M": block_m,
                "BLOCK_K": _MIX_BLOCK_K,
            }  # fmt: skip
            name = f"mix M{block_m} terms {terms}"
            cases.append(_compile_case(name, _mix_kernel, types, constexprs, 4, 3, aligned))
    types = {"part_ptr": "*fp32", "square_ptr": "*fp32", "out_ptr": "*fp32"}
    types |= {"inverse_k": "fp32", "eps": "fp32"}
    constexprs = {"MIX": 24, "MIX_PAD": 32, "SLICES": 64, "SLICES_PAD": 64}
    pointers = ("part_ptr", "square_ptr", "out_ptr")
    cases.append(_compile_case("mix merge", _mix_merge_kernel, types, constexprs, 2, 3, pointers))
    block_m, block_n, block_k = _BMM_BLOCKS
    for terms in (1, 3):
        types = {"a_ptr": "*fp32", "b_ptr": "*fp32", "out_ptr": "*fp32"}
        constexprs = {"TERMS": terms, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
        aligned = (*types, "stride_ab", "stride_am", "stride_bb", "stride_bn", "depth")
        cases.append(_compile_case(f"bmm {terms}", _bmm_kernel, types, constexprs, 4, 3, aligned))
    return cases


def _compile_case(name, kernel, types, constexprs, warps, stages, aligned) -> CompileCase:
    arguments = [each for each in kernel.arg_names if each not in constexprs]
    signature = {each: types.get(each, "i32") for each in arguments}
    return CompileCase(name, kernel, signature, constexprs, warps, stages, aligned)


def checks(device: str) -> Sequence[Check]:
    """Both operations against float64, with the error that each number of terms promises."""
    from dsv4doctor.kernels import glue_cases

    return glue_cases.checks(META.error_bar)


def bench_cases(device: str) -> Iterable[BenchCase]:
    """The model's shapes against the float32 path."""
    from dsv4doctor.kernels import glue_cases

    return glue_cases.bench_cases(device)
