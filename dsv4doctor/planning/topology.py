"""The GPUs to plan for, by NUMA node, and how they are divided."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsv4doctor.errors import UsageError
from dsv4doctor.models import Arch, Gpu, GpuFacts

_ITEM = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?(?:@([0-9]{1,3}))?")
_FORM = "write it like --gpus 0-3@0,4-7@1 (GPUs 0 to 3 on NUMA node 0, 4 to 7 on node 1)"
_MOST = 64
GIB = 1 << 30


@dataclass(frozen=True)
class Named:
    """One GPU of `--gpus`."""

    index: int
    node: int | None


@dataclass(frozen=True)
class Side:
    """The GPUs of one server."""

    gpus: tuple[Gpu, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Their NUMA nodes; empty where one is not known."""
        found = [gpu.numa_node for gpu in self.gpus]
        return (
            tuple(sorted({node for node in found if node is not None})) if all_known(found) else ()
        )


def all_known(values: Sequence[object]) -> bool:
    return all(value is not None for value in values)


def parse_gpus(text: str) -> tuple[Named, ...]:
    """The GPUs that `--gpus` names, in its order; UsageError where it is not of that form."""
    found: dict[int, Named] = {}
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise UsageError(f"--gpus {text[:80]}: {item.strip()[:40] or 'empty'} is no GPU", _FORM)
        first, last, node = match.groups()
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            raise UsageError(f"--gpus {text[:80]}: {item.strip()} counts down", _FORM)
        for index in numbers:
            if index in found:
                raise UsageError(f"--gpus {text[:80]}: GPU {index} is named twice", _FORM)
            if len(found) == _MOST:
                raise UsageError(f"--gpus {text[:80]}: more than {_MOST} GPUs", _FORM)
            found[index] = Named(index, None if node is None else int(node))
    return tuple(found.values())


def choose(
    facts: GpuFacts, named: Sequence[Named], arch: Arch, memory_gib: float | None
) -> tuple[Gpu, ...]:
    """The GPUs to plan for: those of `facts`, or the `named` ones of them, or, where the facts
    have none, the `named` ones as said.

    Raises UsageError where there are none, where a named one does not exist, and where the
    memory of GPUs that were not looked at is not given.
    """
    if not facts.gpus and not named:
        reason = f" ({facts.unavailable})" if facts.unavailable else ""
        raise UsageError(
            f"no GPU to plan for{reason}",
            "give --snapshot box.json of the serving machine, or --gpus 0-3@0,4-7@1 "
            "with --gpu-memory",
        )
    if not facts.gpus:
        return tuple(_declared(one, arch, memory_gib) for one in named)
    there = {gpu.index: gpu for gpu in facts.gpus}
    missing = [one.index for one in named if one.index not in there]
    if missing:
        known = ", ".join(str(index) for index in there)
        raise UsageError(f"--gpus: there is no GPU {missing[0]}", f"there are: {known}")
    chosen = [there[one.index] for one in named] or list(facts.gpus)
    nodes = {one.index: one.node for one in named if one.node is not None}
    gpus = [replace(gpu, numa_node=nodes.get(gpu.index, gpu.numa_node)) for gpu in chosen]
    if memory_gib is not None:
        gpus = [replace(gpu, memory_bytes=int(memory_gib * GIB)) for gpu in gpus]
    return _alike(gpus)


def _declared(one: Named, arch: Arch, memory_gib: float | None) -> Gpu:
    if memory_gib is None:
        raise UsageError(
            "--gpus: the memory of these GPUs is not known",
            "say it, in GiB for each: --gpu-memory 95",
        )
    return Gpu(one.index, f"{arch.name} GPU", arch, int(memory_gib * GIB), numa_node=one.node)


def _alike(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    kinds = {(gpu.name, gpu.arch) for gpu in gpus}
    if len(kinds) > 1:
        names = ", ".join(sorted(f"{name} ({arch.name})" for name, arch in kinds))
        raise UsageError(f"GPUs of several kinds: {names}", "pick those of one kind with --gpus")
    if not all(gpu.memory_bytes for gpu in gpus):
        raise UsageError(
            "the memory of the GPUs is not known", "say it, in GiB for each: --gpu-memory 95"
        )
    return tuple(gpus)


# ------------------------------------------------------------------------------ division


def divide(gpus: Sequence[Gpu], divisors: Sequence[int]) -> tuple[Side, Side]:
    """The prefill side and the decode side, equally large, each on its own NUMA nodes where there
    are several.

    `divisors` are the tensor-parallel sizes that the model allows.  Raises UsageError where the
    GPUs cannot be divided.
    """
    count = len(gpus)
    if count < 2:
        raise UsageError(
            f"{_gpus(count)}: prefill and decode need at least one each",
            "use `dsv4doctor plan single`",
        )
    if count % 2:
        raise UsageError(
            f"{_gpus(count)}: prefill and decode need equally many", _leave_out(gpus, count - 1)
        )
    sides = _by_node(gpus) or (Side(tuple(gpus[: count // 2])), Side(tuple(gpus[count // 2 :])))
    sizes = [len(side.gpus) for side in sides]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{sizes[0]} GPUs on the first NUMA nodes and {sizes[1]} on the others: prefill and "
            "decode need equally many",
            "pick as many of each with --gpus",
        )
    _check_size(sizes[0], divisors, "a side")
    return sides


def together(gpus: Sequence[Gpu], divisors: Sequence[int]) -> Side:
    """All GPUs as one server; UsageError where the model cannot be divided so."""
    _check_size(len(gpus), divisors, "the server")
    return Side(tuple(gpus))


def sizes_allowed(*counts: int | None) -> tuple[int, ...]:
    """The tensor-parallel sizes that divide what a model has of each: heads, experts, ..."""
    return tuple(
        size
        for size in range(1, _MOST + 1)
        if all(not count or count % size == 0 for count in counts)
    )


def _by_node(gpus: Sequence[Gpu]) -> tuple[Side, Side] | None:
    """The first half of the NUMA nodes and the second; None without an even number of nodes."""
    nodes = Side(tuple(gpus)).nodes
    if len(nodes) < 2 or len(nodes) % 2:
        return None
    first = nodes[: len(nodes) // 2]
    return (
        Side(tuple(gpu for gpu in gpus if gpu.numa_node in first)),
        Side(tuple(gpu for gpu in gpus if gpu.numa_node not in first)),
    )


def _check_size(size: int, divisors: Sequence[int], whose: str) -> None:
    if size in divisors:
        return
    fitting = max((number for number in divisors if number < size), default=1)
    raise UsageError(
        f"{_gpus(size)} for {whose}: the model's heads and experts cannot be divided by {size}",
        f"pick {fitting} for {whose} with --gpus",
    )


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _leave_out(gpus: Sequence[Gpu], count: int) -> str:
    kept = ",".join(str(gpu.index) for gpu in gpus[:count])
    return f"leave one out, e.g. --gpus {kept}"
