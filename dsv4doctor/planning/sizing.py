"""How much of a GPU a server may take for weights and KV cache, and what fits into that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsv4doctor.memory import Parallel, TorchIndexer, Weights, kv_bytes_per_token, weights
from dsv4doctor.models import Checkpoint, TreeFeatures

MIB, GIB = 1 << 20, 1 << 30
CHUNKS = (8192, 4096, 2048)
"""Chunked-prefill sizes to choose from, the fastest first."""
SMALL_CHUNKS = (1024, 512, 256)
"""For an indexer in torch operations, which holds a row for every new token; whole pages."""
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
    indexer: int
    """Of it, what an indexer in torch operations holds; 0: there is none."""
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
                f"left for weights and KV cache{self._indexer}"
            )
        if self.tokens is not None and self.tokens < self.context:
            return (
                f"the KV cache holds {self.tokens:,} tokens, less than one request of "
                f"{self.context:,}{self._indexer}"
            )
        return None

    @property
    def _indexer(self) -> str:
        """What the indexer has to do with it, and the ways out."""
        if not self.indexer:
            return ""
        rows = f", {self.chunk:,} new tokens a step," if self.chunk else ""
        return (
            f"; {gib(self.indexer)} are kept for the indexer, which this SGLang runs in torch "
            f"operations{rows} at {self.context:,} tokens of context: apply FIX104 (`dsv4doctor "
            "fix`) and plan again, ask for a smaller --context, or for a release with another "
            "indexer (`dsv4doctor trace --path indexer --sglang VERSION` names it)"
        )


def size(
    checkpoint: Checkpoint,
    features: TreeFeatures,
    *,
    memory: int,
    ranks: int,
    load: Load,
    prefills: bool,
    decodes: bool,
    attentions: int = 1,
    indexer: TorchIndexer | None = None,
) -> Size:
    """For one server of `ranks` GPUs with `memory` bytes each, which hold `attentions` replicas of
    the attention; `indexer`: the one in torch operations, where it is what runs.

    Takes the largest chunk with which the load fits, and the smallest chunk where none does.
    """
    draft = load.draft_tokens > 1
    parallel = Parallel(
        ranks, max(ranks // attentions, 1), engram_over_ranks=features.engram_over_ranks
    )
    need = weights(checkpoint, parallel, draft=draft, wo_a_in_bf16=True)
    token = kv_of_token(checkpoint.text_config, features, draft)
    sizes = []
    chunks = (*CHUNKS, *SMALL_CHUNKS) if indexer is not None else CHUNKS
    for chunk in chunks if prefills else (None,):
        steps = load.requests * load.draft_tokens if decodes else 0
        scores = indexer.bytes(max(chunk or 0, steps), load.context) if indexer else 0
        held = reserve(memory, ranks, load, chunk, decodes) + scores
        # SGLang takes the fraction as it is written: rounded down, so that the reserve stays.
        fraction = max(math.floor((memory - held) / memory * 1000) / 1000, 0.001)
        sizes.append(Size(fraction, chunk, memory, held, scores, need, token, load.context))
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
