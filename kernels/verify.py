"""Runs the kernels' numeric self-checks on this GPU, and keeps what passed as stamps."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dsv4doctor.errors import DoctorError
from dsv4doctor.kernels import catalog, registry, stamps
from dsv4doctor.kernels.registry import KernelModule


class UnverifiedKernelError(DoctorError):
    """A kernel was asked to serve without a valid stamp."""


@dataclass(frozen=True)
class Checked:
    """One self-check, done."""

    kernel: str
    check: str
    error: float | None
    """||out - reference|| / ||reference||; None: it did not get that far."""
    bar: float
    seconds: float
    failure: str = ""
    """Why there is no error, on one line."""

    @property
    def passed(self) -> bool:
        return self.error is not None and math.isfinite(self.error) and self.error <= self.bar


def run_checks(
    name: str, module: KernelModule, device: str = "cuda", quick: bool = False
) -> Iterator[Checked]:
    """Each check of `module` as it gets done; one that raises has failed."""
    try:
        checks = [check for check in module.checks(device) if check.quick or not quick]
        if not checks:
            raise ValueError("it has no checks")
    except Exception as error:
        yield Checked(name, "(its checks)", None, module.META.error_bar, 0.0, _said(error))
        return
    for check in checks:
        yield _run(name, check, device)


def _run(name: str, check: registry.Check, device: str) -> Checked:
    start = time.perf_counter()
    error: float | None = None
    failure = ""
    try:
        error = float(check.run(device))
    except Exception as raised:
        failure = _said(raised)
    return Checked(name, check.name, error, check.bar, time.perf_counter() - start, failure)


def _said(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1].strip()}"[:300]


def record(
    name: str,
    results: Sequence[Checked],
    platform: stamps.Platform,
    quick: bool = False,
    folder: Path = catalog.FOLDER,
) -> Path | None:
    """Writes the stamp of `name` when all of `results` passed; else removes an old one.

    A quick run writes a stamp too, and says in it that it was quick.
    """
    if not results or not all(result.passed for result in results):
        stamps.remove(name, platform)
        return None
    details = {
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "quick": quick,
        "checks": [asdict(result) for result in results],
    }
    return stamps.write(name, platform, details, folder)


def require_stamp(name: str, device: str = "cuda", platform: stamps.Platform | None = None) -> None:
    """For adapters, before they serve: raises UnverifiedKernelError unless `name` was verified
    on this GPU with this driver, torch, Triton and kernel source.

    A trace runs no kernel and asks for no stamp; it says so of the layers that it reports.  With
    DSV4DOCTOR_ALLOW_UNVERIFIED=1 it warns instead.  `platform` is for tests.
    """
    if os.environ.get(stamps.TRACE_VARIABLE) == "1":
        return
    reason = stamps.stale(name, platform or stamps.current_platform(device))
    if reason is None:
        return
    message = f"kernel {name} {reason}"
    if os.environ.get(stamps.UNVERIFIED_VARIABLE) == "1":
        warnings.warn(
            f"dsv4doctor: {message}; it serves all the same because "
            f"{stamps.UNVERIFIED_VARIABLE}=1. Its output may be wrong.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    raise UnverifiedKernelError(
        f"{message}: run `dsv4doctor kernels verify --only {name}` on this machine"
    )
