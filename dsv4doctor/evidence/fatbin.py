"""The GPU architectures in a native library: its fat binaries' headers, read without CUDA.

A fat binary is a header (magic, version, its own size, the size of what follows) and entries, each
with a header of its own.  An entry's architecture stands in its header whether or not its code is
compressed.  The layout was checked against cuobjdump on libraries built with known targets.
"""

from __future__ import annotations

import mmap
import re
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from dsv4doctor.evidence.elf import Bytes, NotReadable, sections
from dsv4doctor.models import NativeLibrary

_MAGIC = 0xBA55ED50
_MAGIC_BYTES = struct.pack("<I", _MAGIC)
_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
_TEXTS = b".rodata"
_MAX_TEXTS = 64 << 20
_SCHEMA = re.compile(rb"\b([a-z_][a-z0-9_]{2,80})\((?:Tensor|int|float|bool)\b")
_PTX, _CUBIN = 1, 2
_EXACT, _FAMILY = 0x100000, 0x200000
"""In an entry's flags: made for this one GPU ("sm_90a"), or for its family ("sm_120f")."""
_MAX_ENTRIES = 1_000_000


def read_library(path: Path) -> NativeLibrary:
    """What `path` holds for GPUs; an unreadable or damaged file says so in `problem`."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
            return NativeLibrary(str(path), problem="not a regular file")
        if status.st_size == 0:
            return NativeLibrary(str(path), problem="empty")
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image,
        ):
            return library_in(image, str(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return NativeLibrary(str(path), problem=f"cannot be read ({reason})")


def library_in(image: Bytes, name: str) -> NativeLibrary:
    """As `read_library`, of the bytes of a file."""
    cubins: set[str] = set()
    ptx: set[str] = set()
    ops: set[str] = set()
    problem = None
    try:
        for section in sections(image):
            if section.name in _SECTIONS:
                for kind, target in _entries(image, section.offset, section.offset + section.size):
                    (ptx if kind == _PTX else cubins).add(target)
            elif section.name == _TEXTS:
                ops.update(_operators(image[section.offset : section.offset + section.size]))
    except NotReadable as error:
        problem = str(error)
    return NativeLibrary(name, _ordered(cubins), _ordered(ptx), tuple(sorted(ops)), problem)


def _operators(texts: bytes) -> Iterator[str]:
    """The operators in a library's texts, where they are registered by schema."""
    for match in _SCHEMA.finditer(texts[:_MAX_TEXTS]):
        yield match[1].decode("ascii")


def _ordered(targets: set[str]) -> tuple[str, ...]:
    return tuple(sorted(targets, key=lambda name: (len(name.rstrip("af")), name)))


def _entries(image: Bytes, at: int, end: int) -> Iterator[tuple[int, str]]:
    """(kind, "90a" or "120") of every entry in a section of fat binaries."""
    count = 0
    while at + 16 <= end:
        magic, _, header, size = struct.unpack("<IHHQ", image[at : at + 16])
        if magic != _MAGIC:
            # Between two of them there is padding only; where there is not, look for the next.
            at = image.find(_MAGIC_BYTES, at + 1, end)
            if at < 0:
                return
            continue
        if header < 16 or at + header + size > end:
            raise NotReadable("damaged: a fat binary is larger than its section")
        entry, stop = at + header, at + header + size
        while entry + 64 <= stop:
            kind, _, length, payload = struct.unpack("<HHIQ", image[entry : entry + 16])
            if length < 48 or entry + length + payload > stop:
                raise NotReadable("damaged: an entry is larger than its fat binary")
            arch, _, _, flags = struct.unpack("<IIIQ", image[entry + 28 : entry + 48])
            if kind in (_PTX, _CUBIN) and 10 <= arch < 1000:
                yield kind, f"{arch}{'a' if flags & _EXACT else 'f' if flags & _FAMILY else ''}"
            entry += length + payload
            count += 1
            if count > _MAX_ENTRIES:
                raise NotReadable("damaged: no end of entries")
        at = stop
