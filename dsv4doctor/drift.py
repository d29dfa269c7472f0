"""A prediction against a recording: what a trace said of a launch, and what its server did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.files import read_json, shown
from dsv4doctor.jsonio import from_plain

SCHEMA = "dsv4doctor-report/1"
_MAX_BYTES = 256 << 20
_ABOUT_THE_MACHINE = {
    "model_path",
    "speculative_draft_model_path",
    "mem_fraction_static",
    "chunked_prefill_size",
}
"""Arguments that SGLang resolves by the machine: its paths, and its GPUs' memory."""
_OURS = ("triton:", "tilelang:", "jit:", "torch.ops.", "sglang.")


class Standing(str, Enum):
    """How one thing compares."""

    SAME = "same"
    DRIFT = "drift"
    UNKNOWN = "unknown"
    """One side does not know it, or neither does."""


@dataclass(frozen=True)
class Difference:
    """One thing that was predicted and recorded."""

    subject: str
    """E.g. "main model.layers.3.mlp.experts"."""
    what: str
    """"kernel", "quant method", ..."""
    predicted: str | None
    recorded: str | None
    standing: Standing
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    differences: tuple[Difference, ...]
    """Everything that was compared, in the recording's order."""
    not_recorded: tuple[str, ...] = ()
    """Predicted paths that the recording has nothing of; they count as neither."""

    def of(self, standing: Standing) -> tuple[Difference, ...]:
        return tuple(one for one in self.differences if one.standing is standing)

    @property
    def exit_code(self) -> int:
        """1 drift, 3 nothing drifts and something is unknown, 0 all the same."""
        if self.of(Standing.DRIFT):
            return 1
        return 3 if self.of(Standing.UNKNOWN) or not self.differences else 0


def read_report(path: Path) -> dict[str, Any]:
    """A report of `dsv4doctor trace --format json`; UsageError for anything else."""
    hint = "write one with `dsv4doctor trace --format json -o FILE`, or record one in the server"
    plain = read_json(path, _MAX_BYTES, hint)
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
        raise UsageError(f"{path}: not a report of dsv4doctor ({SCHEMA})", hint)
    # A run that gave no trace has its errors and not much else.
    errors = from_plain(plain, _Errors, str(path)).errors
    ending = next((one for one in errors if one.kind != "sglang" and one.phase is None), None)
    if ending is not None:
        said = shown(ending.message)
        raise UsageError(f"{path}: the report of a run that gave no trace ({said})", hint)
    from_plain(plain, _Report, str(path))
    return plain


# ------------------------------------------------------------------------ what is read of one


@dataclass(frozen=True)
class _Error:
    kind: str
    message: str = ""
    phase: str | None = None
    """Of a trace that stopped short: which model it was building."""


@dataclass(frozen=True)
class _Errors:
    errors: tuple[_Error, ...] = ()


@dataclass(frozen=True)
class _Kernel:
    symbol: str


@dataclass(frozen=True)
class _Layer:
    role: str
    name: str
    quant_method: str | None
    runner_backend: str | None
    flags_consulted: tuple[str, ...]
    kernel: _Kernel | None
    verdict: str
    reason: str


@dataclass(frozen=True)
class _Path:
    role: str
    name: str
    layers: tuple[str, ...]
    choice: str | None
    kernel: _Kernel | None
    detail: str | None
    verdict: str
    reason: str


@dataclass(frozen=True)
class _Release:
    version: str | None


@dataclass(frozen=True)
class _Report:
    arch: str | None
    resolved_args: dict[str, Any]
    layers: tuple[_Layer, ...]
    paths: tuple[_Path, ...]
    sglang: _Release | None = None


# ------------------------------------------------------------------------ comparison


