"""Which GPUs a launch takes, against SGLang's own count."""

import ast
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4doctor.models import Arch, Facts, Launch, SglangTree
from dsv4doctor.rules import pd_apart
from dsv4doctor.rules.common import set_by_user
from dsv4doctor.rules.samples import scene
from dsv4doctor.rules.topology import has_nvlink, machine, placement, ranks, used_gpus
from dsv4doctor.trace.session import TraceRequest

_SIZES = ("tp_size", "pp_size", "dp_size", "nnodes", "base_gpu_id", "gpu_id_step")
_RANGES = (
    *("pp_size_per_node", "nnodes_per_pp_rank", "pp_rank_range"),
    *("nnodes_per_tp_group", "tp_size_per_node", "tp_rank_range"),
)
_CASES = [
    (tensor, stages, replicas, nodes, base, step)
    for tensor, stages, replicas, nodes, base, step in itertools.product(
        (1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4), (0, 3), (1, 2)
    )
    if tensor * stages % nodes == 0
]


def _launch(sizes: Sequence[int], **more: object) -> Facts:
    return scene(resolved={**dict(zip(_SIZES, sizes, strict=True)), **more})


def _taken(facts: Facts) -> list[int]:
    found = placement(facts)
    numbers = list(found.numbers(1000))
    assert len(numbers) == found.count == ranks(facts)
    assert max(numbers) == found.last
    return numbers


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        ((4, 1, 1, 1, 0, 1), [0, 1, 2, 3]),
        ((2, 1, 1, 1, 3, 2), [3, 5]),
        # The step is between the ranks of a stage; the stages are as far apart as without it.
        ((2, 2, 1, 1, 0, 1), [0, 1, 2, 3]),
        ((2, 2, 1, 1, 0, 2), [0, 2, 2, 4]),
        ((1, 4, 1, 1, 1, 2), [1, 2, 3, 4]),
        # It is between replicas too.
        ((2, 1, 2, 1, 0, 2), [0, 2, 4, 6]),
        ((2, 2, 2, 1, 0, 2), [0, 2, 2, 4, 8, 10, 10, 12]),
        # A node has whole stages, or a share of one; replicas are apart as on one node.
        ((4, 2, 1, 2, 0, 2), [0, 2, 4, 6]),
        ((8, 1, 1, 2, 0, 2), [0, 2, 4, 6]),
        ((4, 1, 2, 2, 0, 1), [0, 1, 4, 5]),
    ],
)
def test_numbers_of_the_ranks(sizes: tuple[int, ...], numbers: list[int]) -> None:
    assert _taken(_launch(sizes)) == numbers


def test_replicas_of_attention_share_the_ranks() -> None:
    assert _taken(_launch((4, 1, 4, 1, 0, 1), enable_dp_attention=True)) == [0, 1, 2, 3]


def test_gpus_of_the_machine() -> None:
    def indices(count: int, visible: str | None = None, **resolved: int) -> list[int]:
        environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        facts = machine(count, resolved=resolved, environment=environment)
        return [gpu.index for gpu in used_gpus(facts)]

    assert indices(8, tp_size=2, pp_size=2, gpu_id_step=2) == [0, 2, 4]
    assert indices(8, "7,6,5,4,3", tp_size=2, pp_size=2, gpu_id_step=2) == [7, 5, 3]
    assert indices(8, tp_size=2, dp_size=2, gpu_id_step=2) == [0, 2, 4, 6]
    assert indices(4, tp_size=4, base_gpu_id=2) == [2, 3]


def test_a_gpu_of_two_ranks_is_not_a_gpu_too_few() -> None:
    links = ({"nvlinks": 18},) * 5
    sizes = {"tp_size": 2, "pp_size": 2, "gpu_id_step": 2}
    assert has_nvlink(machine(5, "sm_100", links=links, resolved=sizes))


def _in_front(wrapper: str, own: dict[str, str], devices: tuple[str, ...] = ()) -> Facts:
    """A launch from a shell in which GPUs 2 and 3 are visible."""
    facts = machine(4, resolved={"tp_size": 2}, environment=own)
    assert facts.snapshot.launch is not None
    launch = replace(facts.snapshot.launch, wrappers=(wrapper,), devices=devices)
    shell = {"CUDA_VISIBLE_DEVICES": "2,3", "NCCL_P2P_DISABLE": "1"}
    return replace(facts, snapshot=replace(facts.snapshot, launch=launch, environment=shell))


