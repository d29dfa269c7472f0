"""Stamps: a kernel passed its numeric self-check on this GPU, with this software.

A stamp is a small JSON file in the user's state folder.  It holds what it was made with, and
counts only while all of that is still so.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4doctor.errors import UndeterminedError, UsageError
from dsv4doctor.kernels import catalog
from dsv4doctor.state import STATE_VARIABLE, state_folder

UNVERIFIED_VARIABLE = "DSV4DOCTOR_ALLOW_UNVERIFIED"
TRACE_VARIABLE = "DSV4DOCTOR_IN_TRACE"
"""Set for the process that traces; never in a server."""


@dataclass(frozen=True)
class Platform:
    """What a kernel's correctness depends on besides its source."""

    gpu: str
    capability: str
    """E.g. "12.0"."""
    driver: str
    torch: str
    triton: str


def current_platform(device: str = "cuda") -> Platform:
    """This process's GPU and software.

    Raises UndeterminedError without a usable GPU, UsageError for a device that is not there and
    under Triton's interpreter, which would run a kernel on the CPU in the GPU's name.
    """
    try:
        import torch
        import triton
    except ImportError as error:
        raise UndeterminedError(
            f"{error.name} is not installed for {sys.executable}",
            "run dsv4doctor from the environment that serves",
        ) from error
    if not torch.cuda.is_available():
        raise UndeterminedError(
            "no NVIDIA GPU that torch can use: the kernels cannot be run here",
            "run this on the serving machine; `dsv4doctor kernels compile` needs no GPU",
        )
    if triton.knobs.runtime.interpret:
        raise UsageError("TRITON_INTERPRET is set: no kernel runs on the GPU", "unset it")
    index = torch.device(device).index
    if index is not None and index >= torch.cuda.device_count():
        raise UsageError(f"--device {device}: torch sees {torch.cuda.device_count()} GPU(s)")
    major, minor = torch.cuda.get_device_capability(device)
    return Platform(
        gpu=torch.cuda.get_device_name(device),
        capability=f"{major}.{minor}",
        driver=_driver(),
        torch=torch.__version__,
        triton=triton.__version__,
    )


@functools.cache
def _driver() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return "unknown"


def key(name: str, platform: Platform, folder: Path = catalog.FOLDER) -> dict[str, Any]:
    """What a stamp of operation `name` is valid for."""
    return {**asdict(platform), "kernel": name, "source": catalog.source_hash(name, folder)}


def path_of(name: str, platform: Platform) -> Path:
    """One file per operation and GPU model, so that machines can share a state folder."""
    gpu = "".join(c if c.isalnum() else "-" for c in platform.gpu)
    return state_folder() / "stamps" / f"{name}.{gpu}.{platform.capability}.json"


def write(
    name: str, platform: Platform, details: Mapping[str, Any], folder: Path = catalog.FOLDER
) -> Path:
    """Replaces the stamp of `name` on this GPU model, in one step; `details` is for readers.

    Raises UndeterminedError when the state folder cannot be written.
    """
    path = path_of(name, platform)
    text = json.dumps({"key": key(name, platform, folder), **details}, indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def remove(name: str, platform: Platform) -> None:
    """Takes the stamp of `name` on this GPU model away, if there is one.

    Raises UndeterminedError when it cannot be taken away.
    """
    path = path_of(name, platform)
    try:
        path.unlink(missing_ok=True)
    except NotADirectoryError:
        return
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> UndeterminedError:
    return UndeterminedError(
        f"{path}: cannot be written ({error.strerror})",
        f"set {STATE_VARIABLE} to a folder that can",
    )


def stale(name: str, platform: Platform, folder: Path = catalog.FOLDER) -> str | None:
    """Why there is no valid stamp, in a few words; None: there is one."""
    try:
        path = path_of(name, platform)
    except UsageError as error:  # asked in the server too, which goes on without
        return f"has no stamp: {error.message} ({error.hint})"
    try:
        stored = _stored(path)["key"]
        wanted = key(name, platform, folder)
        changed = [field for field, value in wanted.items() if stored.get(field) != value]
    except FileNotFoundError:
        return "was never verified on this GPU"
    except _UNREADABLE:
        return f"has a stamp that cannot be read ({path})"
    if not changed:
        return None
    what = {"source": "the kernel's source", "driver": "the driver"}
    return f"was verified before {', '.join(what.get(each, each) for each in changed)} changed"


def day(name: str, platform: Platform, folder: Path = catalog.FOLDER) -> str | None:
    """When the valid stamp of `name` was made, e.g. "2026-11-29"; None: there is none."""
    if stale(name, platform, folder) is not None:
        return None
    try:
        return str(_stored(path_of(name, platform))["made"]).partition("T")[0]
    except _UNREADABLE:
        return None


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)


def _stored(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
