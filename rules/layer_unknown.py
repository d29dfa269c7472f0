"""Routed-expert layers of which it is not known whether they run.

Either the trace stopped before it reached the layer's kernel, or it reached one of which nothing
tells for which GPUs it exists: it is in no table, no FlashInfer declares it, and no library in the
environment holds its code.  That is no promise in either direction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.folding import fold
from dsv4doctor.models import Facts, Finding, Kernel, Remedy, Severity, Verdict
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import MAIN_CUTLASS, facts

_STOPPED = Remedy("Trace it with the Python of the serving environment: --python INTERPRETER.")
_CHECK = Remedy("Start the server once to know: it checks its arguments before it loads anything.")
_UNKNOWN = Remedy("Start the server once to know; --strict makes this count as undetermined.")
_VERIFY = re.compile(r"dsv4doctor kernels verify --only \w+")
"""What a layer's reason says of a kernel of ours."""


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    for problem in facts.trace.unresolved:
        phase, _, reason = problem.partition(": ")
        went_on = phase == "arguments" and facts.trace.layers
        yield Finding(
            rule=RULE.id,
            severity=Severity.INFO,
            subject=phase,
            message=f"{'Not determined' if went_on else 'The trace stopped short'}: {reason}.",
            consequence=(
                "SGLang may refuse this launch before it loads anything."
                if went_on
                else "What comes after this point was not looked at."
            ),
            evidence=(),
            remedy=_CHECK if went_on else _STOPPED,
        )
    for layers in fold(facts.trace.layers):
        layer = layers.layer
        if layer.verdict is Verdict.UNKNOWN:
            kernel = layer.kernel
            yield Finding(
                rule=RULE.id,
                severity=Severity.INFO,
                subject=layers.name,
                message=f"Whether this runs on {facts.arch.name} is unknown: {layer.reason}.",
                consequence="Nothing is promised for these layers.",
                evidence=(f"reaches {kernel.symbol}",) if kernel else (),
                locations=(kernel.call_site,) if kernel and kernel.call_site else (),
                remedy=_remedy(layer.reason),
            )


def _remedy(reason: str) -> Remedy:
    command = _VERIFY.search(reason)
    if command is None:
        return _UNKNOWN
    return Remedy("Verify the kernel on the serving machine.", commands=(command.group(),))


RULE = Rule(
    id="DSV106",
    title="Routed experts of which nothing is known",
    severity=Severity.INFO,
    reads=("trace",),
    check=check,
)

_NEW = [replace(layer, kernel=Kernel("brand.new_moe", None)) for layer in MAIN_CUTLASS]

EXAMPLES = (
    Example(
        "a kernel that is in no table",
        facts("sm_120", _NEW),
        expect=("model.layers.0-2.mlp.experts",),
    ),
    Example(
        "a trace that stopped outside SGLang",
        facts("sm_120", [], unresolved=("draft: KeyError: 'x'",)),
        expect=("draft",),
    ),
    Example(
        "arguments of which SGLang's own check is not known",
        facts("sm_120", [*MAIN_CUTLASS], unresolved=("arguments: it calls pydantic.BaseModel",)),
        expect=("arguments",),
    ),
    Example("a known kernel", facts("sm_120", [*MAIN_CUTLASS])),
)
