"""A Chrome trace of the torch profiler as GPU events, in constant memory.

A trace of several GB holds a few GPU events among many of the CPU.  Only those are parsed, each
by the standard library's JSON parser: a regular expression finds the `"cat"` member of a GPU
event, and the object around it is parsed from its brace.  An unescaped quote cannot stand inside
a JSON string, so what is found is a member of an object; a brace that stands inside a string does
not parse and the one before it is tried.  What the profiler writes wrongly elsewhere (escapes,
NaN) does no harm.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

from dsv4doctor.errors import UsageError

BLOCK = 1 << 22
"""Bytes read at once."""
MAX_EVENT = 1 << 20
"""Characters of one GPU event."""
_MAX_HEAD = 1 << 22
_MAX_BRACES = 100

Progress = Callable[[int, "int | None"], None]
"""Told the bytes read and, where known, the bytes of the file."""

# Each begins with plain text, which is what makes the search fast.
_CATEGORIES = (
    *("kernel", "Kernel", "gpu_memcpy", "gpu_memset", "memcpy", "Memcpy", "memset", "Memset"),
    *("gpu_user_annotation", "gpu_user_Annotation"),
)
_GPU = re.compile(
    r'"cat"\s*:\s*"(?:[Kk]ernel|gpu_memcpy|gpu_memset|[Mm]emcpy|[Mm]emset|gpu_user_[aA]nnotation)"'
)
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_ALONE = re.compile(r"\s*\[(?=\s*\{)")
_ANY_EVENT = re.compile(r'"ph"\s*:\s*"')
_STEP_ON_CPU = re.compile(
    r'"cat"\s*:\s*"user_annotation"\s*,\s*"name"\s*:\s*"(?:ProfilerStep#\d+|step\[)'
)
_OBJECT_START = re.compile(r'\{\s*"')
_NEXT = re.compile(r"\s*,\s*(?=\{)")
_END = re.compile(r"\s*\]")
# Not raw_decode, which is this with a layer of Python around it.
_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder(strict=False).scan_once  # type: ignore[attr-defined]
_NO_JSON = (ValueError, RecursionError, StopIteration)


class TraceFile:
    """One trace, read by iterating over `events()` once; the facts below are complete after it.

    Raises UsageError naming the file when it cannot be opened or is no trace.
    """

    def __init__(self, path: str, progress: Progress | None = None) -> None:
        self.path = path
        self.rank: int | None = None
        """From the profiler's own record of the process group."""
        self.gpu_names: dict[int, str] = {}
        self.bytes_read = 0
        """Of the trace's text, unpacked."""
        self.steps_on_cpu = False
        """Steps are marked on the CPU's side."""
        self.notes: list[str] = []
        self._progress = progress
        self._broken = 0
        self._last_failed = False
        self._cut_off = False

    def events(self) -> Iterator[dict[str, Any]]:
        """Every GPU event (kernel, copy, fill, annotation) as the profiler wrote it."""
        window, done = "", 0  # `done`: up to where of `window` the events were given out
        is_trace = False
        for text in self._texts():
            window = window[done:] + text
            done = 0
            if not is_trace:
                start = self._first_event(window)
                if start is None:
                    continue
                is_trace, window = True, window[start:]
            self.steps_on_cpu = self.steps_on_cpu or _STEP_ON_CPU.search(text) is not None
            done = yield from self._in_window(window, last=False)
            done = max(done, len(window) - MAX_EVENT)
        if not is_trace:
            raise self._no_trace(window)
        yield from self._in_window(window[done:], last=True)
        self._check_end(window)
        if self._broken:
            self.notes.append(f"{self._broken} GPU events are no JSON and were left out")

    # -------------------------------------------------------------------------- events

    def _in_window(self, window: str, last: bool) -> Generator[dict[str, Any], None, int]:
        """The events of `window`; returns from where on the next window has to hold it again."""
        done = 0
        for match in _GPU.finditer(window):
            inside = match.start()
            if inside < done or window[inside - 1] == "\\":
                continue
            event, end = _object_around(window, inside, done)
            if event is not None:
                done = end
                self._last_failed = False
                if event.get("cat") in _CATEGORIES:  # not just a member further in
                    yield event
            elif not last and len(window) - inside < MAX_EVENT:
                return max(done, end)  # it goes on in the next block
            else:
                self._broken += 1
                self._last_failed = True
                done = match.end()
        return done

    # -------------------------------------------------------------------------- head and end

    def _first_event(self, window: str) -> int | None:
        """Where the events begin; None: not in `window` yet.  Reads what stands before them."""
        found = _EVENTS.search(window)
        if found is not None:
            self._read_facts(window[: found.start()])
            return found.end()
        # The other form of a Chrome trace is the array of events alone.
        alone = _ALONE.match(window)
        if alone is not None and _ANY_EVENT.search(window[:4096]):
            return alone.end()
        if len(window) > _MAX_HEAD or not window.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
            raise self._no_trace(window)
        return None

    def _read_facts(self, head: str) -> None:
        rank = re.search(r'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*([0-9]{1,9})\b', head)
        if rank:
            self.rank = int(rank.group(1))
        devices = re.search(r'"deviceProperties"\s*:\s*(?=\[)', head)
        if devices is None:
            return
        try:
            listed, _ = _scan(head, devices.end())
            self.gpu_names = {int(one["id"]): str(one["name"]) for one in listed}
        except (*_NO_JSON, KeyError, TypeError, OverflowError):
            self.gpu_names = {}

    def _check_end(self, window: str) -> None:
        """Notes a file that stops in the middle of its events."""
        text = window[-MAX_EVENT:]
        starts = [match.start() for match in _OBJECT_START.finditer(text)]
        # What is inside an event may look like the start of one: any that parses on to the end
        # of the list will do.  Without a start, the window begins behind the last event.
        whole = [
            end
            for start in starts[-200:] or [0]
            if (end := _events_from(text, start) if starts else 0) is not None
            and _END.match(text, end)
        ]
        if not whole and (starts or len(window) < MAX_EVENT):
            self.notes.append("the file ends in the middle of its events: it is not complete")
            self._broken -= self._last_failed

    def _no_trace(self, window: str) -> UsageError:
        if self.notes:
            return UsageError(
                f"{self.path}: a .gz file that is cut off or damaged before its first event", _HINT
            )
        if not window.strip():
            return UsageError(f"{self.path}: empty", _HINT)
        return UsageError(f"{self.path}: not a torch-profiler trace (no traceEvents)", _HINT)

    # -------------------------------------------------------------------------- bytes

    def _texts(self) -> Iterator[str]:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        raw, size = _opened(self.path)
        with raw:
            magic = raw.read(2)
            raw.seek(0)
            stream: io.BufferedReader | gzip.GzipFile = raw
            if magic == b"\x1f\x8b":
                stream = gzip.GzipFile(fileobj=raw)
            while not self._cut_off and (block := self._block(stream)):
                self.bytes_read += len(block)
                if self._progress is not None:
                    self._progress(raw.tell(), size)
                yield decode(block)

    def _block(self, stream: io.BufferedReader | gzip.GzipFile) -> bytes:
        parts: list[bytes] = []
        wanted = BLOCK
        try:
            # read1: what comes before an error is given first.
            while wanted and (part := stream.read1(min(wanted, 1 << 18))):
                parts.append(part)
                wanted -= len(part)
        except EOFError:
            self._cut_off = True
            self.notes.append("the .gz file is cut off: what is there is counted")
        except (zlib.error, gzip.BadGzipFile):
            self._cut_off = True
            self.notes.append("the .gz file is damaged: what comes before the damage is counted")
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read ({error.strerror})", _HINT) from error
        return b"".join(parts)


_HINT = "give a .trace.json or .trace.json.gz that the torch profiler wrote"


def _opened(path: str) -> tuple[io.BufferedReader, int]:
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path}: not a regular file", _HINT)
        raw = open(path, "rb")  # noqa: SIM115
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path}: cannot be read ({reason})", _HINT) from error
    return raw, os.fstat(raw.fileno()).st_size


def _events_from(text: str, start: int) -> int | None:
    """The end of the events that follow each other from `start` on; None: one is broken."""
    position = start
    try:
        while True:
            _, position = _scan(text, position)
            comma = _NEXT.match(text, position)
            if comma is None:
                return position
            position = comma.end()
    except _NO_JSON:
        return None


def _object_around(text: str, inside: int, floor: int) -> tuple[dict[str, Any] | None, int]:
    """The event that the character `inside` belongs to, and its end; from `floor` on.

    Without one: None, and the first brace that it could start at.
    """
    brace = inside
    first = inside
    for _ in range(_MAX_BRACES):
        brace = text.rfind("{", floor, brace)
        if brace < 0:
            break
        first = brace
        try:
            found, end = _scan(text, brace)
        except _NO_JSON:
            continue
        if end > inside and "ph" in found:
            return found, end
    return None, first
