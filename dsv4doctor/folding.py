"""Identical neighbouring layers as one: `model.layers.0-42.mlp.experts`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dsv4doctor.models import Layer


@dataclass(frozen=True)
class LayerRange:
    """Neighbouring layers that differ in nothing but their number."""

    name: str
    """One layer's name, or a range such as "model.layers.0-42.mlp.experts"."""
    count: int
    layer: Layer
    """The first of them."""


def fold(layers: Iterable[Layer]) -> tuple[LayerRange, ...]:
    """`layers` in their order, identical neighbours with consecutive numbers taken together."""
    ranges: list[LayerRange] = []
    for _, group in itertools.groupby(layers, key=lambda layer: repr(replace(layer, name=""))):
        ranges += _runs(list(group))
    return tuple(ranges)


def _runs(layers: Sequence[Layer]) -> list[LayerRange]:
    runs: list[list[Layer]] = []
    for layer in layers:
        if runs and _follows(runs[-1][-1].name, layer.name):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [LayerRange(_range_name(run), len(run), run[0]) for run in runs]


def _number(name: str) -> tuple[str, int, str] | None:
    """(before, number, after) of the first numeric part of a dotted name."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:index]), int(part), ".".join(parts[index + 1 :])
    return None


def _follows(earlier: str, later: str) -> bool:
    first, second = _number(earlier), _number(later)
    if first is None or second is None:
        return False
    return (first[0], first[1] + 1, first[2]) == second


def _range_name(run: Sequence[Layer]) -> str:
    first, last = _number(run[0].name), _number(run[-1].name)
    if len(run) == 1 or first is None or last is None:
        return run[0].name
    return ".".join(part for part in (first[0], f"{first[1]}-{last[1]}", first[2]) if part)
