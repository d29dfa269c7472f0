"""From the kernel that a layer reaches to what will become of it on a GPU.

What is installed is asked first: FlashInfer's own declarations and the code in native libraries
(`dsv4doctor.evidence`).  For what neither shows there is a table (`rules/data/kernels.toml`), each
row with its sources.  A kernel that nothing is known of is unknown, and never runs.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, TypeVar

from packaging.version import InvalidVersion, Version

from dsv4doctor.errors import cut
from dsv4doctor.evidence.grounds import Grounds
from dsv4doctor.evidence.judgement import Judgement, of_kernel, refusal
from dsv4doctor.models import (
    ARCHS,
    Arch,
    HotPath,
    Layer,
    MissingImport,
    SglangError,
    StoredFormat,
    Verdict,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class ErrorLine:
    """An error of FlashInfer from one version on up to before another, on some generations."""

    line: str
    """{sm} is the GPU's number."""
    since: Version | None = None
    before: Version | None = None
    majors: tuple[int, ...] = ()

    def holds_for(self, version: Version, arch: Arch) -> bool:
        return (
            (self.since is None or version >= self.since)
            and (self.before is None or version < self.before)
            and (not self.majors or arch.major in self.majors)
        )


@dataclass(frozen=True)
class KnownKernel:
    """One row of the table."""

    symbol: str
    name: str
    sources: tuple[str, ...]
    archs: tuple[Arch, ...] = ()
    minimum: Arch | None = None
    since: Version | None = None
    """The first FlashInfer that has it; importing its module fails before."""
    methods: tuple[str, ...] = ()
    call: str | None = None
    sm100: bool = False
    clamp: str | None = None
    condition: str | None = None
    """What it takes beyond the right GPU, as a clause: without it there is no promise."""
    operation: str | None = None
    """Its name in `kernels verify`, for one of ours: a stamp of this machine is that condition."""
    wrong: str | None = None
    """Why its output is wrong for DeepSeek-V4 wherever it runs, as a clause."""
    fallback: str | None = None
    """Why it is far slower than what the GPU can do, as a clause."""
    slow_on: tuple[Arch, ...] = ()
    """Where it is; empty: wherever it runs."""
    errors: tuple[ErrorLine, ...] = ()
    """What the log says where it does not exist; the first that holds counts."""
    stored: tuple[StoredFormat, ...] = ()
    """The stored formats whose weights it takes; empty: it does not hang on that."""
    tier: int | None = None
    """Its place in the order of `matrix --recommend`, 1 the fastest known; None: not ranked."""

    def exists_for(self, arch: Arch) -> bool:
        if self.minimum is not None:
            return (arch.major, arch.minor) >= (self.minimum.major, self.minimum.minor)
        return arch in self.archs

    def covers(self, symbol: str, method: str | None, call_text: str) -> bool:
        return (
            fnmatch.fnmatchcase(symbol, self.symbol)
            and (not self.methods or method in self.methods)
            and (self.call is None or self.call in call_text)
        )

    def error_line(self, flashinfer: Version, arch: Arch) -> str | None:
        """What the log says on `arch` with that FlashInfer; None: not known."""
        for error in self.errors:
            if error.holds_for(flashinfer, arch):
                return error.line.replace("{sm}", f"{arch.major}{arch.minor}")
        return None

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


def format_needed(layer: Layer) -> str | None:
    """The stored formats, in words, that the layer's quant method, the weights that it built or
    its kernel can use, where they are known and the checkpoint stores another."""
    unmet = _unmet(layer)
    return None if unmet is None else unmet.formats


@dataclass(frozen=True)
class _Need:
    """Who takes which stored formats, in words."""

    subject: str
    formats: str
    purpose: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.subject} needs {self.formats}{self.purpose}"


def _unmet(layer: Layer) -> _Need | None:
    if layer.stored_format in _NOT_KNOWN:
        return None
    for subject, purpose, formats in _needs(layer):
        if formats and layer.stored_format not in formats:
            return _Need(subject, " or ".join(stored.value for stored in formats), purpose)
    return None


