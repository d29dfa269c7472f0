"""Prefill and decode servers that do not fit each other: what has to be the same on both sides.

A prefill server computes a prompt's cache and sends it to a decode server, which goes on with it.
Whatever decides what is in that cache, how it lies in memory and how it is sent has to be the same
on both sides; the rest may differ.  Arguments are compared as SGLang resolves them, and where it
stops on one side before it has, as they are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsv4doctor.models import Facts, Finding, Remedy, Severity, Stack
from dsv4doctor.rules.common import flag, in_effect, same_value, set_by_user, stopped_early
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import scene

MODE = "--disaggregation-mode"
BACKEND = "--disaggregation-transfer-backend"
PORT = "--disaggregation-bootstrap-port"
DEFAULT_BOOTSTRAP = "8998"
_DEFAULT_BACKEND = "mooncake"

_LAYOUT = (
    "Their KV cache layout differs: the transfer is refused, or the decode side reads the cache "
    "wrongly."
)
_SPECULATION = (
    "Their speculative decoding differs: the transfer is refused, or the decode side reads the "
    "cache wrongly."
)
_ANSWERS = "What the client gets depends on the side that writes it."
_RESOLVED = {
    "kv_cache_dtype": _LAYOUT,
    "page_size": _LAYOUT,
    "dsv4_attn_backend": _LAYOUT,
    "pp_size": _LAYOUT,
    "speculative_algorithm": _SPECULATION,
    "speculative_num_steps": _SPECULATION,
    "speculative_eagle_topk": _SPECULATION,
    "speculative_num_draft_tokens": _SPECULATION,
    "speculative_draft_model_path": _SPECULATION,
    "speculative_draft_model_quantization": _SPECULATION,
    "quantization": "The two sides compute with different weights.",
}
"""Argument -> what a difference means; both sides have to resolve it alike."""
_ALGORITHM = "speculative_algorithm"
_NAMES = {
    "tp_size": ("--tp-size", "--tp", "--tensor-parallel-size"),
    "pp_size": ("--pp-size", "--pp", "--pipeline-parallel-size"),
    "dp_size": ("--dp-size", "--dp", "--data-parallel-size"),
}
"""Argument -> its flags, where it has more than one."""
_WRITTEN = {
    "--dtype": (Severity.ERROR, _LAYOUT),
    "--disaggregation-decode-allocation-policy": (
        Severity.ERROR,
        "One side waits for what the other never announces.",
    ),
    "--disaggregation-enable-kv-checksum": (
        Severity.WARNING,
        "The checksum is computed on one side and never compared.",
    ),
    "--chat-template": (Severity.WARNING, _ANSWERS),
    "--default-chat-template-kwargs": (Severity.WARNING, _ANSWERS),
    "--reasoning-parser": (Severity.WARNING, _ANSWERS),
    "--tool-call-parser": (Severity.WARNING, _ANSWERS),
    "--served-model-name": (Severity.WARNING, "The router knows one model by two names."),
    "--context-length": (
        Severity.WARNING,
        "A request that the one side takes is refused by the other.",
    ),
}
"""Flag -> how bad a difference is, and what it means."""
_SWITCH = re.compile(
    r"(SGLANG|SGL|FLASHINFER|DG|DEEP_GEMM|DEEPEP|TORCH|TRITON|UCX|NIXL|MOONCAKE|MC|NCCL)_\w+"
)
_OWN = re.compile(r".*(_PORT|_HOST|_IP|_ADDR|_DIR|_PATH|_CACHE|_HOME|_ID|_DEVICES?|_HCA|_SUFFIX)")
"""Variables that say where something is, and may well differ."""
_CACHE_VARIABLES = (
    *("SGLANG_DSV4_COMPRESS_STATE_DTYPE", "SGLANG_DSV4_FP4_EXPERTS"),
    *("SGLANG_DSV4_KV_LAYOUT", "SGLANG_DSV4_COMPRESSED_KV_LAYOUT"),
    *("SGLANG_OPT_USE_ONLINE_COMPRESS", "SGLANG_OPT_SM120_DIRECT_SWA_KV"),
)
"""Those that decide how the cache lies in memory, or with which weights it is computed."""
_PACKAGES = ("torch", "flashinfer-python", "sgl-kernel", "nixl", "mooncake-transfer-engine")


@dataclass(frozen=True)
class Difference:
    """One thing that both sides say, each in its way."""

    subject: str
    sides: Sequence[str]
    """What this side says, and what the other does."""
    consequence: str
    severity: Severity = Severity.ERROR


def check(facts: Facts) -> Iterator[Finding]:
    other = other_side(facts)
    if other is None:
        return
    found = list(differences(facts, other))
    traces = [side.trace for side in (facts, other) if side.trace is not None]
    if not found and any(stopped_early(trace) for trace in traces):
        raise NotChecked("SGLang stops before it has resolved one side's arguments")
    for difference in found:
        yield _finding(difference, facts, other)


def other_side(facts: Facts) -> Facts | None:
    """The other launch of the pair; None where this is no half of one."""
    if facts.peer is None:
        if flag(facts, MODE) not in ("prefill", "decode"):
            return None
        raise NotChecked("the launch of the other side is not given")
    return facts.peer


def name_of(facts: Facts) -> str:
    """How a finding calls a side."""
    return flag(facts, MODE) or "the one without a mode"


def differences(one: Facts, other: Facts) -> Iterator[Difference]:
    """What two resolved launches of a prefill/decode pair do not agree on."""
    modes = [flag(side, MODE) or "none" for side in (one, other)]
    if sorted(modes) != ["decode", "prefill"]:
        yield Difference(MODE, modes, "They are no pair of prefill and decode.")
    if one.trace is None or other.trace is None:
        raise NotChecked("one side was not traced")
    yield from _releases(one, other)
    yield from _models(one, other)
    if stopped_early(one.trace) or stopped_early(other.trace):
        yield from _as_written(one, other)
    else:
        yield from _arguments(one.trace.resolved_args, other.trace.resolved_args)
        yield from _sizes(one.trace.resolved_args, other.trace.resolved_args)
    yield from _flags(one, other)
    yield from _variables(one, other)
    yield from _stacks(one.snapshot.stack, other.snapshot.stack)


def _releases(one: Facts, other: Facts) -> Iterator[Difference]:
    assert one.trace is not None
    assert other.trace is not None
    mine, theirs = one.trace.sglang.version, other.trace.sglang.version
    if mine != theirs:
        what = "Their cache layouts and messages are those of two releases."
        yield Difference("SGLang version", (mine, theirs), what)


def _models(one: Facts, other: Facts) -> Iterator[Difference]:
    """Another checkpoint is an error, the same one by another path a warning."""
    stored = [side.snapshot.checkpoint for side in (one, other)]
    keys = [held.content_key if held else None for held in stored]
    paths = [side.snapshot.launch.model if side.snapshot.launch else None for side in (one, other)]
    if keys[0] != keys[1]:
        names = [held.name if held else "unknown" for held in stored]
        shown = [f"{path} ({name})" for path, name in zip(paths, names, strict=True)]
        what = "The decode side goes on with another model than the one that read the prompt."
        yield Difference("model path", shown, what)
    elif paths[0] != paths[1]:
        what = "Today both are the same checkpoint; the next change to one of them goes unnoticed."
        shown = [str(path) for path in paths]
        yield Difference("model path", shown, what, Severity.WARNING)


def _arguments(mine: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Difference]:
    algorithms = [args.get(_ALGORITHM) for args in (mine, theirs)]
    one_sided = (algorithms[0] is None) != (algorithms[1] is None)
    for name, consequence in _RESOLVED.items():
        if one_sided and name.startswith("speculative_") and name != _ALGORITHM:
            continue  # all of it follows from the algorithm
        if name in mine and name in theirs and mine[name] != theirs[name]:
            yield Difference(name, (str(mine[name]), str(theirs[name])), consequence)


def _as_written(one: Facts, other: Facts) -> Iterator[Difference]:
    """What both sides write, and differently; what SGLang makes of the rest is not known."""
    mine, theirs = _said(one), _said(other)
    known = {name for name in mine if name in theirs}
    if not any(flag(side, "--config") for side in (one, other)):
        known |= {_ALGORITHM, "tp_size"}
        yield from _sizes(mine, theirs)
    both = [{name: said.get(name) for name in known} for said in (mine, theirs)]
    yield from _arguments(both[0], both[1])


def _said(facts: Facts) -> dict[str, Any]:
    """Argument -> its value as the flags have it, without those that they leave out."""
    launch = facts.snapshot.launch
    flags = launch.all_flags if launch else ()
    found: dict[str, Any] = {}
    for name in (*_RESOLVED, *_NAMES):
        names = _NAMES.get(name, ("--" + name.replace("_", "-"),))
        values = [value for one in names if (value := flag(facts, one)) is not None]
        if values:
            found[name] = values[-1]
    if "--enable-dp-attention" in flags:
        found["enable_dp_attention"] = True
    return found


def _sizes(mine: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Difference]:
    """Attention ranks: equal, or at least a multiple of one another."""
    sizes = [_attention_ranks(args) for args in (mine, theirs)]
    if sizes[0] == sizes[1]:
        return
    small, large = sorted(sizes)
    if large % small:
        what = "The cache of a rank has no counterpart on the other side."
        yield Difference("tp_size", [str(size) for size in sizes], what)
    else:
        what = (
            "Every cache is cut anew on its way; SGLang refuses that for some of DeepSeek-V4's "
            "states."
        )
        yield Difference("tp_size", [str(size) for size in sizes], what, Severity.WARNING)


def _attention_ranks(args: dict[str, Any]) -> int:
    ranks = int(args.get("tp_size") or 1)
    if args.get("enable_dp_attention"):
        return max(ranks // int(args.get("dp_size") or 1), 1)
    return ranks


def _flags(one: Facts, other: Facts) -> Iterator[Difference]:
    backends = [flag(side, BACKEND) or _DEFAULT_BACKEND for side in (one, other)]
    if backends[0] != backends[1]:
        yield Difference(BACKEND, backends, "They cannot talk to each other.")
    ports = [flag(side, PORT) or DEFAULT_BOOTSTRAP for side in (one, other)]
    if ports[0] != ports[1]:
        yield Difference(PORT, ports, "The decode side finds no bootstrap.")
    for name, (severity, consequence) in _WRITTEN.items():
        values = [_written(side, name) for side in (one, other)]
        if values[0] != values[1]:
            yield Difference(name, values, consequence, severity)


def _written(facts: Facts, name: str) -> str:
    """The flag's value, "set" for a switch, "not set" without it."""
    launch = facts.snapshot.launch
    flags = launch.all_flags if launch else ()
    if name in flags:
        value = flag(facts, name)
        return "set" if value is None or value.startswith("--") else value
    return flag(facts, name) or "not set"


