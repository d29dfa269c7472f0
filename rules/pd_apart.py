"""Prefill and decode servers that get in each other's way: what must not be the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from dsv4doctor.models import Facts, Finding, Remedy, RouterLaunch, Severity
from dsv4doctor.rules.common import flag, numa_nodes
from dsv4doctor.rules.pd_pair import DEFAULT_BOOTSTRAP, MODE, PORT, name_of, other_side, pair
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import gpus, scene
from dsv4doctor.rules.topology import placement, visible_gpus

_SERVICE = "30000"
"""SGLang's default port."""
_OWN_PORTS = (
    "--nccl-port",
    "--engine-info-bootstrap-port",
    "--grpc-port",
    "--encoder-bootstrap-port",
)
_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Devices:
    """The GPUs that a launch takes."""

    names: tuple[str, ...]
    """Indices or UUIDs, as CUDA_VISIBLE_DEVICES has them."""
    named: bool
    """The launch says which; False: they are the first ones by default."""


def check(facts: Facts) -> Iterator[Finding]:
    other = other_side(facts)
    if other is None:
        return
    together = _together(facts, other)
    if together is False:
        return
    severity = Severity.ERROR if together else Severity.WARNING
    yield from _shared_gpus(facts, other, severity)
    yield from _shared_ports(facts, other, severity)
    yield from _nodes(facts, other)


def _together(one: Facts, other: Facts) -> bool | None:
    """Whether the two run on one machine; None: nothing tells."""
    if one.snapshot.gpu != other.snapshot.gpu:
        return False
    router = one.router or other.router
    if router is not None:
        hosts = {host_of(url) for url in (*(url for url, _ in router.prefill), *router.decode)}
        hosts = {"127.0.0.1" if host in LOOPBACK else host for host in hosts}
        return len(hosts) < 2
    # Whoever divides a machine's GPUs says which are whose.
    return True if any(devices(side).named for side in (one, other)) else None


LOOPBACK = frozenset(("127.0.0.1", "localhost", "::1", "0.0.0.0", "::"))


def host_of(url: str) -> str:
    try:
        return urlsplit(url if "//" in url else f"//{url}").hostname or ""
    except ValueError:
        return ""


# ------------------------------------------------------------------------------ GPUs


def devices(facts: Facts) -> Devices:
    """The GPUs of a launch, by its variables and flags."""
    names = visible_gpus(facts)
    taken = placement(facts)
    numbers = dict.fromkeys(taken.numbers(len(names) or taken.last + 1))
    if names:
        return Devices(tuple(names[number] for number in numbers) or names, True)
    return Devices(tuple(str(number) for number in numbers), taken.base > 0 or taken.step > 1)


def _shared_gpus(one: Facts, other: Facts, severity: Severity) -> Iterator[Finding]:
    sides = [devices(side) for side in (one, other)]
    shared = sorted(set(sides[0].names) & set(sides[1].names))
    if not shared:
        return
    yield _finding(
        _names(one, other),
        _DEVICES,
        f"Both sides take GPU {', '.join(shared)}",
        "On one machine the second to start runs out of memory.",
        [", ".join(side.names) for side in sides],
        severity,
    )


# ------------------------------------------------------------------------------ ports


def ports_of(facts: Facts) -> dict[str, str]:
    """Port -> what a launch listens with there."""
    found = {flag(facts, "--port") or _SERVICE: "--port"}
    meeting = flag(facts, "--dist-init-addr")
    match = re.search(r":(\d+)$", meeting or "")
    if match:
        found.setdefault(match[1], "--dist-init-addr")
    for name in _OWN_PORTS:
        value = flag(facts, name)
        if value is not None:
            found.setdefault(value, name)
    if name_of(facts) == "prefill":
        found.setdefault(flag(facts, PORT) or DEFAULT_BOOTSTRAP, PORT)
    return found


def router_ports(router: RouterLaunch) -> dict[str, str]:
    found = {router.port: "--port"}
    if router.metrics_port is not None:
        found.setdefault(router.metrics_port, "the router's --prometheus-port")
    return found


def _shared_ports(one: Facts, other: Facts, severity: Severity) -> Iterator[Finding]:
    mine, theirs = ports_of(one), ports_of(other)
    router = one.router or other.router
    for port in sorted(set(mine) & set(theirs)):
        clash = (port, mine[port], theirs[port])
        yield _port_finding(_names(one, other), clash, severity)
    for port, what in router_ports(router).items() if router else ():
        for side, ports in ((one, mine), (other, theirs)):
            if port in ports:
                clash = (port, what, ports[port])
                yield _port_finding(("router", name_of(side)), clash, severity)


