"""Two profiles: what moved.

Where both mark steps, times are of the mean step (all GPUs' steps alike), else of the mean GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4doctor.profiling.types import SHOWN, Kernel, Profile


@dataclass(frozen=True)
class Moved:
    name: str
    category: str
    before_ns: float
    after_ns: float

    @property
    def change_ns(self) -> float:
        return self.after_ns - self.before_ns


@dataclass(frozen=True)
class Comparison:
    unit: str
    """"step" or "GPU": what the times are the mean of."""
    categories: tuple[Moved, ...]
    """In the order of `SHOWN`."""
    kernels: tuple[Moved, ...]
    """The largest change first."""
    whole: Moved


def compare(before: Profile, after: Profile) -> Comparison:
    by_step = bool(before.steps) and bool(after.steps)
    parts = [_divisor(profile, by_step) for profile in (before, after)]
    categories = tuple(
        Moved(
            name,
            name,
            _of_steps(before, name, by_step) / parts[0],
            _of_steps(after, name, by_step) / parts[1],
        )
        for name in SHOWN
    )
    whole = Moved(
        "all",
        "all",
        sum(one.before_ns for one in categories),
        sum(one.after_ns for one in categories),
    )
    return Comparison(
        "step" if by_step else "GPU", categories, _kernels(before, after, parts), whole
    )


def _divisor(profile: Profile, by_step: bool) -> int:
    return sum(step.count for step in profile.steps) if by_step else len(profile.gpus)


def _of_steps(profile: Profile, category: str, by_step: bool) -> int:
    if not by_step:
        return profile.by_category[category]
    return sum(step.by_category[category] for step in profile.steps)


def _kernels(before: Profile, after: Profile, parts: list[int]) -> tuple[Moved, ...]:
    old = {kernel.name: kernel for kernel in before.kernels}
    new = {kernel.name: kernel for kernel in after.kernels}
    moved = [
        Moved(
            name,
            (new.get(name) or old[name]).category,
            _total(old.get(name)) / parts[0],
            _total(new.get(name)) / parts[1],
        )
        for name in {**old, **new}
    ]
    return tuple(sorted(moved, key=lambda one: (-abs(one.change_ns), one.name)))


def _total(kernel: Kernel | None) -> int:
    return kernel.total_ns if kernel else 0