def _needs(layer: Layer) -> Iterator[tuple[str, str, tuple[StoredFormat, ...]]]:
    """(who, what for, formats that it takes); no formats: not known."""
    method = layer.quant_method or ""
    rows = [row for row in _table()["method"] if fnmatch.fnmatchcase(method, row["name"])]
    if rows:
        yield method, "", _stored(rows[0])
    else:
        yield method, f" for its {layer.weights} weights", _BUILT.get(layer.weights or "", ())
    known = known_kernel(layer)
    if layer.kernel is not None and known is not None:
        yield layer.kernel.symbol.rpartition(".")[2], "", known.stored


def _stored(row: dict[str, Any]) -> tuple[StoredFormat, ...]:
    return tuple(StoredFormat(name) for name in row.get("stored", ()))


_NOT_KNOWN = (None, StoredFormat.MISSING, StoredFormat.OTHER)
_PACKED = (StoredFormat.MXFP4, StoredFormat.NVFP4)
_BUILT = {
    "float8_e4m3fn": (StoredFormat.FP8_BLOCK,),
    "bfloat16": (StoredFormat.BF16,),
    "int8": _PACKED,
    "uint8": _PACKED,
}
"""By the dtype of a layer's weights as built, the stored formats that go into them."""


def _row(row: dict[str, Any]) -> KnownKernel:
    return KnownKernel(
        symbol=row["symbol"],
        name=row["name"],
        sources=tuple(row["sources"]),
        archs=tuple(_arch(text) for text in row.get("archs", ())),
        minimum=_arch(row["minimum"]) if "minimum" in row else None,
        since=Version(row["since"]) if "since" in row else None,
        methods=tuple(row.get("methods", ())),
        call=row.get("call"),
        sm100=row.get("sm100", False),
        clamp=row.get("clamp"),
        condition=row.get("condition"),
        operation=row.get("operation"),
        wrong=row.get("wrong"),
        fallback=row.get("fallback"),
        slow_on=tuple(_arch(text) for text in row.get("slow_on", ())),
        errors=tuple(_error(error) for error in row.get("errors", ())),
        stored=_stored(row),
        tier=row.get("tier"),
    )


def _error(row: dict[str, Any]) -> ErrorLine:
    return ErrorLine(
        line=row["line"],
        since=Version(row["since"]) if "since" in row else None,
        before=Version(row["before"]) if "before" in row else None,
        majors=tuple(row.get("majors", ())),
    )


def _arch(text: str) -> Arch:
    major, minor = text.split(".")
    return Arch(int(major), int(minor))


def known_kernel(layer: Layer, call_text: str = "") -> KnownKernel | None:
    """What the table says of the layer's kernel; `call_text` is the source of the call to it."""
    if layer.kernel is None:
        return None
    return _known(layer.kernel.symbol, layer.quant_method, call_text)


def _known(symbol: str, method: str | None, call_text: str) -> KnownKernel | None:
    return next((row for row in known_kernels() if row.covers(symbol, method, call_text)), None)


def judge(layer: Layer, arch: Arch, call_text: str = "", grounds: Grounds | None = None) -> Layer:
    """`layer` with its verdict and the reason for it.

    The reason names what it stands on; without `grounds` that is the table alone.
    """
    verdict, reason = _verdict(layer, arch, call_text, grounds)
    if layer.lacks and verdict is not Verdict.FAILS:
        return replace(layer, verdict=Verdict.UNKNOWN, reason=f"{layer.lacks} ({reason})")
    return replace(layer, verdict=verdict, reason=reason)


def judge_kernel(symbol: str, arch: Arch, grounds: Grounds | None = None) -> tuple[Verdict, str]:
    """The verdict on a kernel that is no routed expert's, and the reason for it."""
    return _of_kernel(symbol, None, arch, "", grounds)


