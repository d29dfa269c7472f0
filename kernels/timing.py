"""How long a call takes on the GPU, by replaying it from a CUDA graph.

torch is imported when a function is called.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Call = Callable[[], Any]

GRAPH_US, GRAPH_CALLS = 2000.0, 256


def graph_median_us(fn: Call | Sequence[Call], repeats: int = 30) -> float:
    """Median microseconds of one call of `fn`, over `repeats` replays of a CUDA graph.

    One graph holds enough calls to take about `GRAPH_US` (at most `GRAPH_CALLS`, at least one of
    each), so that the cost of starting a graph does not count.  Several functions are called in
    turn and stand for the same work on different inputs: give as many as it takes for their
    inputs to exceed the L2 cache.  `fn` must be safe to capture: no host synchronisation.
    Raises what the capture raises.
    """
    calls = tuple(fn) if isinstance(fn, Sequence) else (fn,)
    _warm_up(calls)
    first = _capture(calls, rounds=1)
    estimate = statistics.median(_replay_us(first, 5)) / len(calls)
    del first
    wanted = min(GRAPH_CALLS, GRAPH_US / max(estimate, 0.5))
    rounds = max(1, int(wanted) // len(calls))
    graph = _capture(calls, rounds)
    _replay_us(graph, 3)
    return statistics.median(_replay_us(graph, repeats)) / (rounds * len(calls))


def event_median_us(fn: Call | Sequence[Call], repeats: int = 30) -> float:
    """Median microseconds of one call of `fn` between two events, without a graph.

    For what cannot be captured; includes the time in which the GPU waits for the host.
    """
    import torch

    calls = tuple(fn) if isinstance(fn, Sequence) else (fn,)
    _warm_up(calls)
    times = []
    for index in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[index % len(calls)]()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000.0)
    return float(statistics.median(times))


def _warm_up(calls: Sequence[Call]) -> None:
    """Compiles and allocates what the calls need, on a side stream as captures demand."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def _capture(calls: Sequence[Call], rounds: int) -> Any:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def _replay_us(graph: Any, repeats: int) -> list[float]:
    """Microseconds of each of `repeats` replays."""
    import torch

    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000.0)
    return times
