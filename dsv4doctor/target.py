"""From the command line's options to the one launch that is looked at, and its facts."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from packaging.version import InvalidVersion, Version

from dsv4doctor import jsonio
from dsv4doctor.errors import UsageError
from dsv4doctor.evidence.stamped import verified_for
from dsv4doctor.facts.checkpoint import materialise, read_checkpoint, resolve_model
from dsv4doctor.facts.files import shown
from dsv4doctor.facts.gpu import read_gpus
from dsv4doctor.facts.host import read_host
from dsv4doctor.facts.measure import measure
from dsv4doctor.facts.snapshot import read_snapshot, take, usable_environment
from dsv4doctor.facts.stack import against, read_stack
from dsv4doctor.facts.tree import mixed, read_tree
from dsv4doctor.flags import MODEL_FLAGS, flag_value
from dsv4doctor.launch import from_arguments, read_script
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
    Stack,
)
from dsv4doctor.server_config import flags_of
from dsv4doctor.wheels import default_cache, fetch_tree

_LINE = re.compile("[0-9]{1,9}")

Download = Callable[[int, "int | None"], None]


@dataclass(frozen=True)
class Options:
    """What the user said, as said."""

    model: str | None = None
    flags: tuple[str, ...] = ()
    """SGLang's, after `--`."""
    launch: Path | None = None
    """A script, or `script:LINE` where it holds several SGLang commands."""
    snapshot: Path | None = None
    sglang: str | None = None
    """A folder or a version."""
    python: str | None = None
    arch: str = "auto"
    env: tuple[str, ...] = ()
    """KEY=VALUE each."""
    level: str = "quick"
    """"full": also measure on this machine's GPUs."""
    takes_launch: bool = True
    """The command has --launch."""


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
    launch = _launch(options, saved, environment)
    _refuse_unknown(launch)
    check_limits(launch)
    notes += launch.notes
    # What is cheap and most often missing is asked for first.
    kept = _saved_checkpoint(options, saved, launch)
    if kept is None and launch.model is None:
        raise _no_model(options, launch)
    gpus = saved.gpu if saved else read_gpus()
    variables = {**environment, **launch.environment}
    seen = _seen_by_server(launch, variables)
    arch, arch_source, gpu = _arch(options, gpus, saved is not None, seen, notes)
    if kept is None:
        model_path = _model_path(options, launch, environment, saved)
    else:
        model_path = _materialised(kept, default_cache())
    interpreter = _interpreter(options, launch, notes)
    with ThreadPoolExecutor(max_workers=2) as beside:
        # Most of it is waiting: for the target interpreter's answer, or for a download.
        machine = None if saved else beside.submit(read_host, variables, gpus, launch.model)
        tree_and_stack = beside.submit(_tree, options, saved, interpreter, variables, download)
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
    launch = _launch(options, None, environment) if options.launch is not None else None
    interpreter = _interpreter(options, launch, [])
    variables = {**environment, **(launch.environment if launch else {}), **env_pairs(options.env)}
    if options.sglang is not None:
        return _named_tree(options.sglang, interpreter, download), interpreter, variables
    stack, tree = read_stack(interpreter, variables)
    return _required(tree, interpreter), Path(stack.interpreter), variables


def facts_of_machine(options: Options, download: Download | None = None) -> Snapshot:
    """What this machine has; a launch, model or SGLang that was not named may be absent.

    Raises UsageError for one that was named and cannot be read.
    """
    environment = dict(os.environ)
    named = options.launch is not None or options.model is not None or options.flags
    launch = _launch(options, None, environment) if named else None
    variables = {**environment, **(launch.environment if launch else {}), **env_pairs(options.env)}
    checkpoint = None
    if launch is not None and launch.model is not None:
        path = _model_path(options, launch, environment)
        checkpoint = read_checkpoint(path, default_cache() / "checkpoints")
    interpreter = _interpreter(options, launch, [])
    if options.sglang is not None:
        tree: SglangTree | None = _named_tree(options.sglang, interpreter, download)
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


# ------------------------------------------------------------------------------ launch, model


