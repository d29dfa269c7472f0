"""How the GPUs of this machine hang together: PCIe links, peer-to-peer, NVLink, IOMMU, ACS.

From NVML and sysfs; each fact may be absent and nothing raises.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from dsv4doctor.facts.gpu import sysfs_name
from dsv4doctor.models import GpuFacts, Link, Pair, Topology

# nvml.h: nvmlGpuTopologyLevel_t
_PATHS = {
    0: "board",
    10: "switch",
    20: "switches",
    30: "host bridge",
    40: "NUMA node",
    50: "system",
}
# nvml.h: nvmlGpuP2PStatus_t
_STATUS = {
    0: "ok",
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the way between the GPUs does not support it",
    4: "switched off by a registry key of the driver",
    5: "not supported",
}
_READ, _WRITE = 0, 1  # nvmlGpuP2PCapsIndex_t
_MAX_NVLINKS = 18
_ACS = 0x000D  # PCI Express extended capability
_REDIRECTS = 0b1100  # ACS control: request and completion redirect


def read_topology(
    gpus: GpuFacts | None, nvml: Any = None, root: Path = Path("/")
) -> Topology | None:
    """The topology of `gpus`; None without GPUs that have an address.

    `nvml` is the pynvml module or something with its functions, `root` stands in for the file
    system's in tests.
    """
    addresses = [gpu.pci_bus_id for gpu in gpus.gpus if gpu.pci_bus_id] if gpus else []
    if not addresses:
        return None
    devices = root / "sys/bus/pci/devices"
    links: tuple[Link, ...] = ()
    pairs: tuple[Pair, ...] = ()
    library = nvml if nvml is not None else _library()
    if library is not None:
        links, pairs = _from_nvml(library, addresses)
    return Topology(
        links=links,
        pairs=pairs,
        iommu=_iommu(addresses, devices),
        acs_redirect=_acs_redirect(addresses, devices),
    )


# ------------------------------------------------------------------------------ NVML


def _library() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _from_nvml(nvml: Any, addresses: list[str]) -> tuple[tuple[Link, ...], tuple[Pair, ...]]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return (), ()
    try:
        handles = [
            (address, handle)
            for address in addresses
            if (handle := _asked(nvml, "nvmlDeviceGetHandleByPciBusId", address.encode()))
            is not None
        ]
        links = tuple(_link(nvml, address, handle) for address, handle in handles)
        pairs = tuple(_pair(nvml, one, other) for one, other in combinations(handles, 2))
        return links, pairs
    finally:
        _asked(nvml, "nvmlShutdown")


def _link(nvml: Any, address: str, handle: Any) -> Link:
    return Link(
        address=address,
        generation=_asked(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        gpu_generation=_asked(nvml, "nvmlDeviceGetGpuMaxPcieLinkGeneration", handle),
        width=_asked(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        gpu_width=_asked(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        nvlinks=_nvlinks(nvml, handle),
    )


def _nvlinks(nvml: Any, handle: Any) -> int | None:
    """0 also where the driver says that this GPU has none."""
    links = range(_MAX_NVLINKS)
    states = [_asked(nvml, "nvmlDeviceGetNvLinkState", handle, link) for link in links]
    if all(state is None for state in states):
        return 0 if _is_unsupported(nvml, handle) else None
    return sum(1 for state in states if state)


def _is_unsupported(nvml: Any, handle: Any) -> bool:
    try:
        nvml.nvmlDeviceGetNvLinkState(handle, 0)
    except nvml.NVMLError as error:
        return "not supported" in str(error).lower() or "invalid argument" in str(error).lower()
    except (AttributeError, ValueError):
        pass
    return False


def _pair(nvml: Any, one: tuple[str, Any], other: tuple[str, Any]) -> Pair:
    handles = (one[1], other[1])
    level = _asked(nvml, "nvmlDeviceGetTopologyCommonAncestor", *handles)
    states = [_asked(nvml, "nvmlDeviceGetP2PStatus", *handles, index) for index in (_READ, _WRITE)]
    # The worse of reading and writing counts.
    known = [state for state in states if state in _STATUS]
    return Pair(
        first=one[0],
        second=other[0],
        path=_PATHS.get(level) if level is not None else None,
        peer_to_peer=_STATUS[max(known)] if known else None,
        nvlink=_has_nvlink(nvml, handles),
    )


def _has_nvlink(nvml: Any, handles: tuple[Any, Any]) -> bool | None:
    state = _asked(nvml, "nvmlDeviceGetP2PStatus", *handles, 2)  # NVML_P2P_CAPS_INDEX_NVLINK
    return None if state is None else state == 0


def _asked(nvml: Any, function: str, *arguments: Any) -> Any:
    """The answer, or None where this driver or pynvml does not know the question."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError, ValueError, TypeError):
        return None


# ------------------------------------------------------------------------------ sysfs


def _iommu(addresses: list[str], devices: Path) -> str | None:
    """What stands between the GPUs and memory."""
    kinds = {_iommu_of(folder) for folder in _there(addresses, devices)}
    if not kinds or None in kinds:
        return None
    return next(kind for kind in ("translating", "passthrough", "off") if kind in kinds)


def _iommu_of(folder: Path) -> str | None:
    group = folder / "iommu_group"
    try:
        if not group.exists():
            return "off"
        kind = (group / "type").read_text().strip()
    except (OSError, ValueError):
        return None
    return "passthrough" if kind == "identity" else "translating"


def _acs_redirect(addresses: list[str], devices: Path) -> tuple[str, ...] | None:
    found: dict[str, None] = {}
    for folder in _there(addresses, devices):
        for bridge in _bridges_above(folder):
            control = _acs_control(bridge)
            if control is None:
                return None
            if control & _REDIRECTS:
                found[bridge.name] = None
    return tuple(found)


def _bridges_above(folder: Path) -> Iterator[Path]:
    """From the GPU's own port up to the root port."""
    for parent in Path(os.path.realpath(folder)).parents:
        if parent.name.startswith("pci") or parent == parent.parent:
            return
        yield parent


def _acs_control(bridge: Path) -> int | None:
    """The ACS control register in a device's config space; 0 without that capability, None where
    only the first part of it may be read."""
    try:
        config = (bridge / "config").read_bytes()
    except OSError:
        return None
    if len(config) < 0x104:
        return None
    offset, seen = 0x100, 0
    while offset and seen < 100 and offset + 8 <= len(config):
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS:
            return int.from_bytes(config[offset + 6 : offset + 8], "little")
        offset, seen = header >> 20, seen + 1
    return 0


def _there(addresses: list[str], devices: Path) -> list[Path]:
    """The GPUs' folders."""
    folders = []
    for address in addresses:
        folder = devices / sysfs_name(address)
        try:
            if folder.exists():
                folders.append(folder)
        except OSError:
            continue
    return folders