def _variables(one: Facts, other: Facts) -> Iterator[Difference]:
    """Switches of kernels and of the transfer."""
    for name in sorted(_names(one) | _names(other)):
        mine, theirs = (set_by_user(side, name) for side in (one, other))
        if mine == theirs or same_value(_seen(one, name), _seen(other, name)):
            continue
        in_cache = name in _CACHE_VARIABLES
        what = _LAYOUT if in_cache else "A kernel or transport is switched on one side only."
        severity = Severity.ERROR if in_cache else Severity.WARNING
        yield Difference(name, (mine or "not set", theirs or "not set"), what, severity)


def _seen(facts: Facts, name: str) -> str:
    """What the server sees, which may be the default; where SGLang stopped before that is known,
    what is set."""
    is_known = facts.trace is not None and not stopped_early(facts.trace)
    return (in_effect(facts, name) if is_known else set_by_user(facts, name)) or ""


def _names(facts: Facts) -> set[str]:
    launch = facts.snapshot.launch
    names = {*facts.snapshot.environment, *(launch.environment if launch else ())}
    return {name for name in names if _SWITCH.fullmatch(name) and not _OWN.fullmatch(name)}


def _stacks(one: Stack | None, other: Stack | None) -> Iterator[Difference]:
    versions = [
        {package.name: package.version or "not installed" for package in stack.packages}
        if stack
        else {}
        for stack in (one, other)
    ]
    for name in _PACKAGES:
        mine, theirs = (found.get(name) for found in versions)
        if mine is not None and theirs is not None and mine != theirs:
            what = "The two sides run different kernels or transports."
            yield Difference(name, (mine, theirs), what, Severity.WARNING)


