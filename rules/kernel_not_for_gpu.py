"""Routed experts on a kernel that does not exist for the GPU, whatever kernel it is.

The kernels made for SM100 alone have rules of their own (DSV101, DSV102), with what is known of
them.  This one stands on the verdict: what FlashInfer declares, what a native library holds, what
the table of known kernels says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.folding import fold
from dsv4doctor.models import Facts, Finding, Kernel, Severity, StoredFormat, Verdict
from dsv4doctor.rules.common import call_text, described, way_out, with_source
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import DRAFT_TRTLLM, MAIN_CUTLASS, MAIN_TRTLLM, facts
from dsv4doctor.verdicts import format_needed, known_kernel


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    for layers in fold(facts.trace.layers):
        layer = layers.layer
        if layer.verdict is not Verdict.FAILS or layer.kernel is None or layer.error is not None:
            continue
        known = known_kernel(layer, call_text(facts, layer))
        of_sm100 = known is not None and known.sm100 and not known.exists_for(facts.arch)
        if of_sm100 or format_needed(layer) is not None:
            continue
        is_wrong = known is not None and known.wrong is not None and known.exists_for(facts.arch)
        trouble = "gives wrong output" if is_wrong else f"is not for {facts.arch.name}"
        yield Finding(
            rule=RULE.id,
            severity=Severity.ERROR,
            subject=layers.name,
            message=(
                f"The {layer.role.value} routed experts resolve to {layer.quant_method}, whose "
                f"kernel {trouble}, decided at {described(layer.decided_at)}."
            ),
            consequence=(
                "The answers are wrong, or the kernel's own checks stop the server."
                if is_wrong
                else "The server stops when these layers first run, if not before."
            ),
            evidence=(
                layer.reason,
                *([f"decided at {with_source(layer.decided_at)}"] if layer.decided_at else []),
                f"reaches {layer.kernel.symbol}",
            ),
            locations=tuple(at for at in (layer.decided_at, layer.kernel.call_site) if at),
            remedy=way_out(facts, layer),
        )


RULE = Rule(
    id="DSV110",
    title="Routed experts on a kernel that does not exist for the GPU",
    severity=Severity.ERROR,
    reads=("trace",),
    check=check,
)

_OWN_ROUTING = Kernel("flashinfer.fused_moe.trtllm_fp4_block_scale_moe", None)
_MIXED_INPUT = "moe(use_w4_group_scaling=True, swiglu_limit=limit)"

EXAMPLES = (
    Example(
        "the SM90 form of the CUTLASS MoE on sm_120",
        facts("sm_120", [*MAIN_CUTLASS], call=_MIXED_INPUT),
        expect=("model.layers.0-2.mlp.experts",),
    ),
    Example(
        "a kernel that chooses other experts than the model does",
        facts("sm_100", [replace(layer, kernel=_OWN_ROUTING) for layer in MAIN_TRTLLM]),
        expect=("model.layers.0-2.mlp.experts",),
    ),
    Example("on sm_90 it is right", facts("sm_90", [*MAIN_CUTLASS], call=_MIXED_INPUT)),
    Example("SM100-only kernels have a rule of their own", facts("sm_120", [*MAIN_TRTLLM])),
    Example("a kernel that exists", facts("sm_100", [*MAIN_TRTLLM, DRAFT_TRTLLM])),
    Example(
        "a method for another format has a rule of its own",
        facts(
            "sm_120",
            [replace(layer, stored_format=StoredFormat.NVFP4) for layer in MAIN_CUTLASS],
            call=_MIXED_INPUT,
        ),
    ),
)
