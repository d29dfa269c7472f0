"""Self-checks and benchmark rows of the dense glue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from dsv4doctor.kernels.dense_glue import bmm_nt, hc_mix
from dsv4doctor.kernels.mla_cases import relative_error
from dsv4doctor.kernels.reference import dense_glue as reference
from dsv4doctor.kernels.registry import BenchCase, Check

EPS = 1e-6
MIX_BARS = {1: 5e-3, 2: 1e-5, 3: 5e-6}
BMM_BARS = {1: 5e-3, 3: 2e-5}


def _mix_error(rows: int, depth: int, mixes: int, terms: int) -> Callable[[str], float]:
    def run(device: str) -> float:
        x = torch.randn((rows, depth), device=device).bfloat16()
        fn = torch.randn((mixes, depth), device=device)
        return relative_error(hc_mix(x, fn, EPS, terms), reference.hc_mix(x, fn, EPS))

    return run


def _bmm_error(batch: int, rows: int, cols: int, depth: int, terms: int) -> Callable[[str], float]:
    def run(device: str) -> float:
        a = torch.randn((batch, rows, depth), device=device)
        b = torch.randn((batch, cols, depth), device=device)
        return relative_error(bmm_nt(a, b, terms), reference.bmm_nt(a, b))

    return run


def _batch_difference(device: str) -> float:
    """Elements of single rows that differ in any bit from the same rows in a batch."""
    x = torch.randn((1100, 4096), device=device).bfloat16()
    fn = torch.randn((24, 4096), device=device)
    whole = hc_mix(x, fn, EPS)
    rows = (0, 31, 700, 1099)
    return float(sum((hc_mix(x[r : r + 1], fn, EPS)[0] != whole[r]).sum().item() for r in rows))


def checks(bar: float) -> Sequence[Check]:
    """`bar` is what the default of `hc_mix` has to keep at the model's depths."""
    depth = 16384 if torch.cuda.is_available() else 1024
    result = [] if depth < 4096 else [Check("mix, bits in a batch", 0.0, _batch_difference)]
    result += [Check(f"mix K={depth}, default", bar, _mix_error(7, depth, 24, 2))]
    for terms, mix_bar in MIX_BARS.items():
        result.append(Check(f"mix {terms} terms", mix_bar, _mix_error(33, depth, 24, terms)))
    for terms, bmm_bar in BMM_BARS.items():
        result.append(Check(f"bmm {terms} terms", bmm_bar, _bmm_error(2, 70, 33, 128, terms)))
    return result


def _float32_mix(x: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return F.linear(wide, fn) * scale


def bench_cases(device: str) -> Iterator[BenchCase]:
    """mHC of V4-Flash (4 x 4096) and V4-Pro (4 x 7168); the indexer's bmm of 64 heads."""
    for depth in (16384, 28672):
        for rows in (1, 64, 4096):
            yield _mix_case(rows, depth, device)
    for batch, tokens in ((1, 131072), (64, 8192)):
        yield _bmm_case(batch, tokens, device)


def _mix_case(rows: int, depth: int, device: str) -> BenchCase:
    x = torch.randn((rows, depth), device=device).bfloat16()
    fn = torch.randn((24, depth), device=device)
    return BenchCase(
        name=f"mix T={rows} K={depth}",
        ours=lambda: hc_mix(x, fn, EPS),
        peers={"torch float32": lambda: _float32_mix(x, fn)},
        bytes_moved=x.nbytes + fn.nbytes + rows * 24 * 4,
        flops=2 * rows * depth * 24,
    )


def _bmm_case(batch: int, tokens: int, device: str) -> BenchCase:
    keys = torch.randn((batch, tokens, 128), device=device).to(torch.float8_e4m3fn).float()
    q = torch.randn((batch, 64, 128), device=device).to(torch.float8_e4m3fn).float()
    return BenchCase(
        name=f"indexer bmm B={batch} tokens={tokens}",
        ours=lambda: bmm_nt(keys, q),
        peers={"torch float32": lambda: torch.bmm(keys, q.transpose(1, 2))},
        bytes_moved=keys.nbytes + q.nbytes + batch * tokens * 64 * 4,
        flops=2 * batch * tokens * 64 * 128,
    )
