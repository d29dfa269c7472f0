"""config.json and hf_quant_config.json of a DeepSeek-V4-family checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.declared import (
    Quantization,
    declared_format,
    disagreements,
    read_quantization,
)
from dsv4doctor.facts.files import field, number, shown, strings
from dsv4doctor.models import ExpertLayer, Role, StoredFormat

CONFIG_NAME = "config.json"
QUANT_CONFIG_NAME = "hf_quant_config.json"

SUPPORTED_ARCHITECTURES = ("DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM")


@dataclass(frozen=True)
class Config:
    """The fields that say what should be stored, checked."""

    architectures: tuple[str, ...]
    text: dict[str, Any]
    """The language model's part."""
    main_layers: int | None
    dense_layers: int
    """The first layers, which have no routed experts."""
    draft_layers: int
    """num_nextn_predict_layers; 0 when it is not there."""
    routed_experts: int | None
    expert_dtype: str | None
    dtype: str | None
    quantization: Quantization | None
    """The block that counts: config.json's own, else hf_quant_config.json's."""
    notes: tuple[str, ...]


def read_config(
    config: dict[str, Any], quant_config: dict[str, Any] | None, source: str, quant_source: str
) -> Config:
    """`config` (config.json) and `quant_config` (hf_quant_config.json), checked.

    Raises UsageError, naming the file by `source` or `quant_source`, for a field of the wrong
    type and for a model of another family.
    """
    architectures = strings(config, "architectures", source) or []
    if not set(architectures) & set(SUPPORTED_ARCHITECTURES):
        raise UsageError(
            f"{source}: not a DeepSeek-V4 family checkpoint"
            f" (architectures: {shown(', '.join(architectures)) or 'none'})",
            f"Supported: {', '.join(SUPPORTED_ARCHITECTURES)}.",
        )
    text = field(config, "text_config", dict, source) or config
    block = _first(field, (config, text), "quantization_config", dict, source)
    own = None if block is None else read_quantization(block, f"{source}: quantization_config")
    other = _read_quant_config(quant_config, quant_source)
    views = (config, text, block or {})
    return Config(
        architectures=tuple(architectures),
        text=text,
        main_layers=number(text, "num_hidden_layers", 1, 1024, source),
        dense_layers=number(text, "first_k_dense_replace", 0, 1024, source) or 0,
        draft_layers=number(text, "num_nextn_predict_layers", 0, 64, source) or 0,
        routed_experts=number(text, "n_routed_experts", 0, 1 << 20, source),
        expert_dtype=_first(field, views, "expert_dtype", str, source),
        dtype=_first(field, (text, config), "torch_dtype", str, source)
        or _first(field, (text, config), "dtype", str, source),
        quantization=own or other,
        notes=tuple(_notes(own, other)),
    )


def declared(
    config: Config, layers: tuple[ExpertLayer, ...], role: Role
) -> tuple[StoredFormat | None, list[str]]:
    """The format that the configuration gives to the routed experts of `role`, and notes.

    OTHER when it gives different formats to different layers.
    """
    usual = "layers.0.ffn.experts" if role is Role.MAIN else "mtp.0.ffn.experts"
    names = [layer.name if len(layer.name) <= 40 else usual for layer in layers]
    names = [name for name, layer in zip(names, layers, strict=True) if layer.role is role]
    formats = {
        declared_format(config.quantization, config.expert_dtype, config.dtype, name)
        for name in names or [usual]
    }
    if len(formats) == 1:
        return formats.pop(), []
    found = ", ".join(sorted(item.value if item else "nothing" for item in formats))
    return StoredFormat.OTHER, [f"the config declares several {role.value} formats: {found}"]


def _read_quant_config(quant_config: dict[str, Any] | None, source: str) -> Quantization | None:
    """hf_quant_config.json's block, nested under "quantization" or flat."""
    if quant_config is None:
        return None
    block = field(quant_config, "quantization", dict, source)
    return read_quantization(quant_config if block is None else block, source)


def _first(read: Any, mappings: tuple[dict[str, Any], ...], key: str, *rest: Any) -> Any:
    """The first value of `key` that is there in `mappings`, each read and so checked."""
    values = [read(mapping, key, *rest) for mapping in mappings]
    return next((value for value in values if value is not None), None)


def _notes(own: Quantization | None, other: Quantization | None) -> list[str]:
    notes = []
    if own is not None and other is not None:
        for difference in disagreements(own, other):
            notes.append(f"hf_quant_config.json disagrees with config.json: {difference}")
    elif other is not None:
        notes.append("config.json has no quantization_config; hf_quant_config.json is used")
    for block in (own, other):
        for pattern in block.unread if block is not None else ():
            notes.append(f"module pattern {shown(pattern)} is not evaluated")
    if own is not None and own.method not in (None, "fp8", "compressed-tensors"):
        notes.append(f"quant_method {shown(own.method)} is not DeepSeek's own")
    return notes