def _finding(found: Difference, one: Facts, other: Facts) -> Finding:
    names = (name_of(one), name_of(other))
    same = Remedy(f"Give both launches the same {found.subject}, e.g. from one shared file.")
    return Finding(
        rule=RULE.id,
        severity=found.severity,
        subject=found.subject,
        message=(
            f"The two sides disagree about {found.subject}: {found.sides[0]} for {names[0]}, "
            f"{found.sides[1]} for {names[1]}."
        ),
        consequence=found.consequence,
        evidence=_evidence(found, one, other),
        remedy=Remedy("Give each launch its own.") if found.subject == MODE else same,
    )


def _evidence(found: Difference, one: Facts, other: Facts) -> tuple[str, ...]:
    return tuple(
        f"{side.snapshot.launch.source if side.snapshot.launch else 'a launch'}: {value}"
        for side, value in zip((one, other), found.sides, strict=True)
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
    "tp_size": 4,
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 1,
}


def pair(
    prefill: tuple[str, ...] = (),
    decode: tuple[str, ...] = (),
    changed: dict[str, object] | None = None,
    gpus: tuple[str, str] = ("0,1", "2,3"),
    **decode_scene: Any,
) -> Facts:
    """A prefill launch with its decode side, for examples."""
    one = scene(
        flags=(MODE, "prefill", "--port", "30000", *prefill),
        resolved=_ARGS,
        environment={"CUDA_VISIBLE_DEVICES": gpus[0]},
    )
    environment = {"CUDA_VISIBLE_DEVICES": gpus[1], **decode_scene.pop("environment", {})}
    other = scene(
        flags=(MODE, "decode", "--port", "30001", *decode),
        resolved={**_ARGS, **(changed or {})},
        environment=environment,
        **decode_scene,
    )
    return replace(one, peer=other)


