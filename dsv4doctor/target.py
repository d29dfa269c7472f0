"""From the command line's options to the one launch that is looked at, and its facts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsv4doctor.asked import Options, env_pairs
from dsv4doctor.asked_launch import (
    launch_of,
    materialised,
    model_path_of,
    no_model,
    refuse_unknown,
    saved_checkpoint,
)
from dsv4doctor.asked_sglang import (
    Download,
    interpreter_of,
    named_tree,
    required,
    sglang_of,
)
from dsv4doctor.errors import UsageError
from dsv4doctor.evidence.stamped import verified_for
from dsv4doctor.facts.checkpoint import read_checkpoint
from dsv4doctor.facts.gpu import read_gpus
from dsv4doctor.facts.host import read_host
from dsv4doctor.facts.measure import measure
from dsv4doctor.facts.snapshot import read_snapshot, take, usable_environment
from dsv4doctor.facts.stack import read_stack
from dsv4doctor.facts.tree import mixed
from dsv4doctor.launch_limits import check_limits
from dsv4doctor.models import (
    ARCHS,
    Arch,
    Checkpoint,
    Gpu,
    GpuFacts,
    Launch,
    Said,
    SglangTree,
    Snapshot,
)
from dsv4doctor.wheels import default_cache


@dataclass(frozen=True)
class Target:
    """One launch on one GPU type, with everything a trace needs."""

    snapshot: Snapshot
    """All facts, secrets redacted."""
    arch: Arch
    arch_source: str
    tree: SglangTree
    interpreter: Path
    checkpoint: Checkpoint
    model_path: Path
    launch: Launch
    """As written, nothing redacted."""
    environment: dict[str, str]
    """The machine's variables, under the launch's own."""
    gpu: Gpu | None = None
    """The GPU to simulate, when it was looked at; None: a typical one of `arch`."""
    gpu_count: int | None = None
    elsewhere: bool = False
    """The launch is for another machine than this one."""
    seconds: float = 0.0
    """Spent on reading the facts."""
    notes: tuple[str, ...] = field(default=())
    """What was decided for the user."""
    said: Said = field(default=Said())


def resolve(options: Options, download: Download | None = None) -> Target:
    """The launch that `options` describe; the snapshot supplies what the options do not.

    Raises UsageError naming the flag or file that is wrong or missing, and UndeterminedError
    when a release cannot be fetched.  `download` is told about bytes fetched.
    """
    started = time.monotonic()
    notes: list[str] = []
    saved = read_snapshot(options.snapshot) if options.snapshot else None
    environment = usable_environment(saved.environment) if saved else dict(os.environ)
    launch = launch_of(options, saved, environment)
    refuse_unknown(launch)
    check_limits(launch)
    notes += launch.notes
    # What is cheap and most often missing is asked for first.
    kept = saved_checkpoint(options, saved, launch)
    if kept is None and launch.model is None:
        raise no_model(options, launch)
    gpus = saved.gpu if saved else read_gpus()
    variables = {**environment, **launch.environment}
    seen = _seen_by_server(launch, variables)
    arch, arch_source, gpu = _arch(options, gpus, saved is not None, seen, notes)
    if kept is None:
        model_path = model_path_of(options, launch, environment, saved)
    else:
        model_path = materialised(kept, default_cache())
    interpreter = interpreter_of(options, launch, notes)
    with ThreadPoolExecutor(max_workers=2) as beside:
        # Most of it is waiting: for the target interpreter's answer, or for a download.
        machine = None if saved else beside.submit(read_host, variables, gpus, launch.model)
        tree_and_stack = beside.submit(sglang_of, options, saved, interpreter, variables, download)
        checkpoint = kept or read_checkpoint(model_path, default_cache() / "checkpoints")
        tree, stack = tree_and_stack.result()
        host = machine.result() if machine is not None else saved.host if saved else None
    notes += mixed(Path(tree.root))
    snapshot = take(
        gpu=gpus,
        sglang=tree,
        stack=stack,
        checkpoint=checkpoint,
        launch=launch,
        environment=environment,
        host=host,
    )
    return Target(
        snapshot=snapshot,
        arch=arch,
        arch_source=arch_source,
        tree=tree,
        interpreter=interpreter,
        checkpoint=checkpoint,
        model_path=model_path,
        launch=launch,
        environment=environment,
        gpu=gpu,
        gpu_count=len(gpus.gpus) if gpu else None,
        elsewhere=saved is not None or gpu is None,
        seconds=time.monotonic() - started,
        notes=tuple(notes),
        said=_said(options, saved, snapshot.launch),
    )


def _said(options: Options, saved: Snapshot | None, launch: Launch | None) -> Said:
    """`launch`: as the facts have it."""
    is_saved = saved is not None and saved.launch is not None
    own = is_saved and options.launch is None and not options.flags
    return Said(
        model=options.model,
        python=options.python,
        snapshot=str(options.snapshot) if options.snapshot is not None else None,
        saved_flags=launch.flags if own and launch is not None else None,
    )


def measured(target: Target, progress: Callable[[str], None] | None = None) -> Target:
    """`target` with what its machine's GPUs do when they communicate; minutes at most."""
    host = target.snapshot.host
    assert host is not None
    variables = {**target.environment, **target.launch.environment}
    found, note = measure(target.interpreter, variables, target.snapshot.gpu, progress)
    snapshot = replace(target.snapshot, host=replace(host, measured=found))
    return replace(target, snapshot=snapshot, notes=(*target.notes, *([note] if note else [])))


