"""SGLang's custom all-reduce on GPUs without NVLink.

It switches itself off on more than two PCIe GPUs, and on two where its peer-to-peer test fails:
`can_use_custom_all_reduce_with_nvlink` in SGLang's custom_all_reduce_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.topology import has_nvlink, machine, pairs, ranks


def check(facts: Facts) -> Iterator[Finding]:
    trace = facts.trace
    assert trace is not None
    size = trace.resolved_args.get("tp_size")  # pipeline stages do not reduce together
    count = min(ranks(facts), size) if isinstance(size, int) else ranks(facts)
    if count < 2 or trace.resolved_args.get("disable_custom_all_reduce") or has_nvlink(facts):
        return
    refused = [one for one in pairs(facts) if one.peer_to_peer not in (None, "ok")]
    if count == 2 and not refused:
        return
    why = (
        f"there are {count} GPUs without NVLink, and over PCIe it serves two"
        if count > 2
        else f"the driver offers no peer-to-peer ({refused[0].peer_to_peer})"
    )
    yield Finding(
        rule=RULE.id,
        severity=Severity.INFO,
        subject="custom all-reduce",
        message=f"SGLang will switch its custom all-reduce off: {why}.",
        consequence="Small all-reduces of the decode go through NCCL, which takes longer for each.",
        evidence=("SGLang distributed/device_communicators/custom_all_reduce_utils.py",),
        remedy=Remedy(
            "Nothing has to be done; --disable-custom-all-reduce only silences the warning. Fewer "
            "ranks with expert or pipeline parallelism exchange less."
        ),
    )


RULE = Rule(
    id="DSV606",
    title="Custom all-reduce over PCIe",
    severity=Severity.INFO,
    reads=("trace", "host"),
    check=check,
    about_machine=True,
)

_OFF = {"disable_custom_all_reduce": True}

EXAMPLES = (
    Example("four PCIe GPUs", machine(4), expect=("custom all-reduce",)),
    Example(
        "two GPUs without peer-to-peer",
        machine(pair={"peer_to_peer": "the chipset does not support it"}),
        expect=("custom all-reduce",),
    ),
    Example("two PCIe GPUs", machine(2)),
    Example("switched off by hand", machine(4, resolved=_OFF)),
    Example("NVLink", machine(4, "sm_100", links=({"nvlinks": 18},) * 4)),
    Example("two by two", machine(4, resolved={"tp_size": 2, "pp_size": 2})),
    Example("one rank", machine(1)),
)
