"""Source files as the text that fixes work on, and back with the line ends they had."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

_MARK = "\ufeff"


class NotText(ValueError):
    """The bytes are no UTF-8 text; the message says where."""


@dataclass(frozen=True)
class Text:
    """A file's text with "\\n" for every line end, and what its bytes looked like."""

    body: str
    ends: tuple[str, ...]
    """The line end of each line: "\\n", "\\r\\n", or "" for a last line without one."""
    mark: bool = False
    """It starts with a byte order mark."""

    def encode(self, body: str) -> bytes:
        """`body` as bytes: lines of the original keep their ends, new ones get the usual one."""
        usual = "\r\n" if 2 * self.ends.count("\r\n") > len(self.ends) else "\n"
        new = _lines(body)
        if "\r\n" not in self.ends:
            ends = ["\n"] * len(new)
        elif set(self.ends) <= {"\r\n", ""}:
            ends = ["\r\n"] * len(new)
        else:
            ends = _matched(_lines(self.body), self.ends, new, usual)
        joined = "".join(line + end for line, end in zip(new, ends, strict=True))
        if not body.endswith("\n") and new:
            joined = joined[: -len(ends[-1])]
        # A body that begins with a mark of its own needs the file's in front of it.
        mark = _MARK if self.mark or joined.startswith(_MARK) else ""
        return (mark + joined).encode("utf-8")


def decode(content: bytes) -> Text:
    """The text in `content`; NotText when it is not UTF-8."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotText(f"not UTF-8 text (byte {error.start})") from error
    mark = text.startswith(_MARK)
    pieces = text.removeprefix(_MARK).split("\n")
    ends = ["\r\n" if piece.endswith("\r") else "\n" for piece in pieces[:-1]]
    lines = [piece.removesuffix("\r") for piece in pieces[:-1]] + pieces[-1:]
    if pieces[-1]:
        ends.append("")
    return Text("\n".join(lines), tuple(ends), mark)


def _lines(body: str) -> list[str]:
    """The lines of `body` without their ends."""
    lines = body.split("\n")
    return lines[:-1] if not lines[-1] else lines


def _matched(old: list[str], ends: tuple[str, ...], new: list[str], usual: str) -> list[str]:
    found = [usual] * len(new)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for block in matcher.get_matching_blocks():
        for offset in range(block.size):
            found[block.b + offset] = ends[block.a + offset] or usual
    return found
