"""The machine around the GPUs: kernel, memory, container, NUMA, PCI, nvcc, hub cache.

Everything is read on its own and may be absent; nothing raises.  The only program that is started
is `nvcc --version`, with a deadline, while the files are read.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dsv4doctor.facts.gpu import sysfs_name
from dsv4doctor.facts.hub import hub_cache
from dsv4doctor.facts.topology import read_topology
from dsv4doctor.models import GpuFacts, HostFacts

_NVCC_SECONDS = 2.0
_CAP_SYS_NICE = 23
_MODEL_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_MAX_BYTES = 1 << 20


def read_host(
    environment: Mapping[str, str],
    gpus: GpuFacts | None = None,
    model: str | None = None,
    root: Path = Path("/"),
) -> HostFacts:
    """The facts of this machine for a launch of `model` with `environment`.

    `root` stands in for the file system's in tests.
    """
    cuda_home, nvcc = _nvcc(environment)
    with ThreadPoolExecutor(max_workers=1) as beside:
        version = beside.submit(_nvcc_version, nvcc) if nvcc else None
        memory = _meminfo(root)
        status = _status(root)
        roots, switches = _pci(gpus, root / "sys/bus/pci/devices")
        hub_id = model if model and _MODEL_ID.fullmatch(model) and not _exists(model) else None
        return HostFacts(
            kernel=_line(root / "proc/sys/kernel/osrelease") or platform.release() or None,
            memory_bytes=memory.get("MemTotal"),
            cma_total_bytes=memory.get("CmaTotal"),
            cma_free_bytes=memory.get("CmaFree"),
            cuda_home=cuda_home,
            container=_container(root, environment),
            may_set_memory_policy=_may_set_memory_policy(status),
            memory_nodes=_numbers(status.get("Mems_allowed_list", "")),
            cpus=len(_numbers(status.get("Cpus_allowed_list", ""))) or None,
            numa_nodes=_numbers(_line(root / "sys/devices/system/node/online")),
            pci_roots=roots,
            pci_switches=switches,
            hub_model=hub_id,
            hub_model_cached=_cached(hub_id, environment) if hub_id else None,
            topology=read_topology(gpus, root=root),
            nvcc=nvcc,
            nvcc_version=version.result() if version else None,
        )


# ------------------------------------------------------------------------------ files


def _line(path: Path) -> str:
    return _text(path).strip()


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _exists(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _meminfo(root: Path) -> dict[str, int]:
    """Name -> bytes."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(kilobytes) << 10 for name, kilobytes in lines}


def _status(root: Path) -> dict[str, str]:
    lines = (line.partition(":") for line in _text(root / "proc/self/status").splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}


def _numbers(text: str) -> tuple[int, ...]:
    """(0, 1, 2, 8) for "0-2,8"; empty where that is not what it says."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match is None:
            return ()
        first = int(match.group(1))
        found.extend(range(first, int(match.group(2) or first) + 1))
    return tuple(found)


# ------------------------------------------------------------------------------ container


def _container(root: Path, environment: Mapping[str, str]) -> str | None:
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if _is_there(root / ".dockerenv"):
        return "docker"
    if _is_there(root / "run/.containerenv"):
        return "podman"
    named = re.search(r"(kubepods|docker|containerd|libpod|lxc)", _text(root / "proc/1/cgroup"))
    return named.group(1) if named else None


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _may_set_memory_policy(status: Mapping[str, str]) -> bool | None:
    """Container runtimes' default seccomp filters allow set_mempolicy with CAP_SYS_NICE only."""
    try:
        capable = bool(int(status["CapEff"], 16) >> _CAP_SYS_NICE & 1)
        return capable or status["Seccomp"] == "0"
    except (KeyError, ValueError):
        return None


# ------------------------------------------------------------------------------ PCI


def _pci(gpus: GpuFacts | None, devices: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Address -> host bridge, and address -> the first bridge below it, from sysfs."""
    roots: dict[str, str] = {}
    switches: dict[str, str] = {}
    for gpu in gpus.gpus if gpus else ():
        if gpu.pci_bus_id is None:
            continue
        try:
            parts = Path(os.path.realpath(devices / sysfs_name(gpu.pci_bus_id))).parts
        except OSError:
            continue
        start = next((i for i, part in enumerate(parts) if part.startswith("pci")), None)
        if start is not None and "devices" in parts[:start]:
            roots[gpu.pci_bus_id] = parts[start]
            if len(parts) > start + 2:
                switches[gpu.pci_bus_id] = parts[start + 1]
    return roots, switches


# ------------------------------------------------------------------------------ nvcc


def _nvcc(environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    """CUDA_HOME as set, and the nvcc that a JIT build would take."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home:
        own = os.path.join(home, "bin", "nvcc")
        if os.access(own, os.X_OK):
            return home, own
    found = shutil.which("nvcc", path=environment.get("PATH") or os.defpath)
    if found is None and os.access("/usr/local/cuda/bin/nvcc", os.X_OK):
        found = "/usr/local/cuda/bin/nvcc"
    return home or None, found


def _nvcc_version(nvcc: str) -> str | None:
    try:
        answer = subprocess.run(
            [nvcc, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_NVCC_SECONDS,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    match = re.search(rb"release (\d+\.\d+)", answer.stdout)
    return match.group(1).decode() if match else None


# ------------------------------------------------------------------------------ hub


def _cached(model: str, environment: Mapping[str, str]) -> bool | None:
    """Whether a snapshot of `model` with its config.json is in the local hub cache."""
    snapshots = hub_cache(environment) / f"models--{model.replace('/', '--')}" / "snapshots"
    try:
        folders: Sequence[str] = os.listdir(snapshots)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return any(_is_there(snapshots / folder / "config.json") for folder in folders)
