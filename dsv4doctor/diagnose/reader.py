"""A log as chunks of whole lines, in constant memory."""

from __future__ import annotations

import codecs
import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from dsv4doctor.errors import UsageError

BLOCK = 1 << 20
MAX_LINE = 1 << 20
"""Bytes of a line that are kept; the rest of a longer one is dropped."""
_CONTROLS = bytes(sorted({*range(32), 127} - set(b"\b\t\n\v\f\r\x1b")))
_MOST_CONTROLS, _MOST_DAMAGED = 0.05, 0.3
_SAMPLE = 1 << 16

Progress = Callable[[int, "int | None"], None]
"""Told the bytes read and, where known, the bytes of the file."""


class Source:
    """A log file or standard input ("-"), closed by `with`.

    Raises UsageError naming the file when it cannot be opened, is empty or is not text.
    """

    def __init__(self, name: str, progress: Progress | None = None) -> None:
        self.name = "standard input" if name == "-" else name
        self.notes: list[str] = []
        self._progress = progress
        self._raw, self._size = _opened(name)
        self._stream: BinaryIO | gzip.GzipFile = self._raw
        if name.endswith((".gz", ".gzip")) or (name == "-" and _is_gz(self._raw)):
            self._stream = gzip.GzipFile(fileobj=self._raw)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        if self._raw is not sys.stdin.buffer:
            self._raw.close()

    def chunks(self) -> Iterator[bytes]:
        """The log as bytes objects that end with a newline each; no line above MAX_LINE."""
        carry = b""
        for block in self._blocks():
            cut = block.rfind(b"\n") + 1
            if not cut:
                carry = (carry + block)[:MAX_LINE]
                continue
            chunk = carry + block[:cut] if len(carry) < MAX_LINE else carry + _rest(block[:cut])
            carry = block[cut:]
            yield chunk
        if carry:
            yield carry + b"\n"

    def _blocks(self) -> Iterator[bytes]:
        first = self._read()
        if not first:
            raise UsageError(f"{self.name}: empty", "give the server's log")
        decode = _decoder(first, self.name)
        block = first
        while block:
            if self._progress is not None:
                self._progress(self._raw.tell() if self._size else len(block), self._size)
            yield decode(block)
            block = self._read()

    def _read(self) -> bytes:
        try:
            # read1: of a .gz that is cut off, what is there is handed over first.
            if isinstance(self._stream, gzip.GzipFile):
                return self._stream.read1(BLOCK)
            return self._stream.read(BLOCK)
        except EOFError:
            self.notes.append(f"{self.name} is cut off: read up to there")
            return b""
        except (OSError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"{self.name}: cannot be read ({reason})", "give a text log, or a .gz of one"
            ) from error


def _is_gz(stream: BinaryIO) -> bool:
    return isinstance(stream, io.BufferedReader) and stream.peek(2)[:2] == b"\x1f\x8b"


def _opened(name: str) -> tuple[BinaryIO, int | None]:
    if name == "-":
        return sys.stdin.buffer, None
    path = Path(name)
    try:
        if path.is_dir():
            raise UsageError(f"{name}: a folder", "give the log file itself")
        stream = path.open("rb")
        return stream, path.stat().st_size or None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{name}: cannot be opened ({reason})", "give a log file, or -") from error


def _decoder(first: bytes, name: str) -> Callable[[bytes], bytes]:
    """Bytes of the file -> UTF-8; UsageError when the file is not text."""
    for mark, encoding in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        if first.startswith(mark):
            reader = codecs.getincrementaldecoder(encoding)("replace")
            return lambda block: reader.decode(block).encode("utf-8", "replace")
    if not _is_text(first):
        raise UsageError(f"{name}: not a text file", "give the server's log, or a .gz of it")
    return lambda block: block


def _is_text(first: bytes) -> bool:
    """Whether the first block of a file can be a log's.

    Random or packed bytes are one tenth control characters and mostly no UTF-8; a log in another
    encoding has no control characters, and one with binary garbage in it has few of either.
    """
    controls = len(first) - len(first.translate(None, _CONTROLS))
    if controls > len(first) * _MOST_CONTROLS:
        return False
    sample = first[:_SAMPLE]
    damaged = sample.decode("utf-8", "replace").count("\ufffd")
    return damaged <= len(sample) * _MOST_DAMAGED


def _rest(block: bytes) -> bytes:
    """`block` from the end of the over-long line it begins inside."""
    return block[block.find(b"\n") :]