def resolve_tree(options: Options, download: Download | None = None) -> SglangTree:
    """The SGLang tree that `options` name, by default the interpreter's; no launch is needed.

    Raises UsageError where there is none.
    """
    return _tree_alone(options, download)[0]


def resolve_verified(
    options: Options, download: Download | None = None
) -> tuple[SglangTree, dict[str, str]]:
    """`resolve_tree`, and our kernels that were verified on this machine for it, and the day."""
    tree, interpreter, variables = _tree_alone(options, download)
    return tree, verified_for(tree, interpreter, read_gpus(), variables)


def _tree_alone(
    options: Options, download: Download | None
) -> tuple[SglangTree, Path, dict[str, str]]:
    """The tree, the interpreter around it and the variables that it is run with."""
    environment = dict(os.environ)
    launch = launch_of(options, None, environment) if options.launch is not None else None
    interpreter = interpreter_of(options, launch, [])
    variables = {**environment, **(launch.environment if launch else {}), **env_pairs(options.env)}
    if options.sglang is not None:
        return named_tree(options.sglang, interpreter, download), interpreter, variables
    stack, tree = read_stack(interpreter, variables)
    return required(tree, interpreter), Path(stack.interpreter), variables


def facts_of_machine(options: Options, download: Download | None = None) -> Snapshot:
    """What this machine has; a launch, model or SGLang that was not named may be absent.

    Raises UsageError for one that was named and cannot be read.
    """
    environment = dict(os.environ)
    named = options.launch is not None or options.model is not None or options.flags
    launch = launch_of(options, None, environment) if named else None
    variables = {**environment, **(launch.environment if launch else {}), **env_pairs(options.env)}
    checkpoint = None
    if launch is not None and launch.model is not None:
        path = model_path_of(options, launch, environment)
        checkpoint = read_checkpoint(path, default_cache() / "checkpoints")
    interpreter = interpreter_of(options, launch, [])
    if options.sglang is not None:
        tree: SglangTree | None = named_tree(options.sglang, interpreter, download)
        stack, _ = read_stack(interpreter, variables, against=tree)
    else:
        stack, tree = read_stack(interpreter, variables)
    gpus = read_gpus()
    return take(
        gpu=gpus,
        sglang=tree,
        stack=stack,
        checkpoint=checkpoint,
        launch=launch,
        environment=environment,
        host=read_host(variables, gpus, launch.model if launch else None),
    )


# ------------------------------------------------------------------------------ GPU


def _arch(
    options: Options,
    gpus: GpuFacts,
    is_saved: bool,
    variables: Mapping[str, str],
    notes: list[str],
) -> tuple[Arch, str, Gpu | None]:
    """The architecture, where it comes from, and the GPU that has it."""
    used = _used_gpu(gpus, variables)
    if options.arch != "auto":
        arch = ARCHS[options.arch]
        return arch, "--arch", used if used is not None and used.arch == arch else None
    if used is None:
        where = "the snapshot has no GPU" if is_saved else "no GPU on this machine"
        reason = f" ({gpus.unavailable})" if gpus.unavailable else ""
        raise UsageError(
            f"{where}{reason}",
            f"say which one is meant: --arch {'|'.join(ARCHS)}",
        )
    if len({gpu.arch for gpu in gpus.gpus}) > 1:
        kinds = ", ".join(sorted({f"{gpu.name} ({gpu.arch.name})" for gpu in gpus.gpus}))
        notes.append(f"GPUs of several kinds ({kinds}): GPU {used.index} is used; see --arch")
    return traceable(used), "snapshot" if is_saved else "NVML", used


def traceable(gpu: Gpu) -> Arch:
    """The architecture of `gpu`; UsageError for one that no launch is traced for."""
    if gpu.arch not in ARCHS.values():
        raise UsageError(
            f"{gpu.name} is {gpu.arch.name}: launches are traced for other GPUs",
            f"say which one is meant: --arch {'|'.join(ARCHS)}",
        )
    return gpu.arch


def _seen_by_server(launch: Launch, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that say which GPUs the server sees; `variables`: the shell's and its own."""
    if not launch.in_container:
        return dict(variables)
    given = {"CUDA_VISIBLE_DEVICES": ",".join(launch.devices)} if launch.devices else {}
    return {**launch.environment, **given}


def _used_gpu(gpus: GpuFacts, variables: Mapping[str, str]) -> Gpu | None:
    """The first GPU that a server with `variables` can see."""
    visible = variables.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    chosen = [gpu for gpu in gpus.gpus if str(gpu.index) == visible]
    return next(iter(chosen or gpus.gpus), None)
