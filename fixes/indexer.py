"""FIX104: the indexer's scores on our kernel where sm_12x falls back to torch operations.

Looks for: where `forward_c4_indexer` takes `fp8_paged_mqa_logits_torch_sm120`, whose cost follows
the context limit.  Writes: our kernel, whose cost follows the tokens that are there, with the same
interface; without a stamp the torch path stays.
"""

from __future__ import annotations

import libcst.matchers as m

from dsv4doctor.fixes import verified_kernels as shared
from dsv4doctor.fixes.fix import Absent, Choice, Example, Fix, Outcome, Present, Refused, Sources
from dsv4doctor.models import Facts
from dsv4doctor.rules.common import in_effect, is_true
from dsv4doctor.rules.rule import NotChecked

ID = "FIX104"
FILE = "sglang/srt/layers/attention/dsv4/indexer.py"
_TORCH = "fp8_paged_mqa_logits_torch_sm120"
_PATHS = ("indexer-decode", "indexer-prefill")

_CODE = (
    f"# dsv4doctor {ID}: its time follows the tokens, not the context limit.\n"
    + shared.ours(ID, "ours", "indexer_logits", _TORCH)
    + f"fn = ours or {_TORCH}\n"
)
_SITE = shared.Site(
    files=(FILE,),
    function="C4IndexerBackendMixin.forward_c4_indexer",
    word=_TORCH,
    matcher=m.SimpleStatementLine(
        body=[m.Assign(targets=[m.AssignTarget(m.Name("fn"))], value=m.Name(_TORCH))]
    ),
    code=lambda piece, node: _CODE,
    expected=f"fn = {_TORCH}",
    reason="the torch indexer of sm_12x is taken another way",
)


_SUMMARY = "Where sm_12x has the torch indexer, it gets dsv4doctor's."


def plan(sources: Sources, choice: Choice) -> Outcome:
    return shared.plan(sources, choice, ID, (_SITE,), _SUMMARY, "indexer_logits")


def needed(facts: Facts) -> str | None:
    if not facts.arch.is_sm12x:
        return None
    if facts.trace is not None and facts.trace.paths:
        on_torch = shared.on_path(facts.trace, _PATHS, _TORCH)
        return "the indexer runs in torch operations" if on_torch else None
    try:
        torch = in_effect(facts, "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH")
        tilelang = in_effect(facts, "SGLANG_OPT_USE_TILELANG_INDEXER")
    except NotChecked:
        return None
    return (
        "the indexer runs in torch operations" if is_true(torch) and not is_true(tilelang) else None
    )


def verify(facts: Facts, after: Facts) -> tuple[str, ...]:
    return shared.still_on(after.trace, _PATHS, _TORCH) if facts.arch.is_sm12x else ()


_BEFORE = """\
class C4IndexerBackendMixin:
    def forward_c4_indexer(self, x):
        if envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.get():
            if is_sm120_supported():
                fn = fp8_paged_mqa_logits_torch_sm120
            else:
                fn = fp8_paged_mqa_logits_torch
        return fn(x)
"""
_AFTER = """\
class C4IndexerBackendMixin:
    def forward_c4_indexer(self, x):
        if envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.get():
            if is_sm120_supported():
                # dsv4doctor FIX104: its time follows the tokens, not the context limit.
                try:
                    from dsv4doctor.kernels.adapters.verified import (
                        verified,
                    )
                except ImportError as error:
                    raise RuntimeError(
                        f"SGLang is patched by dsv4doctor (FIX104), not importable here ({error}): "
                        "run `pip install dsv4doctor`, or with it `dsv4doctor fix --revert`"
                    ) from error

                ours = verified("indexer_logits", "fp8_paged_mqa_logits_torch_sm120")
                fn = ours or fp8_paged_mqa_logits_torch_sm120
            else:
                fn = fp8_paged_mqa_logits_torch
        return fn(x)
"""

FIX = Fix(
    id=ID,
    title="The indexer on a kernel whose time follows the tokens",
    rules=("DSV204",),
    files=(FILE,),
    plan=plan,
    needed=needed,
    changes=shared.no_layer,
    changes_path=lambda path: shared.reaches(path, _PATHS, _TORCH),
    verify=verify,
    verified_by="the trace of the hot paths: the indexer reaches dsv4doctor's kernel",
    examples=(
        Example("the torch indexer", {FILE: _BEFORE}, {FILE: _AFTER}),
        Example("patched already", {FILE: _AFTER}, None, Present),
        Example(
            "taken through a table",
            {
                FILE: _BEFORE.replace(
                    "fn = fp8_paged_mqa_logits_torch_sm120",
                    "fn = wrap(fp8_paged_mqa_logits_torch_sm120)",
                )
            },
            None,
            Refused,
        ),
        Example("no such indexer", {FILE: "x = 1\n"}, None, Absent),
    ),
)