def _launch(options: Options, saved: Snapshot | None, environment: Mapping[str, str]) -> Launch:
    given = env_pairs(options.env)
    if options.launch is not None and options.flags:
        raise UsageError(
            "--launch and SGLang flags after `--` are both given", "give one of the two"
        )
    if options.launch is not None:
        path, line = _script(options.launch)
        launch = read_script(path, {**environment, **given}, line, given)
    elif saved is not None and saved.launch is not None and not options.flags:
        launch = replace(saved.launch, environment=usable_environment(saved.launch.environment))
    else:
        launch = from_arguments(options.model, options.flags, {})
    launch = _with_configuration(launch)
    if options.model is not None:
        launch = replace(launch, model=options.model)
    elif launch.model is None and _unknown_model(launch) is None:
        launch = _with_configured_model(launch)
    environment = {**launch.environment, **given}
    return replace(launch, environment=environment, given=tuple(given))


def _unknown_model(launch: Launch) -> str | None:
    """What is not known of the model that the script names; None: it names none, or it is known."""
    said = (note.partition(": ")[2] for note in launch.notes if note.startswith("line "))
    return next((text for text in said if text.startswith("cannot know the model")), None)


def _with_configuration(launch: Launch) -> Launch:
    """`launch` with what its --config file says; what of it cannot be read is SGLang's to say."""
    named = flag_value(launch.flags, "--config")
    if named is None or not os.path.isfile(named):
        return launch
    check_limits(launch)
    return replace(launch, configured=flags_of(Path(named)))


def _with_configured_model(launch: Launch) -> Launch:
    """`launch` with the model of its --config file; a flag would count more."""
    model = next((m for name in MODEL_FLAGS if (m := flag_value(launch.configured, name))), None)
    if model is None:
        return launch
    note = f"the model is what --config {flag_value(launch.flags, '--config')} names"
    return replace(launch, model=model, notes=(*launch.notes, note))


def _refuse_unknown(launch: Launch) -> None:
    """UsageError for a launch of which not every argument is known: a guess helps nobody."""
    if launch.unknown:
        more = f", and {len(launch.unknown) - 1} more" if len(launch.unknown) > 1 else ""
        at = f":{launch.line}" if launch.line else ""
        raise UsageError(
            f"{launch.source}{at}: {launch.unknown[0]}{more}",
            "write the value into the script, give a variable of it with --env NAME=VALUE, or "
            "give SGLang's flags after `--`",
        )


def _script(named: Path) -> tuple[Path, int | None]:
    text, colon, number = str(named).rpartition(":")
    if colon and _LINE.fullmatch(number) and not os.path.exists(named):
        return Path(text), int(number)
    return named, None


def env_pairs(texts: Sequence[str]) -> dict[str, str]:
    """What each --env, a KEY=VALUE, says; UsageError for one that is none."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or "\0" in value:
            said = re.split(r"[=\s]", text, maxsplit=1)[0]  # the rest may be a secret
            raise UsageError(f"--env {said}...: not KEY=VALUE", "write it like --env SGLANG_X=1")
        found[name] = value
    return found


def _model_path(
    options: Options,
    launch: Launch,
    environment: Mapping[str, str],
    saved: Snapshot | None = None,
) -> Path:
    """The folder of the launch's model on this machine."""
    if launch.model is None:
        raise _no_model(options, launch)
    try:
        return resolve_model(
            launch.model,
            {**environment, **launch.environment},
            flag_value(launch.all_flags, "--revision"),
        )
    except UsageError as error:
        if saved is None or saved.checkpoint is None or options.model is not None:
            raise
        raise UsageError(
            f"{launch.source}: {error.message}, and {options.snapshot} is of another model, "
            f"{saved.checkpoint.name}",
            "take the snapshot with this launch: dsv4doctor snapshot --launch FILE -o FILE",
        ) from error


def _no_model(options: Options, launch: Launch) -> UsageError:
    config = flag_value(launch.flags, "--config")
    if options.launch is not None or config is not None:
        unknown = _unknown_model(launch)
        if unknown is not None:
            return UsageError(
                f"{launch.source}:{launch.line}: {unknown}",
                "give it as MODEL, or a variable of it with --env NAME=VALUE",
            )
        beside = f", nor does --config {config}" if config is not None else ""
        return UsageError(
            f"{launch.source}: names no model{beside}",
            "give it as MODEL: a checkpoint folder or a Hugging Face id",
        )
    model = "give a checkpoint folder or a Hugging Face id as MODEL"
    if not options.takes_launch:
        where = f"{options.snapshot}: has no model, and " if options.snapshot is not None else ""
        return UsageError(f"{where}no MODEL given", model)
    script = "the script that starts the server (--launch serve.sh)"
    return UsageError("no MODEL and no --launch given", f"{model}, or {script}")


