"""Every flag and variable of a plan's servers and router, each with its reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dsv4doctor.errors import UsageError
from dsv4doctor.models import Checkpoint
from dsv4doctor.planning.layout import INSIDE, Part, Ports, Router, Server, Setting
from dsv4doctor.planning.release import Release
from dsv4doctor.planning.sizing import Size, gib
from dsv4doctor.planning.topology import Side

_DECIDED = (
    *("--model", "--model-path", "--host", "--port", "--tp", "--tp-size"),
    *("--tensor-parallel-size", "--base-gpu-id", "--dist-init-addr", "--nccl-port", "--nnodes"),
    *(
        "--node-rank",
        "--disaggregation-mode",
        "--disaggregation-bootstrap-port",
        "--context-length",
    ),
    *("--disaggregation-transfer-backend", "--config"),
)
"""Flags that the plan gives, each with the option of ours that changes it."""
_INSTEAD = {
    "--context-length": "--context",
    "--disaggregation-transfer-backend": "--transfer",
    "--host": "--host in front of `--`",
    "--port": "--port in front of `--`",
    "--model-path": "MODEL",
    "--model": "MODEL",
}
_REPLICAS = ("--dp-size", "--data-parallel-size", "--dp")
EAGLE_STEPS = (
    ("--speculative-num-steps", "1"),
    ("--speculative-eagle-topk", "1"),
    ("--speculative-num-draft-tokens", "2"),
)


@dataclass(frozen=True)
class Wanted:
    """What every server of a plan is asked for."""

    context: int
    context_why: str
    requests: int
    host: str
    """The address that the outside reaches."""
    transfer: str
    may_bind: bool | None
    """Whether the machine lets a process bind its memory; None: not known."""
    extra: tuple[Setting, ...] = ()
    """The user's own flags for SGLang, and speculation's."""

    @property
    def draft_tokens(self) -> int:
        """Tokens that speculation verifies in a step; 1 without speculation."""
        named = {setting.name: setting.values for setting in self.extra}
        if "--speculative-algorithm" not in named:
            return 1
        said = "".join(named.get("--speculative-num-draft-tokens", ()))
        return int(said) if said.isdigit() and int(said) > 1 else 4

    @property
    def attentions(self) -> int:
        """Replicas of the attention among a server's ranks; 1 without data-parallel attention."""
        named = {setting.name: setting.values for setting in self.extra}
        if "--enable-dp-attention" not in named:
            return 1
        said = "".join("".join(named.get(name, ())) for name in _REPLICAS)
        return int(said) if said.isdigit() and int(said) > 1 else 1


def parse_extra(words: Sequence[str]) -> tuple[Setting, ...]:
    """SGLang's flags after `--`; UsageError for one that the plan itself decides."""
    found: dict[str, Setting] = {}
    name, values = "", []
    for word in (*words, "--"):
        if not word.startswith("--"):
            if not name:
                raise UsageError(f"{word[:80]}: no flag of SGLang", "flags start with `--`")
            values.append(word)
            continue
        if name:
            found[name] = Setting(name, tuple(values), "given after `--`")
        name, equals, value = word.partition("=")
        values = [value] if equals else []
        if name in _DECIDED:
            hint = f"change it with {_INSTEAD[name]}" if name in _INSTEAD else "leave it out"
            raise UsageError(f"{name} after `--`: the plan decides it for each server", hint)
    return tuple(found.values())


def speculation(checkpoint: Checkpoint, kinds: Iterable[str]) -> tuple[Setting, ...]:
    """For the draft that the checkpoint stores, of `kinds`; UsageError where it stores none."""
    stored = set(kinds)
    why = f"{checkpoint.name} stores a {' and '.join(sorted(stored))} draft; equal on both sides"
    if "DSpark" in stored:
        return (Setting("--speculative-algorithm", ("DSPARK",), why),)
    if "NextN" in stored:
        steps = tuple(
            Setting(name, (value,), "one guess a step; equal on both sides")
            for name, value in EAGLE_STEPS
        )
        return (Setting("--speculative-algorithm", ("EAGLE",), why), *steps)
    raise UsageError(
        f"--speculative auto: {checkpoint.name} stores no draft that is known",
        "give the --speculative-* flags after `--`, or leave it out",
    )


