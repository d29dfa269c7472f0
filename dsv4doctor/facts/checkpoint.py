"""A checkpoint folder: config.json, hf_quant_config.json, the index and every shard's header.

Nothing here reads weights or needs torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.cache import load_entry, save_entry
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
from dsv4doctor.facts.headers import Header, Kind, RawHeader, parse_header, read_header
from dsv4doctor.facts.hub import repository_name, resolve_model
from dsv4doctor.facts.index import (
    INDEX_NAME,
    Index,
    listed_tensors,
    parse_index,
    read_index,
    shards_of,
)
from dsv4doctor.facts.materialise import materialise
from dsv4doctor.models import Checkpoint, ExpertLayer, Role, StoredFormat, TensorInfo

__all__ = ["materialise", "read_checkpoint", "resolve_model"]

_CONFIG_LIMIT = 32 * MIB
_QUANT_CONFIG_LIMIT = 64 * MIB
_HEADERS_LIMIT = 256 * MIB
"""All headers together; V4-Pro-NVFP4's take 40 MiB."""


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


@dataclass(frozen=True)
class _Files:
    """What was read of the folder beside its shards, not parsed yet."""

    folder: Path
    config: bytes
    quant_config: bytes | None
    index: bytes | None


_Headers = dict[str, RawHeader]
"""By shard, sorted."""


def read_checkpoint(path: Path, cache: Path | None = None) -> Checkpoint:
    """The facts of the checkpoint in folder `path`.

    With `cache`, a folder, the facts of a checkpoint read before come from there: its files
    are read and hashed as always, but not parsed again.

    Raises UsageError, naming the file and what to do, for a folder that is not a whole
    DeepSeek-V4-family checkpoint.
    """
    files = _read_files(path)
    headers: _Headers = {}
    key = ""
    if cache is not None:
        # Parsing an index takes longer than all else here, so its shards are taken to be those in
        # the folder.  Where they are others the key is none that was kept: it covers both.
        with contextlib.suppress(UsageError):
            headers = _read_headers(files.folder, shards_of(files.folder, None))
            key = _content_key(files, headers)
            found = _kept(cache, files, key)
            if found is not None:
                return found
    index = None if files.index is None else parse_index(files.index, files.folder / INDEX_NAME)
    shards = shards_of(files.folder, index)
    if shards != [*headers]:
        headers = _read_headers(files.folder, shards)
        key = _content_key(files, headers)
        found = None if cache is None else _kept(cache, files, key)
        if found is not None:
            return found
    checkpoint = _checkpoint(files, index, headers, key)
    if cache is not None:
        save_entry(_entry(cache, key), checkpoint)
    return checkpoint


def _read_files(path: Path) -> _Files:
    """Read the configs and the index of the folder at `path`."""
    folder = path.absolute()
    if not folder.is_dir():
        raise UsageError(f"{path}: no such folder", "Give the folder that holds config.json.")
    config = read_file(folder / CONFIG_NAME, _CONFIG_LIMIT)
    quant_config = None
    if os.path.lexists(folder / QUANT_CONFIG_NAME):
        quant_config = read_file(folder / QUANT_CONFIG_NAME, _QUANT_CONFIG_LIMIT)
    return _Files(folder, config, quant_config, read_index(folder))


def _read_headers(folder: Path, shards: Iterable[str]) -> _Headers:
    headers: _Headers = {}
    total = 0
    for shard in shards:
        headers[shard] = read_header(folder / shard)
        total += len(headers[shard].raw)
        if total > _HEADERS_LIMIT:
            raise UsageError(
                f"{folder}: headers of more than {_HEADERS_LIMIT} bytes in all", DOWNLOAD_HINT
            )
    return headers


def _content_key(files: _Files, headers: _Headers) -> str:
    parts = [(CONFIG_NAME, files.config, 0), (QUANT_CONFIG_NAME, files.quant_config or b"", 0)]
    parts.append((INDEX_NAME, files.index or b"", 0))
    parts += [(shard, header.raw, header.file_size) for shard, header in headers.items()]
    return _digest(parts)


def _entry(cache: Path, content_key: str) -> Path:
    return cache / f"{content_key[:32]}-{_code_key()[:16]}.json"


def _kept(cache: Path, files: _Files, content_key: str) -> Checkpoint | None:
    """The facts kept under the key, as those of this folder."""
    found = load_entry(_entry(cache, content_key), Checkpoint)
    if found is None or found.content_key != content_key:
        return None
    return replace(found, path=str(files.folder), name=repository_name(files.folder))


def _digest(parts: Iterable[tuple[str, bytes, int]]) -> str:
    digest = hashlib.sha256()
    for label, raw, size in parts:
        text = f"{len(label)} {label} {len(raw)} {size} "
        digest.update(text.encode(errors="surrogateescape"))  # a file's name may be any bytes
        digest.update(raw)
    return digest.hexdigest()


@functools.cache
def _code_key() -> str:
    """A key over the code that makes facts: other code, other facts."""
    here = Path(__file__).parent
    sources = [*sorted(here.glob("*.py")), *sorted((here.parent / "models").glob("*.py"))]
    return _digest((source.name, source.read_bytes(), 0) for source in sources)


def _checkpoint(
    files: _Files, index: Index | None, headers: _Headers, content_key: str
) -> Checkpoint:
    folder = files.folder
    config_source, quant_source = str(folder / CONFIG_NAME), str(folder / QUANT_CONFIG_NAME)
    raw_config = parse_object(files.config, config_source)
    raw_quant = None
    if files.quant_config is not None:
        raw_quant = parse_object(files.quant_config, quant_source)
    config = read_config(raw_config, raw_quant, config_source, quant_source)
    names, stored = _read_shards(folder, index, headers)

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
        shard_count=len(headers),
        content_key=content_key,
        notes=tuple(notes),
        indexed=index is not None,
    )


def _read_shards(
    folder: Path, index: Index | None, headers: _Headers
) -> tuple[Iterable[str], _Stored]:
    """The names of the tensors to keep, in order, and what the shards hold."""
    stored = _Stored()
    names: Iterable[str] = stored.kept
    keep: dict[str, list[str]] = {shard: [] for shard in headers}
    if index is not None:
        listed = listed_tensors(index)
        names = kept_names(index.weight_map)
        for name in names:
            keep[index.weight_map[name]].append(name)
    for shard, raw in headers.items():
        header = parse_header(raw, folder / shard)
        if index is None:
            _add_shard(stored, shard, header, set(header.tensors), kept_names(header.tensors))
        else:
            _add_shard(stored, shard, header, listed[shard], keep[shard])
    return names, stored


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