def judge_path(path: HotPath, arch: Arch, grounds: Grounds | None = None) -> HotPath:
    """`path` with its verdict and the reason for it.

    A path of which no kernel was traced (the KV cache, the all-reduce) and one whose trace has a
    caveat (`path.reason`) are never promised to run.
    """
    if path.error is not None:
        return replace(path, verdict=Verdict.FAILS, reason=raised(path.error))
    if path.kernel is not None:
        verdict, reason = judge_kernel(path.kernel.symbol, arch, grounds)
        if path.reason and verdict is not Verdict.FAILS:
            return replace(path, verdict=Verdict.UNKNOWN, reason=f"{path.reason} ({reason})")
        return replace(path, verdict=verdict, reason=reason)
    read_off = "it was read off, and no kernel of it was traced"
    reason = path.reason or (read_off if path.choice is not None else "no kernel was reached")
    return replace(path, verdict=Verdict.UNKNOWN, reason=reason)


Judged = TypeVar("Judged", Layer, HotPath)


def after_imports(judged: Judged, missing: Sequence[MissingImport]) -> Judged:
    """What was judged, of a server that does not start where packages are `missing`."""
    if not missing or judged.verdict is Verdict.FAILS:
        return judged
    symbol = judged.kernel.symbol.removeprefix("torch.ops.") if judged.kernel is not None else ""
    own = (one for one in missing if re.match(rf"{one.package}[.:]", symbol))
    error = next(own, missing[0]).error
    return replace(judged, verdict=Verdict.FAILS, reason=raised(error), error=error)


def raised(error: SglangError) -> str:
    """What SGLang raises, where, and the first line of what it says."""
    where = f" at {error.at.file}:{error.at.line}" if error.at else ""
    message = cut(error.message.splitlines()[0], 200) if error.message else "no message"
    return f"SGLang raises {error.type}{where}: {message}"


def _verdict(
    layer: Layer, arch: Arch, call_text: str, grounds: Grounds | None
) -> tuple[Verdict, str]:
    if layer.error is not None:
        return Verdict.FAILS, raised(layer.error)
    if layer.kernel is None:
        return Verdict.UNKNOWN, layer.reason or "the trace reached no kernel for this layer"
    verdict, reason = _of_kernel(layer.kernel.symbol, layer.quant_method, arch, call_text, grounds)
    if verdict is Verdict.FAILS:
        return verdict, reason
    unmet = _unmet(layer)
    if unmet is not None and layer.stored_format is not None:
        return Verdict.FAILS, f"{unmet.sentence}, stored is {layer.stored_format.value}"
    if layer.stored_format in (None, StoredFormat.MISSING):
        return Verdict.UNKNOWN, "the checkpoint holds no tensors of these experts"
    if layer.stored_format is StoredFormat.OTHER and verdict is not Verdict.UNKNOWN:
        mixed = "the checkpoint stores these experts in no one format that is known here"
        return Verdict.UNKNOWN, f"{mixed} ({reason})"
    return verdict, reason