_THINKING_FLAG, _THINKING_VARIABLE = "--default-chat-template-kwargs", "SGLANG_DEFAULT_THINKING"


def thinking_flag(asked: str, release: Release) -> tuple[Setting, ...]:
    """For releases that have a flag for what requests do not say."""
    if asked not in ("on", "off") or _THINKING_FLAG not in release.options:
        return ()
    value = json.dumps({"thinking": asked == "on"})
    return (Setting(_THINKING_FLAG, (value,), "as asked with --thinking; a request may differ"),)


def thinking_variable(asked: str, release: Release) -> tuple[Setting, ...]:
    """For those that have not."""
    if asked not in ("on", "off") or _THINKING_FLAG in release.options:
        return ()
    value = "1" if asked == "on" else "0"
    return (
        Setting(_THINKING_VARIABLE, (value,), "as asked with --thinking; a request may differ"),
    )


# ------------------------------------------------------------------------------ servers


def server(
    part: Part,
    side: Side,
    ports: Ports,
    wanted: Wanted,
    size: Size,
    release: Release,
    checkpoint: Checkpoint,
) -> Server:
    """The server of `part` on the GPUs of `side`; only flags that the release knows."""
    nodes = side.nodes
    bind = bool(nodes) and len(nodes) == 1 and wanted.may_bind is not False
    planned = [
        *_network(part, ports, wanted),
        *_parallel(side),
        *_memory(part, size, wanted),
        *(_disaggregation(part, ports, wanted) if part is not Part.SINGLE else ()),
        *_answers(release, checkpoint),
        Setting("--enable-metrics", (), "for the Prometheus and Grafana files"),
    ]
    own = {setting.name: setting for setting in wanted.extra}
    names = {setting.name for setting in planned}
    flags = [own.get(setting.name, setting) for setting in planned]
    flags += [setting for setting in wanted.extra if setting.name not in names]
    known = [flag for flag in flags if flag.name in release.options or flag in wanted.extra]
    devices = ",".join(str(gpu.index) for gpu in side.gpus)
    return Server(
        part=part,
        gpus=side.gpus,
        nodes=nodes,
        bind=bind,
        ports=ports,
        flags=tuple(known),
        environment=(Setting("CUDA_VISIBLE_DEVICES", (devices,), _devices_why(part, side)),),
    )


def _devices_why(part: Part, side: Side) -> str:
    nodes = side.nodes
    where = f"those of NUMA node {_list(nodes)}" if nodes else "their NUMA node is not known"
    return where if part is Part.SINGLE else f"{where}; the other side has the others"


def _network(part: Part, ports: Ports, wanted: Wanted) -> list[Setting]:
    is_single = part is Part.SINGLE
    host = wanted.host if is_single else INSIDE
    why = "as asked" if is_single else "only the router talks to it"
    return [
        Setting("--host", (host,), why),
        Setting("--port", (str(ports.service),), "used by nothing else of the plan"),
        Setting(
            "--dist-init-addr",
            (f"{INSIDE}:{ports.dist_init}",),
            "the ranks meet here; fixed, so that two servers never draw the same port",
        ),
    ]


def _parallel(side: Side) -> list[Setting]:
    count = len(side.gpus)
    return [Setting("--tp-size", (str(count),), f"all {count} GPUs hold one copy of the model")]


def _memory(part: Part, size: Size, wanted: Wanted) -> list[Setting]:
    found = [
        Setting("--context-length", (str(size.context),), wanted.context_why),
        Setting("--mem-fraction-static", (f"{size.fraction:g}",), _fraction_why(size)),
    ]
    if size.chunk is not None:
        why = "the largest of 8192, 4096 and 2048 that leaves room for a request of full length"
        if size.indexer:
            why = (
                "the largest with which that and the indexer's rows fit, one for each new token "
                "in torch operations"
            )
        found.append(Setting("--chunked-prefill-size", (str(size.chunk),), why))
    if part is not Part.PREFILL:
        count = str(wanted.requests)
        why = "requests that run at once, as asked with --requests"
        found.append(Setting("--max-running-requests", (count,), why))
        why = "graphs for no batch that --max-running-requests does not allow: memory and time"
        found.append(Setting("--cuda-graph-max-bs-decode", (count,), why))
    return found


