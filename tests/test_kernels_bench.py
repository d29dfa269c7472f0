"""What the benchmark makes of its measurements, and where upstream's side comes from.

The measuring itself needs a GPU; here a timer takes the calls' own word for it.
"""

import ast
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsv4doctor.kernels.bench import Rates, Timed, document, run_cases
from dsv4doctor.kernels.registry import BenchCase, KernelMeta
from dsv4doctor.kernels.stamps import Platform

HERE = Platform("NVIDIA RTX PRO 6000", "12.0", "580.65", "2.9.1", "3.5.1")
RATES = Rates(copy_bytes_per_second=1e12, bf16_flops_per_second=1e14)


class Kernel:
    META = KernelMeta("fake", "A fake", (), 0.01)

    def __init__(self, cases: Callable[[], Iterator[BenchCase]]) -> None:
        self._cases = cases

    def compile_cases(self, arch: str) -> tuple[()]:
        return ()

    def checks(self, device: str) -> tuple[()]:
        return ()

    def bench_cases(self, device: str) -> Iterator[BenchCase]:
        return self._cases()


def told(calls: Sequence[Callable[[], Any]], graph: bool) -> float:
    """The mean of what the calls return; what is not captured costs 100 us more."""
    return sum(float(call()) for call in calls) / len(calls) + (0 if graph else 100)


def cases() -> Iterator[BenchCase]:
    yield BenchCase(
        name="bytes",
        ours=lambda: 15.0,
        ours_rotation=(lambda: 25.0,),
        peers={"torch": lambda: 80.0, "broken": lambda: 1 / 0},
        peers_rotation={"torch": (lambda: 120.0,)},
        bytes_moved=10e6,
        flops=1e8,
    )
    yield BenchCase("flops", lambda: 40.0, {"slow": lambda: 100.0}, 1e6, 2e9, graph=False)
    raise MemoryError("too large for this GPU")


def rows() -> list[Timed]:
    return list(run_cases("fake", Kernel(cases), RATES, timer=told))


def test_rows() -> None:
    first, second, last = rows()
    assert (first.ours_us, first.peers_us) == (20.0, {"torch": 100.0})
    assert first.ratios == {"torch": 5.0}
    assert first.floor_us == pytest.approx(10.0)
    assert first.of_floor == pytest.approx(0.5)
    assert first.failures == {"broken": "ZeroDivisionError: division by zero"}
    assert (second.ours_us, second.peers_us) == (40.0, {"slow": 200.0})
    assert second.floor_us == pytest.approx(20.0)
    assert (last.ours_us, last.of_floor, last.ratios) == (None, None, {})
    assert "too large for this GPU" in last.failures["ours"]


def test_the_results_file() -> None:
    made = json.loads(json.dumps(document(rows(), RATES, HERE, "0.5.14")))
    assert made["machine"]["gpu"] == "NVIDIA RTX PRO 6000"
    assert made["sglang"] == "0.5.14"
    assert made["date"].endswith("Z")
    assert made["rows"][0]["ratios"] == {"torch": 5.0}
    assert made["rows"][2]["ours_us"] is None


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder that looks like an unpacked SGLang, whose package itself must not be run."""
    layers = tmp_path / "tree" / "sglang" / "srt" / "layers"
    layers.mkdir(parents=True)
    (layers.parent.parent / "__init__.py").write_text("raise SystemExit('sglang was run')\n")
    (layers / "whole.py").write_text("from sglang.srt.layers.other import two\nfour = two * 2\n")
    (layers / "other.py").write_text("two = 2\n")
    (layers / "parts.py").write_text(
        textwrap.dedent(
            """
            from __future__ import annotations
            import math
            import a_package_that_is_nowhere
            from elsewhere_too import Thing
            SIDES = 3
            REGISTERED = a_package_that_is_nowhere.register()

            def _half(x: Thing) -> Thing:
                return x / 2

            def perimeter(x):
                return math.floor(SIDES * _half(x))

            def uses(x):
                return Thing(x)
            """
        )
    )
    (tmp_path / "tree" / "sglang-0.5.99.dist-info").mkdir()
    return tmp_path / "tree"


def in_new_process(code: str) -> Any:
    """What `code` prints, a Python literal; modules stay loaded, so each test has a process."""
    done = subprocess.run(
        [sys.executable, "-c", "from pathlib import Path\n"
         "from dsv4doctor.kernels import upstream\n" + textwrap.dedent(code)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def test_upstream_without_its_package_start(tree: Path) -> None:
    version, value = in_new_process(
        f"""
        version = upstream.use_tree(Path({str(tree)!r}))
        print((version, upstream.module("srt.layers.whole").four))
        """
    )
    assert (version, value) == ("0.5.99", 4)


def test_single_functions_of_a_file_that_does_not_import(tree: Path) -> None:
    whole, perimeter, thing, missing, problems = in_new_process(
        f"""
        upstream.use_tree(Path({str(tree / "sglang")!r}))
        whole = upstream.module("srt.layers.parts")
        found = upstream.functions("srt.layers.parts", "perimeter")
        thing = upstream.functions("srt.layers.parts", "uses", given={{"Thing": str}})
        missing = upstream.functions("srt.layers.parts", "area")
        upstream.functions("srt.layers.absent", "area")
        print((whole, found["perimeter"](5), thing["uses"](5), missing, upstream.problems))
        """
    )
    assert (whole, perimeter, thing, missing) == (None, 7, "5", None)
    assert "no area in the file" in problems["srt.layers.parts"]
    assert "no srt/layers/absent.py" in problems["srt.layers.absent"]


def test_no_sglang_at_all(tmp_path: Path) -> None:
    message = in_new_process(
        f"""
        from dsv4doctor.errors import UsageError
        try:
            upstream.use_tree(Path({str(tmp_path)!r}))
        except UsageError as error:
            print(repr(error.message))
        """
    )
    assert message == f"--sglang {tmp_path}: no sglang/srt in this folder"
