"""What users sent and got back, as a server logs it with --log-requests: no evidence of anything.

SGLang writes `Receive: obj=`, `Receive OpenAI: obj=` and `Finish: obj=`, or JSON whose event is
`request.received`, `request.received.openai` or `request.finished`; vLLM `Received request` and
`Generated response`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dsv4doctor.diagnose.lines import unwrapped

MARKS = (b": obj=", b"request.received", b"request.finished", b"Received request ",
         b"Generated response ")  # fmt: skip
"""A chunk without any of these begins no request or response."""

_HEAD = re.compile(
    # A brace and a letter: the statement itself, as a traceback shows it.
    r"\b(?:Receive(?: OpenAI)?|Finish): obj=(?!\{[_a-z])"
    r"|\"event\": ?\"request\.(?:received|finished)"
    r"|Received request \S{1,200}: prompt: |Generated response \S{1,200}[^:\n]{0,80}: output: "
)
_RECORD = re.compile(
    r"(?:\[[^\n]{0,40}%\|[^\n]{0,200}\])?\[20\d\d-\d\d-\d\d[ T]\d\d:"
    r"|(?:\([\w.-]{1,60} pid=\d{1,10}[^)\n]{0,40}\) ?)?(?:INFO|WARNING|ERROR|CRITICAL|DEBUG)"
    r"(?:: {2,9}\S| {1,4}\d\d-\d\d \d\d:)"
    r"|\[rank ?\d{1,5}\]:|\S{1,80}:\d{1,10}:\d{1,10} \[\d{1,3}\] NCCL "
)
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_OPENING, _CLOSING = "([{", ")]}"


class Payloads:
    """Fed the raw lines of a log in order; knows which belong to a request or a response."""

    def __init__(self) -> None:
        self._is_open = False
        """The last payload goes on: a prompt with newlines, or a line that was split."""

    def may_touch(self, chunk: bytes) -> bool:
        """Whether any line of `chunk` can belong to a payload."""
        return self._is_open or any(mark in chunk for mark in MARKS)

    def without(
        self, lines: Sequence[bytes], is_boring: Callable[[bytes], object]
    ) -> tuple[list[bytes], int | None]:
        """The lines that are neither boring nor a payload, and where the last payload began."""
        left: list[bytes] = []
        last: int | None = None
        for at, raw in enumerate(lines):
            if is_boring(raw):
                self._is_open = False
            elif (self._is_open or any(mark in raw for mark in MARKS)) and self._covers(raw):
                last = at
            else:
                left.append(raw)
        return left, last

    def _covers(self, raw: bytes) -> bool:
        text, _, is_partial = unwrapped(raw.decode("utf-8", "replace"))
        head = _HEAD.search(text)
        if head is not None:
            self._is_open = is_partial or not _is_whole(text[head.start() :])
            return True
        if self._is_open and _RECORD.match(text) is None:
            return True
        self._is_open = False
        return False


def _is_whole(text: str) -> bool:
    """Whether every quote and bracket of `text` is closed."""
    if text.startswith('"event"'):
        text = "{" + text
    bare = _QUOTED.sub("", text)
    if "'" in bare or '"' in bare:
        return False
    return sum(map(bare.count, _OPENING)) == sum(map(bare.count, _CLOSING))
