"""Every instant of a GPU's time to one category.

Kernels of several streams overlap.  The time from the first GPU event to the last is cut at every
start and end; each piece belongs to the category of highest claim among what runs in it (the order
of `CATEGORIES`: communication last, so that only what nothing else hides counts as communication),
or to idle where nothing runs.  So the parts add up to the whole, to the nanosecond.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

from dsv4doctor.profiling.types import CATEGORIES

Piece = tuple[int, int, int]
"""Start and end in ns, and the category's place in CATEGORIES."""
_RUN = 1 << 16


class Intervals:
    """Kernels' intervals as they come, given back in order of their start, packed in memory.

    24 bytes an interval: the profiler writes them nearly in order, and sorted runs are merged.
    """

    def __init__(self) -> None:
        self._runs: list[array[int]] = []
        self._open: list[Piece] = []
        self.count = 0

    def add(self, start: int, end: int, category: int) -> None:
        self._open.append((start, end, category))
        self.count += 1
        if len(self._open) == _RUN:
            self._close()

    def in_order(self) -> Iterator[Piece]:
        self._close()
        runs = [_unpacked(run) for run in self._runs]
        in_order = all(one[-3] <= two[0] for one, two in pairwise(self._runs))
        return chain.from_iterable(runs) if in_order else heapq.merge(*runs)

    def _close(self) -> None:
        if self._open:
            self._open.sort()
            self._runs.append(array("q", [number for one in self._open for number in one]))
            self._open = []


def _unpacked(run: array[int]) -> Iterator[Piece]:
    numbers = iter(run)
    return zip(numbers, numbers, numbers, strict=True)


_NEVER = (1 << 63, 1 << 63, 0)
"""Behind every interval: what still runs then comes to its end."""


def pieces(intervals: Iterable[Piece]) -> Iterator[Piece]:
    """The time in which something runs, cut up; `intervals` in order of their start.

    Pieces come in order and do not overlap; neighbours may be of one category.
    """
    running = [0] * len(CATEGORIES)
    claims = 0  # a bit for every category that runs, that of highest claim lowest
    ends: list[tuple[int, int]] = []
    now = 0
    for start, end, category in chain(intervals, (_NEVER,)):
        while ends and ends[0][0] <= start:
            stop, ended = heapq.heappop(ends)
            if stop > now:
                yield now, stop, _lowest(claims)
                now = stop
            running[ended] -= 1
            if not running[ended]:
                claims ^= 1 << ended
        if ends and start > now:
            yield now, start, _lowest(claims)
        now = start
        if end > start:
            heapq.heappush(ends, (end, category))
            running[category] += 1
            claims |= 1 << category


def _lowest(claims: int) -> int:
    return (claims & -claims).bit_length() - 1


class Windows:
    """Shares within marked steps, fed with pieces in order.  Steps may overlap each other."""

    def __init__(self, windows: Iterable[tuple[int, int, str]]) -> None:
        self._waiting = sorted(windows, reverse=True)
        self._active: list[tuple[int, int, str]] = []
        self.names: dict[str, list[int]] = {}
        """Name -> count, ns, ns by category."""
        for start, end, name in reversed(self._waiting):
            row = self.names.setdefault(name, [0, 0, *([0] * len(CATEGORIES))])
            row[0] += 1
            row[1] += end - start
        self.covered = _union([(start, end) for start, end, _ in reversed(self._waiting)])

    def add(self, start: int, end: int, category: int) -> None:
        while self._waiting and self._waiting[-1][0] < end:
            self._active.append(self._waiting.pop())
        self._active = [window for window in self._active if window[1] > start]
        for first, last, name in self._active:
            self.names[name][2 + category] += max(0, min(end, last) - max(start, first))


def _union(ordered: Sequence[tuple[int, int]]) -> int:
    total, reached = 0, 0
    for start, end in ordered:
        start = max(start, reached)
        if end > start:
            total += end - start
            reached = end
    return total
