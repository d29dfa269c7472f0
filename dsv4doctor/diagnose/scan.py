"""One pass over a log: what was seen, where, and what stood around it.

Most of a log is batch and request lines; those are dropped by one pattern, and what is left of
a chunk is looked at line by line only when it holds one of a few telling words.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dsv4doctor.diagnose.lines import MAX_TEXT, Line, Stripper
from dsv4doctor.diagnose.payloads import Payloads
from dsv4doctor.diagnose.signature import Signature
from dsv4doctor.diagnose.traces import Traceback, Tracebacks

BEFORE = 60
AFTER = 40
"""Lines kept around a match, batch and request lines not counted."""
_START_BYTES = 4 << 20
"""The beginning of a log is read line by line: versions, GPU and arguments stand there."""
_KEPT = 3
"""Sightings of a signature that are kept whole; the others are counted."""
_DISTINCT = 64

GATES = (
    b"rror", b"ERROR", b"xception", b"ailed", b"ailure", b"nsupported", b"upported", b"illed",
    b"support", b"ismatch", b"SIG", b"signal", b"server_args=", b"TRT-LLM", b"trtllm",
    b"haRunner", b"must match", b"exceeds", b"mempolicy", b"mbind", b"unexpected weight",
    b"sing default", b"COMPLETE", b"imeout", b"sparse_mla", b"sparse-MLA", b"num_tokens >",
    b"out of resource", b"no kernel", b"not compatible", b"not defined", b"ibv_", b"NIXL_ERR",
    b"illegal memory", b"out of memory", b"Not enough memory", b"unrecognized", b"oom-kill",
    b"affinity", b"membind", b"exit code", b"sigquit", b"core dumped", b"terminate called",
    b"Traceback", b"speculative algorithm", b"attn-backend", b"ne-shot", b"neshot", b"KeyError",
    b"load weight", b"ddress already", b"EADDRINUSE", b"egmentation", b"egfault", b"/KILL",
    b"/SEGV", b"ode 137", b"ode 139", b"ode: 137", b"ode: 139",
    b"\" 503 Serv",
)  # fmt: skip
"""A chunk without any of these holds nothing to look at."""

_BORING = re.compile(
    rb"(?:\x1b\[[0-9;]{0,12}m)?"
    rb"(?:\{\"log\":\"|\S{20,35} std(?:out|err) F |\w{3} [ \d]\d [\d:]{8} \S{1,60} \S{1,60}: "
    rb"|[\w.-]{1,60} {1,20}\| )?"
    rb"(?:\x1b\[[0-9;]{0,12}m)?\[20\d\d-[\d.,: -]{10,24}[A-Z0-9_ ]{0,60}\] "
    rb"(?:(?:Decode|Prefill) batch(?: \[\d+\])?[^\[\]{}='\n]{0,900}"
    rb"|INFO:[^\n]{0,40} - \"[A-Z]{3,7} [^\"\n]{1,300}\" 200 OK)"
    rb"(?:\\n\",\"stream\"[^\n]{0,100})?(?:\x1b\[0?m)?\r?$"
)
_LAYER = re.compile(
    r"(?<![\w.])((?:draft_)?model\.(?:decoder|layers\.\d{1,3})[\w.]{0,80}|stages?\.\d{1,2}[\w.]{0,80}"
    r"|mtp\.\d{1,2}[\w.]{0,80})"
)
_ERROR_START = re.compile(
    r"\s{0,8}(?:[A-Za-z_][\w.]{0,100}(?:Error|Exception|Interrupt|OutOfResources)(?::|$)"
    r"|Fatal Python error|terminate called|Segmentation fault|Aborted|Killed\b|Bus error"
    r"|CUDA error|E\d{4} |error: )"
)
_ERROR_INSIDE = ("Scheduler hit an exception", "core dumped", " ERROR ", "[ERROR]", "ERROR:",
                 " FATAL ", "CUDA error:", " error: ")  # fmt: skip
_NO_FAILURE = re.compile(
    r"KeyboardInterrupt|(?:asyncio\.exceptions\.)?CancelledError"
    r"|longer than the model's context length|exceeds the model's (?:maximum )?context length"
    r"|exceeds the maximum allowed length|RequestValidationError|ClientDisconnect"
)
"""An error line with this tells of the user who ended the server, or of a client's mistake."""
_READY = "ready to roll"
_PROGRESS = ("Load weight", "Loading", "avail mem", _READY, "Uvicorn running",
             "startup complete", "Memory pool", "Cache is allocated", "Prefill batch",
             "Decode batch")  # fmt: skip
