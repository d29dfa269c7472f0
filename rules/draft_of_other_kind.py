"""EAGLE on a checkpoint whose draft is DSpark, and the other way round.

A NextN draft joins hidden state and embedding through `e_proj` and `h_proj`; a DSpark draft has
`main_proj` and a Markov head instead.  Which one is stored shows in the tensors' names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.errors import cut
from dsv4doctor.models import (
    Checkpoint,
    Facts,
    Finding,
    Remedy,
    Severity,
    SglangError,
    StoredFormat,
    TensorInfo,
)
from dsv4doctor.rules.common import flag, is_speculative
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import checkpoint, scene

_NEXTN = re.compile(r"mtp\.\d+\.(e_proj|h_proj|enorm|hnorm|eh_proj)\.")
_DSPARK = re.compile(r"mtp\.\d+\.(main_proj|main_norm|markov_head)\.")


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    stored_by = facts.snapshot.checkpoint
    assert stored_by is not None
    if _other_draft(facts):
        return
    kinds = kinds_stored(stored_by)
    if kinds == {"DSpark"} and (is_speculative(facts, "EAGLE") or is_speculative(facts, "NEXTN")):
        yield _finding(facts, stored_by, "EAGLE", "DSpark", Severity.WARNING)
    elif kinds == {"NextN"} and is_speculative(facts, "DSPARK"):
        stops = bool(facts.trace.errors)
        severity = Severity.ERROR if stops else Severity.WARNING
        yield _finding(facts, stored_by, "DSPARK", "NextN", severity)


def _other_draft(facts: Facts) -> bool:
    """True when the draft comes from another checkpoint, which was not read."""
    named = flag(facts, "--speculative-draft-model-path")
    launch = facts.snapshot.launch
    return named is not None and launch is not None and named != launch.model


def kinds_stored(stored_by: Checkpoint) -> set[str]:
    """ "NextN" and "DSpark": the drafts that the checkpoint's tensors belong to."""
    names = [tensor.name for tensor in stored_by.tensors]
    kinds = {"NextN"} if any(_NEXTN.match(name) for name in names) else set()
    return kinds | ({"DSpark"} if any(_DSPARK.match(name) for name in names) else set())


def _finding(
    facts: Facts, stored_by: Checkpoint, asked: str, kind: str, severity: Severity
) -> Finding:
    assert facts.trace is not None
    example = next(
        tensor.name
        for tensor in stored_by.tensors
        if (_NEXTN if kind == "NextN" else _DSPARK).match(tensor.name)
    )
    stops = severity is Severity.ERROR
    return Finding(
        rule=RULE.id,
        severity=severity,
        subject="--speculative-algorithm",
        message=(
            f"--speculative-algorithm {asked} asks for another draft than {stored_by.name} "
            f"stores, which is {kind}."
        ),
        consequence=(
            "The server does not start."
            if stops
            else "The draft's own projections are not in the checkpoint: its guesses are hardly "
            "ever accepted and speculation only costs time."
        ),
        evidence=(
            f"{example} is stored",
            *(f"{error.type}: {cut(error.message, 200)}" for error in facts.trace.errors[:1]),
        ),
        remedy=Remedy(
            "Use --speculative-algorithm DSPARK (SGLang 0.5.16 on)."
            if kind == "DSpark"
            else "Use --speculative-algorithm EAGLE with --speculative-eagle-topk 1."
        ),
    )


RULE = Rule(
    id="DSV403",
    title="Speculative algorithm of another draft than stored",
    severity=Severity.ERROR,
    reads=("trace", "checkpoint", "launch"),
    check=check,
)


def _storing(name: str) -> Checkpoint:
    plain = checkpoint(StoredFormat.MXFP4, StoredFormat.MXFP4, None, None)
    return replace(plain, tensors=(TensorInfo(name, "BF16", (4096, 4096), "model.safetensors"),))


_DSPARK_DRAFT = _storing("mtp.0.main_proj.weight")
_NEXTN_DRAFT = _storing("mtp.0.e_proj.weight")
_EAGLE_FLAGS = ("--speculative-algorithm", "EAGLE")
_DSPARK_FLAGS = ("--speculative-algorithm", "DSPARK")
_RAISED = SglangError("arguments", "ValueError", "no DSpark draft", None)

EXAMPLES = (
    Example(
        "EAGLE on a DSpark draft",
        scene(checkpoint=_DSPARK_DRAFT, flags=_EAGLE_FLAGS),
        expect=("--speculative-algorithm",),
    ),
    Example(
        "DSPARK on a NextN draft",
        scene(checkpoint=_NEXTN_DRAFT, flags=_DSPARK_FLAGS, errors=(_RAISED,)),
        expect=("--speculative-algorithm",),
    ),
    Example("EAGLE on a NextN draft", scene(checkpoint=_NEXTN_DRAFT, flags=_EAGLE_FLAGS)),
    Example("DSPARK on a DSpark draft", scene(checkpoint=_DSPARK_DRAFT, flags=_DSPARK_FLAGS)),
    Example(
        "a draft of its own",
        scene(
            checkpoint=_DSPARK_DRAFT,
            flags=(*_EAGLE_FLAGS, "--speculative-draft-model-path", "another"),
        ),
    ),
    Example("no speculation", scene(checkpoint=_DSPARK_DRAFT)),
)