def compare(predicted: dict[str, Any], recorded: dict[str, Any]) -> Comparison:
    """Both as from `read_report`."""
    differences = [
        *_heads(predicted, recorded),
        *_compare_layers(dict(_layers(predicted)), dict(_layers(recorded)), _short(predicted)),
        *_compare_paths(predicted, recorded),
    ]
    seen = {key for key, _ in _paths(recorded)}
    missing = sorted({key for key, _ in _paths(predicted)} - seen)
    return Comparison(tuple(differences), tuple(" ".join(key) for key in missing))


def same_kernel(predicted: str, recorded: str) -> bool:
    """The same entry point under its two names: as SGLang imports it, and as it calls itself.

    Of kernels that are compiled at run time a recording knows the module, not the function.
    """
    if predicted == recorded:
        return True
    if predicted.startswith("jit:") and recorded.startswith("jit:"):
        return (predicted + ".").startswith(recorded + ".")
    if predicted.startswith(_OURS) or recorded.startswith(_OURS):
        return False
    one, other = predicted.split("."), recorded.split(".")
    return (_package(one[0]), one[-1]) == (_package(other[0]), other[-1])


def _package(root: str) -> str:
    return root.removesuffix("_cpp")


# ------------------------------------------------------------------------ head and arguments


def _heads(predicted: dict[str, Any], recorded: dict[str, Any]) -> Iterator[Difference]:
    yield _plain("launch", "architecture", predicted["arch"], recorded["arch"])
    versions = [(side.get("sglang") or {}).get("version") for side in (predicted, recorded)]
    yield _plain("launch", "SGLang", versions[0], versions[1])
    ours, theirs = predicted["resolved_args"], recorded["resolved_args"]
    for name in sorted(ours.keys() & theirs.keys() - _ABOUT_THE_MACHINE):
        if ours[name] != theirs[name]:
            yield _plain("argument", name, ours[name], theirs[name], values=True)


