"""PCIe, NVLink, peer-to-peer, IOMMU and ACS from a stand-in for NVML and a made-up sysfs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsv4doctor.facts.topology import read_topology
from dsv4doctor.models import Arch, Gpu, GpuFacts, Link, Pair

_GPUS = GpuFacts(
    tuple(
        Gpu(index, "RTX PRO 6000", Arch(12, 0), 95 << 30, f"00000000:{bus}:00.0")
        for index, bus in enumerate(("C1", "C2", "41"))
    )
)


class _Failure(Exception):
    pass


class _Nvml:
    """Two boards behind one switch, a third in a narrow slot of the other socket."""

    NVMLError = _Failure
    nvlinks = 0
    without: tuple[str, ...] = ()

    def __getattribute__(self, name: str) -> Any:
        if name in type(self).without:
            raise AttributeError(name)
        return super().__getattribute__(name)

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> str:
        return address.decode()[9:11]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return 4 if handle == "41" else 5

    def nvmlDeviceGetGpuMaxPcieLinkGeneration(self, handle: str) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: str) -> int:
        return 8 if handle == "41" else 16

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return 16

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link >= self.nvlinks:
            raise _Failure("Not Supported" if not self.nvlinks else "Invalid Argument")
        return int(link != 1)

    def nvmlDeviceGetTopologyCommonAncestor(self, one: str, other: str) -> int:
        return 50 if "41" in (one, other) else 10

    def nvmlDeviceGetP2PStatus(self, one: str, other: str, index: int) -> int:
        if index == 2:
            return 0 if self.nvlinks else 5
        return 1 if "41" in (one, other) and index == 1 else 0


def _tree(root: Path, iommu: str | None = "identity", control: int = 0) -> None:
    """A GPU below a switch port below a root port, as sysfs has it."""
    real = root / "sys/devices/pci0000:c0/0000:c0:01.0/0000:c1:00.0"
    real.mkdir(parents=True)
    devices = root / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    (devices / "0000:c1:00.0").symlink_to(real)
    # Extended capabilities: AER (1) at 0x100, then ACS (0xd) at 0x148.
    config = bytearray(4096)
    config[0x100:0x104] = (0x148 << 20 | 1 << 16 | 0x0001).to_bytes(4, "little")
    config[0x148:0x14C] = (1 << 16 | 0x000D).to_bytes(4, "little")
    config[0x14E:0x150] = control.to_bytes(2, "little")
    (real.parent / "config").write_bytes(bytes(config))
    if iommu is not None:
        (real / "iommu_group").mkdir()
        (real / "iommu_group/type").write_text(f"{iommu}\n")


def test_links_and_pairs(tmp_path: Path) -> None:
    found = read_topology(_GPUS, _Nvml(), tmp_path)
    assert found is not None
    one, two, three = (gpu.pci_bus_id or "" for gpu in _GPUS.gpus)
    assert found.links == (
        Link(one, 5, 5, 16, 16, 0),
        Link(two, 5, 5, 16, 16, 0),
        Link(three, 4, 5, 8, 16, 0),
    )
    chipset = "the chipset does not support it"
    assert found.pairs == (
        Pair(one, two, "switch", "ok", False),
        Pair(one, three, "system", chipset, False),
        Pair(two, three, "system", chipset, False),
    )


def test_nvlinks_that_are_up_are_counted(tmp_path: Path) -> None:
    class Linked(_Nvml):
        nvlinks = 4

    found = read_topology(_GPUS, Linked(), tmp_path)
    assert found is not None
    assert [link.nvlinks for link in found.links] == [3, 3, 3]
    assert all(pair.nvlink for pair in found.pairs)


def test_what_a_driver_does_not_know_is_none(tmp_path: Path) -> None:
    class Old(_Nvml):
        without = (
            "nvmlDeviceGetGpuMaxPcieLinkGeneration",
            "nvmlDeviceGetP2PStatus",
            "nvmlDeviceGetTopologyCommonAncestor",
            "nvmlDeviceGetNvLinkState",
        )

    found = read_topology(_GPUS, Old(), tmp_path)
    assert found is not None
    assert found.links[0] == Link("00000000:C1:00.0", 5, None, 16, 16, None)
    assert found.pairs[0] == Pair("00000000:C1:00.0", "00000000:C2:00.0")


def test_no_driver_and_no_gpus(tmp_path: Path) -> None:
    class Broken(_Nvml):
        def nvmlInit(self) -> None:
            raise _Failure("Driver Not Loaded")

    found = read_topology(_GPUS, Broken(), tmp_path)
    assert found is not None
    assert (found.links, found.pairs, found.iommu) == ((), (), None)
    assert read_topology(GpuFacts(()), _Nvml(), tmp_path) is None
    assert read_topology(None, _Nvml(), tmp_path) is None


@pytest.mark.parametrize(
    ("iommu", "said"),
    [(None, "off"), ("identity", "passthrough"), ("DMA", "translating"), ("DMA-FQ", "translating")],
)
def test_iommu(tmp_path: Path, iommu: str | None, said: str) -> None:
    _tree(tmp_path, iommu)
    found = read_topology(_GPUS, _Nvml(), tmp_path)
    assert found is not None
    assert found.iommu == said


@pytest.mark.parametrize(
    ("control", "bridges"), [(0, ()), (0b10001, ()), (0b11101, ("0000:c0:01.0",))]
)
def test_acs(tmp_path: Path, control: int, bridges: tuple[str, ...]) -> None:
    _tree(tmp_path, control=control)
    found = read_topology(_GPUS, _Nvml(), tmp_path)
    assert found is not None
    assert found.acs_redirect == bridges


def test_acs_where_config_space_may_not_be_read(tmp_path: Path) -> None:
    _tree(tmp_path, control=0b1100)
    config = tmp_path / "sys/devices/pci0000:c0/0000:c0:01.0/config"
    config.write_bytes(config.read_bytes()[:64])
    found = read_topology(_GPUS, _Nvml(), tmp_path)
    assert found is not None
    assert found.acs_redirect is None
