"""A launch that takes more GPUs than it sees.

SGLang counts a rank's GPU from its sizes and asks nobody whether there is one: the rank ends in
torch's `set_device`, and its server with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import gpus, scene
from dsv4doctor.rules.topology import placement

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_RAY = "--use-ray"
_PLAIN = frozenset(("exec", "numactl", "nohup", "nice", "taskset", "time"))
"""What stands in front of a server and changes neither its machine nor its environment."""
_HERE = _PLAIN | {"env", "sudo", "docker", "podman", "nerdctl"}
"""What starts it on this machine."""


def check(facts: Facts) -> Iterator[Finding]:
    trace = facts.trace
    assert trace is not None
    args = trace.resolved_args
    launch = facts.snapshot.launch
    if launch is not None and _RAY in launch.all_flags:
        return
    seen, evidence = _seen(facts)
    if not args:
        raise NotChecked("SGLang stopped before it had resolved its arguments")
    taken = placement(facts)
    count, last = taken.count, taken.last
    if last < seen:
        return
    sizes = ("tp_size", "pp_size", "dp_size", "nnodes", "base_gpu_id", "gpu_id_step")
    said = ", ".join(f"{name} {args[name]}" for name in sizes if args.get(name) is not None)
    yield Finding(
        rule=RULE.id,
        severity=Severity.ERROR,
        subject="GPUs",
        message=(
            f"The launch takes {count} GPU{'s' if count > 1 else ''} (up to number {last}) and "
            f"sees {f'{seen} (up to number {seen - 1})' if seen else 'none'}."
        ),
        consequence=(
            "A rank without a GPU ends in torch's set_device with \"CUDA error: invalid device "
            'ordinal" before anything is loaded, and the server with it.'
        ),
        evidence=(*evidence, said),
        remedy=Remedy(
            f"Let it see {last + 1} GPU{'s' if last else ''}, or take fewer: "
            "--tp, --pp-size, --dp-size, --base-gpu-id, --gpu-id-step."
        ),
    )


def _seen(facts: Facts) -> tuple[int, list[str]]:
    """How many GPUs the server sees at most, and why; NotChecked where nobody says."""
    launch = facts.snapshot.launch
    around = set(launch.wrappers) if launch else set()
    is_known = facts.arch_source != "--arch" and around <= _HERE
    found = facts.snapshot.gpu
    total = len(found.gpus) if is_known and not found.unavailable else 0
    visible = launch.environment.get(_VISIBLE) if launch else None
    is_noted = any(_VISIBLE in note for note in launch.notes) if launch else False
    if visible is None and total and around <= _PLAIN and not is_noted:
        visible = facts.snapshot.environment.get(_VISIBLE)
    evidence = [f"{_VISIBLE}={visible}"] if visible is not None else []
    if launch is not None and launch.devices:
        total = len(launch.devices)
        evidence.append(f"the container is given GPU {', '.join(launch.devices)}")
    elif total:
        evidence.append(f"the machine has {total} GPU{'s' if total > 1 else ''}")
    if visible is not None:
        return _named(visible, total), evidence
    if not total:
        raise NotChecked("which GPUs the server sees is not known without its machine")
    return total, evidence


def _named(visible: str, total: int) -> int:
    """How many GPUs that value names at most: CUDA stops at the first that is none."""
    if not visible.strip():
        return 0
    count, there = 0, {str(index) for index in range(total)}
    names = [name.strip() for name in visible.split(",")]
    for name in dict.fromkeys(names):
        is_number = name.isascii() and name.isdigit()
        if name == "-1" or (total and is_number and (name.lstrip("0") or "0") not in there):
            break
        if not is_number and not name.startswith(("GPU-", "MIG-")):
            raise NotChecked(f"{_VISIBLE}={visible} names GPUs by something else")
        count += 1
    return count


RULE = Rule(
    id="DSV611",
    title="More GPUs than the server sees",
    severity=Severity.ERROR,
    reads=("trace",),
    check=check,
    about_machine=True,
)


def _on(
    machine: int,
    visible: str | None = None,
    *,
    around: Sequence[str] = (),
    arch_source: str = "NVML",
    flags: tuple[str, ...] = (),
    **resolved: object,
) -> Facts:
    """A launch on a machine with that many GPUs."""
    said = {} if visible is None else {_VISIBLE: visible}
    made = scene(
        flags=flags, gpus=gpus(machine), environment=said, resolved={"tp_size": 1} | resolved
    )
    assert made.snapshot.launch is not None
    launch = replace(made.snapshot.launch, wrappers=tuple(around))
    return replace(made, snapshot=replace(made.snapshot, launch=launch), arch_source=arch_source)


def _unread() -> Facts:
    """One of two GPUs did not answer."""
    made = _on(1, "0,1", tp_size=2)
    gpu = replace(made.snapshot.gpu, unavailable="GPU 1: no answer")
    return replace(made, snapshot=replace(made.snapshot, gpu=gpu))


def _inherited(around: str) -> Facts:
    """Two of the machine's GPUs are visible where the launch is typed in."""
    made = _on(4, around=(around,), tp_size=4)
    return replace(made, snapshot=replace(made.snapshot, environment={_VISIBLE: "0,1"}))


