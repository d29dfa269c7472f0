"""Which of our own kernels were verified on this machine, where the launch is for this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from dsv4doctor.errors import DoctorError
from dsv4doctor.kernels import stamps
from dsv4doctor.kernels.registry import OPERATIONS
from dsv4doctor.models import GpuFacts, SglangTree, Snapshot
from dsv4doctor.state import STATE_VARIABLE

_ELSEWHERE = ("PYTHONPATH", "PYTHONHOME", "HOME", "XDG_STATE_HOME", STATE_VARIABLE)
"""A launch that sets one of these differently has other packages, or looks for other stamps."""
_VERSION = re.compile(r"""^__version__ = ['"]([^'"]+)['"]""", re.MULTILINE)


def verified_here(snapshot: Snapshot, arch_source: str) -> dict[str, str]:
    """Operation -> the day (UTC) of its valid stamp, as the server will ask for it.

    Empty for a GPU that was named or read from a file, for several kinds of GPUs, for an SGLang
    or a Python other than the one that runs dsv4doctor: there the server may find another answer.
    """
    tree, stack, launch = snapshot.sglang, snapshot.stack, snapshot.launch
    if arch_source != "NVML" or tree is None or stack is None or launch is None:
        return {}
    return verified_for(tree, Path(stack.interpreter), snapshot.gpu, launch.environment)


def verified_for(
    tree: SglangTree, interpreter: Path, gpus: GpuFacts, environment: Mapping[str, str]
) -> dict[str, str]:
    """The same of whatever is served from that tree with `interpreter` and those variables on
    this machine, whose GPUs are `gpus`."""
    moved = [name for name in _ELSEWHERE if name in environment]
    is_moved = any(environment[name] != os.environ.get(name) for name in moved)
    if tree.borrowed or is_moved or not _is_this(interpreter):
        return {}
    platform = _platform(gpus)
    if platform is None:
        return {}
    try:
        days = {name: stamps.day(name, platform) for name in OPERATIONS}
    except DoctorError:
        return {}
    return {name: day for name, day in days.items() if day is not None}


def _platform(found: GpuFacts) -> stamps.Platform | None:
    """What `stamps.current_platform` gives on these GPUs, without torch; None: not for sure."""
    kinds = {(gpu.name, gpu.arch) for gpu in found.gpus}
    torch, triton = _version("torch", "version.py"), _version("triton", "__init__.py")
    if len(kinds) != 1 or found.unavailable or not (found.driver and torch and triton):
        return None
    [(name, arch)] = kinds
    return stamps.Platform(name, f"{arch.major}.{arch.minor}", found.driver, torch, triton)


def _version(package: str, file: str) -> str | None:
    """What `package.__version__` is, from its source; the metadata leaves "+cu130" out."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            found = _VERSION.search(Path(folder, file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if found is not None:
            return found[1]
    return None


def _is_this(interpreter: Path) -> bool:
    this = Path(sys.executable)
    try:
        return interpreter.parent == this.parent and os.path.samefile(interpreter, this)
    except OSError:
        return False
