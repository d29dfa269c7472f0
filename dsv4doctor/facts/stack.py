"""The packages of a serving environment against what its SGLang asks for."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName, default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from dsv4doctor.errors import UsageError
from dsv4doctor.evidence.gather import PACKAGES as KERNEL_PACKAGES
from dsv4doctor.evidence.gather import gather
from dsv4doctor.facts.files import shown
from dsv4doctor.facts.tree import read_tree, requirements
from dsv4doctor.models import Package, SglangTree, Stack
from dsv4doctor.wheels import default_cache

PACKAGES = (
    "sglang",
    "sglang-kernel",
    "sgl-kernel",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "sgl-deep-gemm",
    "deep-gemm",
    "sgl-deep-ep",
    "sgl-flash-mla",
    "flash-attn-4",
    "tilelang",
    "tokenspeed-mla",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "humming-kernels",
    "apache-tvm-ffi",
    "kernels",
    "compressed-tensors",
    "torchao",
    "xgrammar",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
)
"""What has a part in which kernel runs.  The order of the report."""

_DEADLINE_SECONDS = 30.0
_MAX_OUTPUT = 4 << 20
_MARK = "dsv4doctor-probe:"
_HINT = "give the Python of the serving environment: --python /path/to/venv/bin/python"

# Runs in the target interpreter, Python 3.8 or newer, with its standard library only.  The
# folder it is started in is not where the server will run, so it leaves sys.path.
_PROBE = """
import email, importlib.util, json, os, platform, sys
from importlib import metadata
sys.path[:1] = [entry for entry in sys.argv[1].split(os.pathsep) if entry]
packages, editable = {}, False
for found in metadata.distributions():
    try:
        # found.metadata would parse a whole README after the header.
        text = found.read_text("METADATA") or found.read_text("PKG-INFO") or found.read_text("")
        header = email.message_from_string(text.partition("\\n\\n")[0])
        name, version = header["Name"], header["Version"]
        if isinstance(name, str) and isinstance(version, str) and name not in packages:
            packages[name] = version
            if name.lower() == "sglang":
                editable = '"editable": true' in (found.read_text("direct_url.json") or "")
    except Exception:
        pass
try:
    spec = importlib.util.find_spec("sglang")
    folders = list(spec.submodule_search_locations or ()) if spec else []
except Exception:
    folders = []
kernels = {}
for name in sys.argv[3].split(","):
    try:
        spec = importlib.util.find_spec(name)
        kernels.update((name, folder) for folder in list(spec.submodule_search_locations)[:1])
    except Exception:
        pass
