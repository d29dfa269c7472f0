"""Two real traces of an H200 against the sums that another program made of them."""

import json
from pathlib import Path

import pytest

from dsv4doctor.profiling.build import read_profile

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks" / "h200-2026-11-29-profile"


@pytest.mark.parametrize("name", ["upstream", "ours"])
def test_shares_are_those_of_an_independent_sum(name: str) -> None:
    checked = json.loads((FOLDER / "checks.json").read_text("utf-8"))[name]
    profile = read_profile(str(FOLDER / f"{name}.trace.json.gz"))
    assert sum(kernel.count for kernel in profile.kernels) == checked["gpu_events"]
    # The file's times are decimal microseconds: a nanosecond an event is rounding.
    assert profile.by_category == pytest.approx(checked["covered_ns"], abs=checked["gpu_events"])
