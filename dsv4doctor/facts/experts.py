"""The routed experts of each layer as stored: read off tensor names, dtypes and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from dsv4doctor.facts.headers import Kind
from dsv4doctor.models import ExpertLayer, Role, StoredFormat

_LAYER = re.compile(r"(?:(?:model|language_model)\.)*(layers|mtp|nextn)\.(?:layers\.)?(\d{1,3})\.")

_WEIGHTS = ("weight", "weight_packed")
_SCALES = ("scale", "weight_scale", "weight_scale_inv")
_GLOBAL_SCALES = ("weight_scale_2", "weight_global_scale")


def layer_place(name: str, main_layers: int | None) -> tuple[Role, int] | None:
    """Which model a tensor belongs to, and its layer or stage there; None: to no layer.

    Layers from `main_layers` on are draft stages: that is how NextN layers are stored when
    they are not called `mtp`.
    """
    match = _LAYER.match(name)
    if match is None:
        return None
    index = int(match[2])
    if match[1] != "layers":
        return Role.DRAFT, index
    if main_layers is not None and index >= main_layers:
        return Role.DRAFT, index - main_layers
    return Role.MAIN, index


@dataclass
class Tally:
    """What the tensors of one layer's routed experts are.

    "layers.3.ffn.experts.7.w1.scale" is leaf "w1.scale" of expert "7" of layer "layers.3.ffn".
    """

    experts: set[str] = field(default_factory=set)
    kinds: set[tuple[str, Kind]] = field(default_factory=set)
    """(leaf, kind) of every tensor; of one that holds all experts, the leaf is its last name."""


def count_experts(tensors: dict[str, Kind], tallies: dict[str, Tally]) -> None:
    """Add the routed experts among `tensors` to `tallies`, by layer."""
    for name, kind in tensors.items():
        layer, found, rest = name.partition(".experts.")
        if not found:
            continue
        expert, _, leaf = rest.partition(".")
        tally = tallies.get(layer)
        if tally is None:
            tally = tallies[layer] = Tally()
        if expert.isdecimal():
            tally.experts.add(expert)
            tally.kinds.add((leaf, kind))
        else:
            tally.kinds.add((rest, kind))


def kept_names(names: Iterable[str]) -> list[str]:
    """All names but those of experts above number 0, in the order given.

    The first expert of a layer stays whatever its number, so that a reader who takes the
    first routed expert it meets meets one of the same layer and dtype.
    """
    kept = []
    seen: set[tuple[str, str]] = set()
    for name in names:
        layer, found, rest = name.partition(".experts.")
        if found:
            expert, _, leaf = rest.partition(".")
            first = (layer, leaf) not in seen
            if not first and expert != "0" and expert.isdecimal():
                continue
            seen.add((layer, leaf))
        kept.append(name)
    return kept


def expert_layers(
    tallies: dict[str, Tally], main_layers: int | None, dense_layers: int, draft_stages: int
) -> tuple[ExpertLayer, ...]:
    """The layers in order, main first.

    Main layers from `dense_layers` to `main_layers` and draft stages below `draft_stages` that
    have no experts are there too, as MISSING.
    """
    layers = []
    for prefix, tally in tallies.items():
        place = layer_place(f"{prefix}.", main_layers)
        if place is not None:
            stored, detail = _stored_format(tally)
            name = f"{prefix}.experts"
            layers.append(ExpertLayer(name, *place, stored, len(tally.experts), detail))
    present = {(layer.role, layer.index) for layer in layers}
    wanted = [(Role.MAIN, index) for index in range(dense_layers, main_layers or 0)]
    wanted += [(Role.DRAFT, index) for index in range(draft_stages)]
    for role, index in wanted:
        if (role, index) not in present:
            name = f"{'layers' if role is Role.MAIN else 'mtp'}.{index}.ffn.experts"
            layers.append(
                ExpertLayer(name, role, index, StoredFormat.MISSING, 0, "no routed experts stored")
            )
    return tuple(sorted(layers, key=lambda layer: (layer.role is Role.DRAFT, layer.index)))


def _stored_format(tally: Tally) -> tuple[StoredFormat, str]:
    """The one format of a layer's experts, or OTHER when they are mixed or unknown."""
    projections: dict[str, dict[str, set[Kind]]] = {}
    for leaf, kind in tally.kinds:
        projection, _, part = leaf.rpartition(".")
        projections.setdefault(projection, {}).setdefault(part, set()).add(kind)
    found: set[tuple[StoredFormat, str]] = set()
    for parts in projections.values():
        if any(len(kinds) > 1 for kinds in parts.values()):
            dtypes = sorted({kind[0] for kinds in parts.values() for kind in kinds})
            return StoredFormat.OTHER, f"experts differ from each other: {', '.join(dtypes)}"
        found.add(_projection_format({part: next(iter(kinds)) for part, kinds in parts.items()}))
    if not tally.experts:
        dtypes = sorted({kind[0] for _, kind in tally.kinds})
        return StoredFormat.OTHER, f"one tensor for all experts: {', '.join(dtypes)}"
    if len(found) == 1:
        return next(iter(found))
    details = sorted({detail for _, detail in found})
    return StoredFormat.OTHER, f"projections differ: {'; '.join(details[:4])}"


