"""The sections of an ELF file by name, from its headers alone."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

_MAGIC = b"\x7fELF"
_MAX_SECTIONS = 4096
_NO_CONTENT = 8  # SHT_NOBITS


class Bytes(Protocol):
    """bytes, or a file mapped into memory."""

    def __getitem__(self, at: slice, /) -> bytes: ...
    def __len__(self) -> int: ...
    def find(self, piece: bytes, start: int = ..., end: int = ..., /) -> int: ...


class NotReadable(Exception):
    """The file is not what it should be; the message says in what."""


@dataclass(frozen=True)
class Section:
    name: bytes
    offset: int
    """In the file, bytes."""
    size: int


def sections(image: Bytes) -> Iterator[Section]:
    """The sections that lie in the file.  Raises NotReadable for what is no whole ELF file."""
    start = image[0:64]
    if start[:4] != _MAGIC:
        raise NotReadable("not an ELF file")
    if len(start) < 64 or start[4] != 2 or start[5] not in (1, 2):
        raise NotReadable("not a 64-bit ELF file")
    order = "<" if start[5] == 1 else ">"
    (table,) = struct.unpack_from(order + "Q", start, 0x28)
    width, count, names_at = struct.unpack_from(order + "HHH", start, 0x3A)
    if width < 64 or not 0 < count <= _MAX_SECTIONS or names_at >= count:
        raise NotReadable("no usable section table")
    headers = image[table : table + width * count]
    if len(headers) < width * count:
        raise NotReadable("truncated: its section table lies beyond its end")
    rows = [struct.unpack_from(order + "IIQQQQ", headers, width * n) for n in range(count)]
    _, _, _, _, offset, size = rows[names_at]
    names = image[offset : offset + min(size, 1 << 20)]
    for name_at, kind, _, _, offset, size in rows:
        end = names.find(b"\0", name_at)
        name = names[name_at : end if end >= 0 else len(names)]
        if kind != _NO_CONTENT and name:
            if offset + size > len(image):
                raise NotReadable(f"truncated: section {name[:40]!r} lies beyond its end")
            yield Section(name, offset, size)
