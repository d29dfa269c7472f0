"""DeepSeek-V4.1's dense FP8 layers (blocks of 32) off the MXFP8 path on sm_12x.

`auto` asks for an MXFP8 backend on SM100 only; on sm_12x the choice has to be explicit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.models import Facts, Finding, Remedy, Severity, Trace
from dsv4doctor.rules.common import is_v41, with_source
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import SOURCES, scene

_EXPLICIT = ("flashinfer_cutlass", "flashinfer_cutedsl")


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    assert facts.features is not None
    decided = facts.features.mxfp8_dense
    if not facts.arch.is_sm12x or not is_v41(facts) or decided is None:
        return
    backend = facts.trace.resolved_args.get("fp8_gemm_runner_backend")
    if backend is None:
        raise NotChecked("the trace did not resolve fp8_gemm_runner_backend")
    if backend in _EXPLICIT:
        return
    yield Finding(
        rule=RULE.id,
        severity=Severity.WARNING,
        subject="dense FP8 layers",
        message=(
            f"The dense FP8 layers are not on the MXFP8 path: --fp8-gemm-backend is {backend}, "
            f"and on {facts.arch.name} that path needs an explicit choice."
        ),
        consequence="Reported as slow and not as wrong: the dense products dominate the profile.",
        evidence=(
            f"fp8_gemm_runner_backend resolves to {backend}",
            f"explicit backends only at {with_source(decided)}",
            *_reached(facts.trace),
            "sgl-project/sglang pull requests 39961 and 39967",
        ),
        locations=(decided,),
        remedy=Remedy("Try --fp8-gemm-backend flashinfer_cutlass and compare speed and answers."),
    )


def _reached(trace: Trace) -> tuple[str, ...]:
    """The kernels that the layers go to instead, where that was traced."""
    paths = [path for path in trace.paths if path.name == "dense-fp8" and path.kernel]
    symbols = dict.fromkeys(path.kernel.symbol for path in paths if path.kernel)
    return tuple(f"they reach {symbol}" for symbol in symbols)


RULE = Rule(
    id="DSV206",
    title="DeepSeek-V4.1's dense FP8 layers off the MXFP8 path",
    severity=Severity.WARNING,
    reads=("trace", "checkpoint", "features"),
    check=check,
)

_AUTO = {"fp8_gemm_runner_backend": "auto"}

EXAMPLES = (
    Example(
        "auto on sm_120",
        scene(model="deepseek_v41", resolved=_AUTO),
        expect=("dense FP8 layers",),
    ),
    Example(
        "asked for",
        scene(model="deepseek_v41", resolved={"fp8_gemm_runner_backend": "flashinfer_cutlass"}),
    ),
    Example("V4, whose blocks are 128", scene(resolved=_AUTO)),
    Example("SM100", scene("sm_100", model="deepseek_v41", resolved=_AUTO)),
    Example(
        "an SGLang without the path",
        scene(model="deepseek_v41", resolved=_AUTO, features=replace(SOURCES, mxfp8_dense=None)),
    ),
)
