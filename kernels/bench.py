"""Times the kernels against upstream's implementations and this GPU's own floor, in one run."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsv4doctor.errors import UsageError
from dsv4doctor.kernels import stamps, timing, upstream
from dsv4doctor.kernels.registry import BenchCase, KernelModule

SCHEMA = "dsv4doctor-kernel-bench/1"

Timer = Callable[[Sequence[Callable[[], Any]], bool], float]
"""Calls that do the same on different inputs, and whether they can be captured -> microseconds."""


@dataclass(frozen=True)
class Rates:
    """What this GPU reaches on simple work, measured in the same run."""

    copy_bytes_per_second: float
    """Bytes read plus bytes written."""
    bf16_flops_per_second: float

    def floor_us(self, case: BenchCase) -> float:
        """Microseconds below which no implementation of `case` can go at these rates."""
        seconds = max(
            case.bytes_moved / self.copy_bytes_per_second, case.flops / self.bf16_flops_per_second
        )
        return seconds * 1e6


@dataclass(frozen=True)
class Timed:
    """One row: medians in microseconds."""

    kernel: str
    case: str
    ours_us: float | None
    """None: it raised; `failures` says what."""
    peers_us: Mapping[str, float]
    floor_us: float
    bytes_moved: float
    flops: float
    notes: str = ""
    extra: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    """"ours" or a peer's name -> why there is no time for it."""

    @property
    def ratios(self) -> dict[str, float]:
        """Peer -> how many times longer than ours it takes."""
        if not self.ours_us:
            return {}
        return {name: peer / self.ours_us for name, peer in self.peers_us.items()}

    @property
    def of_floor(self) -> float | None:
        """Floor over ours: 1.0 would be the floor itself."""
        return self.floor_us / self.ours_us if self.ours_us else None


def gpu_timer(calls: Sequence[Callable[[], Any]], graph: bool) -> float:
    """Microseconds a call, from a CUDA graph where `graph`."""
    return timing.graph_median_us(calls) if graph else timing.event_median_us(calls)


def measure_rates(device: str = "cuda") -> Rates:
    """A 1 GiB copy and an 8192 x 8192 x 8192 bf16 matrix product."""
    import torch

    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    # Two ways, the faster counts: in a graph `copy_` becomes a copy node, which reaches 2.8 TB/s
    # on an H200 whose memory gives 4.3.
    copies = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    copy_us = min(timing.graph_median_us(copy) for copy in copies)
    size = 8192
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(left)
    matmul_us = timing.graph_median_us(lambda: torch.mm(left, right, out=out))
    return Rates(2 * (1 << 30) / copy_us * 1e6, 2 * size**3 / matmul_us * 1e6)


def run_cases(
    name: str,
    module: KernelModule,
    rates: Rates,
    device: str = "cuda",
    timer: Timer = gpu_timer,
) -> Iterator[Timed]:
    """Each row of `module` as it gets done; what raises is told in the row's `failures`.

    When making a row's inputs raises, a last row without times says so.
    """
    cases: Iterator[BenchCase] | None = None
    while True:
        try:
            cases = cases or iter(module.bench_cases(device))
            case = next(cases)
        except StopIteration:
            return
        except Exception as error:
            failures = {"ours": _said(error)}
            yield Timed(name, "(next row)", None, {}, 0.0, 0.0, 0.0, failures=failures)
            return
        yield _row(name, case, rates, timer)
        del case  # its inputs, before the next row makes its own


def _row(name: str, case: BenchCase, rates: Rates, timer: Timer) -> Timed:
    failures: dict[str, str] = {}
    ours = _timed("ours", (case.ours, *case.ours_rotation), True, timer, failures)
    peers = {
        peer: _timed(peer, (call, *case.peers_rotation.get(peer, ())), case.graph, timer, failures)
        for peer, call in case.peers.items()
    }
    return Timed(
        kernel=name,
        case=case.name,
        ours_us=ours,
        peers_us={peer: us for peer, us in peers.items() if us is not None},
        floor_us=rates.floor_us(case),
        bytes_moved=case.bytes_moved,
        flops=case.flops,
        notes=case.notes,
        extra=case.extra,
        failures=failures,
    )


def _timed(
    name: str,
    calls: Sequence[Callable[[], Any]],
    graph: bool,
    timer: Timer,
    failures: dict[str, str],
) -> float | None:
    try:
        return timer(calls, graph)
    except Exception as error:
        failures[name] = _said(error)
        return None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def document(
    results: Sequence[Timed], rates: Rates, platform: stamps.Platform, sglang: str | None
) -> dict[str, Any]:
    """The results file; docs/kernels.md describes it."""
    return {
        "schema": SCHEMA,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": ["dsv4doctor", *sys.argv[1:]],
        "machine": asdict(platform),
        "python": sys.version.split()[0],
        "sglang": sglang,
        "upstream_unavailable": dict(upstream.problems),
        "rates": asdict(rates),
        "rows": [
            {**asdict(row), "ratios": row.ratios, "of_floor": row.of_floor} for row in results
        ],
    }


def need_matplotlib() -> None:
    """Raises UsageError without matplotlib; to be asked before the measuring starts."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--plot: matplotlib is not installed", "install dsv4doctor[bench], or leave --plot out"
        )


def plot(results: Sequence[Timed], platform: stamps.Platform, path: Path) -> None:
    """Bars of every row: ours, peers and floor, on a logarithmic axis of microseconds.

    Raises UsageError without matplotlib, or when `path` cannot be written.
    """
    need_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for row in results for name in _bars(row)))
    height = 0.8 / max((len(_bars(row)) for row in results), default=1)
    figure, axes = pyplot.subplots(
        figsize=(10, 1.5 + 0.25 * sum(len(_bars(row)) + 1 for row in results)),
        layout="constrained",
    )
    for number, name in enumerate(names):
        places, values = [], []
        for at, row in enumerate(results):
            bars = _bars(row)
            if name in bars:
                places.append(at + (list(bars).index(name) - (len(bars) - 1) / 2) * height)
                values.append(bars[name])
        axes.barh(places, values, height, label=name, color=f"C{number}")
    axes.set_yticks(range(len(results)), [f"{row.kernel}\n{row.case}" for row in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlabel("microseconds a call, median of CUDA graph replays (less is better)")
    axes.set_title(f"{platform.gpu}, torch {platform.torch}, triton {platform.triton}")
    figure.legend(loc="outside lower center", ncols=4)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}", "name a .png or .svg file") from error
    finally:
        pyplot.close(figure)


def _bars(row: Timed) -> dict[str, float]:
    """Label -> microseconds, for what has a time."""
    ours = {"dsv4doctor": row.ours_us} if row.ours_us is not None else {}
    return {"floor": row.floor_us, **ours, **row.peers_us}
