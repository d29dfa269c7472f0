"""What a kernel file declares of itself, and the list of them.

Standard library only at module level, so that `dsv4doctor kernels list` works on a machine
without torch.  A kernel file `kernels/<operation>.py` holds, in this order: a docstring (the
mathematics, layouts, source), `META`, its tuned constants with the measurement behind each, the
Triton kernels, the launch function, and three functions that `compile`, `verify` and `bench`
call.  Its float32 reference in plain torch is `kernels/reference/<operation>.py`, its SGLang
adapter `kernels/adapters/<operation>.py`.

The three functions (`KernelModule` has them as types):

`compile_cases(arch: str) -> Sequence[CompileCase]`
    Every configuration that a launch on `arch` ("sm_120") can choose.  Runs without a GPU.  A
    configuration that another arch has and this one does not is in the list too, with
    `withheld` saying why; it is shown and not compiled.
`checks(device: str) -> Sequence[Check]`
    The numeric self-checks for a torch device ("cuda", "cuda:0"; "cpu" under Triton's
    interpreter).  Building the list is cheap: inputs are made inside `Check.run`.  All of them
    together take seconds; those with `quick=True` alone about one second.
`bench_cases(device: str) -> Iterable[BenchCase]`
    The rows of the benchmark; a generator that builds one row's inputs at a time keeps memory
    low.  Upstream's implementations are fetched with `upstream.module("srt.layers....")` or, from
    files that do not import alone, `upstream.functions("srt.layers....", "name", ...)`; both are
    None when there is no SGLang to take them from: the row then has no such peer.

`META` is read without importing the file, so it is one `KernelMeta(...)` call with keyword
arguments that are plain literals.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

ARCHS = ("sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
"""The architectures that a kernel can be offered on."""


@dataclass(frozen=True)
class KernelMeta:
    """What `dsv4doctor kernels list` shows of an operation."""

    name: str
    title: str
    replaces: tuple[str, ...]
    """The SGLang symbols it can stand in for."""
    error_bar: float
    """||out - reference|| / ||reference|| that `verify` demands."""
    archs: tuple[str, ...] = ARCHS
    """Where it is offered at all; single configurations are withheld by `compile_cases`."""
    notes: str = ""
    """One line for the list, e.g. what a variant must be asked for with."""


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
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the launch, e.g. {"maxnreg": 128}."""
    withheld: str = ""
    """Why this configuration is not offered on this arch; "": it is."""


@dataclass(frozen=True)
class Check:
    """One numeric self-check: `run(device)` returns the relative error."""

    name: str
    bar: float
    run: Callable[[str], float]
    quick: bool = True
    """Part of `verify --quick`."""


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
    ours_rotation: tuple[Callable[[], Any], ...] = ()
    """`ours` on further, equally large inputs: called in turn with it inside one graph, so that
    no call finds its inputs in the L2 cache.  Needed when the inputs are under twice the L2."""
    peers_rotation: Mapping[str, tuple[Callable[[], Any], ...]] = field(default_factory=dict)
    """The same for a peer."""
    graph: bool = True
    """False: `peers` cannot be captured (they synchronise); they are timed with events."""


class KernelModule(Protocol):
    """What a kernel file offers; see this module's docstring for the contracts."""

    META: KernelMeta

    def compile_cases(self, arch: str) -> Sequence[CompileCase]: ...

    def checks(self, device: str) -> Sequence[Check]: ...

    def bench_cases(self, device: str) -> Iterable[BenchCase]: ...


OPERATIONS = ("moe_mxfp4", "moe_nvfp4", "sparse_mla_decode", "indexer_logits", "dense_glue")
"""The kernel files, each importable as `dsv4doctor.kernels.<name>`."""


def load(name: str) -> ModuleType:
    """The kernel file `name`; imports torch and triton."""
    return importlib.import_module(f"dsv4doctor.kernels.{name}")
