"""An nvcc that cannot build for sm_12x, which FlashInfer and SGLang ask for at run time.

CUDA 12.8 is the first to know sm_120, 12.9 the first to know sm_121.  FlashInfer up to 0.6.17 wants
12.9 for both; 0.7.2 takes 12.8 for sm_120 (its compilation_context.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from dsv4doctor.models import Facts, Finding, HostFacts, Remedy, Severity
from dsv4doctor.rules.common import flashinfer_version
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import flashinfer, gpus, scene

_FIRST = {"sm_120": Version("12.8"), "sm_121": Version("12.9")}
_WANTED = Version("12.9")
_WANTS_MORE, _TAKES_LESS = Version("0.6.17"), Version("0.7.2")
"""FlashInfers that were looked at: up to the one, and from the other on."""


def check(facts: Facts) -> Iterator[Finding]:
    host = facts.snapshot.host
    assert host is not None
    needed = _FIRST.get(facts.arch.name)
    if needed is None:
        return
    if host.nvcc is None or host.nvcc_version is None:
        raise NotChecked(f"{host.nvcc}: no version" if host.nvcc else "no nvcc was found")
    try:
        version = Version(host.nvcc_version)
    except InvalidVersion as error:
        raise NotChecked(f"nvcc's version {host.nvcc_version!r} is not one") from error
    message = f"{host.nvcc} is CUDA {version}, which cannot build for {facts.arch.name}."
    flashinfer = flashinfer_version(facts)
    if needed <= version < _WANTED and flashinfer is not None and flashinfer < _TAKES_LESS:
        if flashinfer > _WANTS_MORE:
            raise NotChecked(f"whether FlashInfer {flashinfer} takes CUDA {version} is unknown")
        needed = _WANTED
        message = (
            f"{host.nvcc} is CUDA {version}, and FlashInfer {flashinfer} builds for "
            f"{facts.arch.name} with {needed} or newer only."
        )
    if version >= needed:
        return
    yield Finding(
        rule=RULE.id,
        severity=Severity.ERROR,
        subject="nvcc",
        message=message,
        consequence=(
            "What FlashInfer and SGLang compile at run time fails, e.g. No supported CUDA "
            "architectures found for major versions [12]; kernels built beforehand still run."
        ),
        evidence=(
            f"{host.nvcc} --version: {version}",
            f"CUDA_HOME is {host.cuda_home or 'not set'}",
            "flashinfer issue 2577",
        ),
        remedy=Remedy(
            f"Install CUDA {needed} or newer, and let CUDA_HOME and PATH name it before the old "
            "one."
        ),
    )


RULE = Rule(
    id="DSV406",
    title="nvcc too old for the GPU",
    severity=Severity.ERROR,
    reads=("host",),
    check=check,
    about_machine=True,
)


def _nvcc(version: str, arch: str = "sm_120", installed: str = "0.7.2") -> Facts:
    host = HostFacts(nvcc="/usr/bin/nvcc", nvcc_version=version)
    return scene(arch, host=host, gpus=gpus(1, arch), packages=flashinfer(installed))


EXAMPLES = (
    Example("CUDA 12.4", _nvcc("12.4"), expect=("nvcc",)),
    Example("CUDA 12.8 on GB10", _nvcc("12.8", "sm_121"), expect=("nvcc",)),
    Example("CUDA 12.8", _nvcc("12.8")),
    Example(
        "CUDA 12.8 with an older FlashInfer",
        _nvcc("12.8", installed="0.6.17"),
        expect=("nvcc",),
    ),
    Example("CUDA 12.9 with an older FlashInfer", _nvcc("12.9", installed="0.6.17")),
    Example("CUDA 13.0 on GB10", _nvcc("13.0", "sm_121")),
    Example("an older GPU", _nvcc("12.4", "sm_90")),
)
