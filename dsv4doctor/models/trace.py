"""What one launch resolves to: layers, hot paths, decisions, errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsv4doctor.models.facts import SglangTree
from dsv4doctor.models.vocabulary import Arch, Location, Role, StoredFormat, Verdict


@dataclass(frozen=True)
class Branch:
    """One condition met on the way to a decision."""

    location: Location
    condition: str
    values: dict[str, str]
    """Name in the condition -> the value seen, as Python would write it."""
    taken: bool | None = None


@dataclass(frozen=True)
class Step:
    """One dispatch function that ran, with the branches it took."""

    phase: str
    """"arguments", "main" or "draft"."""
    function: str
    file: str
    branches: tuple[Branch, ...]
    returned: str | None
    times: int = 1


@dataclass(frozen=True)
class ArgChange:
    """SGLang changed one of its own arguments while resolving them."""

    name: str
    before: str | None
    after: str | None
    at: Location


@dataclass(frozen=True)
class SglangError:
    """An exception that SGLang itself raised: a result, not a failure of the tool."""

    phase: str
    """"arguments", "main", "draft", "main weights", "main forward", ..."""
    type: str
    message: str
    at: Location | None


@dataclass(frozen=True)
class Kernel:
    """The first kernel entry that a layer's forward reached."""

    symbol: str
    """E.g. "flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe"."""
    call_site: Location | None


@dataclass(frozen=True)
class Layer:
    """The routed experts of one layer as SGLang built them."""

    name: str
    """SGLang's module name, e.g. "model.layers.3.mlp.experts"."""
    role: Role
    stored_format: StoredFormat | None
    """None: the checkpoint's headers were not read or hold no such layer."""
    quant_method: str | None
    runner_backend: str | None
    """None: the quant method has no runner."""
    decided_at: Location | None
    flags_consulted: tuple[str, ...]
    """The arguments and environment variables that the deciding code read."""
    kernel: Kernel | None
    verdict: Verdict
    reason: str
    """Why the verdict is what it is, in one sentence."""
    error: SglangError | None = None
    """Raised while the layer loaded its weights or ran."""
    weights: str | None = None
    """The dtype of its weights as built, before the checkpoint's are copied in, e.g.
    "float8_e4m3fn"; None: not known."""
    clamp_read: bool | None = None
    """False: on the way to its kernel nothing read the model's swiglu_limit; None: not known."""
    lacks: str = ""
    """That what its kernel takes is not installed in the serving interpreter; empty: nothing."""


@dataclass(frozen=True)
class HotPath:
    """What one class of layers does beside its routed experts, and with which kernel."""

    name: str
    """"dense-fp8", "sparse-mla-decode", "sparse-mla-prefill", "indexer-decode", "indexer-prefill",
    "mhc-pre", "mhc-post", "kv-cache" or "all-reduce"."""
    role: Role
    layers: tuple[str, ...]
    """SGLang's module names; empty for what no single layer does."""
    choice: str | None
    """In the words of SGLang's options, e.g. "triton" or "flashinfer"; None: unknown."""
    kernel: Kernel | None
    """The first kernel reached; for plain torch operations, SGLang's function that holds them."""
    decided_at: Location | None
    flags_consulted: tuple[str, ...]
    verdict: Verdict
    reason: str
    detail: str = ""
    """Sizes that matter, e.g. the width of the indexer's logits or bytes per token."""
    error: SglangError | None = None


IMPORTS = "imports"
"""The phase before any other: SGLang's own modules."""


@dataclass(frozen=True)
class MissingImport:
    """A package that SGLang imports as it starts, and that the serving interpreter does not have.

    Nothing of SGLang's catches the error, so the server does not start.
    """

    package: str
    """Its import name."""
    requirement: str | None
    """SGLang's own, e.g. "sglang-kernel==0.4.4"; None: it declares none."""
    at: Location

    @property
    def error(self) -> SglangError:
        text = f"No module named '{self.package}'"
        return SglangError(IMPORTS, "ModuleNotFoundError", text, self.at)


@dataclass(frozen=True)
class Trace:
    """What one launch resolves to."""

    sglang: SglangTree
    arch: Arch
    resolved_args: dict[str, Any]
    """SGLang's arguments after its own resolution: moe_runner_backend, quantization, ..."""
    arg_changes: tuple[ArgChange, ...]
    environment_overwritten: dict[str, tuple[str | None, str]]
    """Variable -> (value before, value that SGLang set)."""
    layers: tuple[Layer, ...]
    errors: tuple[SglangError, ...]
    steps: tuple[Step, ...]
    """The decision path; empty unless asked for."""
    leniencies: tuple[str, ...]
    """What stood in for something missing, and could have mattered."""
    timings: dict[str, float]
    """Seconds by phase."""
    cached: bool = False
    unresolved: tuple[str, ...] = ()
    """What stopped the trace and was not raised by SGLang itself: the answer is unknown."""
    paths: tuple[HotPath, ...] = ()
    """Empty where they were not asked for."""
    missing: tuple[MissingImport, ...] = ()
    """In the order of the imports; empty where another machine serves."""

    def of(self, role: Role) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.role is role)

    @property
    def failing_paths(self) -> tuple[HotPath, ...]:
        return tuple(path for path in self.paths if path.verdict is Verdict.FAILS)