_COMMANDS = ("server_args=", "launch_server", "sglang serve")
_BATCH = ("Prefill batch", "Decode batch")
SERVING = "(batches served)"
"""Stands in the lines around a match for any number of batch and request lines."""
_ERROR_WORDS = ("rror", "ERROR", "FATAL", "xception", "Killed", "dumped", "fault", "terminate",
                "Abort", "Interrupt", "Resources")  # fmt: skip
_LAYER_WORDS = ("model.decoder", "model.layers", "stages.", "stage.", "mtp.")
_START_LINES = 4000


@dataclass
class Sighting:
    """A line that a signature matched, with the lines around it."""

    signature: Signature
    line: Line
    fields: dict[str, str]
    before: tuple[str, ...]
    layer: str | None
    """The layer named last before it."""
    after: list[str] = field(default_factory=list)
    traceback: Traceback | None = None

    @property
    def lead(self) -> str:
        """The lines before it, and itself."""
        return "\n".join((*self.before, self.line.text[:MAX_TEXT]))

    @property
    def window(self) -> str:
        return "\n".join((self.lead, *self.after))


@dataclass
class Tally:
    """All sightings of one signature."""

    signature: Signature
    kept: list[Sighting] = field(default_factory=list)
    count: int = 0
    ranks: dict[str, None] = field(default_factory=dict)
    values: dict[str, dict[str, None]] = field(default_factory=dict)
    """Field -> its distinct values, the first _DISTINCT of them."""
    last_line: int = 0


@dataclass
class Observation:
    """What one pass over a log saw."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    errors: list[Line] = field(default_factory=list)
    """Lines that report an error, the first 200."""
    error_count: int = 0
    tracebacks: list[Traceback] = field(default_factory=list)
    arguments: list[Line] = field(default_factory=list)
    """Lines with the server's arguments or its command, up to the first error and after it."""
    start: list[str] = field(default_factory=list)
    """The first lines, where versions and the GPU are named."""
    lines: int = 0
    size: int = 0
    progress_line: int = 0
    """The last line that shows the server getting on: loading, capturing, serving."""
    is_ready: bool = False
    """SGLang said that it is."""


