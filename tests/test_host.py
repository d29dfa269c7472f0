"""Facts about the machine, read from a made-up file system and the real one."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4doctor.facts.host import read_host
from dsv4doctor.models import Arch, Gpu, GpuFacts

ADDRESS = "00000000:C1:00.0"
_GPUS = GpuFacts((Gpu(0, "GPU", Arch(12, 0), 1 << 30, ADDRESS),))


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A container on a machine with two NUMA nodes and a GPU behind a switch."""
    root = tmp_path / "root"
    _write(
        root,
        {
            "proc/sys/kernel/osrelease": "7.0.0-1019-nvidia\n",
            "proc/meminfo": "MemTotal: 1024 kB\nCmaTotal:   131072 kB\nCmaFree:  4194304 kB\n",
            "proc/self/status": (
                "Name:\tx\nCapEff:\t00000000a80425fb\nSeccomp:\t2\n"
                "Cpus_allowed_list:\t0-3,8\nMems_allowed_list:\t0\n"
            ),
            "sys/devices/system/node/online": "0-1\n",
            ".dockerenv": "",
        },
    )
    device = root / "sys/devices/pci0000:c0/0000:c0:01.1/0000:c1:00.0"
    device.mkdir(parents=True)
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True)
    (links / "0000:c1:00.0").symlink_to(device)
    return root


def test_a_pci_domain_of_five_digits(machine: Path) -> None:
    """The bridge of the GPU itself, and not of the device with the same last digits."""
    device = machine / "sys/devices/pci10000:00/10000:c1:00.0"
    device.mkdir(parents=True)
    (machine / "sys/bus/pci/devices/10000:c1:00.0").symlink_to(device)
    gpu = replace(_GPUS.gpus[0], pci_bus_id="00010000:C1:00.0")
    host = read_host({"PATH": ""}, GpuFacts((gpu,)), root=machine)
    assert host.pci_roots == {"00010000:C1:00.0": "pci10000:00"}
    assert host.pci_switches == {}
    assert host.topology is not None
    assert host.topology.iommu == "off"


def test_a_restricted_container(machine: Path) -> None:
    host = read_host({"PATH": ""}, _GPUS, root=machine)
    assert host.kernel == "7.0.0-1019-nvidia"
    assert (host.memory_bytes, host.cma_total_bytes) == (1 << 20, 128 << 20)
    assert host.cma_free_bytes == 4 << 30
    assert host.container == "docker"
    assert host.may_set_memory_policy is False
    assert host.memory_nodes == (0,)
    assert host.numa_nodes == (0, 1)
    assert host.cpus == 5
    assert host.pci_roots == {ADDRESS: "pci0000:c0"}
    assert host.pci_switches == {ADDRESS: "0000:c0:01.1"}


@pytest.mark.parametrize(
    ("capabilities", "seccomp", "allowed"),
    [("0000000000800000", "2", True), ("0000000000000000", "0", True), ("junk", "2", None)],
)
def test_memory_policy(machine: Path, capabilities: str, seccomp: str, allowed: bool) -> None:
    text = f"CapEff:\t{capabilities}\nSeccomp:\t{seccomp}\n"
    (machine / "proc/self/status").write_text(text)
    assert read_host({"PATH": ""}, root=machine).may_set_memory_policy is allowed


def test_an_empty_machine_has_nothing_and_raises_nothing(tmp_path: Path) -> None:
    host = read_host({"PATH": ""}, _GPUS, root=tmp_path)
    assert host.cma_free_bytes is None
    assert host.may_set_memory_policy is None
    assert host.memory_nodes == ()
    assert host.pci_roots == {}


def _nvcc(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_cuda_home_goes_before_path(tmp_path: Path) -> None:
    _nvcc(tmp_path / "home/bin/nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")
    _nvcc(tmp_path / "path/nvcc", "echo 'release 13.0, V13.0.1'")
    on_path = {"PATH": str(tmp_path / "path")}
    host = read_host(on_path, root=tmp_path)
    assert (host.nvcc_version, host.cuda_home) == ("13.0", None)
    host = read_host({**on_path, "CUDA_HOME": str(tmp_path / "home")}, root=tmp_path)
    assert host.nvcc == str(tmp_path / "home/bin/nvcc")
    assert host.nvcc_version == "12.4"


def test_an_nvcc_that_hangs_is_left_alone(tmp_path: Path) -> None:
    _nvcc(tmp_path / "bin/nvcc", "exec sleep 60")
    started = time.monotonic()
    host = read_host({"PATH": f"{tmp_path / 'bin'}:/bin:/usr/bin"}, root=tmp_path)
    assert host.nvcc_version is None
    assert time.monotonic() - started < 10


def test_hub_cache(tmp_path: Path) -> None:
    cache = {"HF_HUB_CACHE": str(tmp_path), "PATH": ""}
    model = "org/DeepSeek-V4-Flash-FP8"
    host = read_host(cache, model=model, root=tmp_path)
    assert (host.hub_model, host.hub_model_cached) == (model, False)
    snapshot = tmp_path / "models--org--DeepSeek-V4-Flash-FP8/snapshots/abc"
    _write(snapshot, {"config.json": "{}"})
    assert read_host(cache, model=model, root=tmp_path).hub_model_cached is True
    assert read_host(cache, model=str(tmp_path), root=tmp_path).hub_model is None


def test_this_machine_is_read_without_nvcc_in_a_moment() -> None:
    started = time.monotonic()
    host = read_host({"PATH": os.devnull})
    assert host.kernel
    assert time.monotonic() - started < 5
