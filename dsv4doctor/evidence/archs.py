"""Whether code made for one compute capability runs on a GPU of another."""

from __future__ import annotations

from collections.abc import Iterable

from dsv4doctor.models import Arch, NativeLibrary


def admits(capabilities: Iterable[str], arch: Arch) -> bool:
    """True when "12.0" or a whole generation, "12.x", is among `capabilities`."""
    here = (f"{arch.major}.{arch.minor}", f"{arch.major}.x")
    return any(name in here for name in capabilities)


def holds_code_for(library: NativeLibrary, arch: Arch) -> bool:
    """True when the library holds code that the GPU can run.

    A cubin runs within its generation on GPUs at least as new, "90a" on that GPU alone and "120f"
    within its family.  PTX is compiled at load time for any GPU at least as new, "90a" and "120f"
    with the same limits.
    """
    return any(_runs(name, arch, is_ptx=False) for name in library.cubins) or any(
        _runs(name, arch, is_ptx=True) for name in library.ptx
    )


def _runs(target: str, arch: Arch, *, is_ptx: bool) -> bool:
    number = int(target.rstrip("af"))
    major, minor = divmod(number, 10)
    if target.endswith("a"):
        return (major, minor) == (arch.major, arch.minor)
    if is_ptx and not target.endswith("f"):
        return (arch.major, arch.minor) >= (major, minor)
    # Families are generations so far: 10.0 and 10.3, 12.0 and 12.1.
    return arch.major == major and arch.minor >= minor
