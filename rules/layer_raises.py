"""SGLang itself raises while it resolves this launch.

The trace runs SGLang's own code, so what it raises there it will raise on the serving machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.commands import launch_change, server_command
from dsv4doctor.errors import cut
from dsv4doctor.flags import without, written_out
from dsv4doctor.folding import fold
from dsv4doctor.models import (
    IMPORTS,
    Facts,
    Finding,
    Layer,
    Location,
    Remedy,
    Severity,
    SglangError,
)
from dsv4doctor.rules.common import both, described, flag, way_out, with_source
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import MAIN_CUTLASS, MAIN_TRTLLM, SOURCES, facts, scene

_WHEN = {
    "arguments": "while it resolves its arguments",
    "main": "while it builds the main model",
    "draft": "while it builds the draft model",
}


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    for error in facts.trace.errors:
        yield _finding(facts, error.phase, error, None)
    for layers in fold(facts.trace.layers):
        own = layers.layer.error
        if own is not None and own.phase != IMPORTS:  # DSV405 says what to install
            yield _finding(facts, layers.name, own, layers.layer)


def _finding(facts: Facts, subject: str, error: SglangError, layer: Layer | None) -> Finding:
    message = cut(" ".join(error.message.split()).rstrip("."), 300) or "no message"
    evidence = [f"{error.type}: {message}"]
    if error.at is not None:
        evidence.append(f"raised at {with_source(error.at)}")
    if layer is not None and layer.decided_at is not None:
        evidence.append(f"method {layer.quant_method} decided at {with_source(layer.decided_at)}")
    return Finding(
        rule=RULE.id,
        severity=Severity.ERROR,
        subject=subject,
        message=(
            f"This launch stops with {error.type}: {message}, raised at {described(error.at)}."
        ),
        consequence=f"The server never answers: SGLang raises this {_when(error.phase)}.",
        evidence=tuple(evidence),
        locations=(error.at,) if error.at else (),
        remedy=_algorithm(facts, error) or _eagle(facts, error) or way_out(facts, layer),
    )


def _algorithm(facts: Facts, error: SglangError) -> Remedy | None:
    """An algorithm that this SGLang does not have; NEXTN is its other name for EAGLE."""
    asked = (flag(facts, "--speculative-algorithm") or "").upper()
    known = facts.features.speculative_algorithms if facts.features else ()
    about = error.phase == "arguments" and "speculative" in error.message
    if not asked or not known or not about or asked in (*known, "NEXTN"):
        return None
    version = f"SGLang {facts.trace.sglang.version}" if facts.trace else "This SGLang"
    return Remedy(
        f"{version} has no {asked}: its algorithms are {both(known)}, and of those only what the "
        "message allows for this model. Another release may have it: `dsv4doctor check --sglang "
        "VERSION` tells before anything is installed."
    )


def _eagle(facts: Facts, error: SglangError) -> Remedy | None:
    """EAGLE without its companions: SGLang's own default of topk is not what this model takes."""
    if "EAGLE" not in error.message or "topk" not in error.message:
        return None
    text = (
        "Add --speculative-eagle-topk 1, and beside it --speculative-num-steps and "
        "--speculative-num-draft-tokens, one more than the steps."
    )
    companions = ("--speculative-eagle-topk", "--speculative-num-steps")
    launch = facts.snapshot.launch
    own = written_out(launch) if launch else ()
    flags = without(own, (*companions, "--speculative-num-draft-tokens"))
    flags = (*flags, *_COMPANIONS)
    change, command = launch_change(facts, flags), server_command(facts, flags)
    lines = (text, change) if change else (text,)
    return Remedy("\n".join(lines), (command,) if command else ())


_COMPANIONS = (
    *("--speculative-eagle-topk", "1"),
    *("--speculative-num-steps", "3"),
    *("--speculative-num-draft-tokens", "4"),
)


def _when(phase: str) -> str:
    if phase in _WHEN:
        return _WHEN[phase]
    model, _, step = phase.partition(" ")
    if step == "weights":
        return f"while it loads the {model} model's experts"
    if step == "forward":
        return f"when the {model} model first runs"
    return f"in its phase {phase!r}"


RULE = Rule(
    id="DSV105",
    title="SGLang raises while it resolves the launch",
    severity=Severity.ERROR,
    reads=("trace",),
    check=check,
)

_UNSUPPORTED = SglangError(
    "main forward",
    "NotImplementedError",
    "Unsupported moe_runner_backend for NVFP4 MoE: MoeRunnerBackend.TRITON.",
    Location("sglang/srt/layers/quantization/modelopt_quant.py", 3367, "apply", "raise"),
)

EXAMPLES = (
    Example(
        "a backend that the method does not know",
        facts("sm_120", [replace(layer, kernel=None, error=_UNSUPPORTED) for layer in MAIN_TRTLLM]),
        expect=("model.layers.0-2.mlp.experts",),
    ),
    Example(
        "the arguments contradict each other",
        facts(
            "sm_120",
            [],
            errors=(replace(_UNSUPPORTED, phase="arguments", type="ValueError"),),
        ),
        expect=("arguments",),
    ),
    Example(
        "an algorithm that this release does not have",
        scene(
            flags=("--speculative-algorithm", "DSPARK"),
            features=replace(SOURCES, speculative_algorithms=("EAGLE", "NGRAM")),
            errors=(
                replace(
                    _UNSUPPORTED,
                    phase="arguments",
                    type="AssertionError",
                    message="Only EAGLE speculative algorithm is supported",
                ),
            ),
        ),
        expect=("arguments",),
    ),
    Example("nothing raised", facts("sm_120", [*MAIN_CUTLASS])),
)
