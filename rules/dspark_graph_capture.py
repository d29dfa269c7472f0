"""DSpark and the capture of large CUDA graphs in the releases where it was seen to fail.

The server dies with an illegal memory access while it captures, on some starts and not on others,
and on GPUs of every kind; smaller batches were not seen to fail.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import flag, is_speculative
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import scene

_SEEN_IN = ("0.5.16", "0.5.17")
"""The releases of the report.  What fixed it later was not traced to a line, so this is no
statement about any other release."""
_SEEN_FROM = 10
_LIMIT = "--cuda-graph-max-bs"
_LIMITS = (_LIMIT, "--cuda-graph-max-bs-decode")
"""Either caps the graphs of decode, where the draft runs."""


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    launch = facts.snapshot.launch
    assert launch is not None
    version = facts.trace.sglang.version
    if not is_speculative(facts, "DSPARK") or version not in _SEEN_IN:
        return
    limits = [value for name in _LIMITS if (value := flag(facts, name)) is not None]
    limit = limits[-1] if limits else None
    if "--disable-cuda-graph" in launch.all_flags:
        return
    if any(value.isdigit() and int(value) < _SEEN_FROM for value in limits):
        return
    if flag(facts, "--disaggregation-mode") == "prefill":
        return  # SGLang captures no decode graphs there
    yield Finding(
        rule=RULE.id,
        severity=Severity.WARNING,
        subject=_LIMIT,
        message=(
            f"SGLang {version} was seen to fail while it captures CUDA graphs for DSpark at batch "
            f"sizes of {_SEEN_FROM} and more."
        ),
        consequence="Some starts die with an illegal memory access during capture, others do not.",
        evidence=(
            f"{_LIMIT} is {limit or 'not set'}",
            "sgl-project/sglang issue 33356: 0.5.16, and 0.5.17 at batch size 10",
        ),
        remedy=Remedy(
            f"Cap the graphs with {_LIMIT} 8, or use a release of which it was not reported."
        ),
    )


RULE = Rule(
    id="DSV602",
    title="CUDA graph capture with DSpark",
    severity=Severity.WARNING,
    reads=("trace", "launch"),
    check=check,
)

_DSPARK = ("--speculative-algorithm", "DSPARK")

EXAMPLES = (
    Example("0.5.17, no limit", scene(version="0.5.17", flags=_DSPARK), expect=(_LIMIT,)),
    Example("0.5.17, capped", scene(version="0.5.17", flags=(*_DSPARK, _LIMIT, "8"))),
    Example("0.5.17, decode capped", scene(version="0.5.17", flags=(*_DSPARK, _LIMITS[1], "8"))),
    Example("0.5.17, no graphs", scene(version="0.5.17", flags=(*_DSPARK, "--disable-cuda-graph"))),
    Example("0.5.23", scene(flags=_DSPARK)),
    Example("EAGLE", scene(version="0.5.17", flags=("--speculative-algorithm", "EAGLE"))),
)
