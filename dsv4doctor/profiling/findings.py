"""What a profile says is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.files import read_json
from dsv4doctor.models import Finding, Remedy, Severity
from dsv4doctor.profiling.categories import families_of
from dsv4doctor.profiling.types import IDLE, Kernel, Profile

GLUE_LIMIT = 0.30
"""Of the busy time."""
_FP32_WARNING = 0.01
_FP32_WORTH_SAYING = 0.001
_FAMILY_WORTH_SAYING = 0.05
"""Of the MoE kernels whose implementation is known."""
_MAX_BYTES = 256 << 20
_TRITON = "triton:"
_KINDS = {
    "-prefill": {"EXTEND", "MIXED"},
    "-decode": {"DECODE", "VERIFY", "TARGET_VERIFY", "MIXED"},
}
"""A path of one phase is only missed where that phase was profiled."""
_PATH_CATEGORIES = {"dense": "gemm", "sparse": "attention", "kv": "attention", "indexer": "indexer"}


@dataclass(frozen=True)
class Kind:
    """What findings of one id have in common."""

    id: str
    severity: Severity
    title: str
    when: str
    consequence: str
    remedy: str


_GLUE = Kind(
    "PRF101",
    Severity.WARNING,
    "Much of the GPU's time is glue",
    f"More than {GLUE_LIMIT:.0%} of the busy time is copies, casts, elementwise operations, "
    "indexing and reductions.",
    "The GPU moves data between kernels instead of computing; a fused kernel for the operation "
    "around it gives that time back.",
    "Look at what launches the largest of them: plain torch operations stand in where a kernel is "
    "missing for this GPU. `dsv4doctor check` names such paths.",
)
_FP32 = Kind(
    "PRF102",
    Severity.WARNING,
    "Matrix multiplications in FP32 or TF32",
    f"They take {_FP32_WARNING:.0%} of the busy time or more; from {_FP32_WORTH_SAYING:.1%} on it "
    "is said as info.",
    "The weights of this model family are BF16, FP8 or FP4: in FP32 a multiplication runs outside "
    "the fast tensor cores, many times slower. Some small ones (router, hyper-connections) are "
    "FP32 on purpose.",
    "Find the caller by the shape: profile with record_shapes, or look for .float() in front of a "
    "matmul in SGLang's fallback code.",
)
_OTHER = Kind(
    "PRF103",
    Severity.WARNING,
    "Other kernels ran than the report predicts",
    "With --expect FILE, a JSON report: the routed experts, or another path, ran on other kernels.",
    "The profile is of another launch, release or GPU than the report, or SGLang decided otherwise "
    "at run time: one of the two does not describe this server.",
    "Run `dsv4doctor check` with the profiled server's own launch and release.",
)
KINDS = (_GLUE, _FP32, _OTHER)


@dataclass(frozen=True)
class Expected:
    """What a report of `check`, `trace` or `trace-moe` predicts."""

    source: str
    families: frozenset[str]
    symbols: tuple[str, ...]
    unknown: tuple[str, ...]
    """Symbols of which it is not known what a profiler calls their kernels."""
    paths: tuple[tuple[str, str], ...] = ()
    """Beside the experts: the path's name, and the Triton function that a trace would show."""


def read_expected(path: str) -> Expected:
    """The prediction in the JSON report `path`; UsageError where there is none."""
    hint = "write one with: dsv4doctor check --format json -o FILE"
    report: Any = read_json(Path(path), _MAX_BYTES, hint, f"--expect {path}")
    layers = report.get("layers") if isinstance(report, dict) else None
    if not isinstance(layers, list) or not str(report.get("schema", "")).startswith("dsv4doctor"):
        raise UsageError(f"--expect {path}: not a report of one launch", hint)
    symbols = tuple(dict.fromkeys(filter(None, (_symbol(layer) for layer in layers))))
    paths = report.get("paths")
    others = tuple(dict.fromkeys(_triton_paths(paths if isinstance(paths, list) else ())))
    if not symbols and not others:
        raise UsageError(f"--expect {path}: the report names no kernel of a layer", hint)
    families = {symbol: families_of(symbol) for symbol in symbols}
    return Expected(
        source=path,
        families=frozenset().union(*families.values()),
        symbols=symbols,
        unknown=tuple(symbol for symbol, known in families.items() if not known),
        paths=others,
    )


def _symbol(layer: Any) -> str | None:
    kernel = layer.get("kernel") if isinstance(layer, Mapping) else None
    symbol = kernel.get("symbol") if isinstance(kernel, Mapping) else None
    return symbol if isinstance(symbol, str) else None


