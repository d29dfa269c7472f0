"""Main routed experts on a kernel that exists for SM100 alone.

SGLang from 0.5.14 sends the main experts of the hybrid NVFP4 checkpoints to
`flashinfer_trtllm_routed` when nobody asked for a backend, on every GPU.  FlashInfer builds and
starts that MoE on sm_12x too; only its cubins are missing there, so it fails late.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, Role, Severity
from dsv4doctor.rules import sm100_only
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import DRAFT_CUTLASS, DRAFT_TRTLLM, MAIN_CUTLASS, MAIN_TRTLLM, facts


def check(facts: Facts) -> Iterator[Finding]:
    yield from sm100_only.findings(facts, Role.MAIN, RULE.id)


RULE = Rule(
    id="DSV101",
    title="Main routed experts on an SM100-only kernel",
    severity=Severity.ERROR,
    reads=("trace",),
    check=check,
)

EXAMPLES = (
    Example(
        "hybrid NVFP4 with no backend flag on sm_120",
        facts("sm_120", [*MAIN_TRTLLM]),
        expect=("model.layers.0-2.mlp.experts",),
    ),
    Example(
        "the same on sm_121",
        facts("sm_121", [*MAIN_TRTLLM]),
        expect=("model.layers.0-2.mlp.experts",),
    ),
    Example("the same on sm_100", facts("sm_100", [*MAIN_TRTLLM, DRAFT_TRTLLM])),
    Example("the same on sm_103", facts("sm_103", [*MAIN_TRTLLM, DRAFT_TRTLLM])),
    Example("stock MXFP4 on sm_120", facts("sm_120", [*MAIN_CUTLASS, DRAFT_CUTLASS])),
    Example("only the draft on it", facts("sm_120", [*MAIN_CUTLASS, DRAFT_TRTLLM])),
)
