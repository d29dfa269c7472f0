"""The indexer in plain torch operations, whose cost follows the context limit.

It gathers and multiplies at the width of the longest context allowed, whatever the sequences'
lengths: for every query row ceil(N / 4) compressed keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import flag, in_effect, is_true, is_v41, with_source
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import SM120_ENVIRONMENT, SOURCES, scene

_TORCH = "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"
_TILELANG = "SGLANG_OPT_USE_TILELANG_INDEXER"
_ROWS = 64
_NOTICEABLE = 1 << 30
"""Below this, at `_ROWS` rows, nobody will notice."""
_PAGE = 64


def row_bytes(context: int, heads: int, head_dim: int, value_bytes: int) -> int:
    """Bytes of the intermediate values that are alive at once for one query row: the gathered
    pages with a 4-byte scale per key, the keys converted, and two copies of the scores."""
    pages = math.ceil(math.ceil(context / 4) / _PAGE)
    width = pages * _PAGE
    return width * (head_dim + 4 + (head_dim + 2 * heads) * value_bytes)


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.features is not None
    assert facts.snapshot.checkpoint is not None
    where, value_bytes = facts.features.torch_indexer, facts.features.torch_indexer_bytes
    if not facts.arch.is_sm12x or where is None or value_bytes is None or is_v41(facts):
        return
    chosen = in_effect(facts, _TORCH)
    if chosen is None:
        raise NotChecked(f"this SGLang has no {_TORCH}: its indexer is not known")
    if not is_true(chosen) or is_true(in_effect(facts, _TILELANG)):
        return
    model = facts.snapshot.checkpoint.text_config
    context = _context(facts)
    heads, head_dim = model.get("index_n_heads"), model.get("index_head_dim")
    if context is None or not isinstance(heads, int) or not isinstance(head_dim, int):
        raise NotChecked("the context length or the indexer's heads are not in config.json")
    one = row_bytes(context, heads, head_dim, value_bytes)
    if one * _ROWS < _NOTICEABLE:
        return
    if facts.features.indexer_replaced:
        yield _NOT_VERIFIED
        return
    yield Finding(
        rule=RULE.id,
        severity=Severity.WARNING,
        subject="indexer",
        message=(
            f"The indexer runs in torch operations at the width of the context limit ({context:,} "
            f"tokens): {one / 2**20:,.0f} MiB for every query row, {one * _ROWS / 2**30:,.1f} GiB "
            f"for {_ROWS}."
        ),
        consequence=(
            "Its time and memory follow the limit and not the tokens there: the indexer's part of "
            f"every step costs {max(context // 32768, 1)} times what it costs with a limit of "
            "32,768, however short the prompt, and large batches run out of memory."
        ),
        evidence=(
            f"{_TORCH} is {chosen}, {_TILELANG} is {in_effect(facts, _TILELANG)}",
            f"computed at {with_source(where)}",
            "sgl-project/sglang issue 33246",
        ),
        locations=(where,),
        remedy=Remedy(
            "Lower --context-length to what is needed; from SGLang 0.5.16 on the TileLang indexer "
            f"is the default on sm_12x ({_TILELANG}=1).",
            fix="FIX104",
        ),
    )


def _context(facts: Facts) -> int | None:
    assert facts.snapshot.checkpoint is not None
    written = flag(facts, "--context-length")
    if written is not None and written.isdigit():
        return int(written)
    limit = facts.snapshot.checkpoint.text_config.get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


_NOT_VERIFIED = Finding(
    rule="DSV204",
    severity=Severity.INFO,
    subject="indexer",
    message="The indexer is patched, and runs in torch operations until our kernel is verified.",
    consequence="Without that its cost follows the context limit, and the server's log says so.",
    evidence=("FIX104 is in",),
    remedy=Remedy(
        "Verify the kernel on the serving machine.",
        commands=("dsv4doctor kernels verify --only indexer_logits",),
    ),
)

RULE = Rule(
    id="DSV204",
    title="Indexer at the width of the context limit",
    severity=Severity.WARNING,
    reads=("trace", "checkpoint", "features"),
    check=check,
)

_TORCH_ONLY = {**SM120_ENVIRONMENT, _TILELANG: (None, "False")}

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
    Example("torch elsewhere", scene("sm_90", overwritten=_TORCH_ONLY)),
    Example(
        "torch overruled by the user's DeepGEMM",
        scene(overwritten={}, environment={_TORCH: "0", _TILELANG: "0"}),
    ),
)
