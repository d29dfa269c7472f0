"""What `--level full` measured: an all-reduce of two ranks with and without peer-to-peer, and
copies, each in a process of its own with a deadline, so that a hang is a finding and not a hang.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, Measurement, Remedy, Severity
from dsv4doctor.rules.common import set_by_user
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.topology import machine

_SLOW_PEERS = 0.8
"""Peer-to-peer that is below this part of the rate through host memory is no gain."""


def check(facts: Facts) -> Iterator[Finding]:
    host = facts.snapshot.host
    assert host is not None
    if not host.measured:
        raise NotChecked("nothing was measured: --level full does")
    by_name = {one.name: one for one in host.measured}
    peers, host_only = by_name.get("all-reduce"), by_name.get("all-reduce without P2P")
    for one in host.measured:
        if one.outcome != "ok":
            yield _broken(facts, one, host_only)
    if peers and host_only and _is_slower(peers, host_only):
        yield Finding(
            rule=RULE.id,
            severity=Severity.INFO,
            subject="all-reduce",
            message=f"With peer-to-peer an all-reduce moves {peers.gigabytes_per_second:.1f} GB/s, "
            f"through host memory {host_only.gigabytes_per_second:.1f} GB/s.",
            consequence="Peer-to-peer is the slower way on this machine.",
            evidence=tuple(_line(one) for one in host.measured),
            remedy=Remedy("Try NCCL_P2P_DISABLE=1 with --disable-custom-all-reduce."),
        )


def _is_slower(peers: Measurement, host_only: Measurement) -> bool:
    fast, slow = peers.gigabytes_per_second, host_only.gigabytes_per_second
    return fast is not None and slow is not None and fast < _SLOW_PEERS * slow


def _broken(facts: Facts, one: Measurement, host_only: Measurement | None) -> Finding:
    is_off = set_by_user(facts, "NCCL_P2P_DISABLE") == "1"
    helps = one.name == "all-reduce" and host_only is not None and host_only.outcome == "ok"
    remedy = "Look into the driver's log (dmesg, Xid) and the container's devices first."
    if one.name.startswith("all-reduce") and (switches := _nccl_variables(facts)):
        remedy = f"Measure again without {', '.join(switches)}; if it fails then too: {remedy}"
    if helps and not is_off:
        remedy = (
            "Without peer-to-peer it works: export NCCL_P2P_DISABLE=1 and add "
            "--disable-custom-all-reduce."
        )
    does = "does not end" if one.outcome == "hang" else "fails"
    return Finding(
        rule=RULE.id,
        severity=Severity.ERROR if one.name.startswith("all-reduce") else Severity.WARNING,
        subject=one.name,
        message=f"Two ranks: {one.name} {does} on this machine."
        if one.name.startswith("all-reduce")
        else f"{one.name} {does} on this machine.",
        consequence="A server over several of these GPUs does the same: with tensor parallelism "
        "it stops or hangs at its start.",
        evidence=(_line(one), *((one.detail,) if one.detail else ())),
        remedy=Remedy(remedy),
    )


def _nccl_variables(facts: Facts) -> list[str]:
    launch = facts.snapshot.launch
    everything = {*facts.snapshot.environment, *(launch.environment if launch else ())}
    return sorted(name for name in everything if name.startswith("NCCL_"))


def _line(one: Measurement) -> str:
    rate = "" if one.gigabytes_per_second is None else f", {one.gigabytes_per_second:.1f} GB/s"
    return f"{one.name}: {one.outcome}{rate}"


RULE = Rule(
    id="DSV610",
    title="Measured communication",
    severity=Severity.ERROR,
    reads=("host",),
    check=check,
    about_machine=True,
)

_WITHOUT = Measurement("all-reduce without P2P", "ok", 20.0)

EXAMPLES = (
    Example(
        "peer-to-peer hangs",
        machine(measured=(Measurement("all-reduce", "hang"), _WITHOUT)),
        expect=("all-reduce",),
    ),
    Example(
        "a copy fails",
        machine(measured=(Measurement("copy between GPUs", "failed", None, "invalid device"),)),
        expect=("copy between GPUs",),
    ),
    Example(
        "peer-to-peer is slower",
        machine(measured=(Measurement("all-reduce", "ok", 5.0), _WITHOUT)),
        expect=("all-reduce",),
    ),
    Example("all well", machine(measured=(Measurement("all-reduce", "ok", 40.0), _WITHOUT))),
)
