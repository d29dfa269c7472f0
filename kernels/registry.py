"""What a kernel file declares of itself, and the list of them.

Standard library only at module level, so that `dsv4doctor kernels list` works on a machine
without torch.  A kernel file `kernels/<operation>.py` holds, in this order: a docstring (the
mathematics, layouts, source), `META`, its tuned constants with the measurement behind each, the
Triton kernels, the launch function, and three functions that `compile`, `verify` and `bench`
call: `compile_cases`, `checks`, `bench_cases`.  Its float32 reference in plain torch is
`kernels/reference/<operation>.py`, its SGLang adapter `kernels/adapters/<operation>.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class KernelMeta:
    """What `dsv4doctor kernels list` shows of an operation."""

    name: str
    title: str
    replaces: tuple[str, ...]
    """The SGLang symbols it can stand in for."""
    error_bar: float
    """||out - reference|| / ||reference|| that `verify` demands."""


@dataclass(frozen=True)
class CompileCase:
    """One configuration of one Triton kernel, for ahead-of-time compilation."""

    name: str
    kernel: Any
    """The `@triton.jit` function."""
    signature: Mapping[str, str]
    """Argument name -> Triton type, e.g. "*bf16", "i32", "constexpr"."""
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...] = ()
    """Arguments that are divisible by 16 in every launch."""


@dataclass(frozen=True)
class Check:
    """One numeric self-check: `run(device)` returns the relative error."""

    name: str
    bar: float
    run: Callable[[str], float]


@dataclass(frozen=True)
class BenchCase:
    """One row of the benchmark; every callable can be captured in a CUDA graph."""

    name: str
    ours: Callable[[], Any]
    peers: Mapping[str, Callable[[], Any]]
    """Name -> upstream's way of computing the same thing on the same inputs."""
    bytes_moved: float
    """The bytes that any implementation has to move."""
    flops: float
    notes: str = ""
    extra: Mapping[str, float] = field(default_factory=dict)


OPERATIONS = ("moe_mxfp4", "moe_nvfp4", "sparse_mla_decode", "indexer_logits", "dense_glue")
"""The kernel files, each importable as `dsv4doctor.kernels.<name>`."""


def load(name: str) -> ModuleType:
    """The kernel file `name`; imports torch and triton."""
    return importlib.import_module(f"dsv4doctor.kernels.{name}")
