"""Attention that can read memory nobody has written, for prompts over 64 tokens.

SGLang splits its pages for FlashInfer's sparse MLA on sm_12x and copies touched pages only, into
uninitialised memory; masked candidates read the first slot.  FlashInfer reads a row of zeros
there from 0.7.1 on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from packaging.version import Version

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import (
    TRITON_MLA,
    flashinfer_source,
    flashinfer_version,
    uses_flashinfer_mla,
    with_source,
)
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import SOURCES, flashinfer, scene

_LAST_WITHOUT = Version("0.6.18")
_FIRST_WITH = Version("0.7.1")


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.features is not None
    scratch = facts.features.split_scratch
    if scratch is None or not uses_flashinfer_mla(facts):
        return
    version = flashinfer_version(facts)
    if version is None:
        raise NotChecked("FlashInfer's version is not known")
    if version >= _FIRST_WITH:
        return
    if version > _LAST_WITHOUT:
        raise NotChecked(f"whether FlashInfer {version} reads zeros for masked entries is unknown")
    reported = version == _LAST_WITHOUT
    yield Finding(
        rule=RULE.id,
        severity=Severity.ERROR if reported else Severity.INFO,
        subject="sparse MLA attention",
        message=(
            f"With FlashInfer {version} on {facts.arch.name} attention can read memory that "
            "nobody has written once a prompt is longer than 64 tokens."
        ),
        consequence="Answers to longer prompts can be wrong or garbage, and no error is raised."
        if reported
        else "Where it does, answers to longer prompts are wrong; nobody has reported it.",
        evidence=(
            flashinfer_source(facts),
            f"uninitialised pages at {with_source(scratch)}",
            "reported with FlashInfer 0.6.18 on RTX PRO 6000: sgl-project/sglang pull request "
            "39288; fixed there by flashinfer pull request 5075, in 0.7.1",
            *(
                []
                if reported
                else [f"inferred for FlashInfer {version}: it has no such row either"]
            ),
        ),
        locations=(scratch,),
        remedy=Remedy(
            f"Export {TRITON_MLA}, or move to FlashInfer 0.7.1 or newer (SGLang 0.5.22 on)."
        ),
    )


RULE = Rule(
    id="DSV202",
    title="Attention corruption for prompts over 64 tokens",
    severity=Severity.ERROR,
    reads=("trace", "features"),
    check=check,
)

EXAMPLES = (
    Example(
        "FlashInfer 0.6.18",
        scene(packages=flashinfer("0.6.18")),
        expect=("sparse MLA attention",),
    ),
    Example(
        "FlashInfer 0.6.15, of which nothing was reported",
        scene(packages=flashinfer("0.6.15.post1")),
        expect=("sparse MLA attention",),
    ),
    Example("FlashInfer 0.7.1", scene(packages=flashinfer("0.7.1"))),
    Example("sm_100", scene("sm_100", packages=flashinfer("0.6.18"))),
    Example(
        "a release that rewrites the whole pool",
        scene(packages=flashinfer("0.6.14"), features=replace(SOURCES, split_scratch=None)),
    ),
    Example(
        "the Triton path",
        scene(
            packages=flashinfer("0.6.18"),
            environment={"SGLANG_SM120_FLASHMLA_BACKEND": "triton"},
        ),
    ),
)
