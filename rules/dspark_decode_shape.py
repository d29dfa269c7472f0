"""A DSpark draft whose attention shape FlashInfer's sparse MLA decode does not have.

The draft attends over its window of 128 and the guessed block: 192 entries after padding.
FlashInfer before 0.6.18 has no decode kernel of that width for sm_12x and sends the call to its
prefill orchestrator, which refuses so few tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import (
    TRITON_MLA,
    flashinfer_source,
    flashinfer_version,
    is_speculative,
    uses_flashinfer_mla,
)
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import flashinfer, scene

_HAS_192 = Version("0.6.18")


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.features is not None
    if not is_speculative(facts, "DSPARK") or not uses_flashinfer_mla(facts):
        return
    if facts.features.decode_shape_guard:
        return
    version = flashinfer_version(facts)
    if version is None:
        raise NotChecked("FlashInfer's version is not known")
    if version >= _HAS_192:
        return
    yield Finding(
        rule=RULE.id,
        severity=Severity.ERROR,
        subject="DSpark draft attention",
        message=(
            f"FlashInfer {version} has no sparse MLA decode kernel for the DSpark draft's 192 "
            f"entries on {facts.arch.name}."
        ),
        consequence=(
            "The server dies while it captures CUDA graphs: Check failed: num_tokens > 64, Decode "
            "(num_tokens <= 64) must go through sparse_mla_sm120_decode_dsv4."
        ),
        evidence=(
            flashinfer_source(facts),
            "SGLANG_SM120_FLASHMLA_BACKEND is flashinfer",
            f"{facts.features.sparse_mla_file} calls it without asking for the shape",
            "sgl-project/sglang issues 33943 and 33985; flashinfer pull request 3817",
        ),
        remedy=Remedy(
            f"Export {TRITON_MLA}, which is slower, or install the SGLang whose FlashInfer is "
            "0.6.18 or newer (0.5.19 on)."
        ),
    )


RULE = Rule(
    id="DSV201",
    title="DSpark draft attention without a decode kernel",
    severity=Severity.ERROR,
    reads=("trace", "launch", "features"),
    check=check,
)

_DSPARK = ("--speculative-algorithm", "DSPARK")

EXAMPLES = (
    Example(
        "FlashInfer 0.6.17",
        scene(flags=_DSPARK, packages=flashinfer("0.6.17")),
        expect=("DSpark draft attention",),
    ),
    Example("FlashInfer 0.6.18", scene(flags=_DSPARK, packages=flashinfer("0.6.18"))),
    Example("EAGLE", scene(flags=("--speculative-algorithm", "EAGLE"))),
    Example("sm_100", scene("sm_100", flags=_DSPARK, packages=flashinfer("0.6.17"))),
    Example(
        "the Triton path",
        scene(
            flags=_DSPARK,
            packages=flashinfer("0.6.17"),
            environment={"SGLANG_SM120_FLASHMLA_BACKEND": "triton"},
        ),
    ),
)
