"""Routed experts stored in another format than the configuration declares.

SGLang builds its layers from config.json and hf_quant_config.json.  Where the tensors contradict
them, weights do not fit, or their scales are left out with only a warning.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Checkpoint, Facts, Finding, Remedy, Role, Severity, StoredFormat
from dsv4doctor.rules.common import both
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import checkpoint, facts

_MXFP4, _NVFP4 = StoredFormat.MXFP4, StoredFormat.NVFP4
_FP8 = StoredFormat.FP8_BLOCK


def check(facts: Facts) -> Iterator[Finding]:
    stored_by = facts.snapshot.checkpoint
    assert stored_by is not None
    for role, declared in (
        (Role.MAIN, stored_by.declared_main),
        (Role.DRAFT, stored_by.declared_draft),
    ):
        if declared is not None:
            yield from _contradictions(stored_by, role, declared)


def _contradictions(stored_by: Checkpoint, role: Role, declared: StoredFormat) -> Iterator[Finding]:
    layers = stored_by.main_layers if role is Role.MAIN else stored_by.draft_layers
    others = [
        layer for layer in layers if layer.stored_format not in (declared, StoredFormat.MISSING)
    ]
    if not others:
        return
    formats = sorted({layer.stored_format.value for layer in others})
    count = f"{len(others)} of {len(layers)}" if len(others) < len(layers) else f"all {len(layers)}"
    where = f"in {count} layers" if len(layers) > 1 else "in the one layer it has"
    yield Finding(
        rule=RULE.id,
        severity=Severity.ERROR,
        subject=f"{role.value} routed experts",
        message=(
            f"{stored_by.name} declares {declared.value} for its {role.value} routed experts and "
            f"stores {both(formats)} {where}."
        ),
        consequence=(
            "SGLang builds the layers for what is declared: loading stops on shapes that do not "
            "fit, or goes on without the scales and the answers are wrong."
        ),
        evidence=tuple(f"{layer.name}: {layer.detail}" for layer in others[:3]),
        remedy=Remedy(
            "Compare config.json and hf_quant_config.json with the checkpoint's origin and fetch "
            "them again; files of two exports may be mixed in this folder."
        ),
    )


RULE = Rule(
    id="DSV104",
    title="Routed experts stored in another format than declared",
    severity=Severity.ERROR,
    reads=("checkpoint",),
    check=check,
)

EXAMPLES = (
    Example(
        "declared FP8, stored MXFP4",
        facts("sm_120", [], checkpoint=checkpoint(_MXFP4, _MXFP4, _FP8, _MXFP4)),
        expect=("main routed experts",),
    ),
    Example(
        "draft declared NVFP4, stored MXFP4",
        facts("sm_120", [], checkpoint=checkpoint(_NVFP4, _MXFP4, _NVFP4, _NVFP4)),
        expect=("draft routed experts",),
    ),
    Example(
        "hybrid NVFP4, as declared",
        facts("sm_120", [], checkpoint=checkpoint(_NVFP4, _MXFP4, _NVFP4, _MXFP4)),
    ),
    Example(
        "nothing declared",
        facts("sm_120", [], checkpoint=checkpoint(_NVFP4, _MXFP4, None, None)),
    ),
)
