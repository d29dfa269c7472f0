"""GPUs of the launch between which the driver offers no peer-to-peer."""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import set_by_user
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.topology import machine, number, pairs, ranks


def check(facts: Facts) -> Iterator[Finding]:
    if ranks(facts) < 2 or set_by_user(facts, "NCCL_P2P_DISABLE") == "1":
        return
    mine = pairs(facts)
    if not any(one.peer_to_peer for one in mine):
        raise NotChecked("the driver does not say which GPUs can read each other's memory")
    refused = [one for one in mine if one.peer_to_peer not in (None, "ok")]
    if not refused:
        return
    yield Finding(
        rule=RULE.id,
        severity=Severity.INFO,
        subject="peer-to-peer",
        message=f"Between {len(refused)} of {len(mine)} pairs of the launch's GPUs the driver "
        "offers no peer-to-peer.",
        consequence="What these ranks exchange goes through host memory.",
        evidence=tuple(
            f"{number(facts, one.first)} and {number(facts, one.second)}: {one.peer_to_peer}"
            f"{f', over the {one.path}' if one.path else ''}"
            for one in refused[:8]
        ),
        remedy=Remedy(
            "Choose GPUs behind one switch or one host bridge where there are enough; in a virtual "
            "machine, the hypervisor decides."
        ),
    )


RULE = Rule(
    id="DSV609",
    title="No peer-to-peer between GPUs",
    severity=Severity.INFO,
    reads=("trace", "host"),
    check=check,
    about_machine=True,
)

_REFUSED = {"peer_to_peer": "the chipset does not support it"}

EXAMPLES = (
    Example("the chipset refuses", machine(pair=_REFUSED), expect=("peer-to-peer",)),
    Example("offered", machine()),
    Example("switched off", machine(pair=_REFUSED, environment={"NCCL_P2P_DISABLE": "1"})),
    Example("one rank", machine(1)),
)
