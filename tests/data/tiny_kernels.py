"""A kernel file in small, with configurations and checks that go wrong on purpose."""

import os
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from dsv4doctor.kernels.registry import BenchCase, Check, CompileCase, KernelMeta

META = KernelMeta(
    name="tiny_kernels",
    title="A matrix product over one block",
    replaces=("torch.mm",),
    error_bar=0.01,
)


@triton.jit
def _matmul_kernel(
    a, b, out, length, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """out[M, N] = a[M, length] @ b[length, N]; one block."""
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, length, BLOCK_K):
        left = tl.load(a + rows[:, None] * length + start + inner[None, :])
        right = tl.load(b + (start + inner[:, None]) * BLOCK_N + columns[None, :])
        total += tl.dot(left, right)
    tl.store(out + rows[:, None] * BLOCK_N + columns[None, :], total)


def _case(name: str, m: int, n: int, warps: int, stages: int, **more: Any) -> CompileCase:
    return CompileCase(
        name=name,
        kernel=_matmul_kernel,
        signature={"a": "*bf16", "b": "*bf16", "out": "*fp32", "length": "i32"},
        constexprs={"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64},
        num_warps=warps,
        num_stages=stages,
        aligned=("a", "b", "out", "length"),
        **more,
    )


def compile_cases(arch: str) -> Sequence[CompileCase]:
    # The last one's dots are eight stages of 128x64 and 64x128 bf16 values: 256 KiB.
    return (
        _case("good", 64, 64, 4, 3),
        _case("spilling", 64, 256, 1, 2),
        _case("oversized", 128, 128, 8, 9),
        _case("withheld", 64, 64, 4, 3, withheld="just not here" if arch == "sm_121" else ""),
    )


def checks(device: str) -> Sequence[Check]:
    error = float(os.environ.get("TINY_KERNELS_ERROR", "0.001"))
    return (
        Check("product", 0.01, lambda device: error),
        Check("product, slow", 0.01, lambda device: error / 2, quick=False),
    )


def bench_cases(device: str) -> Sequence[BenchCase]:
    return (
        BenchCase(
            name="64x64",
            ours=lambda: 10.0,
            peers={"torch.mm": lambda: 40.0},
            bytes_moved=8e6,
            flops=1e9,
            notes="made up",
        ),
    )
