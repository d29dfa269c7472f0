"""The words that every other type is made of: severities, verdicts, formats, GPUs, places."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    """How bad a finding is."""

    ERROR = "error"
    """Will crash or give wrong output."""
    WARNING = "warning"
    """Slow or fragile."""
    INFO = "info"


class Verdict(str, Enum):
    """What will become of a layer on the GPU in question."""

    RUNS = "runs"
    FALLBACK = "fallback"
    """Runs, on a path that is far slower than what the GPU can do."""
    FAILS = "fails"
    UNKNOWN = "unknown"
    """Not determined; the reason is beside it.  Never printed as "runs"."""


class Outcome(str, Enum):
    """How a rule ended."""

    PASS = "pass"
    FINDING = "finding"
    SKIP = "skip"
    """A fact it needs is missing; the reason is beside it."""
    CRASH = "crash"


class Role(str, Enum):
    """Which model of a launch a layer belongs to."""

    MAIN = "main"
    DRAFT = "draft"


class StoredFormat(str, Enum):
    """How a layer's weights lie in the checkpoint's files."""

    NVFP4 = "NVFP4"
    """E2M1 pairs (U8) with FP8 E4M3 scales per 16 and a global scale."""
    MXFP4 = "MXFP4"
    """E2M1 pairs (I8 or U8) with UE8M0 scales per 32."""
    FP8_BLOCK = "FP8 block"
    """FP8 E4M3 with a scale per block."""
    BF16 = "BF16"
    INT4 = "INT4"
    """Packed 4-bit integers (I32) with group scales."""
    OTHER = "other"
    """Readable, but none of the above; the dtypes are in the detail."""
    MISSING = "missing"
    """No tensors of that layer are stored."""


@dataclass(frozen=True)
class Arch:
    """A CUDA compute capability, e.g. 12.0 for sm_120."""

    major: int
    minor: int

    @property
    def name(self) -> str:
        return f"sm_{self.major}{self.minor}"

    @property
    def is_sm12x(self) -> bool:
        return self.major == 12


ARCHS = {a.name: a for a in (Arch(9, 0), Arch(10, 0), Arch(10, 3), Arch(12, 0), Arch(12, 1))}
"""The architectures that `--arch` takes."""


@dataclass(frozen=True)
class Location:
    """A line in a file, with its text when it was read."""

    file: str
    """Absolute, or relative to the SGLang tree (`sglang/srt/...`)."""
    line: int
    function: str | None = None
    source: str | None = None
