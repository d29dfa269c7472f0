"""Whether SGLang's indexer runs in torch operations, and what it is given."""

from __future__ import annotations

from dsv4doctor.memory import TorchIndexer
from dsv4doctor.models import Facts
from dsv4doctor.rules.common import flag, in_effect, is_true, is_v41
from dsv4doctor.rules.rule import NotChecked

TORCH_INDEXER = "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"
TILELANG_INDEXER = "SGLANG_OPT_USE_TILELANG_INDEXER"


def torch_indexer(facts: Facts) -> TorchIndexer | None:
    """The indexer, where sm_12x has it in torch operations; None where it has another.

    Raises NotChecked where that, or its sizes, cannot be told."""
    features, checkpoint = facts.features, facts.snapshot.checkpoint
    if features is None or checkpoint is None or not facts.arch.is_sm12x or is_v41(facts):
        return None
    where, value_bytes = features.torch_indexer, features.torch_indexer_bytes
    if where is None or value_bytes is None:
        return None
    chosen = in_effect(facts, TORCH_INDEXER)
    if chosen is None:
        raise NotChecked(f"this SGLang has no {TORCH_INDEXER}: its indexer is not known")
    if not is_true(chosen) or is_true(in_effect(facts, TILELANG_INDEXER)):
        return None
    model = checkpoint.text_config
    heads, head_dim = model.get("index_n_heads"), model.get("index_head_dim")
    if not isinstance(heads, int) or not isinstance(head_dim, int):
        raise NotChecked("the indexer's heads are not in config.json")
    return TorchIndexer(heads, head_dim, value_bytes, features.torch_indexer_rows, where)


def context_limit(facts: Facts) -> int | None:
    """The longest sequence that the server takes."""
    written = flag(facts, "--context-length")
    if written is not None and written.isdigit():
        return int(written)
    checkpoint = facts.snapshot.checkpoint
    limit = checkpoint.text_config.get("max_position_embeddings") if checkpoint else None
    return limit if isinstance(limit, int) else None


def prefill_rows(facts: Facts, context: int) -> int | None:
    """New tokens of the largest prefill step; 0 for a server that only decodes, None: not known."""
    args = facts.trace.resolved_args if facts.trace else {}
    if args.get("disaggregation_mode") == "decode":
        return 0
    chunk = args.get("chunked_prefill_size")
    if not isinstance(chunk, int):
        return None
    return chunk if chunk > 0 else context
