"""Variables of NCCL that contradict how the GPUs are connected.

Copied from a machine with NVLink they forbid what a PCIe machine has, or ask for what it lacks;
copied the other way they switch NVLink off.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import set_by_user
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.topology import has_nvlink, machine, ranks

_NEVER = ("LOC", "0")
"""NCCL_P2P_LEVEL for no peer-to-peer at all; as a number, 1 and above are levels of PCIe."""


def check(facts: Facts) -> Iterator[Finding]:
    if ranks(facts) < 2:
        return
    nvlink = has_nvlink(facts)
    algorithms = (set_by_user(facts, "NCCL_ALGO") or "").upper()
    level = (set_by_user(facts, "NCCL_P2P_LEVEL") or "").upper()
    off = set_by_user(facts, "NCCL_P2P_DISABLE") == "1"
    if not nvlink and "NVLS" in algorithms and "^" not in algorithms:
        yield _finding(
            "NCCL_ALGO",
            f"NCCL_ALGO={algorithms} asks for NVLS, which needs NVLink switches.",
            "NCCL has no algorithm left and the server stops when the ranks first talk.",
            "Unset NCCL_ALGO: NCCL knows what the machine has.",
        )
    if not nvlink and set_by_user(facts, "NCCL_NVLS_ENABLE") == "1":
        yield _finding(
            "NCCL_NVLS_ENABLE",
            "NCCL_NVLS_ENABLE=1 asks for multicast over NVLink, and these GPUs have none.",
            "It does nothing here, or NCCL stops while it sets multicast up.",
            "Unset NCCL_NVLS_ENABLE.",
        )
    if not nvlink and level == "NVL" and not off:
        yield _finding(
            "NCCL_P2P_LEVEL",
            "NCCL_P2P_LEVEL=NVL allows peer-to-peer over NVLink only, and there is none.",
            "All that the ranks exchange goes through host memory.",
            "Unset it, or use PIX, PXB, PHB or SYS; where peer-to-peer hangs on this machine, "
            "NCCL_P2P_DISABLE=1 says so plainly.",
        )
    if nvlink and (off or level in _NEVER):
        name, value = ("NCCL_P2P_DISABLE", "1") if off else ("NCCL_P2P_LEVEL", level)
        yield _finding(
            name,
            f"{name}={value} switches NVLink off.",
            "All that the ranks exchange goes through host memory instead of NVLink.",
            f"Unset {name}.",
        )
    no_peers = off or level in _NEVER or (not nvlink and level == "NVL")
    if no_peers and set_by_user(facts, "NCCL_SHM_DISABLE") == "1":
        yield _finding(
            "NCCL_SHM_DISABLE",
            "Peer-to-peer and shared memory are both switched off.",
            "The ranks of one machine talk over the network.",
            "Unset NCCL_SHM_DISABLE; a container needs --ipc=host or a larger --shm-size.",
        )


def _finding(name: str, message: str, consequence: str, remedy: str) -> Finding:
    return Finding(
        rule=RULE.id,
        severity=Severity.WARNING,
        subject=name,
        message=message,
        consequence=consequence,
        evidence=(
            "NVLinks that are up, from NVML",
            "NCCL's documentation of environment variables",
        ),
        remedy=Remedy(remedy),
    )


RULE = Rule(
    id="DSV604",
    title="NCCL variables against the topology",
    severity=Severity.WARNING,
    reads=("trace", "host"),
    check=check,
    about_machine=True,
)

_NVLINK = {"nvlinks": 18}

EXAMPLES = (
    Example(
        "NVLS forced on PCIe",
        machine(environment={"NCCL_ALGO": "NVLS", "NCCL_NVLS_ENABLE": "1"}),
        expect=("NCCL_ALGO", "NCCL_NVLS_ENABLE"),
    ),
    Example(
        "peer-to-peer over NVLink only, on PCIe",
        machine(environment={"NCCL_P2P_LEVEL": "NVL"}),
        expect=("NCCL_P2P_LEVEL",),
    ),
    Example(
        "NVLink switched off",
        machine(2, "sm_100", links=(_NVLINK, _NVLINK), environment={"NCCL_P2P_DISABLE": "1"}),
        expect=("NCCL_P2P_DISABLE",),
    ),
    Example(
        "NVLink switched off by its level",
        machine(2, "sm_100", links=(_NVLINK, _NVLINK), environment={"NCCL_P2P_LEVEL": "LOC"}),
        expect=("NCCL_P2P_LEVEL",),
    ),
    Example("within a PCIe switch, as a number", machine(environment={"NCCL_P2P_LEVEL": "1"})),
    Example("off on PCIe by its level", machine(environment={"NCCL_P2P_LEVEL": "LOC"})),
    Example(
        "neither peers nor shared memory",
        machine(environment={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}),
        expect=("NCCL_SHM_DISABLE",),
    ),
    Example("peer-to-peer off on PCIe", machine(environment={"NCCL_P2P_DISABLE": "1"})),
    Example("NVLS left out by name", machine(environment={"NCCL_ALGO": "^NVLS"})),
    Example(
        "NVLS where there is NVLink",
        machine(2, "sm_100", links=(_NVLINK, _NVLINK), environment={"NCCL_NVLS_ENABLE": "1"}),
    ),
    Example("one rank", machine(1, environment={"NCCL_ALGO": "NVLS"})),
)