@pytest.mark.parametrize(
    ("wrapper", "own", "devices", "indices"),
    [
        ("exec", {}, (), [2, 3]),
        ("docker", {}, (), [0, 1]),
        ("docker", {"CUDA_VISIBLE_DEVICES": "1,2"}, (), [1, 2]),
        ("docker", {}, ("3", "1"), [3, 1]),
        ("docker", {"CUDA_VISIBLE_DEVICES": "1,0"}, ("2", "3"), [3, 2]),
        ("docker", {"CUDA_VISIBLE_DEVICES": "1,2"}, ("2", "3"), [3]),
    ],
)
def test_a_container_has_the_gpus_that_it_is_given(
    wrapper: str, own: dict[str, str], devices: tuple[str, ...], indices: list[int]
) -> None:
    facts = _in_front(wrapper, own, devices)
    assert [gpu.index for gpu in used_gpus(facts)] == indices
    assert pd_apart.devices(facts).names == tuple(map(str, indices))


def test_a_container_has_the_variables_that_it_is_given() -> None:
    name = "NCCL_P2P_DISABLE"
    assert set_by_user(_in_front("exec", {}), name) == "1"
    assert set_by_user(_in_front("docker", {}), name) is None
    assert set_by_user(_in_front("docker", {name: "0"}), name) == "0"


@pytest.mark.parametrize(
    ("front", "seen"), [("numactl", {"NCCL_A", "NCCL_B"}), ("docker", {"NCCL_A"})]
)
def test_a_container_is_traced_with_the_variables_that_it_is_given(
    front: str, seen: set[str]
) -> None:
    launch = Launch("serve.sh", 1, {"NCCL_A": "1"}, "m", (), wrappers=(front,))
    checkpoint = scene().snapshot.checkpoint
    assert checkpoint is not None
    asked = TraceRequest(
        *(SglangTree("tree", "0.5.23", "folder"), Path("python"), Arch(12, 0), checkpoint),
        *(Path("m"), launch),
        environment={"NCCL_B": "1"},
    )
    assert set(asked.variables()) == seen


@pytest.mark.wheels
@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
def test_numbers_are_those_of_sglang(
    sglang_tree: Callable[[str], SglangTree], version: str
) -> None:
    """The lines of SGLang's data-parallel controller that count, run with the same sizes."""
    path = Path(sglang_tree(version).root) / "sglang/srt/managers/data_parallel_controller.py"
    tree = ast.parse(path.read_text("utf-8"))
    for sizes in _CASES:
        for node in range(sizes[_SIZES.index("nnodes")]):
            assert _taken(_launch(sizes)) == list(_counted(tree, sizes, node)), (sizes, node)


def _counted(tree: ast.Module, sizes: Sequence[int], node: int) -> Iterator[int]:
    said = SimpleNamespace(**dict(zip(_SIZES, sizes, strict=True)), node_rank=node)
    scope: dict[str, Any] = {"server_args": said, "base_gpu_id": 0}
    scope.update(get_parallel=lambda: said, get_device=lambda: said)
    functions = {one.name: one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
    group = functions["launch_tensor_parallel_group"]
    for line in _straight(group.body):
        _run([line], scope)
    [number] = [one for one in ast.walk(group) if _name(one) == "gpu_id"]
    [apart] = [
        one
        for one in ast.walk(functions["launch_dp_schedulers"])
        if isinstance(one, ast.AugAssign) and ast.unparse(one.target) == "base_gpu_id"
    ]
    for _ in range(said.dp_size):
        for stage, rank in itertools.product(scope["pp_rank_range"], scope["tp_rank_range"]):
            scope.update(pp_rank=stage, tp_rank=rank)
            _run([number], scope)
            yield scope["gpu_id"]
        _run([apart], scope)


def _straight(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The assignments of sizes and ranges, where no condition holds."""
    for line in body:
        if isinstance(line, ast.If):
            yield from _straight(line.orelse)
        elif _name(line) in _RANGES:
            yield line


def _name(line: ast.AST) -> str | None:
    return ast.unparse(line.targets[0]) if isinstance(line, ast.Assign) else None


def _run(lines: list[Any], scope: dict[str, Any]) -> None:
    exec(compile(ast.Module(lines, []), "sglang", "exec"), scope)
