"""Options of another serving engine, or misspelt ones, in an SGLang command.

Launch commands are carried over from one engine to another.  SGLang stops at an option that it does
not know; one that it happens to know under the same name can mean something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.flags import ENGINES, foreign_options
from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import scene


def check(facts: Facts) -> Iterator[Finding]:
    launch = facts.snapshot.launch
    assert launch is not None
    if facts.trace is not None:
        return  # this SGLang's parser took every flag
    for option in foreign_options(launch.all_flags):
        own = ENGINES[option].sglang
        yield Finding(
            rule=RULE.id,
            severity=Severity.ERROR,
            subject=option,
            message=f"{option} is an option of {ENGINES[option].engine} and not of SGLang.",
            consequence="SGLang stops while it reads the flags.",
            evidence=(f"{launch.source}: {option}",),
            remedy=Remedy(f"SGLang's is {own}." if own else f"Remove it: {ENGINES[option].note}."),
        )


RULE = Rule(
    id="DSV402",
    title="Option of another engine",
    severity=Severity.ERROR,
    reads=("launch",),
    check=check,
)


def _refused(*flags: str) -> Facts:
    return replace(scene(flags=flags), trace=None, trace_failure="SGLang does not take these flags")


EXAMPLES = (
    Example(
        "vLLM's memory fraction",
        _refused("--tp", "8", "--gpu-memory-utilization", "0.95"),
        expect=("--gpu-memory-utilization",),
    ),
    Example("SGLang's", _refused("--tp", "8", "--mem-fraction-static", "0.9")),
    Example("an SGLang that takes it", scene(flags=("--gpu-memory-utilization", "0.95"))),
)
