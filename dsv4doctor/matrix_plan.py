"""What a matrix is made of, from what the user said."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from dsv4doctor.asked import Options, env_pairs
from dsv4doctor.errors import UndeterminedError, UsageError
from dsv4doctor.facts.checkpoint import read_checkpoint, resolve_model
from dsv4doctor.facts.gpu import read_gpus
from dsv4doctor.facts.stack import read_stack
from dsv4doctor.flags import MODEL_FLAGS
from dsv4doctor.matrix import FlagSet, flag_sets_to_try
from dsv4doctor.matrix_run import Model, Plan, Release, cores
from dsv4doctor.models import ARCHS, Arch, SglangTree
from dsv4doctor.target import Target, resolve, resolve_tree, traceable
from dsv4doctor.wheels import default_cache

Download = Callable[[int, "int | None"], None]
_INSTALLED = "installed"


@dataclass(frozen=True)
class Asked:
    """The command line, as said."""

    models: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """SGLang's, after `--`."""
    launch: str | None = None
    snapshot: str | None = None
    sglang: str | None = None
    arch: str = "auto"
    flag_sets: tuple[str, ...] = ()
    """NAME=FLAGS each."""
    recommend: bool = False
    read_flashinfer: bool = False
    python: str | None = None
    env: tuple[str, ...] = ()
    jobs: int | None = None
    timeout: float = 300.0
    use_cache: bool = True


def plan(asked: Asked, download: Download | None = None) -> Plan:
    """What to trace.  Raises UsageError naming the flag or file that is wrong or missing."""
    if asked.sglang is not None:
        _listed(asked.sglang, "--sglang")
    if asked.launch is not None or asked.snapshot is not None:
        return _of_launch(asked, download)
    if not asked.models:
        raise UsageError(
            "no MODEL given", "give checkpoint folders or Hugging Face ids: dsv4doctor matrix MODEL"
        )
    archs = _archs(asked.arch)
    given = env_pairs(asked.env)
    variables = {**os.environ, **given}
    models = _models(asked.models, variables)
    sets = _flag_sets(asked, asked.flags, models)
    interpreter = Path(os.path.expanduser(asked.python or sys.executable))
    stack, own = read_stack(interpreter, variables) if _takes_installed(asked) else (None, None)
    releases = _releases(asked.sglang, own, interpreter, (), download)
    if stack is None:
        tree = next((release.tree for release in releases if release.tree), None)
        stack, _ = read_stack(interpreter, variables, against=tree)
    return Plan(
        releases=releases,
        archs=archs,
        models=models,
        flag_sets=sets,
        interpreter=Path(stack.interpreter),
        stack=stack,
        environment=dict(os.environ),
        given=given,
        jobs=asked.jobs or cores(),
        timeout=asked.timeout,
        use_cache=asked.use_cache,
        with_paths=asked.recommend,
        read_flashinfer=asked.read_flashinfer,
    )


def _of_launch(asked: Asked, download: Download | None) -> Plan:
    """The launch of a script or a snapshot, on other releases, GPUs and flags."""
    listed = None if asked.arch == "auto" else _archs(asked.arch)
    target = _target(asked, listed, download)
    launch = target.launch
    variables = {**target.environment, **launch.environment}
    own = None
    if asked.snapshot is None and _takes_installed(asked):
        _, own = read_stack(target.interpreter, variables)
    first = Model(
        target.checkpoint.name,
        target.model_path,
        target.checkpoint,
        launch.model or str(target.model_path),
    )
    models = (first, *_models(asked.models[1:], variables, (first,)))
    known = (target.tree,) if asked.snapshot is not None else ()
    return Plan(
        releases=_releases(asked.sglang, own, target.interpreter, known, download),
        archs=listed or (target.arch,),
        models=models,
        flag_sets=_flag_sets(asked, launch.flags, models),
        interpreter=target.interpreter,
        stack=target.snapshot.stack,
        environment=target.environment,
        given=launch.environment,
        wrappers=launch.wrappers,
        gpu=target.gpu,
        gpu_count=target.gpu_count,
        jobs=asked.jobs or cores(),
        timeout=asked.timeout,
        use_cache=asked.use_cache,
        with_paths=asked.recommend,
        read_flashinfer=asked.read_flashinfer,
    )


def _target(asked: Asked, listed: tuple[Arch, ...] | None, download: Download | None) -> Target:
    """The launch as it is, on whichever of the releases can be had first."""
    if asked.sglang is not None:
        names = [name for name in _listed(asked.sglang, "--sglang") if name != _INSTALLED]
    else:
        names = [] if asked.snapshot is not None else _cached(needed=False)
    options = Options(
        model=asked.models[0] if asked.models else None,
        flags=asked.flags,
        launch=Path(asked.launch) if asked.launch else None,
        snapshot=Path(asked.snapshot) if asked.snapshot else None,
        sglang=_first_there(names, asked.python, download),
        python=asked.python,
        arch=listed[0].name if listed else "auto",
        env=asked.env,
    )
    return resolve(options, download)


def _first_there(names: Sequence[str], python: str | None, download: Download | None) -> str | None:
    """The first release that can be had; where none can, the first, which says why."""
    for name in names:
        with contextlib.suppress(UndeterminedError, UsageError):
            resolve_tree(Options(sglang=name, python=python), download)
            return name
    return names[0] if names else None


