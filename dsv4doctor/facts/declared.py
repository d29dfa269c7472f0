"""What a checkpoint's configuration says of its routed experts.

Three dialects: DeepSeek's own (`quant_method: fp8` with `expert_dtype`), ModelOpt's
(`quant_algo`, `moe_quant_algo`, `quantized_layers`, exclusions) on top of it, and
compressed-tensors' (`config_groups` with targets).
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.files import DOWNLOAD_HINT, field, objects, shown, strings
from dsv4doctor.models import StoredFormat

_GLOB_LIMIT = 1024
_EXPRESSION_LIMIT = 64
"""More than any export writes; each is tried on every layer."""

_ALGORITHMS = {
    "NVFP4": StoredFormat.NVFP4,
    "W4A16_NVFP4": StoredFormat.NVFP4,
    "MXFP4": StoredFormat.MXFP4,
    "W4A8_MXFP4_FP8": StoredFormat.MXFP4,
    "FP8_PB_WO": StoredFormat.FP8_BLOCK,
    "W4A16_AWQ": StoredFormat.INT4,
}
_EXPERT_DTYPES = {
    "fp4": StoredFormat.MXFP4,
    "mxfp4": StoredFormat.MXFP4,
    "nvfp4": StoredFormat.NVFP4,
    "fp8": StoredFormat.FP8_BLOCK,
    "bf16": StoredFormat.BF16,
    "bfloat16": StoredFormat.BF16,
}
_PLAIN_METHODS = (None, "fp8", "modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed")


@dataclass(frozen=True)
class Patterns:
    """Names of modules as quantization blocks write them."""

    plain: frozenset[str]
    """Names: of a module, or of one that it is in."""
    globs: tuple[str, ...]
    expressions: tuple[str, ...]
    """Regular expressions that match from the start ("re:...")."""

    def cover(self, *names: str) -> bool:
        """Whether one of `names` is meant."""
        return (
            any(part in self.plain for name in names for part in _containing(name))
            or any(fnmatch.fnmatchcase(name, glob) for glob in self.globs for name in names)
            or any(re.match(text, name) for text in self.expressions for name in names)
        )


@dataclass(frozen=True)
class Quantization:
    """One quantization block, its fields checked."""

    method: str | None
    algorithm: str | None
    moe_algorithm: str | None
    block_scaled: bool
    """The dense weights are declared FP8 with a scale per block."""
    excluded: tuple[str, ...] | None
    """As written; None: the block has no such list."""
    exclusions: Patterns
    layers: dict[str, frozenset[str]]
    """Routed experts named in quantized_layers ("layers.3.ffn.experts") -> algorithms."""
    groups: tuple[tuple[Patterns, StoredFormat], ...]
    """compressed-tensors: (targets, format)."""
    unread: tuple[str, ...]
    """Regular expressions that are not evaluated: wrong, or too slow to be a module's name."""


def read_quantization(block: dict[str, Any], source: str) -> Quantization:
    """The quantization block of config.json or hf_quant_config.json.

    Raises UsageError naming `source` for a field of the wrong type.
    """
    excluded = strings(block, "ignore", source)
    if excluded is None:
        excluded = strings(block, "exclude_modules", source)
    layers: dict[str, set[str]] = {}
    for name, entry in (objects(block, "quantized_layers", source) or {}).items():
        layer, found, _ = name.partition(".experts")
        algorithm = field(entry, "quant_algo", str, f"{source}: quantized_layers")
        if found and algorithm:
            layers.setdefault(f"{layer}.experts", set()).add(algorithm.upper())
    unread: set[str] = set()
    exclusions = _patterns(excluded or [], unread, source)
    groups = tuple(_groups(block, unread, source))
    return Quantization(
        method=field(block, "quant_method", str, source),
        algorithm=_upper(field(block, "quant_algo", str, source)),
        moe_algorithm=_upper(field(block, "moe_quant_algo", str, source)),
        block_scaled=bool(field(block, "weight_block_size", list, source)),
        excluded=None if excluded is None else tuple(excluded),
        exclusions=exclusions,
        layers={name: frozenset(found) for name, found in layers.items()},
        groups=groups,
        unread=tuple(sorted(unread)),
    )


def declared_format(
    quantization: Quantization | None, expert_dtype: str | None, dtype: str | None, layer: str
) -> StoredFormat | None:
    """The format that the configuration gives to the routed experts named `layer`.

    `layer` is a tensor prefix such as "mtp.0.ffn.experts"; `dtype` is the config's own
    (torch_dtype).  None: the configuration says nothing that is understood.
    """
    if quantization is None:
        return _plain(None, expert_dtype, dtype)
    if quantization.method == "compressed-tensors":
        return _compressed(quantization, layer)
    if quantization.method not in _PLAIN_METHODS:
        return None
    base = _plain(quantization, expert_dtype, dtype)
    if quantization.exclusions.cover(layer, f"{layer}.0", f"{layer}.0.w1"):
        return base
    if quantization.moe_algorithm:
        return _algorithm(quantization.moe_algorithm)
    if quantization.layers:
        listed = quantization.layers.get(layer)
        if listed is None:
            return base
        return _algorithm(next(iter(listed))) if len(listed) == 1 else StoredFormat.OTHER
    if quantization.algorithm in (None, "MIXED_PRECISION"):
        return base
    return _algorithm(quantization.algorithm or "")