def _plain(
    subject: str, what: str, predicted: Any, recorded: Any, values: bool = False
) -> Difference:
    """`values`: None is a value here, and not something that is not known."""
    unknown = not values and (predicted in (None, "unknown") or recorded in (None, "unknown"))
    standing = Standing.SAME if predicted == recorded else Standing.DRIFT
    return Difference(
        subject, what, _text(predicted), _text(recorded), Standing.UNKNOWN if unknown else standing
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


# ------------------------------------------------------------------------ routed experts

Key = tuple[str, str]


def _layers(report: dict[str, Any]) -> Iterator[tuple[Key, dict[str, Any]]]:
    for layer in report["layers"]:
        yield (
            (layer["role"], layer["name"]),
            {
                "quant method": layer["quant_method"],
                "runner": layer["runner_backend"],
                "flags read": tuple(sorted(layer["flags_consulted"])),
                "kernel": _symbol(layer),
                "verdict": layer["verdict"],
                "reason": layer["reason"],
            },
        )


def _symbol(entry: dict[str, Any]) -> str | None:
    kernel = entry["kernel"]
    return None if kernel is None else str(kernel["symbol"])


def _short(report: dict[str, Any]) -> str | None:
    """Why the trace stopped before it had all layers; None: it has them."""
    errors = (one for one in report.get("errors", ()) if one["kind"] != "sglang")
    return next((f"the trace stopped short: {one['message']}" for one in errors), None)


def _compare_layers(
    predicted: dict[Key, dict[str, Any]],
    recorded: dict[Key, dict[str, Any]],
    short: str | None,
) -> Iterator[Difference]:
    for key in [*recorded, *(key for key in predicted if key not in recorded)]:
        subject = " ".join(key)
        if key not in predicted:
            standing = Standing.DRIFT if short is None else Standing.UNKNOWN
            yield Difference(subject, "layer", None, "built", standing, short or "not predicted")
            continue
        if key not in recorded:
            reason = "not in the recording"
            yield Difference(subject, "layer", "built", None, Standing.UNKNOWN, reason)
            continue
        ours, theirs = predicted[key], recorded[key]
        for what in ("quant method", "runner"):
            yield _plain(subject, what, ours[what], theirs[what], values=True)
        flags = [", ".join(side["flags read"]) or "none" for side in (ours, theirs)]
        yield _plain(subject, "flags read", flags[0], flags[1])
        yield _kernels(subject, [ours["kernel"]], theirs["kernel"], ours["reason"], theirs)
        yield from _outcomes(subject, [ours["verdict"]], theirs)


def _kernels(
    subject: str,
    predicted: list[str | None],
    recorded: str | None,
    reason: str,
    entry: dict[str, Any],
) -> Difference:
    """`predicted` are all that the path may reach, by the number of tokens."""
    known = [symbol for symbol in predicted if symbol is not None]
    said = ", ".join(dict.fromkeys(known)) or None
    if not known or recorded is None:
        why = reason if not known else entry["reason"]
        return Difference(subject, "kernel", said, recorded, Standing.UNKNOWN, why)
    same = any(same_kernel(symbol, recorded) for symbol in known)
    return Difference(subject, "kernel", said, recorded, Standing.SAME if same else Standing.DRIFT)


def _outcomes(subject: str, predicted: list[str], entry: dict[str, Any]) -> Iterator[Difference]:
    """What failed in the server and was not to, and the other way round; else nothing.

    `predicted` are the verdicts of all that the path may reach.
    """
    recorded = entry["verdict"]
    if recorded == "unknown" or any((one == "fails") is (recorded == "fails") for one in predicted):
        return
    if recorded != "fails" and "unknown" in predicted:
        return
    standing = Standing.UNKNOWN if "unknown" in predicted else Standing.DRIFT
    said = ", ".join(dict.fromkeys(predicted))
    yield Difference(subject, "outcome", said, recorded, standing, entry["reason"])


# ------------------------------------------------------------------------ other paths


def _paths(report: dict[str, Any]) -> Iterator[tuple[Key, dict[str, Any]]]:
    for path in report["paths"]:
        yield (
            (path["role"], path["name"]),
            {
                "layers": tuple(path["layers"]),
                "choice": path["choice"],
                "kernel": _symbol(path),
                "detail": path["detail"],
                "verdict": path["verdict"],
                "reason": path["reason"],
            },
        )


def _shares(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether two paths are about the same layers; some are about none."""
    return bool(set(one) & set(other)) or not (one or other)


def _compare_paths(predicted: dict[str, Any], recorded: dict[str, Any]) -> Iterator[Difference]:
    known = list(_paths(predicted))
    for key, theirs in _paths(recorded):
        ours = [
            path
            for other, path in known
            if other == key and _shares(path["layers"], theirs["layers"])
        ]
        first = theirs["layers"][0] if theirs["layers"] else ""
        subject = f"{' '.join(key)} {first}".rstrip()
        if not ours:
            reason = "not predicted for these layers"
            symbol = theirs["kernel"] or theirs["choice"]
            yield Difference(subject, "path", None, symbol, Standing.UNKNOWN, reason)
        elif key[1] == "kv-cache":
            yield _plain(subject, "dtype", ours[0]["choice"], theirs["choice"])
            yield _plain(subject, "layout", ours[0]["detail"] or None, theirs["detail"] or None)
        elif not theirs["layers"] and theirs["kernel"] is None and ours[0]["kernel"] is None:
            # Read off the arguments in both, as the all-reduce: there is no kernel to compare.
            found = _plain(subject, "choice", ours[0]["choice"], theirs["choice"])
            reasons = [path["reason"] for path in (ours[0], theirs) if path["choice"] is None]
            yield replace(found, reason=reasons[0]) if reasons else found
        else:
            symbols = [path["kernel"] for path in ours]
            yield _kernels(subject, symbols, theirs["kernel"], ours[0]["reason"], theirs)
            yield from _outcomes(subject, [path["verdict"] for path in ours], theirs)
