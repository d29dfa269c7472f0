"""From the kernel that a layer reaches to what will become of it on a GPU.

What is known of kernels is data (`rules/data/kernels.toml`), each row with its sources.  A kernel
that no row covers is unknown.
"""

from __future__ import annotations

import fnmatch
import functools
import sys
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from dsv4doctor.models import Arch, Layer, StoredFormat, Verdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class KnownKernel:
    """One row of the table."""

    symbol: str
    name: str
    sources: tuple[str, ...]
    archs: tuple[Arch, ...] = ()
    minimum: Arch | None = None
    methods: tuple[str, ...] = ()
    call: str | None = None
    sm100: bool = False
    clamp: str | None = None
    condition: str | None = None
    """What it takes beyond the right GPU, as a clause."""

    def exists_for(self, arch: Arch) -> bool:
        if self.minimum is not None:
            return (arch.major, arch.minor) >= (self.minimum.major, self.minimum.minor)
        return arch in self.archs

    def covers(self, layer: Layer, call_text: str) -> bool:
        return (
            layer.kernel is not None
            and fnmatch.fnmatchcase(layer.kernel.symbol, self.symbol)
            and (not self.methods or layer.quant_method in self.methods)
            and (self.call is None or self.call in call_text)
        )

    @property
    def gpus(self) -> str:
        """The GPUs it exists for, in words."""
        if self.minimum is not None:
            return f"{self.minimum.name} and newer"
        names = [arch.name for arch in self.archs]
        return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@functools.cache
def _table() -> dict[str, Any]:
    text = resources.files("dsv4doctor.rules").joinpath("data/kernels.toml").read_text("utf-8")
    return tomllib.loads(text)


@functools.cache
def known_kernels() -> tuple[KnownKernel, ...]:
    return tuple(_row(row) for row in _table()["kernel"])


def format_needed(layer: Layer) -> StoredFormat | None:
    """The one stored format that the layer's quant method can use, where that is known and the
    checkpoint stores another."""
    for row in _table()["method"]:
        if fnmatch.fnmatchcase(layer.quant_method or "", row["name"]):
            needed = StoredFormat(row["stored"])
            fits = (None, needed, StoredFormat.MISSING, StoredFormat.OTHER)
            return None if layer.stored_format in fits else needed
    return None


def _row(row: dict[str, Any]) -> KnownKernel:
    return KnownKernel(
        symbol=row["symbol"],
        name=row["name"],
        sources=tuple(row["sources"]),
        archs=tuple(_arch(text) for text in row.get("archs", ())),
        minimum=_arch(row["minimum"]) if "minimum" in row else None,
        methods=tuple(row.get("methods", ())),
        call=row.get("call"),
        sm100=row.get("sm100", False),
        clamp=row.get("clamp"),
        condition=row.get("condition"),
    )


def _arch(text: str) -> Arch:
    major, minor = text.split(".")
    return Arch(int(major), int(minor))


def known_kernel(layer: Layer, call_text: str = "") -> KnownKernel | None:
    """What the table says of the layer's kernel; `call_text` is the source of the call to it."""
    return next((row for row in known_kernels() if row.covers(layer, call_text)), None)


def judge(layer: Layer, arch: Arch, call_text: str = "") -> Layer:
    """`layer` with its verdict and the reason for it."""
    verdict, reason = _verdict(layer, arch, call_text)
    return replace(layer, verdict=verdict, reason=reason)


def _verdict(layer: Layer, arch: Arch, call_text: str) -> tuple[Verdict, str]:
    error = layer.error
    if error is not None:
        where = f" at {error.at.file}:{error.at.line}" if error.at else ""
        message = error.message.splitlines()[0][:200] if error.message else "no message"
        return Verdict.FAILS, f"SGLang raises {error.type}{where}: {message}"
    if layer.kernel is None:
        return Verdict.UNKNOWN, layer.reason or "the trace reached no kernel for this layer"
    known = known_kernel(layer, call_text)
    needed = format_needed(layer)
    short = layer.kernel.symbol.rpartition(".")[2]
    if known is not None and not known.exists_for(arch):
        return Verdict.FAILS, f"{short} ({known.name}) exists for {known.gpus} only"
    if needed is not None and layer.stored_format is not None:
        stored = layer.stored_format.value
        return Verdict.FAILS, f"{layer.quant_method} needs {needed.value}, stored is {stored}"
    if layer.stored_format in (None, StoredFormat.MISSING):
        return Verdict.UNKNOWN, "the checkpoint holds no tensors of these experts"
    if known is None:
        return Verdict.UNKNOWN, f"not known for which GPUs {short} exists"
    condition = f"; {known.condition}" if known.condition else ""
    return Verdict.RUNS, f"{short} ({known.name}) exists for {arch.name}{condition}"


def drops_clamp(layer: Layer, call_text: str) -> bool:
    """True when the SwiGLU clamp provably does not reach the layer's kernel."""
    known = known_kernel(layer, call_text)
    if known is None or known.clamp is None:
        return False
    return known.clamp == "never" or (bool(call_text) and "swiglu_limit" not in call_text)
