"""Bridges that send peer-to-peer traffic up to the root complex (ACS), and an IOMMU that
translates it, on a machine whose ranks talk over PCIe.

NCCL's documentation names both as what makes peer-to-peer over PCIe slow or hang on bare metal;
in a virtual machine they have to stay on.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import set_by_user
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.topology import has_nvlink, machine, ranks, topology


def check(facts: Facts) -> Iterator[Finding]:
    if ranks(facts) < 2 or set_by_user(facts, "NCCL_P2P_DISABLE") == "1" or has_nvlink(facts):
        return
    found = topology(facts)
    if found.acs_redirect:
        yield Finding(
            rule=RULE.id,
            severity=Severity.WARNING,
            subject="ACS",
            message=f"{len(found.acs_redirect)} PCIe bridges above the GPUs redirect peer-to-peer "
            "traffic to the root complex (ACS).",
            consequence="GPUs behind one switch do not talk through it: peer-to-peer is slower, "
            "and hangs on some machines.",
            evidence=(f"ACS control of {', '.join(found.acs_redirect)}",),
            remedy=Remedy(
                "On bare metal, switch ACS off in the BIOS or with setpci on these bridges after "
                "every boot (NCCL's troubleshooting page has the script)."
            ),
        )
    if found.iommu == "translating":
        yield Finding(
            rule=RULE.id,
            severity=Severity.INFO,
            subject="IOMMU",
            message="An IOMMU translates what the GPUs read and write.",
            consequence="Peer-to-peer over PCIe goes through the root complex, where the platform "
            "allows it at all; some machines hang in it.",
            evidence=("iommu_group/type of the GPUs in sysfs",),
            remedy=Remedy(
                "On bare metal, boot with iommu=pt (or switch the IOMMU off), then measure: "
                "dsv4doctor check --level full."
            ),
        )
    if found.acs_redirect is None and found.iommu is None:
        raise NotChecked("IOMMU and ACS are not readable here")


RULE = Rule(
    id="DSV608",
    title="IOMMU and ACS in the way of peer-to-peer",
    severity=Severity.WARNING,
    reads=("trace", "host"),
    check=check,
    about_machine=True,
)

EXAMPLES = (
    Example("redirecting bridges", machine(acs_redirect=("0000:c0:01.0",)), expect=("ACS",)),
    Example("an IOMMU that translates", machine(iommu="translating"), expect=("IOMMU",)),
    Example("passed through", machine(iommu="passthrough")),
    Example("not readable without root, no IOMMU", machine(acs_redirect=None)),
    Example(
        "peer-to-peer is off",
        machine(iommu="translating", environment={"NCCL_P2P_DISABLE": "1"}),
    ),
    Example("NVLink", machine(2, "sm_100", links=({"nvlinks": 18},) * 2, iommu="translating")),
)
