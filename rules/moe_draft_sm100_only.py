"""Draft routed experts on a kernel that exists for SM100 alone.

The hybrid NVFP4 checkpoints keep their draft experts in MXFP4, and SGLang's
`HybridFp8NvFp4Config.get_quant_method` gives those `Mxfp4FlashinferTrtllmMoEMethod` without
looking at the GPU or at any backend flag.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, Role, Severity
from dsv4doctor.rules import sm100_only
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import DRAFT_CUTLASS, DRAFT_TRTLLM, MAIN_CUTLASS, MAIN_TRTLLM, facts


def check(facts: Facts) -> Iterator[Finding]:
    yield from sm100_only.findings(facts, Role.DRAFT, RULE.id)


RULE = Rule(
    id="DSV102",
    title="Draft routed experts on an SM100-only kernel",
    severity=Severity.ERROR,
    reads=("trace",),
    check=check,
)

EXAMPLES = (
    Example(
        "hybrid NVFP4 with EAGLE on sm_120",
        facts("sm_120", [*MAIN_CUTLASS, DRAFT_TRTLLM]),
        expect=("model.decoder.mlp.experts",),
    ),
    Example(
        "hybrid NVFP4 with EAGLE on sm_90, which FlashInfer does not build it for",
        facts("sm_90", [DRAFT_TRTLLM]),
        expect=("model.decoder.mlp.experts",),
    ),
    Example("the same on sm_100", facts("sm_100", [*MAIN_TRTLLM, DRAFT_TRTLLM])),
    Example("stock MXFP4 with EAGLE on sm_120", facts("sm_120", [*MAIN_CUTLASS, DRAFT_CUTLASS])),
    Example("hybrid NVFP4 without speculation", facts("sm_120", [*MAIN_TRTLLM])),
)