def _triton_paths(paths: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """A profiler shows a Triton kernel by the name of its function."""
    for path in paths:
        symbol = _symbol(path) or ""
        if symbol.startswith(_TRITON) and isinstance(path.get("name"), str):
            yield path["name"], symbol.removeprefix(_TRITON).rpartition(".")[2]


def judge(profile: Profile, expected: Expected | None = None) -> tuple[Finding, ...]:
    """The findings, worst first as `KINDS` stand."""
    found = [*_glue(profile), *_fp32(profile)]
    if expected is not None:
        found += [*_other_kernel(profile, expected), *_other_path(profile, expected)]
    return tuple(found)


def busy_ns(profile: Profile) -> int:
    return profile.span_ns - profile.by_category[IDLE]


def _glue(profile: Profile) -> Iterator[Finding]:
    busy, glue = busy_ns(profile), profile.by_category["glue"]
    if not busy or glue / busy <= GLUE_LIMIT:
        return
    yield Finding(
        rule=_GLUE.id,
        severity=_GLUE.severity,
        subject="glue",
        message=f"{glue / busy:.0%} of the busy GPU time is glue: copies, casts, elementwise "
        "operations and reductions.",
        consequence=_GLUE.consequence,
        evidence=_largest(profile, [one for one in profile.kernels if one.category == "glue"]),
        remedy=Remedy(_GLUE.remedy),
    )


def _fp32(profile: Profile) -> Iterator[Finding]:
    kernels = [one for one in profile.kernels if one.fp32]
    time, busy = sum(one.total_ns for one in kernels), busy_ns(profile)
    if not busy or time / busy < _FP32_WORTH_SAYING:
        return
    is_much = time / busy >= _FP32_WARNING
    yield Finding(
        rule=_FP32.id,
        severity=_FP32.severity if is_much else Severity.INFO,
        subject="FP32 matrix multiplications",
        message=f"{time / busy:.1%} of the busy GPU time is matrix multiplication in FP32 or TF32.",
        consequence=_FP32.consequence,
        evidence=_largest(profile, kernels),
        remedy=Remedy(_FP32.remedy),
    )


def _other_kernel(profile: Profile, expected: Expected) -> Iterator[Finding]:
    if expected.unknown or not expected.families:
        return
    by_family: dict[str, int] = {}
    for one in profile.kernels:
        if one.category == "moe" and one.family is not None:
            by_family[one.family] = by_family.get(one.family, 0) + one.total_ns
    known = sum(by_family.values())
    others = {
        family: time
        for family, time in by_family.items()
        if family not in expected.families and time >= _FAMILY_WORTH_SAYING * known
    }
    missing = sorted(expected.families - by_family.keys())
    if not others and not (missing and by_family):
        return
    ran = ", ".join(sorted(others) or sorted(by_family))
    predicted = ", ".join(sorted(expected.families))
    kernels = [one for one in profile.kernels if one.family in (others or by_family)]
    yield Finding(
        rule=_OTHER.id,
        severity=_OTHER.severity,
        subject="routed experts",
        message=f"The routed experts ran on {ran}, and {expected.source} predicts {predicted}"
        + (f" ({', '.join(missing)} did not run)." if missing else "."),
        consequence=_OTHER.consequence,
        evidence=(
            *(f"predicted: {symbol}" for symbol in expected.symbols),
            *_largest(profile, kernels),
        ),
        remedy=Remedy(_OTHER.remedy),
    )


def _other_path(profile: Profile, expected: Expected) -> Iterator[Finding]:
    ran = {one.name for one in profile.kernels}
    kinds = {step.name.split(" ")[0] for step in profile.steps}
    for path, function in expected.paths:
        needed = next((kind for end, kind in _KINDS.items() if path.endswith(end)), None)
        if function in ran or (needed is not None and not kinds & needed):
            continue
        category = _PATH_CATEGORIES.get(path.partition("-")[0])
        kernels = [one for one in profile.kernels if one.category == category]
        yield Finding(
            rule=_OTHER.id,
            severity=_OTHER.severity,
            subject=path,
            message=f"{expected.source} predicts the Triton kernel {function} for {path}, and it "
            "did not run.",
            consequence=_OTHER.consequence,
            evidence=(f"predicted: {function}", *_largest(profile, kernels)),
            remedy=Remedy(_OTHER.remedy),
        )


def expectation_note(profile: Profile, expected: Expected) -> str | None:
    """Why the prediction could not be compared, or None."""
    if expected.unknown:
        return (
            f"{expected.source}: not compared, as it is not known what a profiler calls the "
            f"kernels of {', '.join(expected.unknown)}"
        )
    if expected.symbols and not any(
        one.family and one.category == "moe" for one in profile.kernels
    ):
        return f"{expected.source}: not compared, no MoE kernel of a known kind ran"
    return None


def _largest(profile: Profile, kernels: Sequence[Kernel]) -> tuple[str, ...]:
    busy = busy_ns(profile) or 1  # kernels of no length
    return tuple(
        f"{one.total_ns / 1e6:.3f} ms ({one.total_ns / busy:.1%}), {one.count} times, "
        f"{one.rule}: {short(one.name, 160)}"
        for one in kernels[:5]
    )


def short(name: str, length: int) -> str:
    """`name` in one line of at most `length` characters."""
    line = " ".join(name.split()).removeprefix("void ")
    return line if len(line) <= length else f"{line[: length - 3]}..."
