"""GPU facts from a small stand-in for NVML, and from this machine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4doctor.facts.gpu import read_gpus
from dsv4doctor.models import Arch, Gpu, GpuFacts


class NvmlFailure(Exception):
    pass


class FakeNvml:
    """The functions of pynvml that are asked, for RTX PRO 6000 boards."""

    NVMLError = NvmlFailure

    def __init__(
        self, count: int = 1, failing: tuple[str, ...] = (), as_bytes: bool = False
    ) -> None:
        self.count = count
        self.failing = failing
        self.as_bytes = as_bytes
        self.open = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in self.failing:

            def fail(*_: object) -> None:
                raise NvmlFailure("Not Supported")

            return fail
        return super().__getattribute__(name)

    def _string(self, text: str) -> str | bytes:
        return text.encode() if self.as_bytes else text

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        return self._string("590.48.01")

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 12, 0

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return self._string("NVIDIA RTX PRO 6000 Blackwell Server Edition")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=102_641_958_912)

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self._string(f"00000000:{0xC1 + handle:02X}:00.0"))

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 16


@pytest.fixture
def pci_devices(tmp_path: Path) -> Path:
    for bus, node in (("c1", "0"), ("c2", "1"), ("c3", "-1")):
        folder = tmp_path / f"0000:{bus}:00.0"
        folder.mkdir()
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def card(index: int, node: int | None) -> Gpu:
    return Gpu(
        index=index,
        name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        arch=Arch(12, 0),
        memory_bytes=102_641_958_912,
        pci_bus_id=f"00000000:{0xC1 + index:02X}:00.0",
        pcie_generation=5,
        pcie_width=16,
        numa_node=node,
    )


@pytest.mark.parametrize("as_bytes", [False, True], ids=["str", "bytes"])
def test_several_gpus(pci_devices: Path, as_bytes: bool) -> None:
    nvml = FakeNvml(count=4, as_bytes=as_bytes)
    facts = read_gpus(nvml, pci_devices)
    expected = (card(0, 0), card(1, 1), card(2, None), card(3, None))
    assert facts == GpuFacts(expected, driver="590.48.01", unavailable=None)
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("function", "field", "value"),
    [
        ("nvmlDeviceGetName", "name", "unknown"),
        ("nvmlDeviceGetMemoryInfo", "memory_bytes", 0),
        ("nvmlDeviceGetPciInfo", "pci_bus_id", None),
        ("nvmlDeviceGetPciInfo", "numa_node", None),
        ("nvmlDeviceGetMaxPcieLinkGeneration", "pcie_generation", None),
        ("nvmlDeviceGetCurrPcieLinkWidth", "pcie_width", None),
    ],
)
def test_what_a_driver_does_not_support_becomes_a_value(
    pci_devices: Path, function: str, field: str, value: object
) -> None:
    (gpu,) = read_gpus(FakeNvml(failing=(function,)), pci_devices).gpus
    assert getattr(gpu, field) == value
    assert gpu.arch == Arch(12, 0)


def test_driver_version_and_shutdown_may_fail(pci_devices: Path) -> None:
    failing = ("nvmlSystemGetDriverVersion", "nvmlShutdown")
    facts = read_gpus(FakeNvml(failing=failing), pci_devices)
    assert (facts.driver, facts.gpus) == (None, (card(0, 0),))


@pytest.mark.parametrize(
    ("failing", "count", "reason"),
    [
        (("nvmlInit",), 1, "no NVIDIA driver"),
        (("nvmlDeviceGetCount",), 1, "cannot count"),
        (("nvmlDeviceGetCudaComputeCapability",), 2, "GPU 1: no compute capability"),
        (("nvmlDeviceGetHandleByIndex",), 1, "GPU 0"),
        ((), 0, "lists no GPU"),
    ],
)
def test_no_gpu_says_why(failing: tuple[str, ...], count: int, reason: str) -> None:
    facts = read_gpus(FakeNvml(count, failing))
    assert facts.gpus == ()
    assert reason in (facts.unavailable or "")


def test_this_machine() -> None:
    facts = read_gpus()
    if facts.gpus:
        assert facts.driver
        assert all(gpu.memory_bytes > 0 and gpu.arch.major >= 5 for gpu in facts.gpus)
    else:
        assert facts.unavailable
