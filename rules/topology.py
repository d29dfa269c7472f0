"""What the rules about GPUs, links and communication ask."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4doctor.models import Facts, Gpu, HostFacts, Link, Pair, Topology
from dsv4doctor.rules.common import flag, set_by_user
from dsv4doctor.rules.rule import NotChecked
from dsv4doctor.rules.samples import gpus, scene


def topology(facts: Facts) -> Topology:
    """The machine's; NotChecked where it was not read, as in an old snapshot."""
    host = facts.snapshot.host
    if host is None or host.topology is None:
        raise NotChecked("how the GPUs are connected was not read")
    return host.topology


@dataclass(frozen=True)
class Placement:
    """The GPUs of a launch on one machine, by their numbers among those that it sees."""

    base: int
    step: int
    """From a tensor-parallel rank to the next."""
    tensor: int
    """Tensor-parallel ranks here, of each stage."""
    stages: int
    """Pipeline stages here."""
    replicas: int
    apart: int
    """From a replica to the next."""

    @property
    def count(self) -> int:
        return self.replicas * self.stages * self.tensor

    @property
    def last(self) -> int:
        return self._first(self.replicas - 1, self.stages - 1) + (self.tensor - 1) * self.step

    def numbers(self, below: int) -> Iterator[int]:
        """Those under `below`, rank by rank; one that two ranks get comes twice."""
        for replica in range(self.replicas):
            if self._first(replica, 0) >= below:
                return
            for stage in range(self.stages):
                first = self._first(replica, stage)
                if first >= below:
                    break
                yield from range(first, min(first + self.tensor * self.step, below), self.step)

    def _first(self, replica: int, stage: int) -> int:
        # A stage begins after as many GPUs as the one before has ranks, whatever their step is.
        return self.base + replica * self.apart + stage * self.tensor


def placement(facts: Facts) -> Placement:
    """As SGLang counts a rank's GPU; every node of a launch takes the same."""
    tensor, stages, nodes, replicas, step = (
        max(1, _number(facts, name) or 1)
        for name in ("tp_size", "pp_size", "nnodes", "dp_size", "gpu_id_step")
    )
    # With data-parallel attention the replicas share the ranks; without, each has its own.
    if facts.trace is not None and facts.trace.resolved_args.get("enable_dp_attention"):
        replicas = 1
    return Placement(
        base=_number(facts, "base_gpu_id") or 0,
        step=step,
        # A node has whole stages, or a share of one.
        tensor=max(1, tensor // max(1, nodes // stages)),
        stages=max(1, stages // nodes),
        replicas=replicas,
        apart=tensor * stages * step,
    )


def _number(facts: Facts, name: str) -> int | None:
    """The argument `name` as SGLang resolved it, or else as the launch has it."""
    value = facts.trace.resolved_args.get(name) if facts.trace else None
    if isinstance(value, int):
        return value
    text = flag(facts, f"--{name.replace('_', '-')}")
    return int(text) if text is not None and re.fullmatch("[0-9]{1,9}", text) else None


def ranks(facts: Facts) -> int:
    """The ranks that this launch has on one machine."""
    return placement(facts).count


def visible_gpus(facts: Facts) -> tuple[str, ...]:
    """The machine's numbers or the UUIDs of the GPUs that the server sees; empty: all, or nothing
    says."""
    launch = facts.snapshot.launch
    given = launch.devices if launch else ()
    visible = (set_by_user(facts, "CUDA_VISIBLE_DEVICES") or "").split(",")
    names = tuple(stripped for name in visible if (stripped := name.strip()))
    if not given or not names:
        return given or names
    # A container counts the GPUs that it is given from zero.
    inside = {str(number): name for number, name in enumerate(given)}
    return tuple(inside.get(name, name) for name in names if name in inside or "-" in name)


def placed_gpus(facts: Facts) -> dict[int, Gpu]:
    """SGLang's number -> the machine's GPU, in the order of the ranks; NotChecked where nobody
    says."""
    everyone = facts.snapshot.gpu.gpus
    names = visible_gpus(facts)
    if not all(name.isdigit() for name in names) and ranks(facts) < len(everyone):
        raise NotChecked("the launch names its GPUs by something else than their number")
    chosen = [gpu for name in names for gpu in everyone if str(gpu.index) == name]
    candidates = chosen or list(everyone)
    return {number: candidates[number] for number in placement(facts).numbers(len(candidates))}


def used_gpus(facts: Facts) -> tuple[Gpu, ...]:
    """The machine's GPUs that this launch takes, in the order of the ranks; NotChecked where
    nobody says."""
    return tuple(placed_gpus(facts).values())


def has_nvlink(facts: Facts) -> bool:
    """Whether every GPU of the launch has NVLinks that are up; NotChecked where nobody says."""
    mine = used_gpus(facts)
    addresses = {gpu.pci_bus_id for gpu in mine}
    links = [link for link in topology(facts).links if link.address in addresses]
    taken = placement(facts)
    is_whole = len(mine) >= len(set(taken.numbers(taken.last + 1)))
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
