"""The few things of Triton that SGLang's host code calls, for machines without Triton (macOS)."""

import functools
import types
from typing import NamedTuple

from .recorder import RECORDER, calling_frame


class Target(NamedTuple):
    backend: str
    arch: int
    warp_size: int


class Kernel:
    """What `@triton.jit` makes of a function: `kernel[grid](...)` is recorded, nothing runs."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.fn = function
        self.arg_names = []

    def __getitem__(self, grid):
        return self.run

    def run(self, *args, **kwargs):
        RECORDER.note(f"triton:{self.__module__}.{self.__name__}", calling_frame())

    __call__ = warmup = run


def jit(function=None, **options):
    return jit if function is None else _kernel(function)


def decorator(*args, **kwargs):
    """autotune and heuristics: the kernel under them, unchanged."""
    return _kernel


def _kernel(function):
    return function if isinstance(function, Kernel) else Kernel(function)


def cdiv(value, divisor):
    return (value + divisor - 1) // divisor


def next_power_of_2(value):
    return 1 << max(0, value - 1).bit_length()


EXPORTS = {
    "jit": jit,
    "autotune": decorator,
    "heuristics": decorator,
    "cdiv": cdiv,
    "next_power_of_2": next_power_of_2,
}
"""By the name under `triton`."""


def simulate(driver):
    """Answer `triton.runtime.driver.active` with a simulated driver."""
    driver.target = Target("cuda", driver.board.major * 10 + driver.board.minor, 32)
    active = types.SimpleNamespace(active=driver)
    EXPORTS["runtime"] = types.SimpleNamespace(driver=active)
