"""A checkpoint folder: config.json, hf_quant_config.json, the index and every shard's header.

Nothing here reads weights or needs torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.config import (
    CONFIG_NAME,
    QUANT_CONFIG_NAME,
    Config,
    declared,
    read_config,
)
from dsv4doctor.facts.experts import (
    Tally,
    count_experts,
    expert_layers,
    kept_names,
    layer_place,
)
from dsv4doctor.facts.files import DOWNLOAD_HINT, MIB, parse_object, read_file, shown
from dsv4doctor.facts.headers import Header, Kind, read_header
from dsv4doctor.facts.hub import repository_name, resolve_model
from dsv4doctor.facts.index import INDEX_NAME, Index, read_index, shards_of
from dsv4doctor.facts.materialise import materialise
from dsv4doctor.models import Checkpoint, ExpertLayer, Role, StoredFormat, TensorInfo

__all__ = ["materialise", "read_checkpoint", "resolve_model"]

_CONFIG_LIMIT = 32 * MIB
_QUANT_CONFIG_LIMIT = 64 * MIB
_HEADERS_LIMIT = 1024 * MIB
"""All headers together; V4-Pro's take 45 MiB."""


@dataclass
class _Stored:
    """What the shards hold."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    kept: dict[str, tuple[Kind, str]] = field(default_factory=dict)
    """Name -> (kind, shard) of the tensors that are kept one by one."""
    absent: list[str] = field(default_factory=list)
    """In the index, not in the shard it names."""
    unlisted: list[str] = field(default_factory=list)
    """In a shard, not in the index."""
    unknown_dtypes: set[str] = field(default_factory=set)
    tensor_count: int = 0
    payload_bytes: int = 0
    header_bytes: int = 0


class _Key:
    """The content key as it grows."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, label: str, raw: bytes, size: int) -> None:
        self._digest.update(f"{len(label)} {label} {len(raw)} {size} ".encode())
        self._digest.update(raw)

    @property
    def value(self) -> str:
        return self._digest.hexdigest()


def read_checkpoint(path: Path) -> Checkpoint:
    """The facts of the checkpoint in folder `path`.

    Raises UsageError, naming the file and what to do, for a folder that is not a whole
    DeepSeek-V4-family checkpoint.
    """
    folder = path.absolute()
    if not folder.is_dir():
        raise UsageError(f"{path}: no such folder", "Give the folder that holds config.json.")
    key = _Key()
    raw_config = _read_object(folder / CONFIG_NAME, _CONFIG_LIMIT, key)
    raw_quant = None
    if os.path.lexists(folder / QUANT_CONFIG_NAME):
        raw_quant = _read_object(folder / QUANT_CONFIG_NAME, _QUANT_CONFIG_LIMIT, key)
    config = read_config(
        raw_config, raw_quant, str(folder / CONFIG_NAME), str(folder / QUANT_CONFIG_NAME)
    )
    index = read_index(folder)
    if index is not None:
        key.add(INDEX_NAME, index.raw, len(index.raw))
    shards = shards_of(folder, index)
    names, stored = _read_shards(folder, shards, index, key)

    stages = _draft_stages([*stored.kept, *(f"{name}." for name in stored.tallies)], config)
    layers = expert_layers(
        stored.tallies, config.main_layers, config.dense_layers, max(stages, config.draft_layers)
    )
    declared_main, main_notes = declared(config, layers, Role.MAIN)
    declared_draft, draft_notes = declared(config, layers, Role.DRAFT)
    notes = [*config.notes, *main_notes, *draft_notes, *_layer_notes(layers, stages, config)]
    notes += _stored_notes(stored, index.total_size if index else None)
    return Checkpoint(
        path=str(folder),
        name=repository_name(folder),
        architectures=config.architectures,
        config=raw_config,
        text_config=config.text,
        hf_quant_config=raw_quant,
        declared_main=declared_main,
        declared_draft=declared_draft,
        layers=layers,
        draft_stages=stages,
        tensors=tuple(_tensors(names, stored, index)),
        tensor_count=stored.tensor_count,
        payload_bytes=stored.payload_bytes,
        shard_count=len(shards),
        content_key=key.value,
        notes=tuple(notes),
        indexed=index is not None,
    )


