"""A kernel that is called without the SwiGLU clamp which the model was trained with.

DeepSeek-V4 clamps its gates at `swiglu_limit`.  SGLang's NVFP4 path through FlashInfer's CUTLASS
MoE passes it from 0.5.21 on; before, and through the older grouped GEMM, plain SwiGLU is computed
and nothing says so.  So it is with FP8 experts under flashinfer_trtllm_routed before 0.5.20.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.folding import fold
from dsv4doctor.models import (
    Facts,
    Finding,
    Kernel,
    Layer,
    Location,
    Remedy,
    Role,
    Severity,
    StoredFormat,
    Verdict,
)
from dsv4doctor.rules.common import (
    call_text,
    described,
    is_nvfp4_cutlass,
    marlin_scale,
    with_source,
)
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import (
    CALL_WITH_CLAMP,
    CALL_WITHOUT_CLAMP,
    DRAFT_TRTLLM,
    MAIN_NVFP4_CUTLASS,
    SOURCES,
    facts,
)
from dsv4doctor.verdicts import drops_clamp, known_kernel

_ELSEWHERE = Remedy(
    "SGLang passes the clamp to FlashInfer's CUTLASS MoE (--moe-runner-backend "
    "flashinfer_cutlass) from 0.5.21 on, and before that with FIX103 (`dsv4doctor fix` with that "
    "flag); in this release the Marlin runner (--moe-runner-backend marlin) applies it."
)
_PATCHED = replace(_ELSEWHERE, fix="FIX103")
_FP8 = Remedy(
    "Take --moe-runner-backend triton: SGLang's Triton runner applies the clamp to FP8 experts."
)


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    assert facts.snapshot.checkpoint is not None
    limit = facts.snapshot.checkpoint.text_config.get("swiglu_limit")
    if not limit:
        return
    for layers in fold(facts.trace.layers):
        layer = layers.layer
        works = layer.verdict in (Verdict.RUNS, Verdict.FALLBACK)
        if not works or not drops_clamp(layer, call_text(facts, layer)):
            continue
        assert layer.kernel is not None
        whose = "draft" if layer.role is Role.DRAFT else "main"
        site = _activation(facts, layer) or layer.kernel.call_site
        yield Finding(
            rule=RULE.id,
            severity=Severity.ERROR,
            subject=layers.name,
            message=(
                f"{_what(facts, layer)} without swiglu_limit, which this model sets to {limit:g}."
            ),
            consequence=(
                f"The {whose} routed experts compute plain SwiGLU, which is wrong output: the "
                "server runs and no error is raised."
            ),
            evidence=(
                f"config.json: swiglu_limit {limit:g}",
                _evidence(facts, layer),
            ),
            locations=(site,) if site else (),
            remedy=_remedy(facts, layer),
        )


def _activation(facts: Facts, layer: Layer) -> Location | None:
    """Where SGLang activates the experts itself: the grouped GEMM has no activation."""
    assert layer.kernel is not None
    grouped = layer.kernel.symbol.endswith(".cutlass_fp4_group_mm")
    return facts.features.plain_activation if grouped and facts.features is not None else None


def _what(facts: Facts, layer: Layer) -> str:
    assert layer.kernel is not None
    kernel = layer.kernel.symbol.rpartition(".")[2]
    if _activation(facts, layer) is not None:
        return f"Between two products of {kernel} the experts are activated"
    return f"{kernel} is called"


def _evidence(facts: Facts, layer: Layer) -> str:
    assert layer.kernel is not None
    activation, site = _activation(facts, layer), layer.kernel.call_site
    if activation is not None:
        return f"activated without it at {with_source(activation)}"
    if layer.clamp_read is False:
        return f"nothing reads it on the way to the call at {described(site)}"
    known = known_kernel(layer, call_text(facts, layer))
    if known is not None and known.clamp == "never":
        return f"on the way to and from {known.name}, called at {described(site)}, none is applied"
    return f"the call at {described(site)} does not pass it"


def _remedy(facts: Facts, layer: Layer) -> Remedy:
    if layer.stored_format is StoredFormat.FP8_BLOCK:
        return _FP8
    remedy = _PATCHED if is_nvfp4_cutlass(layer) else _ELSEWHERE
    scale = marlin_scale(facts.features, layer.stored_format, "marlin")
    return remedy if scale is None else replace(remedy, text=f"{remedy.text}\n{scale}")


RULE = Rule(
    id="DSV107",
    title="Routed experts without the model's SwiGLU clamp",
    severity=Severity.ERROR,
    reads=("trace", "checkpoint"),
    check=check,
)

_GROUPED = [
    replace(
        layer,
        kernel=Kernel(
            "torch.ops.sglang.cutlass_fp4_group_mm", Location("sglang/jit_kernel/nvfp4.py", 189)
        ),
    )
    for layer in MAIN_NVFP4_CUTLASS
]
_SOURCES = replace(
    SOURCES,
    plain_activation=Location(
        "sglang/srt/layers/moe/cutlass_moe.py", 475, source="silu_and_mul(c1, intermediate)"
    ),
)

EXAMPLES = (
    Example(
        "FlashInfer CUTLASS called without it",
        facts("sm_120", [*MAIN_NVFP4_CUTLASS], call=CALL_WITHOUT_CLAMP),
        expect=("model.layers.0-2.mlp.experts",),
    ),
    Example(
        "called with it",
        facts("sm_120", [*MAIN_NVFP4_CUTLASS], call=CALL_WITH_CLAMP),
    ),
    Example(
        "the grouped GEMM, whose activation is SGLang's own call",
        replace(facts("sm_120", _GROUPED), features=_SOURCES),
        expect=("model.layers.0-2.mlp.experts",),
    ),
    Example(
        "a path on which nothing reads it",
        facts("sm_100", [replace(DRAFT_TRTLLM, clamp_read=False)]),
        expect=("model.decoder.mlp.experts",),
    ),
    Example(
        "a source that cannot be read proves nothing",
        facts("sm_120", [*MAIN_NVFP4_CUTLASS]),
    ),
    Example(
        "a model without a clamp",
        facts("sm_120", [*MAIN_NVFP4_CUTLASS], call=CALL_WITHOUT_CLAMP, swiglu_limit=None),
    ),
)
