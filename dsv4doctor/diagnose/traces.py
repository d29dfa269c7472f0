"""Python tracebacks in a log: their frames, and which model's code they went through."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dsv4doctor.diagnose.lines import Line

_BEGIN = "Traceback (most recent call last)"
_FRAME = re.compile(
    r'^\s{0,40}File "(?P<file>[^"\n]{1,500})", line (?P<line>\d{1,7})(?:, in (?P<in>.{1,120}))?'
)
_MAX_FRAMES = 120
_MAX_KEPT = 12
_DRAFT_FILES = ("deepseek_v4_nextn", "deepseek_v4_dspark", "dspark_", "_draft_", "draft_worker")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str | None
    source: str | None = None
    """The line as the log shows it."""


@dataclass
class Traceback:
    first_line: int
    rank: str | None
    last_line: int = 0
    frames: list[Frame] = field(default_factory=list)
    error: str = ""
    """The last line: "Type: message"; empty when the log does not have it."""
    count: int = 1

    @property
    def is_draft(self) -> bool:
        return any(
            mark in frame.file.rpartition("/")[2] or "draft" in (frame.function or "")
            for frame in self.frames
            for mark in _DRAFT_FILES
        )


class Tracebacks:
    """Fed the lines in order; `found` holds the distinct tracebacks in order."""

    def __init__(self) -> None:
        self.found: list[Traceback] = []
        self._open: Traceback | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @property
    def first_line(self) -> int | None:
        """Where the traceback that is being read began."""
        return self._open.first_line if self._open is not None else None

    def take(self, line: Line) -> bool:
        """Whether `line` ends a traceback."""
        if _BEGIN in line.text:
            self.close()
            self._open = Traceback(line.number, line.rank)
            return False
        current = self._open
        if current is None:
            return False
        current.last_line = line.number
        text = line.text
        matched = _FRAME.match(text)
        if matched is not None:
            if len(current.frames) < _MAX_FRAMES:
                frame = Frame(matched["file"], int(matched["line"]), matched["in"])
                current.frames.append(frame)
            return False
        if not text.strip() or text[:1] in (" ", "\t"):
            self._source(current, text)
            if line.number - current.first_line > 600:
                self.close()
            return False
        if not current.frames and line.number - current.first_line < 3:
            return False
        current.error = text[:600]
        self.close()
        return True

    def close(self) -> None:
        if self._open is None:
            return
        ended, self._open = self._open, None
        ended.last_line = max(ended.last_line, ended.first_line)
        for known in self.found:
            same_end = known.frames[-1:] == ended.frames[-1:]
            if same_end and known.error.split(":")[0] == ended.error.split(":")[0]:
                known.count += 1
                known.last_line = max(known.last_line, ended.last_line)
                return
        if len(self.found) < _MAX_KEPT:
            self.found.append(ended)

    def around(self, number: int) -> Traceback | None:
        """The traceback whose lines hold line `number`, or end right before it."""
        for trace in self.found:
            if trace.frames and trace.first_line <= number <= trace.last_line + 2:
                return trace
        return None

    @staticmethod
    def _source(current: Traceback, text: str) -> None:
        stripped = text.strip()
        if current.frames and stripped and not stripped.strip("^~"):
            return
        if current.frames and stripped and current.frames[-1].source is None:
            last = current.frames[-1]
            current.frames[-1] = Frame(last.file, last.line, last.function, stripped[:200])
