"""From a Checkpoint back to a folder, so that SGLang can read a snapshot's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.config import CONFIG_NAME, QUANT_CONFIG_NAME
from dsv4doctor.facts.headers import byte_size
from dsv4doctor.facts.index import INDEX_NAME, check_shard_name
from dsv4doctor.models import Checkpoint, TensorInfo


def materialise(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write `checkpoint` into `folder`, new or empty, as header-only files; gives `folder`.

    The configuration and the order of the index are the original's.  The shards are sparse and
    hold `checkpoint.tensors`: whoever looks at names, dtypes and shapes of a layer's first
    expert reads what the original says; the other experts are not there.

    Raises UsageError when the checkpoint's facts are not such as can be written.
    """
    shards: dict[str, list[TensorInfo]] = {}
    for tensor in checkpoint.tensors:
        check_shard_name(tensor.shard, checkpoint.name)
        shards.setdefault(tensor.shard, []).append(tensor)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder}: not empty", "Give a new folder.")
        _write_json(folder / CONFIG_NAME, checkpoint.config)
        if checkpoint.hf_quant_config is not None:
            _write_json(folder / QUANT_CONFIG_NAME, checkpoint.hf_quant_config)
        for shard, tensors in shards.items():
            _write_shard(folder / shard, tensors)
        if checkpoint.indexed:
            weight_map = {tensor.name: tensor.shard for tensor in checkpoint.tensors}
            metadata = {"total_size": checkpoint.payload_bytes}
            _write_json(folder / INDEX_NAME, {"metadata": metadata, "weight_map": weight_map})
    except (OSError, OverflowError, ValueError) as error:
        raise UsageError(
            f"{folder}: cannot be written ({error})", "Give another folder."
        ) from error
    return folder


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _write_shard(path: Path, tensors: list[TensorInfo]) -> None:
    header: dict[str, object] = {}
    position = 0
    for tensor in tensors:
        if not tensor.dtype:
            continue
        size = byte_size((tensor.dtype, *tensor.shape)) or 0
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + position)
