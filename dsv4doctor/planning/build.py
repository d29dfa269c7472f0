"""From what the user asks and what is there to a plan that is not yet proved."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.features import read_features
from dsv4doctor.facts.files import shown
from dsv4doctor.memory import TorchIndexer
from dsv4doctor.models import Gpu, GpuFacts, TreeFeatures
from dsv4doctor.planning import settings, topology
from dsv4doctor.planning.layout import NUMACTL, Part, Plan, Ports, Server, Setting
from dsv4doctor.planning.ports import Allotment
from dsv4doctor.planning.release import Release, read_release
from dsv4doctor.planning.settings import Wanted
from dsv4doctor.planning.sizing import Load, Size, size
from dsv4doctor.planning.topology import Side
from dsv4doctor.rules.draft_of_other_kind import kinds_stored
from dsv4doctor.target import Target

_CONTEXT = 131072
_HOST = re.compile(r"[\w.:-]{1,253}", re.ASCII)
_ROUTER_PORT = 8000
_BOOTSTRAP = 998
_DIST_INIT = 500
_METRICS = 900


@dataclass(frozen=True)
class Ask:
    """The options of `plan`, as said."""

    pair: bool
    gpus: str | None = None
    gpu_memory: float | None = None
    context: int | None = None
    requests: int = 32
    transfer: str = "nixl"
    speculative: str = "none"
    thinking: str = "as-released"
    """ "on" or "off" for requests that do not say; else what this SGLang does."""
    host: str = "127.0.0.1"
    port: int | None = None
    """Of the router, or of the one server."""
    port_base: int = 30000
    flags: tuple[str, ...] = ()
    """SGLang's, after `--`."""
    variables: tuple[tuple[str, str], ...] = ()
    """--env."""
    python: str | None = None
    """The serving environment's, as given."""


@dataclass(frozen=True)
class Ground:
    """What a plan stands on."""

    target: Target
    release: Release
    features: TreeFeatures
    gpus: tuple[Gpu, ...]
    divisors: tuple[int, ...]
    is_busy: Callable[[int], bool] | None
    """None: another machine is planned for."""
    ask: Ask
    indexer: TorchIndexer | None = None
    """The one in torch operations, once a trace has shown that it is what runs."""


def ground(ask: Ask, target: Target, is_busy: Callable[[int], bool] | None) -> Ground:
    """The GPUs and the release; UsageError where there is nothing to plan for."""
    named = topology.parse_gpus(ask.gpus) if ask.gpus else ()
    facts = target.snapshot.gpu
    seen = tuple(gpu for gpu in facts.gpus if gpu.arch == target.arch)
    of_arch = replace(facts, gpus=seen if not named else facts.gpus)
    if facts.gpus and not of_arch.gpus:
        of_arch = GpuFacts((), unavailable=f"there are none of {target.arch.name}")
    gpus = topology.choose(of_arch, named, target.arch, ask.gpu_memory)
    config = target.checkpoint.text_config
    divided = ("num_attention_heads", "n_routed_experts", "o_groups")
    divisors = topology.sizes_allowed(*(_number(config, name) for name in divided))
    root = Path(target.tree.root)
    return Ground(target, read_release(root), read_features(root), gpus, divisors, is_busy, ask)


def plan(ask: Ask, on: Ground) -> Plan:
    """The servers, the router and their settings; UsageError where they cannot be had."""
    model = _model(on.target)
    _check(ask, on, model)
    wanted = _wanted(ask, on)
    ports = Allotment(on.is_busy)
    if ask.pair:
        sides: tuple[Side, ...] = topology.divide(on.gpus, on.divisors)
        outside = _outside(ask, ports, _ROUTER_PORT, "the router")
        pairs = _pair_ports(ask, ports)
        metrics = ports.near(min(ask.port_base + _METRICS, 65000), "the router's metrics")
        parts: tuple[Part, ...] = (Part.PREFILL, Part.DECODE)
    else:
        sides = (topology.together(on.gpus, on.divisors),)
        service = _outside(ask, ports, ask.port_base, "the server")
        pairs = [Ports(service, _dist_init(ask, ports, 0))]
        parts = (Part.SINGLE,)
    sizes = [_size(part, side, wanted, on) for part, side in zip(parts, sides, strict=True)]
    servers = tuple(
        settings.server(part, side, given, wanted, sized, on.release, on.target.checkpoint)
        for part, side, given, sized in zip(parts, sides, pairs, sizes, strict=True)
    )
    variables = tuple(Setting(name, (value,), "given with --env") for name, value in ask.variables)
    variables += settings.thinking_variable(ask.thinking, on.release)
    return Plan(
        model=model,
        model_name=on.target.checkpoint.name,
        interpreter=ask.python or _interpreter(on.target),
        release=on.target.tree.version,
        arch=on.target.arch,
        host=ask.host,
        shared=settings.shared_environment(variables),
        servers=servers,
        router=settings.router(servers[0], servers[1], ask.host, outside, metrics)
        if ask.pair
        else None,
        notes=(*_notes(ask, on, servers), *ports.moved),
        problems=tuple(
            f"{part.value}: {sized.short}"
            for part, sized in zip(parts, sizes, strict=True)
            if sized.short
        ),
    )


