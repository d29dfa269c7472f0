"""From what a launch calls its model to the folder that holds it, without a network."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.files import read_file, shown

_MODEL_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"[\w.-]{1,100}", re.ASCII)
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


def resolve_model(model: str, environment: Mapping[str, str], revision: str | None = None) -> Path:
    """The checkpoint's folder: `model` itself, or its snapshot in the local Hugging Face cache.

    `environment` says where that cache is (HF_HUB_CACHE, HF_HOME, ...), `revision` which branch,
    tag or commit is meant; a folder has none.  Raises UsageError when there is no such folder, or
    when the snapshot is only partly downloaded.
    """
    folder = _expanded(model, environment)
    try:
        if model and folder.is_dir():
            return folder.absolute()
        exists = bool(model) and folder.exists()
    except (OSError, ValueError):
        exists = False
    if exists:
        raise UsageError(f"{model}: not a folder", "Give the folder that holds config.json.")
    _check_access(folder, model)
    if not _MODEL_ID.fullmatch(model):
        raise UsageError(
            f"{shown(model) or 'the model'}: no such folder",
            "Give the checkpoint's folder, or the id of a model in the local Hugging Face cache.",
        )
    return _cached_snapshot(model, hub_cache(environment), revision or "main")


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Where the Hugging Face hub keeps its downloads, by the same variables it reads."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(variable):
            return _expanded(environment[variable], environment)
    if environment.get("HF_HOME"):
        return _expanded(environment["HF_HOME"], environment) / "hub"
    if environment.get("XDG_CACHE_HOME"):
        return _expanded(environment["XDG_CACHE_HOME"], environment) / "huggingface" / "hub"
    return _expanded("~/.cache/huggingface/hub", environment)


def repository_name(folder: Path) -> str:
    """The name of a checkpoint's folder; "org/name" for a snapshot in a hub cache."""
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.name


def is_snapshot(folder: Path) -> bool:
    return "/" in repository_name(folder)


def _expanded(path: str, environment: Mapping[str, str]) -> Path:
    if path == "~" or path.startswith("~/"):
        # not Path.home: it raises for a user without a home, whose "~" then stays
        home = environment.get("HOME") or os.path.expanduser("~")
        return Path(home) / path[2:]
    return Path(path)


def _check_access(path: Path, model: str) -> None:
    """Raises UsageError when it cannot even be seen whether there is something at `path`."""
    try:
        os.stat(path)
    except PermissionError as error:
        raise UsageError(
            f"{shown(model)}: {path} cannot be read ({error.strerror})",
            "Run as a user who can, or give another folder.",
        ) from error
    except (OSError, ValueError):
        pass


def _cached_snapshot(model: str, cache: Path, name: str) -> Path:
    """The snapshot of a branch, tag or commit of that name."""
    repository = cache / f"models--{model.replace('/', '--')}"
    download = f"Download it (hf download {shown(model)}), or give the checkpoint's folder."
    _check_access(repository, model)
    if not os.path.isdir(repository):  # unlike Path.is_dir, false for what cannot be looked at
        raise UsageError(
            f"{shown(model)}: neither a folder nor in the hub cache at {cache}", download
        )
    if not _is_name(name):
        raise UsageError(f"{model}: revision {shown(name)} is not in the hub cache", download)
    snapshot = repository / "snapshots" / name
    if not os.path.isdir(snapshot):
        reference = repository / "refs" / name
        if not os.path.exists(reference):
            raise UsageError(
                f"{model}: {reference} is not there, so no download finished", download
            )
        commit = read_file(reference, 4096).decode("ascii", "replace").strip()
        snapshot = repository / "snapshots" / commit
        if not _is_name(commit) or not os.path.isdir(snapshot):
            raise UsageError(f"{reference}: names a revision that is not downloaded", download)
    missing = _missing_file(snapshot)
    if missing is not None:
        raise UsageError(
            f"{model}: the snapshot at {snapshot} is only partly downloaded ({missing})",
            f"Finish the download (hf download {model}), or give another folder.",
        )
    return snapshot.absolute()


def _is_name(revision: str) -> bool:
    return _REVISION.fullmatch(revision) is not None and revision not in (".", "..")


def _missing_file(snapshot: Path) -> str | None:
    """What a snapshot lacks by the names in it; None: nothing that the names show."""
    if not os.path.exists(snapshot / "config.json"):
        return "no config.json"
    names = [path.name for path in snapshot.glob("*.safetensors") if os.path.exists(path)]
    if not names:
        return "no .safetensors files"
    shards = {int(match[1]): int(match[2]) for match in map(_SHARD.fullmatch, names) if match}
    total = max(shards.values(), default=0)
    if len(shards) < total:
        return f"{len(shards)} of {total} shards"
    return None
