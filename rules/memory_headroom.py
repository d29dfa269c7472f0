"""Weights and KV cache against the GPU's memory, before the server loads anything.

A rank's weights are added up from the safetensors headers as SGLang divides them; what
`mem_fraction_static` leaves is what the cache can have.  Activations, CUDA graphs and the CUDA
context are outside of both, so a tight fit is tighter than it looks; of the activations only those
of an indexer in torch operations are counted, which no usual reserve holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.memory import Parallel, Weights, kv_bytes_per_token, weights
from dsv4doctor.models import (
    Checkpoint,
    Facts,
    Finding,
    Remedy,
    Severity,
    StoredFormat,
    TensorInfo,
)
from dsv4doctor.rules.common import flag, in_effect, is_true, with_source
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import SM120_ENVIRONMENT, checkpoint, gpus, scene
from dsv4doctor.rules.torch_indexer import (
    TILELANG_INDEXER,
    context_limit,
    prefill_rows,
    torch_indexer,
)

_GIB = 1 << 30


def check(facts: Facts) -> Iterator[Finding]:
    trace, stored = facts.trace, facts.snapshot.checkpoint
    assert trace is not None
    assert stored is not None
    used = facts.snapshot.gpu.gpus
    memory = min((gpu.memory_bytes for gpu in used if gpu.arch == facts.arch), default=0)
    if not memory:
        raise NotChecked("the GPU's memory is not known without a GPU")
    args = trace.resolved_args
    fraction = args.get("mem_fraction_static")
    if not isinstance(fraction, int | float) or args.get("pp_size", 1) != 1:
        raise NotChecked("the trace resolved no memory fraction for one pipeline stage")
    if "num_hidden_layers" in (flag(facts, "--json-model-override-args") or ""):
        raise NotChecked("--json-model-override-args loads another number of layers")
    draft = args.get("speculative_algorithm") is not None
    yield from _prefill(facts, memory, fraction)
    need = weights(stored, _parallel(facts), draft=draft, wo_a_in_bf16=_wo_a_in_bf16(facts))
    budget = int(memory * fraction)
    if need.total > budget:
        yield _finding(facts, need, memory, fraction, None)
        return
    token = kv_bytes_per_token(
        stored.text_config,
        speculative=draft,
        window_ratio=_window_ratio(facts),
        state_bytes=4 if in_effect(facts, _STATE) in (None, "float32", "fp32") else 2,
        state_page=_state_page(facts),
    )
    context = args.get("context_length") or stored.text_config.get("max_position_embeddings")
    if token is None or not isinstance(context, int):
        return  # V4.1's cache is laid out otherwise: only the weights are held against it
    tokens = int((budget - need.total) / token)
    if tokens < context:
        yield _finding(facts, need, memory, fraction, (tokens, context, token))


def _prefill(facts: Facts, memory: int, fraction: float) -> Iterator[Finding]:
    """An indexer in torch operations holds a row for every new token, outside of the pool."""
    try:
        indexer, context = torch_indexer(facts), context_limit(facts)
    except NotChecked:  # DSV204 says so
        return
    if indexer is None or context is None or facts.features is None:
        return
    rows = prefill_rows(facts, context)
    room = int(memory * (1 - fraction))
    if not rows or facts.features.indexer_replaced or indexer.bytes(rows, context) <= room:
        return
    longest = max(range(0, context, _PAGE), key=lambda n: (indexer.bytes(rows, n) <= room, n))
    chunk = next((size for size in _CHUNKS if indexer.bytes(size, context) <= room), None)
    yield Finding(
        rule=RULE.id,
        severity=Severity.ERROR,
        subject="prefill",
        message=(
            f"To prefill {rows:,} tokens of a prompt as long as the context limit ({context:,}), "
            f"the indexer takes {indexer.bytes(rows, context) / _GIB:,.1f} GiB, and "
            f"{room / _GIB:.1f} GiB are outside of mem_fraction_static."
        ),
        consequence=(
            f"A prompt longer than about {longest:,} tokens, read {rows:,} at a time, ends the "
            "server with CUDA out of memory."
        ),
        evidence=(
            f"{memory / _GIB:.1f} GiB x (1 - mem_fraction_static {fraction:g}) = "
            f"{room / _GIB:.1f} GiB",
            f"{indexer.row_bytes(context) / (1 << 20):,.1f} MiB for every new token, "
            f"in torch operations at {with_source(indexer.where)}",
        ),
        locations=(indexer.where,),
        remedy=Remedy(
            (
                f"Set --chunked-prefill-size {chunk}"
                if chunk
                else "Lower --context-length and --chunked-prefill-size"
            )
            + ", or take a release with another indexer (`dsv4doctor trace --path indexer "
            "--sglang VERSION` names it).",
            fix="FIX104",
        ),
    )


_CHUNKS = (4096, 2048, 1024, 512, 256)
_PAGE = 256
_STATE = "SGLANG_DSV4_COMPRESS_STATE_DTYPE"


def _parallel(facts: Facts) -> Parallel:
    assert facts.trace is not None
    args = facts.trace.resolved_args
    ranks = int(args.get("tp_size") or 1)
    attention = ranks
    if args.get("enable_dp_attention"):
        attention = max(ranks // int(args.get("dp_size") or 1), 1)
    return Parallel(
        tensor=ranks,
        attention=attention,
        shared_experts_whole=args.get("moe_a2a_backend") not in (None, "none"),
        engram_over_ranks=facts.features is None or facts.features.engram_over_ranks,
    )


def _state_page(facts: Facts) -> int | None:
    assert facts.trace is not None
    if facts.features is not None and facts.features.state_by_token:
        return None
    return int(facts.trace.resolved_args.get("page_size") or 256)


def _wo_a_in_bf16(facts: Facts) -> bool:
    return not is_true(in_effect(facts, "SGLANG_OPT_FP8_WO_A_GEMM"))


def _window_ratio(facts: Facts) -> float:
    """swa_full_tokens_ratio; without it what SGLang sets for DeepSeek-V4."""
    assert facts.trace is not None
    ratio = facts.trace.resolved_args.get("swa_full_tokens_ratio")
    return float(ratio) if isinstance(ratio, int | float) else 0.1


def _finding(
    facts: Facts,
    need: Weights,
    memory: int,
    fraction: float,
    short: tuple[int, int, float] | None,
) -> Finding:
    ranks = _parallel(facts).tensor
    room = memory * fraction
    parts = (
        f"experts {need.experts / _GIB:.1f}",
        *([f"engram {need.engram / _GIB:.1f}"] if need.engram else []),
        f"other weights {(need.divided + need.whole) / _GIB:.1f}",
        *([f"draft {need.draft / _GIB:.1f}"] if need.draft else []),
    )
    evidence = (
        f"{memory / _GIB:.1f} GiB x mem_fraction_static {fraction:g} = {room / _GIB:.1f} GiB",
        f"a rank of {ranks}, in GiB: {', '.join(parts)}, from the safetensors headers",
    )
    if short is None:
        return Finding(
            rule=RULE.id,
            severity=Severity.ERROR,
            subject="GPU memory",
            message=(
                f"The weights take {need.total / _GIB:.1f} GiB on every GPU at --tp {ranks}, and "
                f"SGLang may use {room / _GIB:.1f} GiB."
            ),
            consequence="The server runs out of memory while it loads, or has none left for KV.",
            evidence=evidence,
            remedy=Remedy("Use more GPUs (--tp), or a checkpoint in a smaller format."),
        )
    tokens, context, token = short
    return Finding(
        rule=RULE.id,
        severity=Severity.WARNING,
        subject="KV cache",
        message=(
            f"After {need.total / _GIB:.1f} GiB of weights, the KV cache holds at most "
            f"{tokens:,} tokens, less than the context limit of {context:,}."
        ),
        consequence="A request of that length cannot be served, and few long ones at a time.",
        evidence=(*evidence, f"{token / 1024:.1f} KiB of cache for a token"),
        remedy=Remedy(f"Set --context-length {max(tokens // 4096 * 4096, 4096)} or use more GPUs."),
    )


RULE = Rule(
    id="DSV601",
    title="Memory headroom",
    severity=Severity.ERROR,
    reads=("trace", "checkpoint"),
    check=check,
    about_machine=True,
)


def _storing(gib: int) -> Checkpoint:
    plain = checkpoint(StoredFormat.MXFP4, StoredFormat.MXFP4, None, None)
    config = {
        **plain.text_config,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4],
        "num_hidden_layers": 43,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
    }
    # One expert of 256 is listed.
    shape = (gib << 22,)
    listed = TensorInfo("layers.0.ffn.experts.0.w1.weight", "I8", shape, "model.safetensors")
    return replace(plain, text_config=config, config=config, tensors=(listed,))


def _at(ranks: int) -> dict[str, object]:
    return {"tp_size": ranks, "mem_fraction_static": 0.85}


EXAMPLES = (
    Example(
        "weights too large",
        scene(checkpoint=_storing(150), resolved=_at(1), gpus=gpus(1)),
        expect=("GPU memory",),
    ),
    Example(
        "hardly any room for KV",
        scene(checkpoint=_storing(152), resolved=_at(2), gpus=gpus(2)),
        expect=("KV cache",),
    ),
    Example("four GPUs", scene(checkpoint=_storing(152), resolved=_at(4), gpus=gpus(4))),
    Example(
        "a torch indexer that prefills long prompts",
        scene(
            checkpoint=_storing(152),
            resolved={**_at(4), "chunked_prefill_size": 8192},
            gpus=gpus(4),
            overwritten={**SM120_ENVIRONMENT, TILELANG_INDEXER: (None, "False")},
            flags=("--context-length", "131072"),
        ),
        expect=("prefill",),
    ),
)