def _wanted(ask: Ask, on: Ground) -> Wanted:
    extra = settings.parse_extra(ask.flags)
    if ask.speculative == "auto":
        named = {setting.name for setting in extra}
        stored = settings.speculation(on.target.checkpoint, kinds_stored(on.target.checkpoint))
        extra += tuple(setting for setting in stored if setting.name not in named)
    named = {setting.name for setting in extra}
    thinks = settings.thinking_flag(ask.thinking, on.release)
    extra += tuple(setting for setting in thinks if setting.name not in named)
    context, why = _context(ask, on)
    host = on.target.snapshot.host
    return Wanted(
        context=context,
        context_why=why,
        requests=ask.requests,
        host=ask.host,
        transfer=ask.transfer,
        may_bind=host.may_set_memory_policy if host is not None else None,
        extra=extra,
    )


def _context(ask: Ask, on: Ground) -> tuple[int, str]:
    limit = _number(on.target.checkpoint.text_config, "max_position_embeddings")
    if ask.context is not None:
        if limit is not None and ask.context > limit:
            raise UsageError(
                f"--context {ask.context}: the model takes {limit:,} tokens at most",
                f"give up to {limit}",
            )
        return ask.context, "as asked with --context"
    if limit is not None and limit < _CONTEXT:
        return limit, "the model's own limit; change it with --context"
    return _CONTEXT, "nothing was asked; change it with --context"


def _check(ask: Ask, on: Ground, model: str) -> None:
    """UsageError for what cannot be written, or what this SGLang has not."""
    backends = on.release.transfer_backends
    if ask.pair and backends and ask.transfer not in backends:
        raise UsageError(
            f"--transfer {shown(ask.transfer)}: this SGLang has no such transfer backend",
            f"it has: {', '.join(backends)}",
        )
    if not _HOST.fullmatch(ask.host):
        raise UsageError(f"--host {shown(ask.host)}: no name or address", "e.g. --host 0.0.0.0")
    for what, value in (("MODEL", model), *((f"--env {name}", v) for name, v in ask.variables)):
        if not value.isprintable():  # an environment file has a line for each variable
            raise UsageError(f"{what}: a value with control characters", "give it without")


def _outside(ask: Ask, ports: Allotment, usual: int, what: str) -> int:
    """The port that the outside talks to."""
    return ports.exactly(ask.port, "--port") if ask.port is not None else ports.near(usual, what)


def _pair_ports(ask: Ask, ports: Allotment) -> list[Ports]:
    services = [ports.near(ask.port_base + at, f"the {name} server") for at, name in _SIDES]
    bootstrap = ports.near(min(ask.port_base + _BOOTSTRAP, 65000), "the bootstrap server")
    return [
        Ports(service, _dist_init(ask, ports, number), bootstrap)
        for number, service in enumerate(services)
    ]


_SIDES = ((0, "prefill"), (1, "decode"))


def _dist_init(ask: Ask, ports: Allotment, number: int) -> int:
    """Ten apart: SGLang takes the ones behind it too, with data-parallel attention."""
    start = min(ask.port_base + _DIST_INIT, 65000) + 10 * number
    return ports.near(start, "the ranks' meeting point")


def _size(part: Part, side: Side, wanted: Wanted, on: Ground) -> Size:
    return size(
        on.target.checkpoint,
        on.features,
        memory=min(gpu.memory_bytes for gpu in side.gpus),
        ranks=len(side.gpus),
        attentions=wanted.attentions,
        load=Load(wanted.context, wanted.requests, wanted.draft_tokens),
        prefills=part is not Part.DECODE,
        decodes=part is not Part.PREFILL,
        indexer=on.indexer,
    )


def _model(target: Target) -> str:
    """As the servers will be told: a folder of this machine by its whole path."""
    named = target.launch.model or target.checkpoint.path
    return os.path.abspath(named) if os.path.isdir(named) else named


def _interpreter(target: Target) -> str:
    """The serving environment's Python where it is known, else whichever is first on PATH."""
    if not target.tree.borrowed:
        return str(target.interpreter)
    return target.launch.interpreter or "python"


def _notes(ask: Ask, on: Ground, servers: Sequence[Server]) -> list[str]:
    found = []
    host = on.target.snapshot.host
    if not all(server.nodes for server in servers):
        found.append("the GPUs' NUMA nodes are not known: nothing is bound, see --gpus")
    elif host is not None and host.may_set_memory_policy is False:
        found.append("this container may not bind memory to NUMA nodes: nothing is bound")
    elif any(len(server.nodes) > 1 for server in servers):
        found.append("tensor parallelism across NUMA nodes: nothing is bound")
    if ask.pair and len({server.nodes for server in servers}) == 1 and servers[0].nodes:
        found.append("all GPUs are on one NUMA node: both sides share its CPUs and memory")
    if any(server.bind for server in servers):
        found.append(NUMACTL)
    if on.features.indexer_replaced and on.target.arch.is_sm12x:
        found.append(
            "the memory is planned for dsv4doctor's indexer (FIX104): `dsv4doctor kernels verify "
            "--only indexer_logits` on the serving machine, else SGLang's takes far more"
        )
    if on.is_busy is None:
        found.append("another machine is planned for: whether its ports are free was not asked")
    if ask.pair and ask.transfer == "nixl":
        found.append("NIXL has to be installed in the serving environment (package nixl)")
    if ask.pair:
        found.append("the router is the package sglang-router")
    return found


def _number(config: dict[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
