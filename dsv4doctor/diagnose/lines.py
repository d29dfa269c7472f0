"""One raw line of a log -> its text, time and rank, whatever wrote it and whatever collected it.

Understood in front of the message: docker json-file and journald JSON, CRI (Kubernetes),
`kubectl --prefix`, `docker compose`, journald/syslog, Ray and vLLM workers, torchrun, and
SGLang's own "[time TP3 EP1]".
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

MAX_TEXT = 4096
"""Characters of a line that patterns see."""
_MAX_PARTIAL = 1 << 18

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]{0,40}[ -/]?[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)?|[@-Z])")
_CRI = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]{8,20}(?:Z|[+-]\d\d:?\d\d)) (?:stdout|stderr) ([FP]) ?")
_COLLECTORS = (
    re.compile(r"\[pod/[\w./-]{1,200}\] ?"),
    re.compile(r"[\w.-]{1,80} {1,40}\| ?"),
    re.compile(r"(\w{3} [ \d]\d \d\d:\d\d:\d\d) \S{1,80} [\w./@-]{1,60}(?:\[\d{1,10}\])?: ?"),
    re.compile(
        r"(\d{4}-\d\d-\d\dT[\d:.]{8,20}(?:Z|[+-]\d\d:?\d\d)?) \S{1,80} "
        r"[\w./@-]{1,60}\[\d{1,10}\]: ?"
    ),
    re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]{8,20}(?:Z|[+-]\d\d:?\d\d)) "),
)
_WORKER = re.compile(r"\((?P<rank>[\w.-]{1,60}) (?:pid=)\d{1,10}(?:, ip=[\d.]{1,20})?\) ?")
_TORCHRUN = re.compile(r"\[(?P<rank>rank ?\d{1,5})\]:? ?")
_SGLANG = re.compile(
    r"\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,6})?)"
    r"(?P<rank>(?: [A-Z][A-Z_]{0,15}\d{1,5}){0,8})[^\]\n]{0,60}\] ?"
)
_AFTER_BAR = re.compile(r"%\|[^\n]{0,300}?(?:it|s|B)/(?:s|it)[^\]\n]{0,40}\](?P<next>\[20\d\d-)")
"""A progress bar that a message was written behind, on the same line."""
_RANK_NUMBER = re.compile(r"(?:TP|rank ?|Worker_TP)(\d{1,5})")


@dataclass(frozen=True)
class Line:
    number: int
    text: str
    time: str | None = None
    rank: str | None = None
    """As written, e.g. "TP3 EP1"."""


class Stripper:
    """Raw lines in order -> lines; joins what CRI and docker split at 16 KiB."""

    def __init__(self) -> None:
        self._partial = ""

    def lines(self, raw: bytes, number: int) -> list[Line]:
        """The lines in `raw` (more than one after carriage returns), the partial one held back."""
        text = raw.decode("utf-8", "replace")
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        message, time, is_partial = unwrapped(text)
        message = self._partial + message
        if is_partial and len(message) < _MAX_PARTIAL:
            self._partial = message
            return []
        self._partial = ""
        parts = [part for part in message.rstrip("\r\n").split("\r") if part]
        return [_line(part, number, time) for part in parts[-200:]] or [Line(number, "", time)]


def unwrapped(text: str) -> tuple[str, str | None, bool]:
    """The message without what collected it; its time; whether more of it follows."""
    if text.startswith("[20"):
        return text, None, False  # SGLang's own prefix: nothing collected it
    if text.startswith("{"):
        found = _from_json(text)
        if found is not None:
            return found
    matched = _CRI.match(text)
    if matched is not None:
        return text[matched.end() :], matched[1], matched[2] == "P"
    time = None
    for pattern in _COLLECTORS:
        matched = pattern.match(text)
        if matched is not None:
            time = matched[1] if pattern.groups else time
            text = text[matched.end() :]
    return text, time, False


def _from_json(text: str) -> tuple[str, str | None, bool] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    for key in ("log", "MESSAGE", "message", "msg"):
        message = record.get(key)
        if isinstance(message, str):
            time = record.get("time")
            is_partial = key == "log" and not message.endswith("\n")
            shown = time if isinstance(time, str) else None
            return message.rstrip("\n").replace("\n", " "), shown, is_partial
    return None


def _line(text: str, number: int, time: str | None) -> Line:
    rank: str | None = None
    bar = _AFTER_BAR.search(text) if "%|" in text else None
    if bar is not None:
        text = text[bar.start("next") :]
    for pattern in (_WORKER, _TORCHRUN) if text.startswith(("(", "[r")) else ():
        matched = pattern.match(text)
        if matched is not None:
            rank = matched["rank"]
            text = text[matched.end() :]
    matched = _SGLANG.match(text)
    if matched is not None:
        time = matched["time"]
        rank = matched["rank"].strip() or rank
        text = text[matched.end() :]
    return Line(number, text, time, rank)


def rank_number(rank: str | None) -> str | None:
    """The tensor-parallel rank in a label such as "DP0 TP3 EP1"; None: there is none."""
    matched = _RANK_NUMBER.search(rank or "")
    return matched[1] if matched else None