def _contained(*devices: str) -> Facts:
    """A container with some of the machine's GPUs; what the shell sees is nothing to it."""
    made = _inherited("docker")
    assert made.snapshot.launch is not None
    launch = replace(made.snapshot.launch, devices=devices)
    return replace(made, snapshot=replace(made.snapshot, launch=launch))


_ELSEWHERE = "--arch"

EXAMPLES = (
    Example("two of four named", _on(8, "4,5", tp_size=4), expect=("GPUs",)),
    Example(
        "two named, for another machine",
        _on(0, "4,5", arch_source=_ELSEWHERE, tp_size=4),
        expect=("GPUs",),
    ),
    Example("none named", _on(8, "", tp_size=1), expect=("GPUs",)),
    Example("four named", _on(8, "4,5,6,7", tp_size=4)),
    Example(
        "four named, for another machine", _on(0, "4,5,6,7", arch_source=_ELSEWHERE, tp_size=4)
    ),
    Example("eight ranks on four GPUs", _on(4, tp_size=8), expect=("GPUs",)),
    Example("eight ranks on two such nodes", _on(4, tp_size=8, nnodes=2)),
    Example("eight ranks on two smaller nodes", _on(2, tp_size=8, nnodes=2), expect=("GPUs",)),
    Example("two stages on two nodes", _on(4, tp_size=4, pp_size=2, nnodes=2)),
    Example("GPUs that the machine has not got", _on(4, "4,5,6,7", tp_size=4), expect=("GPUs",)),
    Example("a number longer than any", _on(4, "0,1," + "9" * 5000, tp_size=4), expect=("GPUs",)),
    Example("one GPU by its UUID", _on(8, "GPU-5fd4f087", tp_size=2), expect=("GPUs",)),
    Example("two instances", _on(1, "MIG-5fd4f087,MIG-4ea1aa9b", tp_size=2)),
    Example("a list that ends early", _on(4, "0,1,-1,2,3", tp_size=4), expect=("GPUs",)),
    Example("replicas of plain data parallelism", _on(4, tp_size=4, dp_size=2), expect=("GPUs",)),
    Example(
        "replicas that share the ranks", _on(8, tp_size=8, dp_size=8, enable_dp_attention=True)
    ),
    Example("every other GPU", _on(8, tp_size=4, gpu_id_step=2)),
    Example("every other GPU, past the last", _on(6, tp_size=4, gpu_id_step=2), expect=("GPUs",)),
    Example("past the first GPUs", _on(4, tp_size=2, base_gpu_id=3), expect=("GPUs",)),
    Example("ranks that Ray places", _on(4, flags=(_RAY,), tp_size=8)),
    Example("a GPU that did not answer", _unread()),
    Example("two given to a container", _contained("4", "5"), expect=("GPUs",)),
    Example("four given to a container", _contained("4", "5", "6", "7")),
    Example("the shell's own variable", _inherited("numactl"), expect=("GPUs",)),
    Example("the shell's own variable, not a container's", _inherited("docker")),
)