class Scanner:
    """Fed the chunks of a log in order; `finish` gives what was seen."""

    def __init__(self, signatures: Iterable[Signature]) -> None:
        self._signatures = tuple(signatures)
        words = {literal for entry in self._signatures for literal in entry.literals}
        self._literal = re.compile("|".join(map(re.escape, sorted(words))) or "(?!)").search
        words.update(_PROGRESS, _ERROR_WORDS, _COMMANDS, _LAYER_WORDS, ("Traceback",))
        self._telling = re.compile("|".join(map(re.escape, sorted(words)))).search
        self._seen = Observation()
        self._tracebacks = Tracebacks()
        self._stripper = Stripper()
        self._payloads = Payloads()
        self._recent: deque[str] = deque(maxlen=BEFORE)
        self._skipped: list[bytes] = []
        self._pending: list[Sighting] = []
        self._layer: str | None = None
        self._last_error = ""

    def feed(self, chunk: bytes) -> None:
        """Look at `chunk`: whole lines."""
        boring = _BORING.match
        lines = chunk.split(b"\n")
        lines.pop()
        first = self._seen.lines + 1
        if self._payloads.may_touch(chunk):
            left, served = self._payloads.without(lines, boring)
            if served is not None:
                self._seen.progress_line = first + served
        else:
            left = [line for line in lines if not boring(line)]
        if left:
            joined = b"\n".join(left)
            is_start = self._seen.size < _START_BYTES
            if is_start or self._is_busy() or any(gate in joined for gate in GATES):
                self._refill()
                wanted = set(map(id, left)) if len(left) < len(lines) else None
                for offset, raw in enumerate(lines):
                    if wanted is None or id(raw) in wanted:
                        self._look(raw, first + offset)
                    else:
                        self._note_serving()
            else:
                self._skipped = left[-BEFORE:]
        if len(left) < len(lines):
            last = next((at for at in reversed(range(len(lines))) if boring(lines[at])), -1)
            self._seen.progress_line = max(self._seen.progress_line, first + last)
        self._seen.lines += len(lines)
        self._seen.size += len(chunk)

    def finish(self) -> Observation:
        self._tracebacks.close()
        self._seen.tracebacks = self._tracebacks.found
        for tally in self._seen.tallies.values():
            for sighting in tally.kept:
                sighting.traceback = self._tracebacks.around(sighting.line.number)
        return self._seen

    def _is_busy(self) -> bool:
        return bool(self._pending) or self._tracebacks.is_open

    def _refill(self) -> None:
        """The lines of a skipped chunk become the context of what follows."""
        for raw in self._skipped:
            for line in self._stripper.lines(raw, 0):
                self._recent.append(line.text[:400])
        self._skipped = []

    def _look(self, raw: bytes, number: int) -> None:
        for line in self._stripper.lines(raw, number):
            self._take(line)

    def _take(self, line: Line) -> None:
        text = line.text[:MAX_TEXT]
        if len(self._seen.start) < _START_LINES:
            self._seen.start.append(text[:600])
        for pending in self._pending:
            pending.after.append(text[:400])
        if self._pending:
            self._pending = [one for one in self._pending if len(one.after) < AFTER]
        if self._tracebacks.is_open or self._telling(text) is not None:
            if text.startswith(_BATCH):
                self._seen.progress_line = line.number
                self._note_serving()
                return
            self._tell(line, text)
        self._recent.append(text[:400])

    def _tell(self, line: Line, text: str) -> None:
        """Look at a line that holds one of the telling words, or belongs to a traceback."""
        if any(word in line.text for word in _COMMANDS):
            self._argument(line)
        if any(word in text for word in _PROGRESS):
            self._seen.progress_line = line.number
            self._seen.is_ready = self._seen.is_ready or _READY in text
        began = self._tracebacks.first_line
        ended = self._tracebacks.take(line)
        if any(word in text for word in _LAYER_WORDS):
            named = _LAYER.search(text)
            self._layer = named[1].rstrip(".") if named is not None else self._layer
        if self._literal(text) is not None:
            for signature in self._signatures:
                if any(literal in text for literal in signature.literals):
                    self._try(signature, line, text)
        if ended or _ERROR_START.match(text) or any(word in text for word in _ERROR_INSIDE):
            if _NO_FAILURE.search(text) is None:
                self._error(line)
            elif ended and began is not None:
                self._forget(began)

    def _forget(self, number: int) -> None:
        """The error line that opened a traceback on line `number` reported no failure."""
        if self._seen.errors and self._seen.errors[-1].number == number:
            self._seen.errors.pop()
            self._last_error = ""

    def _note_serving(self) -> None:
        if not self._recent or self._recent[-1] != SERVING:
            self._recent.append(SERVING)

    def _argument(self, line: Line) -> None:
        kept = self._seen.arguments
        if self._seen.errors and kept:
            return  # a later restart is not the launch that failed
        kept.append(line)
        if len(kept) > 8:
            del kept[1]

    def _error(self, line: Line) -> None:
        self._seen.error_count += 1
        if len(self._seen.errors) < 200 and line.text != self._last_error:
            self._seen.errors.append(Line(line.number, line.text[:1000], line.time, line.rank))
        self._last_error = line.text

    def _try(self, signature: Signature, line: Line, text: str) -> None:
        for pattern in signature.patterns:
            matched = pattern.search(text)
            if matched is not None:
                fields = {name: value for name, value in matched.groupdict().items() if value}
                self._sight(signature, line, fields)
                return

    def _sight(self, signature: Signature, line: Line, fields: dict[str, str]) -> None:
        tally = self._seen.tallies.setdefault(signature.id, Tally(signature))
        tally.count += 1
        tally.last_line = line.number
        if line.rank and len(tally.ranks) < _DISTINCT:
            tally.ranks[line.rank] = None
        for name, value in fields.items():
            values = tally.values.setdefault(name, {})
            if len(values) < _DISTINCT:
                values[value] = None
        if len(tally.kept) < _KEPT and len(self._pending) < 50:
            kept = Line(line.number, line.text[:MAX_TEXT], line.time, line.rank)
            # What counts for being the last thing said is not about the layer named before.
            layer = None if signature.at_end else self._layer
            sighting = Sighting(signature, kept, fields, tuple(self._recent), layer)
            tally.kept.append(sighting)
            self._pending.append(sighting)


def is_last(tally: Tally, seen: Observation) -> bool:
    """Whether the log shows no progress after the signature's last match."""
    return tally.last_line > seen.progress_line
