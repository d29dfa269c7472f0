"""An attention backend for SM100 asked for on another GPU.

`trtllm` and `flashmla_mega` are kernels for SM100 and SM103.  SGLang itself checks the GPU and
stops with an assertion while it resolves its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.errors import cut
from dsv4doctor.models import Facts, Finding, Location, Remedy, Severity, SglangError
from dsv4doctor.rules.common import flag, with_source
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import scene

_FLAG = "--dsv4-attn-backend"
_SM100_ONLY = ("trtllm", "flashmla_mega")


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    chosen = flag(facts, _FLAG)
    if chosen not in _SM100_ONLY or facts.arch.major == 10:
        return
    for error in facts.trace.errors:
        if error.phase == "arguments" and _FLAG in error.message:
            yield _finding(facts, chosen, error)


def _finding(facts: Facts, chosen: str, error: SglangError) -> Finding:
    return Finding(
        rule=RULE.id,
        severity=Severity.ERROR,
        subject=_FLAG,
        message=f"{_FLAG} {chosen} exists for SM100 and SM103 and not for {facts.arch.name}.",
        consequence="The server stops while it resolves its arguments.",
        evidence=(
            f"{error.type}: {cut(' '.join(error.message.split()), 300)}",
            *([f"raised at {with_source(error.at)}"] if error.at else []),
        ),
        locations=(error.at,) if error.at else (),
        remedy=Remedy(f"Leave {_FLAG} out: this SGLang then takes flashmla."),
    )


RULE = Rule(
    id="DSV207",
    title="Attention backend for SM100 alone",
    severity=Severity.ERROR,
    reads=("trace", "launch"),
    check=check,
)

_RAISED = SglangError(
    "arguments",
    "AssertionError",
    "--dsv4-attn-backend trtllm requires an SM100/SM103 (Blackwell) GPU.",
    Location("sglang/srt/arg_groups/deepseek_v4_hook.py", 104),
)

EXAMPLES = (
    Example(
        "trtllm on sm_120",
        scene(flags=(_FLAG, "trtllm"), errors=(_RAISED,)),
        expect=(_FLAG,),
    ),
    Example("trtllm on sm_100", scene("sm_100", flags=(_FLAG, "trtllm"))),
    Example("flashmla", scene(flags=(_FLAG, "flashmla"))),
)
