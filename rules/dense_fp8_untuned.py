"""Dense FP8 layers on Triton on sm_12x with settings that were not tuned for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import is_v41, with_source
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import SOURCES, gpus, scene

_FLAG = "--fp8-gemm-backend"
_SM12X = ("RTX_PRO", "RTX_50", "GB10")
"""Parts of the names of the GPUs in question, as SGLang writes them."""


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    assert facts.features is not None
    if not facts.arch.is_sm12x or is_v41(facts):
        return
    backend = facts.trace.resolved_args.get("fp8_gemm_runner_backend")
    if backend is None:
        raise NotChecked("the trace did not resolve fp8_gemm_runner_backend", required=False)
    reached = facts.features.dense_fp8_sm12x if backend == "auto" else backend
    if reached != "triton":
        return
    own = {gpu.name.replace(" ", "_") for gpu in facts.snapshot.gpu.gpus if gpu.arch == facts.arch}
    tuned = facts.features.tuned_dense_fp8
    if any(name in own or (not own and part in name) for name in tuned for part in _SM12X):
        return
    if not tuned:
        raise NotChecked("SGLang's tables for dense FP8 were not found", required=False)
    where = facts.features.dense_fp8_sm12x_at if backend == "auto" else None
    whose = next(iter(own), f"any {facts.arch.name} GPU")
    yield Finding(
        rule=RULE.id,
        severity=Severity.INFO,
        subject="dense FP8 layers",
        message=f"The dense FP8 layers run on Triton, and this SGLang has no table for {whose}.",
        consequence="They run with default settings: right, and slower than they could be.",
        evidence=(
            f"fp8_gemm_runner_backend {backend} becomes {reached} on {facts.arch.name}",
            *((f"decided at {with_source(where)}",) if where else ()),
            f"tables exist for {len(tuned)} other GPUs",
            "sgl-project/sglang pull request 25696 and issue 18870",
        ),
        locations=(where,) if where else (),
        remedy=Remedy(
            "Tune them with SGLang's tuning_block_wise_kernel.py, or use a release from 0.5.16 on, "
            f"where {_FLAG} auto is CUTLASS."
        ),
    )


RULE = Rule(
    id="DSV208",
    title="Dense FP8 layers with untuned settings",
    severity=Severity.INFO,
    reads=("trace", "checkpoint", "features"),
    check=check,
)

_AUTO = {"fp8_gemm_runner_backend": "auto"}
_TRITON = replace(SOURCES, dense_fp8_sm12x="triton", tuned_dense_fp8=("NVIDIA_H200",))
_NAME = "NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition"

EXAMPLES = (
    Example(
        "Triton, tables for others only",
        scene(resolved=_AUTO, features=_TRITON),
        expect=("dense FP8 layers",),
    ),
    Example(
        "asked for",
        scene(resolved={"fp8_gemm_runner_backend": "triton"}, features=_TRITON, gpus=gpus(1)),
        expect=("dense FP8 layers",),
    ),
    Example(
        "a table for this GPU",
        scene(resolved=_AUTO, features=replace(_TRITON, tuned_dense_fp8=(_NAME,)), gpus=gpus(1)),
    ),
    Example(
        "CUTLASS",
        scene(resolved=_AUTO, features=replace(_TRITON, dense_fp8_sm12x="cutlass")),
    ),
    Example("another GPU", scene("sm_90", resolved=_AUTO, features=_TRITON)),
)
