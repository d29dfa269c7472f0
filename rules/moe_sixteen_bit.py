"""4-bit experts computed in 16-bit arithmetic on a GPU that computes in 4 bits.

Marlin reads 4-bit weights and multiplies in BF16.  That is right where a GPU has nothing better;
on sm_12x it leaves the FP4 tensor cores unused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.folding import fold
from dsv4doctor.models import Facts, Finding, Kernel, Layer, Remedy, Severity, StoredFormat, Verdict
from dsv4doctor.rules.common import described, marlin_scale
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import MAIN_CUTLASS, facts


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    for layers in fold(facts.trace.layers):
        layer = layers.layer
        if not facts.arch.is_sm12x or layer.verdict not in (Verdict.RUNS, Verdict.FALLBACK):
            continue
        if layer.kernel is None or "marlin" not in layer.kernel.symbol:
            continue
        if layer.stored_format not in (StoredFormat.MXFP4, StoredFormat.NVFP4):
            continue
        yield Finding(
            rule=RULE.id,
            severity=Severity.WARNING,
            subject=layers.name,
            message=(
                f"The {layer.role.value} routed experts run on a fallback: "
                f"{layer.kernel.symbol.rpartition(':')[2]} computes 4-bit weights in 16-bit "
                f"arithmetic, decided at {described(layer.decided_at)}."
            ),
            consequence=(
                f"They run, and prefill and large batches leave the FP4 tensor cores of "
                f"{facts.arch.name} unused."
                f"{_scale(facts, layer)}"
            ),
            evidence=(
                f"{layer.quant_method} reaches {layer.kernel.symbol}",
                "builds without sm_12x code gave gibberish: vLLM pull request 40860, "
                "sgl-project/sglang pull request 24047",
            ),
            locations=(layer.decided_at,) if layer.decided_at else (),
            remedy=Remedy(
                "Use a runner that computes in FP4 where `dsv4doctor check` says that it runs; "
                "otherwise ask the started server a few questions with known answers."
            ),
        )


def _scale(facts: Facts, layer: Layer) -> str:
    assert layer.kernel is not None
    said = marlin_scale(facts.features, layer.stored_format, layer.kernel.symbol)
    return f" {said}" if said is not None else ""


RULE = Rule(
    id="DSV109",
    title="Routed experts on a 16-bit fallback",
    severity=Severity.WARNING,
    reads=("trace",),
    check=check,
)

_MARLIN = [
    replace(
        layer,
        quant_method="Mxfp4MarlinMoEMethod",
        runner_backend="marlin",
        kernel=Kernel("jit:moe_wna16_marlin.moe_wna16_marlin_gemm", None),
    )
    for layer in MAIN_CUTLASS
]

EXAMPLES = (
    Example("Marlin on sm_120", facts("sm_120", _MARLIN), expect=("model.layers.0-2.mlp.experts",)),
    Example("Marlin on sm_90, which has no FP4", facts("sm_90", _MARLIN)),
    Example("CUTLASS", facts("sm_120", [*MAIN_CUTLASS])),
)
