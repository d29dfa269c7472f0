"""DeepSeek-V4.1's second cache in FlashInfer's sparse MLA prefill on sm_12x.

V4.1 pages its extra keys by 128 or 256; FlashInfer's prefill over two caches takes pages of 64 or
2, and SGLang does not ask before it calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import TRITON_MLA, flashinfer_source, is_v41, uses_flashinfer_mla
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import SOURCES, flashinfer, scene


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.features is not None
    if not is_v41(facts) or not uses_flashinfer_mla(facts) or facts.features.prefill_shape_guard:
        return
    yield Finding(
        rule=RULE.id,
        severity=Severity.WARNING,
        subject="sparse MLA prefill",
        message=(
            f"DeepSeek-V4.1 can meet a sparse MLA prefill shape that FlashInfer lacks on "
            f"{facts.arch.name}, and this SGLang does not ask first."
        ),
        consequence=(
            "A long prefill can abort the server: Unsupported sparse-MLA prefill configuration, "
            "extra_page_block_size=128."
        ),
        evidence=(
            f"{facts.features.sparse_mla_file} has no check of the shape",
            flashinfer_source(facts),
            "sgl-project/sglang pull request 38969; whether FlashInfer 0.7 takes these pages is "
            "not established",
        ),
        remedy=Remedy(f"Export {TRITON_MLA}, which covers every shape and is slower."),
    )


RULE = Rule(
    id="DSV203",
    title="DeepSeek-V4.1 outside FlashInfer's sparse MLA prefill",
    severity=Severity.WARNING,
    reads=("trace", "checkpoint", "features"),
    check=check,
)

_INSTALLED = flashinfer("0.7.2")

EXAMPLES = (
    Example(
        "V4.1 on sm_120",
        scene(model="deepseek_v41", packages=_INSTALLED),
        expect=("sparse MLA prefill",),
    ),
    Example("V4 on sm_120", scene(packages=_INSTALLED)),
    Example("V4.1 on sm_100", scene("sm_100", model="deepseek_v41", packages=_INSTALLED)),
    Example(
        "an SGLang that asks first",
        scene(model="deepseek_v41", features=replace(SOURCES, prefill_shape_guard=True)),
    ),
    Example(
        "the Triton path",
        scene(model="deepseek_v41", environment={"SGLANG_SM120_FLASHMLA_BACKEND": "triton"}),
    ),
)
