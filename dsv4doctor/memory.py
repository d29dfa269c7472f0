"""What a launch needs in GPU memory, from the checkpoint's headers and SGLang's cache layout.

Weights: which tensors are divided among the ranks follows SGLang's model code.  KV cache: one
full-attention token's share of the window, compressed and indexer caches, as SGLang's pool
configurator adds it up.  Activations, CUDA graphs and the CUDA context are not in here: SGLang
keeps `1 - mem_fraction_static` of the GPU for them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsv4doctor.models import Checkpoint, Location, Role, TensorInfo

_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}
_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.\d+\.")
_OVER_ATTENTION_RANKS = re.compile(
    r"(?:^|\.)(?:attn\.(?:wq_b|wo_a|wo_b|attn_sink)|embed\.weight|head\.weight)"
)
_WO_A = re.compile(r"\.attn\.wo_a\.weight$")


@dataclass(frozen=True)
class Parallel:
    """How a launch divides the model."""

    tensor: int = 1
    """All ranks of one replica; expert parallelism divides the experts among the same ranks."""
    attention: int = 1
    """Ranks that share one attention: `tensor` without data-parallel attention."""
    shared_experts_whole: bool = False
    """Every rank has the shared experts whole, as with an all-to-all backend."""
    engram_over_ranks: bool = True


@dataclass(frozen=True)
class Weights:
    """Bytes on the fullest rank."""

    experts: int
    engram: int
    divided: int
    """Attention projections, shared experts, embedding and head."""
    whole: int
    """What every rank has whole."""
    draft: int
    """All of the draft's, whatever its kind; 0 without speculation."""

    @property
    def total(self) -> int:
        return self.experts + self.engram + self.divided + self.whole + self.draft


def weights(
    checkpoint: Checkpoint, parallel: Parallel, *, draft: bool, wo_a_in_bf16: bool = False
) -> Weights:
    """The weights on the fullest rank.

    `wo_a_in_bf16`: SGLang dequantises that projection while it loads, for both models.
    """
    # SGLang makes room for as many as config.json says, whatever the shards hold.
    said = checkpoint.text_config.get("n_routed_experts")
    least = said if isinstance(said, int) else 0
    experts = {
        layer.name: max(layer.experts, least) if layer.role is Role.MAIN else layer.experts
        for layer in checkpoint.layers
    }
    found: dict[str, int] = defaultdict(int)
    for tensor in checkpoint.tensors:
        is_draft = tensor.name.startswith("mtp.")
        if is_draft and not draft:
            continue
        size = tensor_bytes(tensor)
        if wo_a_in_bf16 and _WO_A.search(tensor.name) and tensor.dtype.startswith("F8"):
            size *= 2
        kind, ranks = _placed(tensor.name, parallel)
        expert = _EXPERT.match(tensor.name)
        if expert is not None:
            size *= experts.get(expert["layer"], 1)
        found["draft" if is_draft else kind] += math.ceil(size / ranks)
    return Weights(
        experts=found["experts"],
        engram=found["engram"],
        divided=found["divided"],
        whole=found["whole"],
        draft=found["draft"],
    )


def tensor_bytes(tensor: TensorInfo) -> int:
    """Bytes as stored; 0 for a dtype that safetensors does not have."""
    return math.prod(tensor.shape) * _BITS.get(tensor.dtype, 0) // 8


def _placed(name: str, parallel: Parallel) -> tuple[str, int]:
    """The kind of a tensor, and among how many ranks it is divided."""
    if _EXPERT.match(name):
        return "experts", parallel.tensor
    if ".engram.embed." in name:
        return "engram", parallel.tensor if parallel.engram_over_ranks else 1
    if ".shared_experts." in name:
        return "divided", 1 if parallel.shared_experts_whole else parallel.tensor
    if _OVER_ATTENTION_RANKS.search(name) and ".indexer." not in name:
        return "divided", parallel.attention
    return "whole", 1


# ------------------------------------------------------------------------------ KV cache


_CACHE_SHAPE = (
    "num_hidden_layers",
    "head_dim",
    "qk_rope_head_dim",
    "sliding_window",
    "index_head_dim",
)


def kv_bytes_per_token(
    config: Mapping[str, Any],
    *,
    speculative: bool,
    window_ratio: float,
    state_bytes: int,
    state_page: int | None = None,
) -> float | None:
    """Bytes that one token of context takes on every rank; the latent cache is not divided.

    `config` is the text model's, `window_ratio` SGLang's swa_full_tokens_ratio, `state_bytes` the
    width of the compressor's state (4 for float32).  `state_page` is the page that a ring of
    states belongs to, in releases that pay the state of ratio 128 by the request, which is not in
    here; None: the sliding window, and both by the token.  The result is None for a model with
    other compression ratios than DeepSeek-V4's 0, 4 and 128.
    """
    ratios = config.get("compress_ratios")
    named = [config.get(name) for name in _CACHE_SHAPE]
    numbers = [number for number in named if isinstance(number, int) and number > 0]
    if not isinstance(ratios, list) or len(numbers) < len(_CACHE_SHAPE):
        return None
    layers, head_dim, rope, window, index_dim = numbers
    own = ratios[:layers]
    if len(own) != layers or any(ratio not in (0, 4, 128) for ratio in own):
        return None
    key = (head_dim - rope) + 2 * rope + 8  # FP8 part, BF16 rotary part, scales
    index = index_dim + index_dim // 128 * 4
    fours, many = own.count(4), own.count(128)
    ring = 2 if speculative else 1
    state_of_4 = 4 * (head_dim + index_dim) * state_bytes * 8 * ring / (state_page or window)
    state_of_128 = 0.0 if state_page else 2 * head_dim * state_bytes * 128 * ring / window
    total = (
        window_ratio * key * layers
        + (key + index) / 4 * fours
        + key / 128 * many
        + window_ratio * (state_of_4 * fours + state_of_128 * many)
    )
    # SGLang adds one layer in `layers` for the draft.
    return total * (layers + 1) / layers if speculative else total


# ------------------------------------------------------------------------------ indexer


_INDEX_PAGE = 64


@dataclass(frozen=True)
class TorchIndexer:
    """SGLang's indexer in plain torch operations: what it holds while it scores query rows."""

    heads: int
    head_dim: int
    value_bytes: int
    rows_at_once: int | None
    """None: all that it is given."""
    where: Location

    def row_bytes(self, length: int) -> int:
        """Bytes alive at once for one query row at a sequence of `length` tokens: the gathered
        pages with a 4-byte scale per key, the keys converted, and two copies of the scores."""
        values = (self.head_dim + 2 * self.heads) * self.value_bytes
        return _keys(length) * (self.head_dim + 4 + values)

    def bytes(self, rows: int, length: int) -> int:
        """For a step of `rows` query rows: in decode one a request, in prefill one a new token."""
        least = rows if self.rows_at_once is None else min(rows, self.rows_at_once)
        logits = 4 * rows * _keys(length) if least < rows else 0
        return least * self.row_bytes(length) + logits


def _keys(length: int) -> int:
    """Compressed keys of a sequence, whole pages of them."""
    return math.ceil(math.ceil(length / 4) / _INDEX_PAGE) * _INDEX_PAGE
