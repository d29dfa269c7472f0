"""What CUDA sources say of the GPUs that they serve: launcher checks and the choice of cubins."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CHECK = re.compile(r"\w*CHECK(?:_EQ)?\(\s*(major\s*(?:==|,)[^;]*?)\)\s*(?:<<|;)", re.DOTALL)
_MAJOR = re.compile(r"major\s*(?:==|,)\s*(\d+)")
_CHOICE = re.compile(r"\bbool\s+isArchCompatible\s*\([^)]*\)\s*\{(.*?)\n\}", re.DOTALL)
_VERSION = re.compile(r"smVersion\s*==\s*(\d+)")
_NO_CUBIN = re.compile(r'"([^"\n]*)"\s*<<\s*sm_version\s*<<\s*"([^"\n]*)"')
_LATE = re.compile(r'"(Error occurred when running GEMM!)')


@dataclass(frozen=True)
class Said:
    kind: str
    """"launcher" or "cubins"."""
    admits: tuple[str, ...]
    line: int
    refusal: str | None
    """With {sm} where the GPU's number goes."""


def said(text: str) -> tuple[Said, ...]:
    """The checks in one source file, at most one of each kind."""
    found = []
    checks = list(_CHECK.finditer(text))
    majors = {int(major) for check in checks for major in _MAJOR.findall(check[1])}
    if majors:
        admits = tuple(f"{major}.x" for major in sorted(majors))
        widest = max(checks, key=lambda check: len(_MAJOR.findall(check[1])))
        found.append(Said("launcher", admits, _line(text, widest.start()), None))
    choice = _CHOICE.search(text)
    if choice is not None:
        versions = sorted({int(version) for version in _VERSION.findall(choice[1])})
        refusal = _NO_CUBIN.search(text)
        admits = tuple(f"{version // 10}.{version % 10}" for version in versions)
        message = f"{refusal[1]}{{sm}}{refusal[2]}" if refusal else None
        found.append(Said("cubins", admits, _line(text, choice.start()), message))
    return tuple(found)


def late_failure(text: str) -> str | None:
    """The error of a kernel that does not run on the GPU, where nothing refuses it before."""
    match = _LATE.search(text)
    return match[1] if match else None


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1