def _saved_checkpoint(
    options: Options, saved: Snapshot | None, launch: Launch
) -> Checkpoint | None:
    """The snapshot's, unless the command line or a script names another model."""
    if saved is None or saved.checkpoint is None or options.model is not None:
        return None
    kept, own = saved.checkpoint, saved.launch.model if saved.launch else None
    if launch.model is None or launch.model == own:
        return kept
    # Elsewhere the same checkpoint may lie in another folder, or go by its id.
    names = {PurePosixPath(name).name for name in (own, kept.path, kept.name) if name}
    return kept if PurePosixPath(launch.model).name in names else None


def _materialised(checkpoint: Checkpoint, cache: Path) -> Path:
    """A snapshot's checkpoint as header-only files in our cache, by its content.

    By what the snapshot says now: its own key is of the files that it was taken from.
    """
    content = json.dumps(jsonio.to_plain(checkpoint), sort_keys=True).encode()
    target = cache / "snapshots" / hashlib.sha256(content).hexdigest()[:32]
    if os.path.isdir(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True) as scratch:
            folder = materialise(checkpoint, Path(scratch) / "checkpoint")
            try:
                os.rename(folder, target)
            except OSError:
                if not os.path.isdir(target):  # else another process was first
                    raise
    except OSError as error:
        raise UsageError(
            f"{target}: cannot be written ({error.strerror})",
            "set DSV4DOCTOR_CACHE to a folder that can",
        ) from error
    return target


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


# ------------------------------------------------------------------------------ SGLang


def _interpreter(options: Options, launch: Launch | None, notes: list[str]) -> Path:
    if options.python is not None:
        return Path(os.path.expanduser(options.python))
    is_saved = options.snapshot is not None and options.launch is None
    # A file from elsewhere does not say what is run here.
    if launch is not None and launch.interpreter is not None and not is_saved:
        named = Path(os.path.expanduser(launch.interpreter))
        if os.path.isfile(named):
            return named
        notes.append(f"{named}, the Python of {launch.source}, is not on this machine")
    return Path(sys.executable)


def _tree(
    options: Options,
    saved: Snapshot | None,
    interpreter: Path,
    variables: Mapping[str, str],
    download: Download | None,
) -> tuple[SglangTree, Stack]:
    """The tree to trace, and the packages around it against what it pins."""
    named = options.sglang
    if named is None and saved is not None and saved.sglang is not None:
        named = _same_tree(saved.sglang) or saved.sglang.version
    if named is not None:
        tree = _named_tree(named, interpreter, download)
        stack, _ = read_stack(interpreter, variables, against=tree)
        if saved is not None and saved.stack is not None:
            same = saved.sglang is not None and saved.sglang.version == tree.version
            stack = saved.stack if same else against(saved.stack, tree)
        return tree, stack
    stack, installed = read_stack(interpreter, variables)
    return _required(installed, interpreter), stack


def _required(installed: SglangTree | None, interpreter: Path) -> SglangTree:
    if installed is None:
        raise UsageError(
            f"{interpreter}: no SGLang in this interpreter",
            "give the serving environment's with --python, or a release with --sglang 0.5.23",
        )
    return installed


def _same_tree(saved: SglangTree) -> str | None:
    """A snapshot's SGLang where it is a release in our own cache.

    No other folder that the file names: what lies there would be imported.
    """
    root = Path(saved.root)
    return saved.root if root.is_relative_to(default_cache() / "sglang") and root.is_dir() else None


def _named_tree(named: str, interpreter: Path, download: Download | None) -> SglangTree:
    path = Path(os.path.expanduser(named))
    if os.sep not in named and not os.path.exists(path):
        try:
            Version(named)
        except InvalidVersion as error:
            raise UsageError(
                f"--sglang {shown(named)}: neither a folder nor a version",
                "write it like --sglang 0.5.23, or give a folder",
            ) from error
        return fetch_tree(named, default_cache(), download, sys.executable)
    return read_tree(path)