def _fraction_why(size: Size) -> str:
    parts = f"{gib(size.weights.total)} of weights"
    if size.tokens is not None and size.kv_token is not None:
        asked = size.context * size.kv_token
        parts += (
            f", {gib(asked)} for a request of {size.context:,} tokens, KV cache for "
            f"{size.tokens:,} tokens in all"
        )
    scores = (
        f", {gib(size.indexer)} of it for the indexer's torch operations" if size.indexer else ""
    )
    return (
        f"{gib(size.memory)} of memory less {gib(size.reserve)} for activations and CUDA graphs"
        f"{scores}; in it {parts}"
    )


def _disaggregation(part: Part, ports: Ports, wanted: Wanted) -> list[Setting]:
    bootstrap = "the decode side asks the prefill side for its ranks here; equal on both sides"
    return [
        Setting("--disaggregation-mode", (part.value,), "its half of the pair"),
        Setting(
            "--disaggregation-transfer-backend",
            (wanted.transfer,),
            "moves the KV cache; equal on both sides",
        ),
        Setting("--disaggregation-bootstrap-port", (str(ports.bootstrap),), bootstrap),
    ]


def _answers(release: Release, checkpoint: Checkpoint) -> list[Setting]:
    """The parsers of the model's family, as this release names them."""
    reasoning, tools = parsers(release, checkpoint)
    found = []
    if reasoning is not None:
        why = "keeps the thinking apart from the answer, as this family writes it"
        found.append(Setting("--reasoning-parser", (reasoning,), why))
    if tools is not None:
        why = "tool calls as this family writes them"
        found.append(Setting("--tool-call-parser", (tools,), why))
    return found


def parsers(release: Release, checkpoint: Checkpoint) -> tuple[str | None, str | None]:
    """The reasoning parser and the tool-call parser for the model's family; None where the
    release has none."""
    is_v41 = checkpoint.config.get("model_type") == "deepseek_v41"
    return (
        _named(release.reasoning_parsers, "deepseek-v41" if is_v41 else "deepseek-v4"),
        _named(release.tool_parsers, "deepseekv41" if is_v41 else "deepseekv4"),
    )


def _named(names: Sequence[str], name: str) -> str | None:
    return name if name in names else None


# ------------------------------------------------------------------------------ the rest


def router(prefill: Server, decode: Server, host: str, port: int, metrics: int) -> Router:
    """In front of both."""
    flags = (
        Setting("--pd-disaggregation", (), "a request is prefilled there and decoded here"),
        Setting(
            "--prefill",
            (f"http://{INSIDE}:{prefill.ports.service}", str(prefill.ports.bootstrap)),
            "the prefill server and its bootstrap port",
        ),
        Setting("--decode", (f"http://{INSIDE}:{decode.ports.service}",), "the decode server"),
        Setting("--host", (host,), "what the outside talks to"),
        Setting("--port", (str(port),), "used by nothing else of the plan"),
        Setting("--prometheus-host", (INSIDE,), "only Prometheus on this machine asks"),
        Setting("--prometheus-port", (str(metrics),), "the router's own metrics"),
    )
    return Router(flags, port, metrics)


def shared_environment(found: Sequence[Setting]) -> tuple[Setting, ...]:
    """The variables of every server; `found`: what the release needs."""
    order = Setting(
        "CUDA_DEVICE_ORDER", ("PCI_BUS_ID",), "GPU numbers as the driver lists them, not by speed"
    )
    return (order, *found)


def with_flags(planned: Server, before: Sequence[str], after: Sequence[str], why: str) -> Server:
    """`planned` with the difference between two command lines: flags that are in `before` only
    are taken out, and those that are new or other in `after` come in for the reason `why`."""
    old, new = grouped(before), grouped(after)
    kept = [
        flag
        for flag in planned.flags
        if (flag.name in new or flag.name not in old) and new.get(flag.name) == old.get(flag.name)
    ]
    added = [Setting(name, values, why) for name, values in new.items() if old.get(name) != values]
    return replace(planned, flags=(*kept, *added))


def grouped(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Flag -> its values."""
    found: dict[str, tuple[str, ...]] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = (value,) if equals else ()
        elif name is not None:
            found[name] += (word,)
    return found


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