def _takes_installed(asked: Asked) -> bool:
    """Whether the interpreter's own SGLang is one of the releases; one too old is none else."""
    return asked.sglang is None or _INSTALLED in _listed(asked.sglang, "--sglang")


def _archs(text: str) -> tuple[Arch, ...]:
    if text == "all":
        return tuple(ARCHS.values())
    if text == "auto":
        gpus = read_gpus()
        if gpus.gpus:
            return tuple(dict.fromkeys(traceable(gpu) for gpu in gpus.gpus))
        reason = f" ({gpus.unavailable})" if gpus.unavailable else ""
        raise UsageError(
            f"no GPU on this machine{reason}",
            f"say which ones are meant: --arch {','.join(ARCHS)} or --arch all",
        )
    names = _listed(text, "--arch")
    unknown = [name for name in names if name not in ARCHS]
    if unknown:
        raise UsageError(f"--arch {unknown[0]}: not known", f"known: {', '.join(ARCHS)}")
    return tuple(ARCHS[name] for name in names)


def _listed(text: str, flag: str) -> list[str]:
    names = list(dict.fromkeys(piece.strip() for piece in text.split(",") if piece.strip()))
    if not names:
        raise UsageError(f"{flag}: nothing in the list", f"write it like {flag} one,other")
    return names


def _models(
    named: Sequence[str], environment: dict[str, str], before: tuple[Model, ...] = ()
) -> tuple[Model, ...]:
    """The checkpoints, each under a name of its own; `before` are there already."""
    found: list[Model] = []
    for name in dict.fromkeys(named):
        path = resolve_model(name, environment)
        checkpoint = read_checkpoint(path, default_cache() / "checkpoints")
        taken = any(model.name == checkpoint.name for model in (*before, *found))
        found.append(Model(name if taken else checkpoint.name, path, checkpoint, name))
    return tuple(found)


def _releases(
    text: str | None,
    own: SglangTree | None,
    interpreter: Path,
    known: tuple[SglangTree, ...],
    download: Download | None,
) -> tuple[Release, ...]:
    """The trees to trace; one of several that cannot be had is there with the reason.

    `own` is the interpreter's.  Without a list: that one and `known`, and those in the cache.
    """
    trees = {_INSTALLED: own} if own is not None else {}
    if text is None:
        trees.update({tree.version: tree for tree in known})
        names = list(dict.fromkeys([*trees, *_cached(needed=not trees)]))
    else:
        names = _listed(text, "--sglang")
    if own is None and _INSTALLED in names:
        raise UsageError(
            f"{interpreter}: no SGLang in this interpreter",
            "give the serving environment's with --python",
        )
    found: list[Release] = []
    wrong: UsageError | None = None
    for name in names:
        try:
            tree = trees.get(name) or resolve_tree(Options(sglang=name), download)
            taken = any(release.name == tree.version for release in found)
            found.append(Release(name if taken else tree.version, tree))
        except (UndeterminedError, UsageError) as error:
            wrong = error if wrong is None and isinstance(error, UsageError) else wrong
            found.append(Release(name, None, error))
    if wrong is not None and all(release.tree is None for release in found):
        raise wrong
    return tuple(found)


def _cached(needed: bool) -> list[str]:
    """The releases in the cache, the oldest first; UsageError when there is none and one is
    `needed`."""
    found: list[tuple[Version, str]] = []
    folder = default_cache() / "sglang"
    try:
        entries = list(folder.iterdir())
    except OSError:
        entries = []
    for entry in entries:
        try:
            found.append((Version(entry.name), entry.name))
        except InvalidVersion:
            continue  # what a fetch has not finished
    if needed and not found:
        raise UsageError(
            "no SGLang release in the cache", "name some: --sglang 0.5.14,0.5.23 (they are fetched)"
        )
    return [name for _, name in sorted(found)]


def _flag_sets(
    asked: Asked, flags: tuple[str, ...], models: Sequence[Model]
) -> tuple[FlagSet, ...]:
    """`flags`, alone or with what is added to them."""
    found: dict[str, tuple[str, ...]] = {}
    for said in asked.flag_sets:
        name, equals, text = said.partition("=")
        if not equals or not name.strip() or name in found:
            what = "given twice" if name in found else "not NAME=FLAGS"
            raise UsageError(
                f"--flags-set {name[:40]}: {what}",
                'write it like --flags-set marlin="--moe-runner-backend marlin"',
            )
        try:
            found[name.strip()] = (*flags, *shlex.split(text))
        except ValueError as error:
            raise UsageError(
                f"--flags-set {name[:40]}: {error}", "close the quotes as in a shell"
            ) from error
    for flag in [*flags, *(flag for one in found.values() for flag in one)]:
        if flag.partition("=")[0] in MODEL_FLAGS:
            raise UsageError(
                f"{flag.partition('=')[0]} among SGLang's flags", "the model is matrix's own MODEL"
            )
    if found:
        return tuple(FlagSet(name, one) for name, one in found.items())
    if asked.recommend:
        formats = [layer.stored_format for model in models for layer in model.checkpoint.layers]
        return flag_sets_to_try(flags, formats)
    return (FlagSet("as given", flags),)
