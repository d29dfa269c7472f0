"""The launch's GPUs and its memory on different NUMA nodes.

A process bound to the memory of one node copies to the GPUs of another over the link between the
sockets, and tensor parallelism over both sends every all-reduce over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsv4doctor.models import Facts, Finding, Gpu, Remedy, Severity
from dsv4doctor.rules.common import both
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.topology import has_nvlink, machine, placed_gpus, used_gpus


def check(facts: Facts) -> Iterator[Finding]:
    mine = used_gpus(facts)
    known = [gpu for gpu in mine if gpu.numa_node is not None]
    if not known:
        raise NotChecked("the machine does not say on which NUMA node its GPUs are")
    nodes = sorted({gpu.numa_node for gpu in known if gpu.numa_node is not None})
    yield from _bound_elsewhere(facts, known)
    if len(nodes) > 1 and len(mine) > 1 and not has_nvlink(facts):
        yield Finding(
            rule=RULE.id,
            severity=Severity.INFO,
            subject="ranks across NUMA nodes",
            message=f"The {len(mine)} ranks are on NUMA nodes {both([str(n) for n in nodes])}.",
            consequence="Every all-reduce crosses the link between the sockets, which is slower "
            "than PCIe within one.",
            evidence=_evidence(known),
            remedy=Remedy(
                "Where the model fits into the GPUs of one node, two servers (or prefill on one "
                "node and decode on the other) exchange less."
            ),
        )


def _bound_elsewhere(facts: Facts, known: Sequence[Gpu]) -> Iterator[Finding]:
    launch, trace = facts.snapshot.launch, facts.trace
    assert trace is not None
    bound = set(launch.numa_nodes) if launch else set()
    by_number = trace.resolved_args.get("numa_node")
    wrong: list[Gpu] = []
    if isinstance(by_number, list | tuple):
        wrong = [
            gpu
            for number, gpu in placed_gpus(facts).items()
            if gpu in known and number < len(by_number) and gpu.numa_node != by_number[number]
        ]
        how = f"--numa-node {' '.join(map(str, by_number))}"
    elif bound:
        wrong = [gpu for gpu in known if gpu.numa_node not in bound]
        how = f"numactl binds to node {both([str(node) for node in sorted(bound)])}"
    if not wrong:
        return
    names = both([f"GPU {gpu.index}" for gpu in wrong])
    yield Finding(
        rule=RULE.id,
        severity=Severity.WARNING,
        subject="NUMA affinity",
        message=f"{how}, and {names} "
        f"{'are' if len(wrong) > 1 else 'is'} on node "
        f"{both(sorted({str(gpu.numa_node) for gpu in wrong}))}.",
        consequence="Copies between host and GPU, and launches, go over the link between the "
        "sockets.",
        evidence=_evidence(known),
        remedy=Remedy("Bind to the GPUs' own node, or choose GPUs of the node that is bound to."),
    )


def _evidence(known: Sequence[Gpu]) -> tuple[str, ...]:
    return tuple(f"GPU {gpu.index} ({gpu.pci_bus_id}): node {gpu.numa_node}" for gpu in known)


RULE = Rule(
    id="DSV607",
    title="GPUs and memory on different NUMA nodes",
    severity=Severity.WARNING,
    reads=("trace", "host"),
    check=check,
    about_machine=True,
)

EXAMPLES = (
    Example(
        "tensor parallelism over both sockets",
        machine(4, nodes=(0, 0, 1, 1)),
        expect=("ranks across NUMA nodes",),
    ),
    Example(
        "--numa-node the wrong way round",
        machine(2, nodes=(0, 0), resolved={"numa_node": [1, 1]}),
        expect=("NUMA affinity",),
    ),
    Example(
        "--numa-node counts the GPUs that are left out too",
        machine(
            4,
            nodes=(0, 0, 1, 1),
            resolved={"tp_size": 2, "base_gpu_id": 2, "numa_node": [0, 0, 1, 1]},
        ),
    ),
    Example(
        "--numa-node of the GPUs that are left out",
        machine(
            4,
            nodes=(0, 0, 1, 1),
            resolved={"tp_size": 2, "base_gpu_id": 2, "numa_node": [1, 1, 0, 0]},
        ),
        expect=("NUMA affinity",),
    ),
    Example("all on one node", machine(2, nodes=(1, 1), resolved={"numa_node": [1, 1]})),
    Example(
        "GPUs of one node chosen",
        machine(
            4,
            nodes=(0, 0, 1, 1),
            resolved={"tp_size": 2},
            environment={"CUDA_VISIBLE_DEVICES": "2,3"},
        ),
    ),
    Example(
        "both sockets, with NVLink",
        machine(2, "sm_100", nodes=(0, 1), links=({"nvlinks": 18},) * 2),
    ),
)
