"""NUMA binding where the container does not allow it.

Docker's default seccomp filter lets a process set its memory policy only with CAP_SYS_NICE, and a
cpuset may leave the node out that is bound to: numactl stops, or SGLang dies in its first worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.models import Facts, Finding, HostFacts, Remedy, Severity
from dsv4doctor.rules.common import both, numa_nodes
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import gpus, scene

_FLAG = "--numa-node"


def check(facts: Facts) -> Iterator[Finding]:
    host, launch = facts.snapshot.host, facts.snapshot.launch
    assert host is not None
    assert launch is not None
    nodes = numa_nodes(launch.all_flags)
    by = [_FLAG] if nodes else []
    by += ["numactl"] if "numactl" in launch.wrappers else []
    if not by:
        return
    missing = sorted(set(nodes) - set(host.memory_nodes)) if host.memory_nodes else []
    if missing:
        yield _finding(
            facts,
            f"{_FLAG} names node {both([str(node) for node in missing])}, from which this process "
            "may not take memory.",
            f"Mems_allowed_list: {','.join(map(str, host.memory_nodes))}",
            "Give nodes that the container has, or widen its cpuset (docker --cpuset-mems).",
        )
    if host.may_set_memory_policy is None:
        raise NotChecked("whether set_mempolicy is allowed could not be read")
    if not host.may_set_memory_policy:
        yield _finding(
            facts,
            f"{both(by)} needs set_mempolicy, which this container's seccomp filter allows with "
            "CAP_SYS_NICE only.",
            f"/proc/self/status: a seccomp filter and no CAP_SYS_NICE ({host.container or 'host'})",
            "Start the container with --cap-add SYS_NICE, or leave the binding out.",
        )


def _finding(facts: Facts, message: str, evidence: str, remedy: str) -> Finding:
    return Finding(
        rule=RULE.id,
        severity=Severity.WARNING,
        subject="NUMA binding",
        message=message,
        consequence=(
            "The binding fails with Operation not permitted or Invalid argument: the server stops "
            "or runs unbound, by the release."
        ),
        evidence=(evidence,),
        remedy=Remedy(remedy),
    )


RULE = Rule(
    id="DSV501",
    title="NUMA binding in a restricted container",
    severity=Severity.WARNING,
    reads=("launch", "host"),
    check=check,
    about_machine=True,
)

_FREE = HostFacts(memory_nodes=(0, 1), may_set_memory_policy=True)
_LOCKED = HostFacts(memory_nodes=(0, 1), may_set_memory_policy=False, container="docker")
_BOTH = (_FLAG, "0", "1")

EXAMPLES = (
    Example(
        "no CAP_SYS_NICE",
        scene(flags=_BOTH, host=_LOCKED, gpus=gpus(2)),
        expect=("NUMA binding",),
    ),
    Example(
        "a node outside the cpuset",
        scene(flags=_BOTH, host=replace(_FREE, memory_nodes=(0,)), gpus=gpus(2)),
        expect=("NUMA binding",),
    ),
    Example("allowed", scene(flags=_BOTH, host=_FREE, gpus=gpus(2))),
    Example("no binding asked for", scene(host=_LOCKED, gpus=gpus(2))),
)
