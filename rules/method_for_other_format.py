"""Routed experts whose quant method is made for another format than the one stored.

SGLang chooses the method by the configuration and by the module's name.  Releases that do not
know a checkpoint's mix of formats give some experts the wrong one: the weights do not fit, or
their scales are left out with only a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.folding import fold
from dsv4doctor.models import Facts, Finding, Kernel, Role, Severity, StoredFormat
from dsv4doctor.rules.common import described, way_out, with_source
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import DRAFT_TRTLLM, MAIN_CUTLASS, MAIN_NVFP4_CUTLASS, facts
from dsv4doctor.verdicts import format_needed


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    for layers in fold(facts.trace.layers):
        layer = layers.layer
        needed = format_needed(layer)
        if needed is None or layer.stored_format is None or layer.error is not None:
            continue
        stored = layer.stored_format.value
        worse = "the draft's guesses" if layer.role is Role.DRAFT else "the answers"
        yield Finding(
            rule=RULE.id,
            severity=Severity.ERROR,
            subject=layers.name,
            message=(
                f"The {layer.role.value} routed experts are stored as {stored} and resolve to "
                f"{layer.quant_method}, which is made for {needed}, decided at "
                f"{described(layer.decided_at)}."
            ),
            consequence=(
                "Loading stops on weights that do not fit, or goes on without their scales and "
                f"{worse} are wrong."
            ),
            evidence=(
                *([f"decided at {with_source(layer.decided_at)}"] if layer.decided_at else []),
                f"stored format {stored}, from the safetensors headers",
            ),
            locations=(layer.decided_at,) if layer.decided_at else (),
            remedy=way_out(facts, layer),
        )


RULE = Rule(
    id="DSV108",
    title="Routed experts given the method of another format",
    severity=Severity.ERROR,
    reads=("trace", "checkpoint"),
    check=check,
)

EXAMPLES = (
    Example(
        "NVFP4 experts under an MXFP4 method",
        facts(
            "sm_120", [replace(layer, stored_format=StoredFormat.NVFP4) for layer in MAIN_CUTLASS]
        ),
        expect=("model.layers.0-2.mlp.experts",),
    ),
    Example(
        "MXFP4 draft experts under the NVFP4 method",
        facts(
            "sm_100",
            [
                replace(
                    DRAFT_TRTLLM,
                    quant_method="ModelOptNvFp4FusedMoEMethod",
                    runner_backend="flashinfer_trtllm_routed",
                )
            ],
        ),
        expect=("model.decoder.mlp.experts",),
    ),
    Example(
        "MXFP4 experts under a kernel for FP8 weights",
        facts(
            "sm_100",
            [
                replace(
                    DRAFT_TRTLLM,
                    quant_method="Fp8MoEMethod",
                    runner_backend="flashinfer_trtllm",
                    weights="int8",
                    kernel=Kernel("flashinfer.fused_moe.trtllm_fp8_block_scale_moe", None),
                )
            ],
        ),
        expect=("model.decoder.mlp.experts",),
    ),
    Example("each in its own", facts("sm_100", [*MAIN_NVFP4_CUTLASS, DRAFT_TRTLLM])),
    Example(
        "a layer whose tensors are not stored proves nothing",
        facts("sm_100", [replace(DRAFT_TRTLLM, stored_format=StoredFormat.MISSING)]),
    ),
)
