"""The indexer in plain torch operations, whose cost follows the longest sequence.

For every query row it gathers and multiplies ceil(N / 4) compressed keys.  In a captured decode N
is the context limit, whatever the sequences hold; in prefill it is the longest sequence of the
batch, and every new token is a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.memory import TorchIndexer
from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import in_effect, with_source
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import SM120_ENVIRONMENT, SOURCES, scene
from dsv4doctor.rules.torch_indexer import (
    TILELANG_INDEXER,
    TORCH_INDEXER,
    context_limit,
    prefill_rows,
    torch_indexer,
)

_ROWS = 64
_NOTICEABLE = 1 << 30
"""Below this, at `_ROWS` rows, nobody will notice it in decode."""
_TOKEN = 3 << 19
"""What SGLang's rule of thumb keeps for a token of prefill, in bytes."""


def check(facts: Facts) -> Iterator[Finding]:
    indexer = torch_indexer(facts)
    if indexer is None:
        return
    context = context_limit(facts)
    if context is None:
        raise NotChecked("the context length is not in config.json")
    rows = prefill_rows(facts, context)
    decode = indexer.bytes(_ROWS, context)
    prefill = indexer.bytes(rows, context) if rows else 0
    if decode < _NOTICEABLE and prefill <= (rows or 0) * _TOKEN:
        return
    assert facts.features is not None
    yield (
        _NOT_VERIFIED
        if facts.features.indexer_replaced
        else _finding(facts, indexer, context, rows)
    )


def _finding(facts: Facts, indexer: TorchIndexer, context: int, rows: int | None) -> Finding:
    return Finding(
        rule=RULE.id,
        severity=Severity.WARNING,
        subject="indexer",
        message=(
            f"The indexer runs in torch operations: {indexer.row_bytes(context) / 2**20:,.0f} MiB "
            f"for every query row at the context limit ({context:,} tokens), "
            f"{_gib(indexer.bytes(_ROWS, context))} for a decode batch of {_ROWS}"
            f"{_to_prefill(indexer, context, rows)}."
        ),
        consequence=(
            "Prefill has a row for every new token, as wide as the longest sequence of the batch: "
            "long prompts end the server, out of memory. Decode in CUDA graphs is as wide as the "
            "limit, however short the prompt: the indexer's part of a step costs "
            f"{max(context / 32768, 0.1):,.1f} times what it costs with a limit of 32,768."
        ),
        evidence=(
            f"{TORCH_INDEXER} is {in_effect(facts, TORCH_INDEXER)}, "
            f"{TILELANG_INDEXER} is {in_effect(facts, TILELANG_INDEXER)}",
            f"computed at {with_source(indexer.where)}",
            *_at_once(indexer),
            "sgl-project/sglang issue 33246",
        ),
        locations=(indexer.where,),
        remedy=Remedy(
            "For prefill a smaller --chunked-prefill-size, for decode --context-length lowered to "
            "what is needed; from SGLang 0.5.16 on the TileLang indexer is the default on sm_12x "
            f"({TILELANG_INDEXER}=1).",
            fix="FIX104",
        ),
    )


def _to_prefill(indexer: TorchIndexer, context: int, rows: int | None) -> str:
    if not rows:
        return ""
    return (
        f", {_gib(indexer.bytes(rows, context))} to prefill {rows:,} tokens of a prompt that long"
    )


def _at_once(indexer: TorchIndexer) -> tuple[str, ...]:
    rows = indexer.rows_at_once
    return () if rows is None else (f"it computes {rows:,} rows at a time",)


def _gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"


_NOT_VERIFIED = Finding(
    rule="DSV204",
    severity=Severity.INFO,
    subject="indexer",
    message="The indexer is patched, and runs in torch operations until our kernel is verified.",
    consequence=(
        "Without that its memory follows the longest sequence times the new tokens, and the "
        "server's log says so."
    ),
    evidence=("FIX104 is in",),
    remedy=Remedy(
        "Verify the kernel on the serving machine.",
        commands=("dsv4doctor kernels verify --only indexer_logits",),
    ),
)

RULE = Rule(
    id="DSV204",
    title="Indexer in torch operations",
    severity=Severity.WARNING,
    reads=("trace", "checkpoint", "features"),
    check=check,
)

_TORCH_ONLY = {**SM120_ENVIRONMENT, TILELANG_INDEXER: (None, "False")}

EXAMPLES = (
    Example("torch, a million tokens", scene(overwritten=_TORCH_ONLY), expect=("indexer",)),
    Example(
        "torch until our kernel is verified",
        scene(overwritten=_TORCH_ONLY, features=replace(SOURCES, indexer_replaced=True)),
        expect=("indexer",),
    ),
    Example("TileLang", scene()),
    Example(
        "torch, 4096 tokens", scene(overwritten=_TORCH_ONLY, flags=("--context-length", "4096"))
    ),
    Example(
        "torch, prefill alone",
        scene(
            overwritten=_TORCH_ONLY,
            flags=("--context-length", "16384"),
            resolved={"chunked_prefill_size": 8192},
        ),
        expect=("indexer",),
    ),
    Example(
        "torch, a side that only decodes",
        scene(
            overwritten=_TORCH_ONLY,
            flags=("--context-length", "16384"),
            resolved={"chunked_prefill_size": 8192, "disaggregation_mode": "decode"},
        ),
    ),
    Example("torch elsewhere", scene("sm_90", overwritten=_TORCH_ONLY)),
    Example(
        "torch overruled by the user's DeepGEMM",
        scene(overwritten={}, environment={TORCH_INDEXER: "0", TILELANG_INDEXER: "0"}),
    ),
)