def _port_finding(
    names: tuple[str, str], clash: tuple[str, str, str], severity: Severity
) -> Finding:
    port, mine, theirs = clash
    return _finding(
        names,
        f"port {port}",
        f"Two servers want port {port}: {names[0]} ({mine}) and {names[1]} ({theirs})",
        "The second to start stops with the address already in use.",
        [f"{port} ({mine})", f"{port} ({theirs})"],
        severity,
    )


# ------------------------------------------------------------------------------ NUMA


def _nodes(one: Facts, other: Facts) -> Iterator[Finding]:
    mine, theirs = bound_to(one), bound_to(other)
    if mine and mine == theirs and _several_nodes(one, other):
        yield _finding(
            _names(one, other),
            "NUMA node",
            f"Both sides are bound to NUMA node {_list(mine)}",
            "They share its cores and its memory while another node idles.",
            [_list(mine), _list(theirs)],
            Severity.WARNING,
        )


def bound_to(facts: Facts) -> tuple[int, ...]:
    """The NUMA nodes that numactl or --numa-node binds a launch to."""
    launch = facts.snapshot.launch
    if launch is None:
        return ()
    return tuple(sorted({*launch.numa_nodes, *numa_nodes(launch.all_flags)}))


def _several_nodes(one: Facts, other: Facts) -> bool:
    """False only where the serving machine is known to have one node."""
    for side in (one, other):
        host = side.snapshot.host
        if host is not None and side.snapshot.gpu.gpus and host.numa_nodes:
            return len(host.numa_nodes) > 1
    return True


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(str(number) for number in numbers)


def _names(one: Facts, other: Facts) -> tuple[str, str]:
    return name_of(one), name_of(other)


def _finding(
    names: tuple[str, str],
    subject: str,
    what: str,
    consequence: str,
    values: list[str],
    severity: Severity,
) -> Finding:
    return Finding(
        rule=RULE.id,
        severity=severity,
        subject=subject,
        message=f"{what}.",
        consequence=consequence,
        evidence=(
            f"{names[0]}: {values[0]}",
            f"{names[1]}: {values[1]}",
        ),
        remedy=Remedy(
            "Give each launch its own; `dsv4doctor plan pd` divides GPUs, ports and nodes."
        ),
    )


RULE = Rule(
    id="DSV702",
    title="Prefill and decode servers in each other's way",
    severity=Severity.ERROR,
    reads=("launch",),
    check=check,
    about_machine=True,
)


def _bound(first: int, second: int) -> Facts:
    """A pair on GPUs 0, 1 (node 0) and 2, 3 (node 1), each bound to a node."""
    half = gpus(4)
    there = tuple(replace(gpu, numa_node=gpu.index // 2) for gpu in half)
    one = pair(gpus=("0,1", "2,3"))
    assert one.peer is not None
    sides = []
    for side, node in ((one, first), (one.peer, second)):
        launch = side.snapshot.launch
        assert launch is not None
        assert side.trace is not None
        args = {**side.trace.resolved_args, "tp_size": 2}
        facts = replace(side.snapshot.gpu, gpus=there)
        snapshot = replace(side.snapshot, launch=replace(launch, numa_nodes=(node,)), gpu=facts)
        sides.append(
            replace(side, snapshot=snapshot, trace=replace(side.trace, resolved_args=args))
        )
    return replace(sides[0], peer=sides[1])


_NCCL = ("--nccl-port", "40000")

EXAMPLES = (
    Example("one GPU twice", pair(gpus=("0,1", "1,2")), expect=(_DEVICES,)),
    Example(
        "every other GPU, and the next",
        pair(("--gpu-id-step", "2"), ("--base-gpu-id", "4"), gpus=("", "")),
        expect=(_DEVICES,),
    ),
    Example(
        "every other GPU, and those between",
        pair(("--gpu-id-step", "2"), ("--base-gpu-id", "1", "--gpu-id-step", "2"), gpus=("", "")),
    ),
    Example(
        "replicas that reach into the other's GPUs",
        pair(decode=("--base-gpu-id", "4"), changed={"dp_size": 2}, gpus=("8,9,10,11", "")),
        expect=(_DEVICES,),
    ),
    Example("one port twice", pair(decode=("--port", "30000")), expect=("port 30000",)),
    Example("one rendezvous", pair(_NCCL, _NCCL), expect=("port 40000",)),
    Example(
        "a service port that is the other's bootstrap",
        pair((PORT, "30001"), (PORT, "30001")),
        expect=("port 30001",),
    ),
    Example("one node for both", _bound(0, 0), expect=("NUMA node",)),
    Example("each on its own node", _bound(0, 1)),
    Example(
        "two launches that say nothing",
        replace(scene(flags=(MODE, "prefill")), peer=scene(flags=(MODE, "decode"))),
        expect=(_DEVICES, "port 30000"),
    ),
    Example("a pair", pair()),
    Example("one server", scene()),
)