def _of_kernel(
    symbol: str, method: str | None, arch: Arch, call_text: str, grounds: Grounds | None
) -> tuple[Verdict, str]:
    """In this order: what is installed says no; the table says no; either of them says yes."""
    known = _known(symbol, method, call_text)
    said = of_kernel(symbol, arch, grounds.evidence) if grounds is not None else None
    short = symbol.rpartition(".")[2]
    named = f"{short} ({known.name})" if known is not None else short
    if said is not None and said.exists is False:
        return Verdict.FAILS, f"{named} does not run on {arch.name}: {said.source}{_expect(said)}"
    table = _table_note(symbol, grounds, said)
    if known is not None and not known.exists_for(arch):
        line = _expected_line(known, symbol, arch, grounds)
        expected = f'; expect "{line}"' if line else ""
        return Verdict.FAILS, f"{named} exists for {known.gpus} only{expected}{table}"
    if known is None:
        return _not_in_table(symbol, named, arch, said)
    if known.since is not None and grounds is not None and said is None:
        version = _version(grounds.flashinfer)
        if version is None:
            return Verdict.UNKNOWN, f"{named} takes FlashInfer {known.since}, not known to be there"
        if version < known.since:
            missing = f"No module named '{symbol.rpartition('.')[0]}'"
            where = f"is in FlashInfer from {known.since} on, and {version} serves here"
            return Verdict.FAILS, f'{named} {where}; expect "{missing}"{table}'
    if known.wrong is not None:
        return Verdict.FAILS, f"{named} gives wrong output: {known.wrong}{table}"
    if known.minimum is not None and arch not in ARCHS.values():
        return Verdict.UNKNOWN, f"{named} is for {known.gpus}; nobody looked at {arch.name}{table}"
    source = f": {said.source}" if said is not None and said.exists else table
    if known.fallback is not None and (not known.slow_on or arch in known.slow_on):
        slow = f"{named} runs on {arch.name} and is a fallback: {known.fallback}"
        return Verdict.FALLBACK, f"{slow}{source}"
    day = grounds.verified.get(known.operation or "") if grounds is not None else None
    if day is not None:
        return Verdict.RUNS, f"{named} exists for {arch.name}, verified on this machine on {day}"
    if known.condition is not None:  # whether it holds is for the serving machine to say
        return Verdict.UNKNOWN, f"{named} exists for {arch.name}; {known.condition}{source}"
    return Verdict.RUNS, f"{named} exists for {arch.name}{source}"


def _not_in_table(
    symbol: str, named: str, arch: Arch, said: Judgement | None
) -> tuple[Verdict, str]:
    by_use = any(fnmatch.fnmatchcase(symbol, row.symbol) for row in known_kernels())
    if said is not None and said.exists and not by_use:
        return Verdict.RUNS, f"{named} exists for {arch.name}: {said.source}"
    if said is not None and by_use:
        detail = f"; {said.source}, and how it is called decides"
    else:
        detail = f"; {said.source}" if said is not None else ""
    return Verdict.UNKNOWN, f"not known for which GPUs {named} exists{detail}"


def _expect(said: Judgement) -> str:
    return f'; expect "{said.refusal}"' if said.refusal else ""


def _table_note(symbol: str, grounds: Grounds | None, said: Judgement | None) -> str:
    """Why the table is what the verdict stands on."""
    if grounds is None:
        return ""
    if said is not None:
        return f" (table of known kernels; {said.source})"
    if symbol.startswith(("flashinfer", "torch.ops.sglang.trtllm")) and grounds.missing:
        return f" (table of known kernels; {grounds.missing})"
    return " (table of known kernels)"


def _expected_line(
    known: KnownKernel, symbol: str, arch: Arch, grounds: Grounds | None
) -> str | None:
    """The error to look for in the log, by the FlashInfer that will serve."""
    if grounds is None:
        return None
    line = refusal(symbol, arch, grounds.evidence)
    version = _version(grounds.flashinfer)
    if line is not None or version is None:
        return line
    return known.error_line(version, arch)


def _version(text: str | None) -> Version | None:
    try:
        return Version(text or "")
    except InvalidVersion:
        return None


NO_CLAMP = "wrong output: it runs without the model's SwiGLU clamp"
"""With what the reason of such a layer begins."""


def said_of_clamp(layer: Layer, call_text: str) -> Layer:
    """The judged layer of a model with a clamp, its reason opening with the clamp's loss if it
    runs without."""
    runs = layer.verdict in (Verdict.RUNS, Verdict.FALLBACK)
    if not runs or not drops_clamp(layer, call_text):
        return layer
    return replace(layer, reason=f"{NO_CLAMP} (swiglu_limit); {layer.reason}")


def drops_clamp(layer: Layer, call_text: str) -> bool:
    """True when the SwiGLU clamp provably does not reach the layer's kernel."""
    if layer.clamp_read is False and layer.kernel is not None and layer.error is None:
        return True
    known = known_kernel(layer, call_text)
    if known is None or known.clamp is None:
        return False
    return known.clamp == "never" or (bool(call_text) and "swiglu_limit" not in call_text)
