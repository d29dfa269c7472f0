"""Real traces of an H200 against the sums that another program made of them."""

import json
from pathlib import Path

import pytest

from dsv4doctor.profiling.build import read_profile

_RESULTS = Path(__file__).parents[1] / "docs" / "benchmarks"
_FUNCTIONS, _SERVERS = "h200-2026-11-29-profile", "h200-2026-11-30-server"
_TRACES = [
    (_FUNCTIONS, "upstream"),
    (_FUNCTIONS, "ours"),
    (_SERVERS, "mxfp4"),
    (_SERVERS, "nvfp4-eagle"),
]


@pytest.mark.parametrize(("folder", "name"), _TRACES)
def test_shares_are_those_of_an_independent_sum(folder: str, name: str) -> None:
    checked = json.loads((_RESULTS / folder / "checks.json").read_text("utf-8"))[name]
    profile = read_profile(str(_RESULTS / folder / f"{name}.trace.json.gz"))
    assert sum(kernel.count for kernel in profile.kernels) == checked["gpu_events"]
    # The file's times are decimal microseconds: a nanosecond an event is rounding.
    assert profile.by_category == pytest.approx(checked["covered_ns"], abs=checked["gpu_events"])


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4-eagle"])
def test_every_kernel_of_a_real_server_is_known(name: str) -> None:
    profile = read_profile(str(_RESULTS / _SERVERS / f"{name}.trace.json.gz"))
    assert [one.name for one in profile.kernels if one.category == "unknown"] == []
