"""Several GPUs without NVLink whose traffic crosses PCIe host bridges.

On some such machines NCCL or the custom all-reduce hangs over peer-to-peer, and nothing in the
topology proves that one of them will or will not.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, HostFacts, Remedy, Severity
from dsv4doctor.rules.common import set_by_user
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import gpus, scene
from dsv4doctor.rules.topology import ranks, used_gpus


def check(facts: Facts) -> Iterator[Finding]:
    host = facts.snapshot.host
    assert host is not None
    if facts.arch.name != "sm_120" or ranks(facts) < 2:
        return  # sm_121 has one GPU a machine, the others have NVLink
    if set_by_user(facts, "NCCL_P2P_DISABLE") == "1":
        return
    addresses = [gpu.pci_bus_id for gpu in used_gpus(facts) if gpu.pci_bus_id]
    if len(addresses) < 2:
        return
    if any(address not in host.pci_roots for address in addresses):
        raise NotChecked("the PCIe topology cannot be read")
    bridges = {host.pci_roots[address] for address in addresses}
    switches = {host.pci_switches.get(address, address) for address in addresses}
    if len(bridges) == 1 and len(switches) == 1:
        return  # all behind one switch
    yield Finding(
        rule=RULE.id,
        severity=Severity.INFO,
        subject="peer-to-peer over PCIe",
        message=(
            f"Suspect, not proven: {len(addresses)} GPUs talk over {len(bridges)} PCIe host "
            f"bridge{'s' if len(bridges) > 1 else ''}, where peer-to-peer is known to hang on some "
            "machines."
        ),
        consequence=(
            "Where it does, the server hangs after NCCL's Init COMPLETE with GPUs at 100 % and "
            "idle power; nvidia-smi topo can call the machine fine."
        ),
        evidence=(
            *(f"{address}: {host.pci_roots[address]}" for address in addresses),
            "local-inference-lab/rtx6kpro issues 15 and 21; NVIDIA/nccl issue 1999",
        ),
        remedy=Remedy(
            "If it hangs: run a two-rank all_reduce with and without NCCL_P2P_DISABLE=1; where "
            "only the second works, export NCCL_P2P_DISABLE=1 and add "
            "--disable-custom-all-reduce."
        ),
    )


RULE = Rule(
    id="DSV502",
    title="Peer-to-peer across PCIe host bridges",
    severity=Severity.INFO,
    reads=("trace", "host"),
    check=check,
    about_machine=True,
)

_TWO = gpus(2)
_TP2 = {"tp_size": 2}
_APART = HostFacts(pci_roots={gpu.pci_bus_id or "": f"pci0000:{gpu.index}0" for gpu in _TWO})
_SWITCH = HostFacts(
    pci_roots={gpu.pci_bus_id or "": "pci0000:00" for gpu in _TWO},
    pci_switches={gpu.pci_bus_id or "": "0000:00:01.0" for gpu in _TWO},
)
_FOUR = HostFacts(
    pci_roots={gpu.pci_bus_id or "": f"pci0000:{min(gpu.index, 2)}0" for gpu in gpus(4)},
    pci_switches={gpu.pci_bus_id or "": f"0000:{min(gpu.index, 2)}0:01.0" for gpu in gpus(4)},
)

EXAMPLES = (
    Example(
        "two host bridges",
        scene(resolved=_TP2, host=_APART, gpus=_TWO),
        expect=("peer-to-peer over PCIe",),
    ),
    Example("one switch", scene(resolved=_TP2, host=_SWITCH, gpus=_TWO)),
    Example("one rank", scene(resolved={"tp_size": 1}, host=_APART, gpus=_TWO)),
    Example(
        "switched off",
        scene(resolved=_TP2, host=_APART, gpus=_TWO, environment={"NCCL_P2P_DISABLE": "1"}),
    ),
    Example(
        "the launch's own GPUs are behind one switch",
        scene(
            resolved=_TP2,
            host=_FOUR,
            gpus=gpus(4),
            environment={"CUDA_VISIBLE_DEVICES": "2,3"},
        ),
    ),
    Example(
        "B200, which have NVLink",
        scene("sm_100", resolved=_TP2, host=_APART, gpus=gpus(2, "sm_100")),
    ),
)
