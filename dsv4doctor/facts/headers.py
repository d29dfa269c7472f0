"""Headers of safetensors files: which tensors a shard holds, without reading its data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.files import (
    DOWNLOAD_HINT,
    parse_object,
    read_part,
    regular_size,
    shown,
)

HEADER_LIMIT = 100 * 1000 * 1000
"""The longest header that the safetensors library accepts, in bytes."""

DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(
        ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
    ),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}

Kind = tuple[Any, ...]
"""A tensor's dtype followed by its shape: ("U8", 2048, 2048)."""

_INT_ONLY = {int}


@dataclass(frozen=True)
class Header:
    """The tensors of one shard."""

    payload_bytes: int
    tensors: dict[str, Kind]
    """In the header's order.  Equal kinds are one object."""
    unknown_dtypes: frozenset[str]


def byte_size(kind: Kind) -> int | None:
    """Bytes of a tensor of `kind`; None when the dtype is unknown.  ValueError: no such shape."""
    dtype, *shape = kind
    if len(shape) > 32 or not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        raise ValueError("its shape is not a list of sizes")
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        return None
    for size in shape:
        bits *= size
    if bits % 8:
        raise ValueError("it is not a whole number of bytes")
    return bits // 8


@dataclass(frozen=True)
class RawHeader:
    """The bytes of one shard's header, not looked at yet."""

    raw: bytes
    file_size: int


def read_header(path: Path) -> RawHeader:
    """The header of the safetensors file at `path`, at most HEADER_LIMIT bytes.

    Raises UsageError when the file cannot hold a header of the length it states.
    """
    file_size = regular_size(path)
    start = read_part(path, 8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length < 2 or length > file_size - 8:
        raise _bad(path, f"its header should be {length} bytes, in a file of {file_size}")
    if length > HEADER_LIMIT:
        raise _bad(path, f"a header of {length} bytes, where safetensors allows {HEADER_LIMIT}")
    raw = read_part(path, length, 8)
    if len(raw) != length or raw[:1] != b"{":
        raise _bad(path, "its header does not start with '{'")
    return RawHeader(raw, file_size)


def parse_header(header: RawHeader, path: Path) -> Header:
    """What `header`, of the file at `path`, says, checked against the file's size.

    Raises UsageError when the file is not a whole, well-formed safetensors file.
    """
    entries = parse_object(header.raw, f"{path}: header", any_depth=True)
    metadata = entries.pop("__metadata__", None)
    if metadata is not None and not isinstance(metadata, dict):
        raise _bad(path, "its __metadata__ is not an object")
    if header.raw.count(b'"data_offsets"') != len(entries):
        _refuse_duplicates(header.raw, path)
    payload = header.file_size - 8 - len(header.raw)
    tensors, unknown = _checked(entries, payload, path)
    return Header(payload, tensors, frozenset(unknown))


def _checked(entries: dict[str, Any], payload: int, path: Path) -> tuple[dict[str, Kind], set[str]]:
    """Every entry's kind, once dtype, shape and offsets agree and the data are covered."""
    kinds: dict[Kind, tuple[Kind, int | None]] = {}
    tensors: dict[str, Kind] = {}
    unknown: set[str] = set()
    position, in_order = 0, True
    for name, entry in entries.items():
        try:
            shape = entry["shape"]
            first, last = entry["data_offsets"]
            key = (entry["dtype"], *shape)
            if {type(first), type(last), *map(type, shape)} != _INT_ONLY:
                raise ValueError("a size or offset is not an integer")
            known = kinds.get(key)
            if known is None:
                known = kinds[key] = _new_kind(key, shape, unknown)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _bad(path, f"tensor {shown(name)} is ill-formed ({error})") from error
        tensors[name], size = known
        if last - first != size and (size is not None or last < first):
            raise _bad(
                path,
                f"tensor {shown(name)} takes {last - first} bytes by its offsets and {size} by"
                " its dtype and shape",
            )
        in_order = in_order and first == position
        position = last
    if not in_order:
        position = _covered([entry["data_offsets"] for entry in entries.values()], path)
    if position != payload:
        raise _bad(path, f"its header describes {position} bytes of data, the file has {payload}")
    return tensors, unknown


def _new_kind(key: Kind, shape: Any, unknown: set[str]) -> tuple[Kind, int | None]:
    if not isinstance(key[0], str) or not isinstance(shape, list):
        raise ValueError("its dtype or shape is of the wrong type")
    size = byte_size(key)
    if size is None:
        unknown.add(key[0])
    return key, size


def _covered(spans: list[list[int]], path: Path) -> int:
    """The end of the last span, when the spans follow each other from 0 on without a gap."""
    position = 0
    for first, last in sorted(spans):
        if first != position:
            what = "overlap" if first < position else "leave a gap"
            raise _bad(path, f"its tensors {what} at byte {min(first, position)} of the data")
        position = last
    return position


def _refuse_duplicates(raw: bytes, path: Path) -> None:
    def pairs(items: list[tuple[str, Any]]) -> None:
        names: set[str] = set()
        for name, _ in items:
            if name in names:
                raise _bad(path, f"its header names {shown(name)} twice")
            names.add(name)

    json.loads(raw, object_pairs_hook=pairs)


def _bad(path: Path, what: str) -> UsageError:
    return UsageError(f"{path}: not a whole safetensors file: {what}", DOWNLOAD_HINT)