EXAMPLES = (
    Example(
        "speculation on one side",
        pair(changed={"speculative_algorithm": None}),
        expect=("speculative_algorithm",),
    ),
    Example(
        "speculation with its steps on one side",
        pair(changed={"speculative_algorithm": None, "speculative_num_steps": None}),
        expect=("speculative_algorithm",),
    ),
    Example("page size", pair(changed={"page_size": 64}), expect=("page_size",)),
    Example("transfer backend", pair(decode=(BACKEND, "nixl")), expect=(BACKEND,)),
    Example("bootstrap port", pair((PORT, "8998"), (PORT, "8999")), expect=(PORT,)),
    Example("bootstrap port on one side", pair((PORT, "9000")), expect=(PORT,)),
    Example("model path", pair(path="/models/other"), expect=("model path",)),
    Example("a multiple of ranks", pair(changed={"tp_size": 2}), expect=("tp_size",)),
    Example("another release", pair(version="0.5.22"), expect=("SGLang version",)),
    Example(
        "a kernel switch on one side",
        pair(environment={"SGLANG_SM120_FLASHMLA_BACKEND": "triton"}),
        expect=("SGLANG_SM120_FLASHMLA_BACKEND",),
    ),
    Example(
        "a kernel switch as it is anyway on one side",
        pair(environment={"SGLANG_SM120_FLASHMLA_BACKEND": "flashinfer"}),
    ),
    Example(
        "the cache's layout as it is anyway on one side",
        pair(environment={"SGLANG_DSV4_FP4_EXPERTS": "1"}),
    ),
    Example(
        "a switch as it is by default on one side, where SGLang sets another value",
        pair(environment={"SGLANG_OPT_DEEPGEMM_HC_PRENORM": "1"}, overwritten={}),
        expect=("SGLANG_OPT_DEEPGEMM_HC_PRENORM",),
    ),
    Example(
        "parser on one side",
        pair(decode=("--tool-call-parser", "deepseekv4")),
        expect=("--tool-call-parser",),
    ),
    Example("two prefill servers", pair(decode=(MODE, "prefill")), expect=(MODE,)),
    Example("a pair", pair()),
    Example("one server", scene()),
)
