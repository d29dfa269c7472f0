"""Prefill and decode servers that do not fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import flag, set_by_user
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import scene

_MODE = "--disaggregation-mode"
_BACKEND = "--disaggregation-transfer-backend"
_PORT = "--disaggregation-bootstrap-port"
_RESOLVED = {
    "kv_cache_dtype": "KV cache layout",
    "page_size": "KV cache layout",
    "dsv4_attn_backend": "KV cache layout",
    "speculative_algorithm": "speculative decoding",
    "speculative_num_steps": "speculative decoding",
    "speculative_num_draft_tokens": "speculative decoding",
}
"""Argument -> what it is about; both sides have to resolve it alike."""


def check(facts: Facts) -> Iterator[Finding]:
    mode = flag(facts, _MODE)
    if mode not in ("prefill", "decode"):
        return
    if facts.peer is None:
        raise NotChecked("the launch of the other side is not given")
    yield from disagreements(facts, facts.peer)


def disagreements(one: Facts, other: Facts) -> Iterator[Finding]:
    """What two resolved launches of a prefill/decode pair do not agree on."""
    modes = [flag(side, _MODE) for side in (one, other)]
    if sorted(map(str, modes)) != ["decode", "prefill"]:
        yield _finding(
            _MODE, f"{modes[0]}", f"{modes[1] or 'none'}", "They are no pair of prefill and decode."
        )
    if one.trace is None or other.trace is None:
        raise NotChecked("one side was not traced")
    mine, theirs = one.trace.resolved_args, other.trace.resolved_args
    for name, what in _RESOLVED.items():
        if name in mine and name in theirs and mine[name] != theirs[name]:
            yield _finding(
                name,
                str(mine[name]),
                str(theirs[name]),
                f"Their {what} differs: the transfer is refused, or the decode side reads the "
                "cache wrongly.",
            )
    backends = [flag(side, _BACKEND) or "mooncake" for side in (one, other)]
    if backends[0] != backends[1]:
        yield _finding(_BACKEND, backends[0], backends[1], "They cannot talk to each other.")
    ports = [flag(side, _PORT) for side in (one, other)]
    if None not in ports and ports[0] != ports[1]:
        yield _finding(_PORT, f"{ports[0]}", f"{ports[1]}", "The decode side finds no bootstrap.")
    shared = _gpus(one) & _gpus(other)
    if shared and _same_machine(one, other):
        yield _finding(
            "CUDA_VISIBLE_DEVICES",
            ",".join(sorted(_gpus(one))),
            ",".join(sorted(_gpus(other))),
            "Both want the same GPUs of one machine: the second to start runs out of memory.",
        )


def _gpus(facts: Facts) -> set[str]:
    """The GPUs that a launch names; empty when it names none."""
    visible = set_by_user(facts, "CUDA_VISIBLE_DEVICES") or ""
    return {name.strip() for name in visible.split(",") if name.strip()}


def _same_machine(one: Facts, other: Facts) -> bool:
    """True when nothing says otherwise: the two facts list the very same GPUs."""
    return one.snapshot.gpu == other.snapshot.gpu


def _finding(subject: str, mine: str, theirs: str, consequence: str) -> Finding:
    return Finding(
        rule=RULE.id,
        severity=Severity.ERROR,
        subject=subject,
        message=f"The two sides disagree about {subject}: {mine} here, {theirs} there.",
        consequence=consequence,
        evidence=(f"this launch: {mine}", f"the other launch: {theirs}"),
        remedy=Remedy(f"Give both launches the same {subject}.")
        if subject not in (_MODE, "CUDA_VISIBLE_DEVICES")
        else Remedy("Give each launch its own."),
    )


RULE = Rule(
    id="DSV701",
    title="Prefill and decode servers that disagree",
    severity=Severity.ERROR,
    reads=("launch", "trace"),
    check=check,
    about_machine=True,
)

_ARGS = {
    "kv_cache_dtype": "fp8_e4m3",
    "page_size": 256,
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 1,
}


def _pair(
    prefill: tuple[str, ...] = (),
    decode: tuple[str, ...] = (),
    changed: dict[str, object] | None = None,
    gpus: tuple[str, str] = ("0,1", "2,3"),
) -> Facts:
    one = scene(
        flags=(_MODE, "prefill", *prefill),
        resolved=_ARGS,
        environment={"CUDA_VISIBLE_DEVICES": gpus[0]},
    )
    other = scene(
        flags=(_MODE, "decode", *decode),
        resolved={**_ARGS, **(changed or {})},
        environment={"CUDA_VISIBLE_DEVICES": gpus[1]},
    )
    return replace(one, peer=other)


EXAMPLES = (
    Example(
        "speculation on one side",
        _pair(changed={"speculative_algorithm": None}),
        expect=("speculative_algorithm",),
    ),
    Example("page size", _pair(changed={"page_size": 64}), expect=("page_size",)),
    Example("transfer backend", _pair(decode=(_BACKEND, "nixl")), expect=(_BACKEND,)),
    Example(
        "bootstrap port",
        _pair((_PORT, "8998"), (_PORT, "8999")),
        expect=(_PORT,),
    ),
    Example("one GPU twice", _pair(gpus=("0,1", "1,2")), expect=("CUDA_VISIBLE_DEVICES",)),
    Example("a pair", _pair()),
    Example("one server", scene()),
)
