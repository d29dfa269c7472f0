"""What the rules about GPUs, links and communication ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4doctor.models import Facts, Gpu, HostFacts, Link, Pair, Topology
from dsv4doctor.rules.common import set_by_user
from dsv4doctor.rules.rule import NotChecked
from dsv4doctor.rules.samples import gpus, scene


def topology(facts: Facts) -> Topology:
    """The machine's; NotChecked where it was not read, as in an old snapshot."""
    host = facts.snapshot.host
    if host is None or host.topology is None:
        raise NotChecked("how the GPUs are connected was not read")
    return host.topology


def ranks(facts: Facts) -> int:
    """The GPUs that this launch takes on one machine."""
    trace = facts.trace
    sizes = [trace.resolved_args.get(name) if trace else None for name in ("tp_size", "pp_size")]
    # With data-parallel attention the replicas share the ranks; without, each has its own.
    if trace is not None and not trace.resolved_args.get("enable_dp_attention"):
        sizes.append(trace.resolved_args.get("dp_size"))
    count = 1
    for size in sizes:
        count *= size if isinstance(size, int) and size > 0 else 1
    nodes = trace.resolved_args.get("nnodes") if trace else None
    return max(1, count // nodes) if isinstance(nodes, int) and nodes > 1 else count


def used_gpus(facts: Facts) -> tuple[Gpu, ...]:
    """The machine's GPUs that this launch takes, rank by rank; NotChecked where nobody says."""
    everyone = facts.snapshot.gpu.gpus
    visible = (set_by_user(facts, "CUDA_VISIBLE_DEVICES") or "").replace(" ", "")
    names = [name for name in visible.split(",") if name]
    if not all(name.isdigit() for name in names) and ranks(facts) < len(everyone):
        raise NotChecked("CUDA_VISIBLE_DEVICES names GPUs by something else than their number")
    chosen = [gpu for name in names for gpu in everyone if str(gpu.index) == name]
    candidates = chosen or list(everyone)
    arguments: dict[str, Any] = facts.trace.resolved_args if facts.trace else {}
    first = arguments.get("base_gpu_id")
    step = arguments.get("gpu_id_step")
    start = first if isinstance(first, int) and first > 0 else 0
    stride = step if isinstance(step, int) and step > 0 else 1
    return tuple(candidates[start::stride][: ranks(facts)])


def has_nvlink(facts: Facts) -> bool:
    """Whether every GPU of the launch has NVLinks that are up; NotChecked where nobody says."""
    mine = used_gpus(facts)
    addresses = {gpu.pci_bus_id for gpu in mine}
    links = [link for link in topology(facts).links if link.address in addresses]
    is_whole = len(mine) >= ranks(facts)
    if is_whole and links and all(link.nvlinks is not None for link in links):
        return all(link.nvlinks for link in links)
    if facts.arch.is_sm12x:
        return False  # no board of sm_12x has any
    if not is_whole:
        raise NotChecked("the launch takes more GPUs than this machine has")
    raise NotChecked("the driver does not say whether there is NVLink")


def pairs(facts: Facts) -> tuple[Pair, ...]:
    """The pairs among the launch's GPUs."""
    mine = {gpu.pci_bus_id for gpu in used_gpus(facts)}
    return tuple(one for one in topology(facts).pairs if one.first in mine and one.second in mine)


def number(facts: Facts, address: str) -> str:
    """ "GPU 3" for its PCI address."""
    return next(
        (f"GPU {gpu.index}" for gpu in facts.snapshot.gpu.gpus if gpu.pci_bus_id == address),
        address,
    )


# ------------------------------------------------------------------------------ for examples


def machine(
    count: int = 2,
    arch: str = "sm_120",
    *,
    links: Sequence[dict[str, Any]] = (),
    pair: dict[str, Any] | None = None,
    nodes: Sequence[int | None] = (),
    **said: Any,
) -> Facts:
    """A launch with `count` ranks; `links` and `nodes` by GPU, `pair` for all pairs."""
    boards = tuple(
        Gpu(
            gpu.index,
            gpu.name,
            gpu.arch,
            gpu.memory_bytes,
            gpu.pci_bus_id,
            numa_node=nodes[gpu.index] if nodes else None,
        )
        for gpu in gpus(count, arch)
    )
    plain = {"generation": 5, "gpu_generation": 5, "width": 16, "gpu_width": 16, "nvlinks": 0}
    names = [gpu.pci_bus_id or "" for gpu in boards]
    found = Topology(
        links=tuple(
            Link(name, **{**plain, **(links[place] if place < len(links) else {})})
            for place, name in enumerate(names)
        ),
        pairs=tuple(
            Pair(one, other, **{"path": "host bridge", "peer_to_peer": "ok", **(pair or {})})
            for place, one in enumerate(names)
            for other in names[place + 1 :]
        ),
        iommu=said.pop("iommu", "off"),
        acs_redirect=said.pop("acs_redirect", ()),
    )
    host = HostFacts(topology=found, measured=said.pop("measured", ()))
    resolved = {"tp_size": count, **said.pop("resolved", {})}
    return scene(arch, resolved=resolved, host=host, gpus=boards, **said)
