"""What a profile comes to.  Times are whole nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dsv4doctor.models import Finding

CATEGORIES = (
    "moe",
    "attention",
    "indexer",
    "gemm",
    "other",
    "glue",
    "unknown",
    "communication",
)
"""In the order of their claim: an instant in which several of them run belongs to the first."""
IDLE = "idle"
SHOWN = (*CATEGORIES, IDLE)


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel on one GPU."""

    name: str
    category: str
    rule: str | None
    """The row of gpu_categories.toml that put it there; None: no row knows it."""
    count: int
    total_ns: int
    """The launches' durations added up, whatever ran beside them."""
    fp32: bool = False
    family: str | None = None


@dataclass(frozen=True)
class Step:
    """The marked steps of one name on one GPU."""

    name: str
    """E.g. "DECODE bs=64" or "ProfilerStep#3"."""
    count: int
    total_ns: int
    by_category: dict[str, int]
    """Category and idle -> nanoseconds; they add up to `total_ns`."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of one process."""

    name: str
    """E.g. "GPU 0" or "TP-3, GPU 0"."""
    model: str | None
    events: int
    span_ns: int
    """From the first GPU event's start to the last one's end."""
    by_category: dict[str, int]
    """Category and idle -> nanoseconds; they add up to `span_ns`."""
    kernels: tuple[Kernel, ...]
    """By time, longest first."""
    steps: tuple[Step, ...]
    outside_steps_ns: int = 0
    """Of `span_ns`, what no step covers; 0 without steps."""


@dataclass(frozen=True)
class Profile:
    source: str
    gpus: tuple[Gpu, ...]
    bytes_read: int
    seconds: float
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def span_ns(self) -> int:
        return sum(gpu.span_ns for gpu in self.gpus)

    @property
    def by_category(self) -> dict[str, int]:
        """Over all GPUs."""
        return {name: sum(gpu.by_category.get(name, 0) for gpu in self.gpus) for name in SHOWN}

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Over all GPUs, longest first."""
        return merged(kernel for gpu in self.gpus for kernel in gpu.kernels)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Over all GPUs, in the order in which they came first."""
        found: dict[str, list[Step]] = {}
        for gpu in self.gpus:
            for step in gpu.steps:
                found.setdefault(step.name, []).append(step)
        return tuple(_sum_steps(name, steps) for name, steps in found.items())


def merged(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """Kernels of one name added up, longest first."""
    counts: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        counts.setdefault(kernel.name, []).append(kernel)
    added = [
        Kernel(
            name,
            same[0].category,
            same[0].rule,
            sum(one.count for one in same),
            sum(one.total_ns for one in same),
            same[0].fp32,
            same[0].family,
        )
        for name, same in counts.items()
    ]
    return tuple(sorted(added, key=lambda one: (-one.total_ns, one.name)))


def _sum_steps(name: str, steps: list[Step]) -> Step:
    return Step(
        name,
        sum(step.count for step in steps),
        sum(step.total_ns for step in steps),
        {key: sum(step.by_category.get(key, 0) for step in steps) for key in SHOWN},
    )