def _read_object(path: Path, limit: int, key: _Key) -> dict[str, Any]:
    raw = read_file(path, limit)
    key.add(path.name, raw, len(raw))
    return parse_object(raw, str(path))


def _read_shards(
    folder: Path, shards: dict[str, set[str]], index: Index | None, key: _Key
) -> tuple[Iterable[str], _Stored]:
    """The names of the tensors to keep, in order, and what the shards hold."""
    stored = _Stored()
    listed = None if index is None else kept_names(index.weight_map)
    keep: dict[str, list[str]] = {shard: [] for shard in shards}
    for name in listed or ():
        assert index is not None
        keep[index.weight_map[name]].append(name)
    for shard, wanted in shards.items():
        header = read_header(folder / shard)
        key.add(shard, header.raw, header.file_size)
        stored.header_bytes += len(header.raw)
        if stored.header_bytes > _HEADERS_LIMIT:
            raise UsageError(
                f"{folder}: headers of more than {_HEADERS_LIMIT} bytes in all", DOWNLOAD_HINT
            )
        if listed is None:
            wanted, keep[shard] = set(header.tensors), kept_names(header.tensors)
        _add_shard(stored, shard, header, wanted, keep[shard])
    return stored.kept if listed is None else listed, stored


def _add_shard(
    stored: _Stored, shard: str, header: Header, wanted: set[str], keep: list[str]
) -> None:
    count_experts(header.tensors, stored.tallies)
    for name in keep:
        kind = header.tensors.get(name)
        if kind is not None:
            stored.kept[name] = kind, shard
    stored.absent += sorted(wanted - header.tensors.keys())
    stored.unlisted += sorted(header.tensors.keys() - wanted)
    stored.unknown_dtypes |= header.unknown_dtypes
    stored.tensor_count += len(header.tensors)
    stored.payload_bytes += header.payload_bytes


def _tensors(names: Iterable[str], stored: _Stored, index: Index | None) -> Iterator[TensorInfo]:
    for name in names:
        found = stored.kept.get(name)
        if found is not None:
            (dtype, *shape), shard = found
            yield TensorInfo(name, dtype, tuple(shape), shard)
        elif index is not None:
            yield TensorInfo(name, "", (), index.weight_map[name])


def _draft_stages(names: Iterable[str], config: Config) -> int:
    places = {layer_place(name, config.main_layers) for name in names}
    return len({place for place in places if place is not None and place[0] is Role.DRAFT})


def _layer_notes(layers: tuple[ExpertLayer, ...], stages: int, config: Config) -> Iterator[str]:
    if stages != config.draft_layers:
        yield (
            f"num_nextn_predict_layers is {config.draft_layers}, and {stages} draft stages are"
            " stored"
        )
    missing = [layer.index for layer in layers if layer.stored_format is StoredFormat.MISSING]
    for layer in layers:
        if layer.role is Role.MAIN and layer.stored_format is StoredFormat.MISSING:
            yield f"{layer.name}: no routed experts stored ({len(missing)} such layers)"
            break
    wrong = [
        layer
        for layer in layers
        if layer.role is Role.MAIN and layer.experts not in (0, config.routed_experts)
    ]
    if wrong and config.routed_experts is not None:
        yield (
            f"{wrong[0].name}: {wrong[0].experts} routed experts stored,"
            f" {config.routed_experts} configured ({len(wrong)} such layers)"
        )
    for role in Role:
        formats = {layer.stored_format.value for layer in layers if layer.role is role}
        if len(formats) > 1:
            yield f"{role.value} layers are stored in several formats: {', '.join(sorted(formats))}"


def _stored_notes(stored: _Stored, total_size: Any) -> Iterator[str]:
    if total_size is not None and total_size != stored.payload_bytes:
        yield (
            f"the index's total_size is {shown(str(total_size))}, the shards hold"
            f" {stored.payload_bytes} bytes"
        )
    for names, what in (
        (stored.absent, "in the index, not in the shard it names"),
        (stored.unlisted, "in a shard, not in the index under it"),
    ):
        if names:
            yield f"{shown(names[0])}: {what} ({len(names)} such tensors)"
    if stored.unknown_dtypes:
        yield f"unknown dtypes: {shown(', '.join(sorted(stored.unknown_dtypes)))}"
