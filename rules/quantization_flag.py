"""`--quantization` on a checkpoint that mixes formats.

SGLang finds the mix by itself when nothing is asked for.  `modelopt_fp4` makes it build the
experts to be quantised while they load, and makes rules fire that are meant for other checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.folding import fold
from dsv4doctor.models import Facts, Finding, Remedy, Role, Severity, StoredFormat
from dsv4doctor.rules.common import described, flag, with_source
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import MAIN_NVFP4_CUTLASS, checkpoint, facts

_FLAG = "--quantization"
_HYBRID_METHOD = "ModelOptNvFp4FusedMoEMethod"


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    assert facts.snapshot.checkpoint is not None
    asked = flag(facts, _FLAG)
    main = {layer.stored_format for layer in facts.snapshot.checkpoint.main_layers}
    if asked is None or main != {StoredFormat.NVFP4}:
        return
    for layers in fold(facts.trace.of(Role.MAIN)):
        layer = layers.layer
        if layer.quant_method in (_HYBRID_METHOD, None):
            continue
        yield Finding(
            rule=RULE.id,
            severity=Severity.ERROR,
            subject=layers.name,
            message=(
                f"{_FLAG} {asked} makes the main routed experts {layer.quant_method}, decided at "
                f"{described(layer.decided_at)}; the stored NVFP4 experts need {_HYBRID_METHOD}."
            ),
            consequence=(
                "The layers are not built for the NVFP4 weights and scales that are stored: "
                "loading stops, or the answers are wrong."
            ),
            evidence=(
                f"set: {_FLAG} {asked}",
                *([f"decided at {with_source(layer.decided_at)}"] if layer.decided_at else []),
                "stored format NVFP4, from the safetensors headers",
            ),
            locations=(layer.decided_at,) if layer.decided_at else (),
            remedy=Remedy(f"Leave {_FLAG} out: SGLang reads the mix from hf_quant_config.json."),
        )


RULE = Rule(
    id="DSV301",
    title="--quantization on a checkpoint that mixes formats",
    severity=Severity.ERROR,
    reads=("trace", "checkpoint", "launch"),
    check=check,
)

_ONLINE = [
    replace(layer, quant_method="ModelOptNvFp4OnlineFusedMoEMethod") for layer in MAIN_NVFP4_CUTLASS
]
_MXFP4 = StoredFormat.MXFP4

EXAMPLES = (
    Example(
        "modelopt_fp4 on the hybrid checkpoint",
        facts("sm_120", _ONLINE, flags=(_FLAG, "modelopt_fp4")),
        expect=("model.layers.0-2.mlp.experts",),
    ),
    Example(
        "fp8, which SGLang reads as the hybrid",
        facts("sm_120", [*MAIN_NVFP4_CUTLASS], flags=(_FLAG, "fp8")),
    ),
    Example("nothing asked for", facts("sm_120", [*MAIN_NVFP4_CUTLASS])),
    Example(
        "a checkpoint in one format",
        facts(
            "sm_120",
            _ONLINE,
            flags=(_FLAG, "fp8"),
            checkpoint=checkpoint(_MXFP4, _MXFP4, None, None),
        ),
    ),
)