def disagreements(config: Quantization, other: Quantization) -> list[str]:
    """Where hf_quant_config.json contradicts config.json's block, in words."""
    found = []
    if other.algorithm != config.algorithm:
        found.append(f"quant_algo {config.algorithm} against {other.algorithm}")
    if config.excluded is not None and other.excluded is not None:
        difference = sorted(set(config.excluded) ^ set(other.excluded))
        if difference:
            found.append(f"excluded modules differ by {shown(', '.join(difference))}")
    if config.layers and other.layers and config.layers != other.layers:
        found.append("quantized_layers differ")
    return found


def _upper(text: str | None) -> str | None:
    return text.upper() if text else None


def _algorithm(name: str) -> StoredFormat:
    return _ALGORITHMS.get(name, StoredFormat.OTHER)


def _plain(
    quantization: Quantization | None, expert_dtype: str | None, dtype: str | None
) -> StoredFormat | None:
    """What is said outside ModelOpt's fields."""
    if expert_dtype is not None:
        return _EXPERT_DTYPES.get(expert_dtype.lower(), StoredFormat.OTHER)
    if quantization is not None and quantization.method == "fp8":
        return StoredFormat.FP8_BLOCK if quantization.block_scaled else StoredFormat.OTHER
    if quantization is None and dtype in ("bfloat16", "torch.bfloat16"):
        return StoredFormat.BF16
    return None


def _compressed(quantization: Quantization, layer: str) -> StoredFormat:
    # Targets use Hugging Face's projection names even where the tensors say w1.
    names = (f"{layer}.0.w1", f"{layer}.0.gate_proj")
    if not quantization.exclusions.cover(*names):
        for targets, stored in quantization.groups:
            if "Linear" in targets.plain or targets.cover(*names):
                return stored
    return StoredFormat.BF16


def _groups(
    block: dict[str, Any], unread: set[str], source: str
) -> Iterator[tuple[Patterns, StoredFormat]]:
    for name, group in (objects(block, "config_groups", source) or {}).items():
        where = f"{source}: config_groups.{shown(name)}"
        weights = field(group, "weights", dict, where) or {}
        targets = strings(group, "targets", where) or []
        yield _patterns(targets, unread, where), _weights_format(weights)


def _weights_format(weights: dict[str, Any]) -> StoredFormat:
    kind, bits, group = (weights.get(key) for key in ("type", "num_bits", "group_size"))
    if kind == "float" and bits == 4:
        return {16: StoredFormat.NVFP4, 32: StoredFormat.MXFP4}.get(
            group if isinstance(group, int) else 0, StoredFormat.OTHER
        )
    if kind == "float" and bits == 8 and weights.get("strategy") == "block":
        return StoredFormat.FP8_BLOCK
    return StoredFormat.INT4 if kind == "int" and bits == 4 else StoredFormat.OTHER


def _patterns(texts: list[str], unread: set[str], source: str) -> Patterns:
    """`texts` by kind; expressions that are not evaluated go to `unread`."""
    expressions = {text for text in texts if text.startswith("re:")}
    globs = {text for text in texts if any(mark in text for mark in "*?[")} - expressions
    if len(globs) > _GLOB_LIMIT or len(expressions) > _EXPRESSION_LIMIT:
        raise UsageError(
            f"{source}: {len(globs)} patterns and {len(expressions)} regular expressions for"
            f" modules are too many (at most {_GLOB_LIMIT} and {_EXPRESSION_LIMIT})",
            DOWNLOAD_HINT,
        )
    slow = {text for text in expressions if not _is_cheap(text[3:])}
    slow |= {text for text in globs if len(text) > 300}
    unread |= slow
    return Patterns(
        plain=frozenset(texts) - globs - expressions,
        globs=tuple(sorted(globs - slow)),
        expressions=tuple(sorted(text[3:] for text in expressions - slow)),
    )


def _containing(name: str) -> Iterator[str]:
    """ "a.b.c" gives "a.b.c", "a.b", "a"."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _is_cheap(expression: str) -> bool:
    """Whether a regular expression is right and cannot take long: few repeats, none nested."""
    repeats = len(re.findall(r"[*+{]", expression))
    if len(expression) > 300 or repeats > 3 or re.search(r"\)[*+{]|\\[1-9]", expression):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of what Python will read otherwise one day
            re.compile(expression)
    except (re.error, OverflowError, RecursionError, Warning):
        return False
    return True