implementation = sys.implementation.version
print()
print(sys.argv[2] + json.dumps({
    "packages": packages,
    "kernels": kernels,
    "sglang": folders[0] if folders else None,
    "editable": editable,
    "markers": {
        "implementation_name": sys.implementation.name,
        "implementation_version": "%d.%d.%d" % implementation[:3],
        "os_name": os.name,
        "platform_machine": platform.machine(),
        "platform_release": platform.release(),
        "platform_system": platform.system(),
        "platform_version": platform.version(),
        "python_full_version": platform.python_version(),
        "platform_python_implementation": platform.python_implementation(),
        "python_version": "%d.%d" % sys.version_info[:2],
        "sys_platform": sys.platform,
    },
}))
"""


@dataclass(frozen=True)
class _Probe:
    packages: dict[str, str]
    """Canonical name -> version."""
    sglang: str | None
    """The folder that `import sglang` would take."""
    editable: bool
    markers: dict[str, str]
    kernels: dict[str, str]
    """Import name of a package with kernels -> its folder."""


def read_stack(
    interpreter: Path,
    environment: Mapping[str, str] | None = None,
    against: SglangTree | None = None,
    deadline: float = _DEADLINE_SECONDS,
) -> tuple[Stack, SglangTree | None]:
    """What is installed for `interpreter`, and the SGLang that it would import (or None).

    `environment` is the launch's: its PYTHONPATH counts.  The packages are compared with what
    `against` requires, by default the SGLang found.  Nothing of the target is imported.  What its
    kernel packages say of GPUs is kept in the cache.  Raises
    UsageError when `interpreter` is no working Python, or its SGLang has no DeepSeek-V4 and
    `against` is not given.
    """
    executable = _executable(interpreter)
    python_path = (environment or {}).get("PYTHONPATH", "")
    probe = _run_probe(executable, python_path, deadline)
    tree = None if against is not None else _installed_tree(probe)
    reference = against or tree
    declared = requirements(reference) if reference is not None else ()
    installed = dict(probe.packages)
    if reference is not None:
        installed["sglang"] = reference.version
    packages = compare(installed, declared, probe.markers)
    evidence = gather(probe.kernels, installed, default_cache())
    return Stack(str(executable), probe.markers["python_full_version"], packages, evidence), tree


def against(stack: Stack, tree: SglangTree) -> Stack:
    """`stack`, read beside another SGLang, as it stands to what `tree` requires."""
    installed = {package.name: package.version for package in stack.packages if package.version}
    installed["sglang"] = tree.version
    markers: dict[str, str] = {
        **{name: str(value) for name, value in default_environment().items()},
        "python_full_version": stack.python_version,
        "python_version": ".".join(stack.python_version.split(".")[:2]),
    }
    return replace(stack, packages=compare(installed, requirements(tree), markers))


def compare(
    installed: Mapping[str, str], declared: Sequence[Requirement], markers: Mapping[str, str]
) -> tuple[Package, ...]:
    """The packages of interest that are installed or declared.

    `installed` maps canonical names to versions; `markers` describes the target interpreter, as
    `packaging.markers.default_environment` does for ours.
    """
    specifiers: dict[str, SpecifierSet] = {}
    for requirement in declared:
        if _applies(requirement, markers):
            name = canonicalize_name(requirement.name)
            specifiers[name] = specifiers.get(name, SpecifierSet()) & requirement.specifier
    return tuple(
        _package(name, installed.get(name), specifiers.get(name))
        for name in PACKAGES
        if name in installed or name in specifiers
    )


def _package(name: str, version: str | None, specifier: SpecifierSet | None) -> Package:
    if specifier is None:
        return Package(name, version, required=None, satisfied=None)
    satisfied: bool | None = False
    if version is not None:
        try:
            satisfied = specifier.contains(Version(version), prereleases=True)
        except InvalidVersion:
            satisfied = None
    return Package(name, version, str(specifier) or "*", satisfied)


def _applies(requirement: Requirement, markers: Mapping[str, str]) -> bool:
    try:
        return requirement.marker is None or requirement.marker.evaluate({**markers, "extra": ""})
    except (UndefinedComparison, UndefinedEnvironmentName, InvalidVersion):
        return False


def _installed_tree(probe: _Probe) -> SglangTree | None:
    if probe.sglang is None:
        return None
    tree = read_tree(Path(probe.sglang), origin="installed")
    # The metadata of an editable install lies elsewhere than its source.
    if tree.version == "unknown" and probe.editable and "sglang" in probe.packages:
        return replace(tree, version=probe.packages["sglang"])
    return tree


def _executable(interpreter: Path) -> Path:
    """`interpreter` as an absolute path; links are kept, since a venv's Python is one."""
    if len(interpreter.parts) == 1 and not os.path.exists(interpreter):
        found = shutil.which(str(interpreter))
        if found is not None:
            return Path(found).absolute()
    try:
        status = os.stat(interpreter)
    except (FileNotFoundError, NotADirectoryError):
        what = "no such interpreter"
    except OSError as error:
        what = f"cannot be started ({error.strerror})"
    except ValueError as error:
        what = str(error)
    else:
        if stat.S_ISREG(status.st_mode):
            return interpreter.absolute()
        what = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        what += ", not a Python"
    raise UsageError(f"{shown(str(interpreter))}: {what}", _HINT)


def _run_probe(executable: Path, python_path: str, deadline: float) -> _Probe:
    command = [str(executable), "-E", "-c", _PROBE, python_path, _MARK, ",".join(KERNEL_PACKAGES)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"{executable}: cannot be started ({error})", _HINT) from error
    try:
        output = _read_until(process, time.monotonic() + deadline)
    finally:
        _kill(process)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if output is None:
        raise UsageError(f"{executable}: no answer within {deadline:g} s", _HINT)
    return _parse(executable, output.decode(errors="replace"))


def _read_until(process: subprocess.Popen[bytes], end: float) -> bytes | None:
    """What `process` printed, up to a limit; None: it was not done at `end` (monotonic seconds).

    A process of its own that it left behind, and that holds its output open, is not waited for.
    """
    assert process.stdout is not None
    output = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(output) < _MAX_OUTPUT:
            left = end - time.monotonic()
            if left <= 0:
                return None
            is_done = process.poll() is not None
            if selector.select(0 if is_done else min(left, 0.1)):
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    break
                output += chunk
            elif is_done:
                break
    return bytes(output)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the probe and whatever it started, all in its own session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _parse(executable: Path, output: str) -> _Probe:
    marked = [line for line in output.splitlines() if line.startswith(_MARK)]
    try:
        plain = json.loads(marked[-1][len(_MARK) :])
        packages = {str(canonicalize_name(name)): v for name, v in plain["packages"].items()}
        probe = _Probe(
            packages, plain["sglang"], plain["editable"], plain["markers"], plain["kernels"]
        )
        _check(probe)
        return probe
    except (LookupError, ValueError, AttributeError, TypeError, RecursionError) as error:
        last = output.strip().splitlines()[-1:] or ["no output"]
        reason = shown(last[0][:100])
        raise UsageError(f"{executable}: not a working Python ({reason})", _HINT) from error


def _check(probe: _Probe) -> None:
    """ValueError for what no Python answers: the probe's interpreter may be any program."""
    texts = [*probe.packages.values(), *probe.markers.values(), probe.sglang or ""]
    texts += [*probe.kernels.keys(), *probe.kernels.values()]
    if not all(isinstance(text, str) and "\0" not in text for text in texts):
        raise ValueError("not text")
    if not default_environment().keys() <= probe.markers.keys():
        raise ValueError("markers are missing")
    Version(probe.markers["python_version"])
