"""How much of a GPU a server may take for weights and KV cache, and what fits into that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsv4doctor.memory import Parallel, Weights, kv_bytes_per_token, weights
from dsv4doctor.models import Checkpoint, TreeFeatures

MIB, GIB = 1 << 20, 1 << 30
CHUNKS = (8192, 4096, 2048)
"""Chunked-prefill sizes to choose from, the fastest first."""
_WINDOW_RATIO = 0.1
_PAGE = 256


@dataclass(frozen=True)
class Load:
    """What a server has to hold."""

    context: int
    """Tokens of the longest request."""
    requests: int
    """Running at once."""
    draft_tokens: int
    """Of speculation for a step; 1 without."""


@dataclass(frozen=True)
class Size:
    fraction: float
    """mem_fraction_static."""
    chunk: int | None
    """Chunked-prefill size; None: the server does not prefill."""
    memory: int
    reserve: int
    """Left for activations, CUDA graphs and the CUDA context."""
    weights: Weights
    kv_token: float | None
    """Bytes of a token; None: the model's cache is not added up."""
    context: int

    @property
    def budget(self) -> int:
        return int(self.memory * self.fraction)

    @property
    def tokens(self) -> int | None:
        """How many the KV cache holds."""
        if self.kv_token is None:
            return None
        return max(int((self.budget - self.weights.total) / self.kv_token), 0)

    @property
    def short(self) -> str | None:
        """Why it does not fit; None: it does."""
        if self.weights.total > self.budget:
            return (
                f"the weights take {gib(self.weights.total)} of a GPU, and {gib(self.budget)} are "
                "left for weights and KV cache"
            )
        if self.tokens is not None and self.tokens < self.context:
            return (
                f"the KV cache holds {self.tokens:,} tokens, less than one request of "
                f"{self.context:,}"
            )
        return None


def size(
    checkpoint: Checkpoint,
    features: TreeFeatures,
    *,
    memory: int,
    ranks: int,
    load: Load,
    prefills: bool,
    decodes: bool,
) -> Size:
    """For one server of `ranks` GPUs with `memory` bytes each.

    Takes the largest chunk with which the load fits, and the smallest chunk where none does.
    """
    draft = load.draft_tokens > 1
    parallel = Parallel(ranks, ranks, engram_over_ranks=features.engram_over_ranks)
    need = weights(checkpoint, parallel, draft=draft, wo_a_in_bf16=True)
    token = kv_of_token(checkpoint.text_config, features, draft)
    sizes = []
    for chunk in CHUNKS if prefills else (None,):
        held = reserve(memory, ranks, load, chunk, decodes)
        # SGLang takes the fraction as it is written: rounded down, so that the reserve stays.
        fraction = max(math.floor((memory - held) / memory * 1000) / 1000, 0.001)
        sizes.append(Size(fraction, chunk, memory, held, need, token, load.context))
    return next((found for found in sizes if found.short is None), sizes[-1])


def kv_of_token(
    config: Mapping[str, Any], features: TreeFeatures, speculative: bool
) -> float | None:
    """Bytes of a token, states in float32."""
    return kv_bytes_per_token(
        config,
        speculative=speculative,
        window_ratio=_WINDOW_RATIO,
        state_bytes=4,
        state_page=None if features.state_by_token else _PAGE,
    )


def reserve(memory: int, ranks: int, load: Load, chunk: int | None, decodes: bool) -> int:
    """Bytes outside of weights and KV cache, by SGLang's own rule of thumb: 1.5 MiB for a token
    of the largest batch, 2 MiB for a captured request, 512 MiB, 128 MiB for a rank, and at least
    10 GiB on GPUs of more than 60."""
    steps = load.requests * load.draft_tokens if decodes else 0
    batch = max(chunk or 0, steps, 2048)
    held = 512 * MIB + batch * 3 * MIB // 2 + ranks * 128 * MIB
    if decodes:
        held += load.requests * 2 * MIB
    return max(held, 10 * GIB) if memory > 60 * GIB else held


def gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