def _projection_format(parts: dict[str, Kind]) -> tuple[StoredFormat, str]:
    """The format of one projection, from its tensors ("weight", "weight_scale", ...)."""
    weight_name, weight = _first(parts, _WEIGHTS)
    scale_name, scale = _first(parts, _SCALES)
    global_name, global_scale = _first(parts, _GLOBAL_SCALES)
    if weight is None:
        return StoredFormat.OTHER, f"no weight among {', '.join(sorted(parts)[:6])}"
    detail = weight[0] if weight_name == "weight" else f"{weight[0]} {weight_name}"
    if scale is None:
        plain = weight[0] == "BF16" and weight_name == "weight"
        return StoredFormat.BF16 if plain else StoredFormat.OTHER, detail
    block = _block(weight, scale)
    detail += f" + {scale[0]} {scale_name}"
    if block is not None:
        detail += f" per {block[1]}" if block[0] == 1 else f" per {block[0]}x{block[1]}"
    if global_scale is not None:
        detail += f" + {global_scale[0]} {global_name}"
    return _format_of(weight[0], scale, block, global_scale is not None), detail


def _format_of(
    weight: str, scale: Kind, block: tuple[int, int] | None, has_global: bool
) -> StoredFormat:
    if block is None:
        return StoredFormat.OTHER
    if weight in ("U8", "I8", "F4"):
        if block == (1, 16) and scale[0] == "F8_E4M3" and has_global:
            return StoredFormat.NVFP4
        if block == (1, 32) and scale[0] in ("F8_E8M0", "U8") and not has_global:
            return StoredFormat.MXFP4
    elif weight == "F8_E4M3":
        one_scale = scale[1:] == (1, 1)
        if block[0] > 1 and block[1] > 1 and not one_scale and scale[0] != "F8_E4M3":
            return StoredFormat.FP8_BLOCK
    elif weight == "I32" and block[0] == 1 and scale[0] in ("BF16", "F16", "F32"):
        return StoredFormat.INT4
    return StoredFormat.OTHER


def _block(weight: Kind, scale: Kind) -> tuple[int, int] | None:
    """(rows, columns) of weight values per scale; None when the shapes do not fit."""
    if len(weight) != 3 or len(scale) != 3 or not scale[1] or not scale[2]:
        return None
    per_element = {"U8": 2, "I8": 2, "I32": 8}.get(weight[0], 1)
    return -(-weight[1] // scale[1]), -(-weight[2] * per_element // scale[2])


def _first(parts: dict[str, Kind], names: tuple[str, ...]) -> tuple[str, Kind | None]:
    for name in names:
        if name in parts:
            return name, parts[name]
    return "", None
