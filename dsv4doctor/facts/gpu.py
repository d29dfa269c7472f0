"""The GPUs of this machine, through NVML."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dsv4doctor.models import Arch, Gpu, GpuFacts

T = TypeVar("T")


def read_gpus(nvml: Any = None, pci_devices: Path = Path("/sys/bus/pci/devices")) -> GpuFacts:
    """The GPUs that NVML lists, in its order.

    `nvml` is the pynvml module or something with its functions.  Never raises for what NVML
    cannot say: optional facts become None, the name "unknown", the memory 0; a GPU without a
    readable compute capability is left out and named in `unavailable`.
    """
    if nvml is None:
        try:
            import pynvml
        except ImportError as error:
            return GpuFacts((), unavailable=f"pynvml cannot be imported ({error})")
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuFacts((), unavailable=f"no NVIDIA driver ({error})")
    try:
        return _read(nvml, pci_devices)
    finally:
        _guard(nvml, nvml.nvmlShutdown, None)


def _read(nvml: Any, pci_devices: Path) -> GpuFacts:
    driver = _guard(nvml, lambda: _text(nvml.nvmlSystemGetDriverVersion()), None)
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return GpuFacts((), driver, unavailable=f"NVML cannot count the GPUs ({error})")
    gpus: list[Gpu] = []
    missing: list[str] = []
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        except nvml.NVMLError as error:
            missing.append(f"GPU {index}: no compute capability ({error})")
            continue
        gpus.append(_gpu(nvml, handle, index, Arch(major, minor), pci_devices))
    if count == 0:
        missing.append("the NVIDIA driver lists no GPU")
    return GpuFacts(tuple(gpus), driver, "; ".join(missing) or None)


def _gpu(nvml: Any, handle: Any, index: int, arch: Arch, pci_devices: Path) -> Gpu:
    def ask(function: str, default: T, *arguments: Any) -> Any | T:
        return _guard(nvml, lambda: getattr(nvml, function)(handle, *arguments), default)

    memory = ask("nvmlDeviceGetMemoryInfo", None)
    pci = ask("nvmlDeviceGetPciInfo", None)
    bus_id = None if pci is None else _text(pci.busId)
    # The current generation drops while the GPU idles: what the slot can do is asked for.
    return Gpu(
        index=index,
        name=_text(ask("nvmlDeviceGetName", "unknown")),
        arch=arch,
        memory_bytes=0 if memory is None else int(memory.total),
        pci_bus_id=bus_id,
        pcie_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration", None),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth", None),
        numa_node=None if bus_id is None else _numa_node(bus_id, pci_devices),
    )


def _guard(nvml: Any, ask: Callable[[], T], default: T) -> T:
    """What `ask` gives, or `default` where this driver or pynvml does not know the question."""
    try:
        return ask()
    except (nvml.NVMLError, AttributeError, ValueError):
        return default


def _numa_node(bus_id: str, pci_devices: Path) -> int | None:
    """The NUMA node from sysfs; None when the machine has none or does not say."""
    try:
        node = int((pci_devices / sysfs_name(bus_id) / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def sysfs_name(bus_id: str) -> str:
    """A PCI address as sysfs writes it: four digits for the domain, or more; NVML has eight."""
    domain, colon, rest = bus_id.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}{colon}{rest}"


def _text(value: str | bytes) -> str:
    """Older pynvml gives bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
