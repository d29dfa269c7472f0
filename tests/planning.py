"""Grounds to plan on, without a trace; imported by test files."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from dsv4doctor.facts.checkpoint import read_checkpoint
from dsv4doctor.models import (
    Arch,
    Checkpoint,
    Gpu,
    GpuFacts,
    HostFacts,
    Launch,
    SglangTree,
    Snapshot,
)
from dsv4doctor.planning.build import Ask, Ground, ground
from dsv4doctor.target import Target

SM_120 = Arch(12, 0)
NAME = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


def boxed(nodes: tuple[int | None, ...] = (0, 0, 0, 0, 1, 1, 1, 1), gib: float = 95) -> GpuFacts:
    """A machine with a GPU on each of `nodes`."""
    return GpuFacts(
        tuple(
            Gpu(
                index, NAME, SM_120, int(gib * 2**30), f"00000000:{index + 1:02X}:00.0", 5, 16, node
            )
            for index, node in enumerate(nodes)
        )
    )


@cache
def _stored(model: Path) -> Checkpoint:
    return read_checkpoint(model)


def standing(
    model: Path,
    tree: SglangTree,
    ask: Ask,
    gpus: GpuFacts | None = None,
    host: HostFacts | None = None,
    is_busy: Callable[[int], bool] | None = None,
) -> Ground:
    """What `ask` would be planned on, on a machine with `gpus` and `tree`."""
    launch = Launch("command line", None, {}, str(model), ())
    seen = boxed() if gpus is None else gpus
    stored = _stored(model)
    snapshot = Snapshot("0", "", seen, tree, None, stored, launch, {}, host)
    target = Target(
        snapshot=snapshot,
        arch=SM_120,
        arch_source="--arch",
        tree=tree,
        interpreter=Path(sys.executable),
        checkpoint=stored,
        model_path=model,
        launch=launch,
        environment={},
        gpu=next(iter(seen.gpus), None),
        gpu_count=len(seen.gpus) or None,
    )
    return ground(ask, target, is_busy)
