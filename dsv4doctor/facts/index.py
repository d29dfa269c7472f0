"""Which shards make up a checkpoint, and which tensors its index puts into each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.files import DOWNLOAD_HINT, MIB, parse_object, read_file, shown
from dsv4doctor.facts.hub import is_snapshot

INDEX_NAME = "model.safetensors.index.json"

_INDEX_LIMIT = 128 * MIB


@dataclass(frozen=True)
class Index:
    weight_map: dict[str, str]
    """Tensor -> shard, in the file's order."""
    total_size: Any
    """As written; None when it is not there."""


def read_index(folder: Path) -> bytes | None:
    """The folder's index, not looked at yet; None: there is none."""
    path = folder / INDEX_NAME
    return read_file(path, _INDEX_LIMIT) if os.path.lexists(path) else None


def parse_index(raw: bytes, path: Path) -> Index:
    """What the index `raw`, of the file at `path`, says.

    Raises UsageError unless it gives every tensor a shard, a name inside the folder.
    """
    content = parse_object(raw, str(path))
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{path}: weight_map should be an object with entries", DOWNLOAD_HINT)
    if {*map(type, weight_map.values())} != {str}:
        name = next(name for name, shard in weight_map.items() if not isinstance(shard, str))
        raise UsageError(
            f"{path}: {shown(name)} should have its shard's name, a string", DOWNLOAD_HINT
        )
    for shard in set(weight_map.values()):
        check_shard_name(shard, str(path))
    metadata = content.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(weight_map, total_size)


def check_shard_name(shard: str, source: str) -> None:
    """Raise UsageError unless `shard` is a relative path to a .safetensors file further down."""
    parts = PurePosixPath(shard).parts
    inside = parts and not shard.startswith("/") and ".." not in parts and "\0" not in shard
    if not inside or "\\" in shard or not shard.endswith(".safetensors"):
        raise UsageError(
            f"{source}: {shown(shard)} is not the name of a .safetensors file in its folder",
            DOWNLOAD_HINT,
        )


def shards_of(folder: Path, index: Index | None) -> list[str]:
    """The shards by name, all there: those in the index, else every .safetensors file."""
    if index is None:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise UsageError(
                f"{folder}: neither {INDEX_NAME} nor a .safetensors file", DOWNLOAD_HINT
            )
        return names
    names = sorted(set(index.weight_map.values()))
    missing = [shard for shard in names if not os.path.exists(folder / shard)]
    if missing:
        state = "only partly downloaded" if is_snapshot(folder) else "incomplete"
        raise UsageError(
            f"{folder}: {state}: the index names {shown(missing[0])}, which is not there"
            f" ({len(missing)} of {len(names)} shards are missing)",
            "Finish the download, or point to another copy of the checkpoint.",
        )
    return names


def listed_tensors(index: Index) -> dict[str, set[str]]:
    """Shard -> the tensors that the index puts there."""
    listed: dict[str, set[str]] = {}
    for name, shard in index.weight_map.items():
        found = listed.get(shard)
        if found is None:
            found = listed[shard] = set()
        found.add(name)
    return listed
