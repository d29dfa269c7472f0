"""A backend flag that the user set and the deciding code never read.

`--moe-runner-backend` looks like the remedy for a wrong MoE kernel.  Where SGLang decides without
reading it, it changes nothing, and no message says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.commands import doctor_command
from dsv4doctor.folding import fold
from dsv4doctor.models import Facts, Finding, Layer, Remedy, Severity, Verdict
from dsv4doctor.rules.common import both, ignored_flags, with_source
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import DRAFT_CUTLASS, DRAFT_TRTLLM, MAIN_CUTLASS, MAIN_TRTLLM, facts

_BOTH = ("--moe-runner-backend", "triton", "--speculative-moe-runner-backend", "triton")


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    for layers in fold(facts.trace.layers):
        layer = layers.layer
        ignored = ignored_flags(facts, layer)
        if not ignored or layer.decided_at is None:
            continue
        flags = both(list(ignored))
        verb = "was" if len(ignored) == 1 else "were"
        # A layer that runs anyway is no trouble, only a surprise.
        severity = Severity.INFO if layer.verdict is Verdict.RUNS else Severity.WARNING
        consulted = both(layer.flags_consulted) if layer.flags_consulted else "no argument"
        yield Finding(
            rule=RULE.id,
            severity=severity,
            subject=layers.name,
            message=f"{flags} {verb} not consulted for the {layer.role.value} routed experts.",
            consequence=(
                f"They use {layer.quant_method} whatever "
                f"{'that flag says' if len(ignored) == 1 else 'those flags say'}."
            ),
            evidence=(
                *(f"set: {flag} {value}" for flag, value in ignored.items()),
                f"decided at {with_source(layer.decided_at)}",
                f"the deciding code read {consulted}",
            ),
            locations=(layer.decided_at,),
            remedy=_remedy(facts, layer),
        )


def _remedy(facts: Facts, layer: Layer) -> Remedy:
    words = ("trace-moe", f"--{layer.role.value}", "--why")
    command = doctor_command(facts, *words)
    if command is None:
        return Remedy(f"See every branch taken: `dsv4doctor {' '.join(words)}` with your options.")
    return Remedy("See every branch taken:", (command,))


RULE = Rule(
    id="DSV103",
    title="A backend flag that the deciding code never read",
    severity=Severity.WARNING,
    reads=("trace", "launch"),
    check=check,
)

EXAMPLES = (
    Example(
        "both flags set, the draft decided without them",
        facts("sm_120", [*MAIN_TRTLLM, DRAFT_TRTLLM], flags=_BOTH),
        expect=("model.decoder.mlp.experts",),
    ),
    Example(
        "flag=value counts as set",
        facts("sm_120", [DRAFT_TRTLLM], flags=("--moe-runner-backend=marlin",)),
        expect=("model.decoder.mlp.experts",),
    ),
    Example(
        "the main experts decided without it",
        facts(
            "sm_120",
            [replace(layer, flags_consulted=()) for layer in MAIN_TRTLLM],
            flags=_BOTH[:2],
        ),
        expect=("model.layers.0-2.mlp.experts",),
    ),
    Example(
        "a DSpark draft follows the main flag, not its own",
        facts(
            "sm_120",
            [replace(DRAFT_CUTLASS, flags_consulted=("moe_runner_backend",))],
            flags=_BOTH,
        ),
        expect=("model.decoder.mlp.experts",),
    ),
    Example("no flag set", facts("sm_120", [*MAIN_TRTLLM, DRAFT_TRTLLM])),
    Example("both read", facts("sm_120", [*MAIN_CUTLASS, DRAFT_CUTLASS], flags=_BOTH)),
    Example(
        "the draft follows the main flag",
        facts("sm_120", [*MAIN_CUTLASS, DRAFT_CUTLASS], flags=_BOTH[:2]),
    ),
    Example(
        "the draft's flag is not expected to count for the main experts",
        facts("sm_120", [*MAIN_CUTLASS], flags=_BOTH[2:]),
    ),
)
