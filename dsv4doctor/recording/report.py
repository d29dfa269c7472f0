"""A recording in the schema of `dsv4doctor trace --format json`."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dsv4doctor import __version__
from dsv4doctor.models import (
    Arch,
    Facts,
    GpuFacts,
    HotPath,
    Layer,
    Report,
    SglangTree,
    Snapshot,
    Trace,
    Verdict,
)
from dsv4doctor.report import json
from dsv4doctor.trace.protocol import trace_from

RAN = "recorded in the server"


def text_of(
    layers: list[dict[str, Any]], paths: list[dict[str, Any]], arguments: dict[str, Any]
) -> str:
    """The report as text; what a recording does not know (the stored formats, say) is null."""
    arch = _arch()
    tree = _tree()
    result = {
        "resolved_args": arguments,
        "arg_changes": [],
        "environment_overwritten": {},
        "layers": layers,
        "paths": paths,
        "errors": [],
        "steps": [],
        "leniencies": [],
        "timings": {},
    }
    trace = _judged(trace_from(result, tree, arch, None))
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    snapshot = Snapshot(__version__, created, GpuFacts(()), tree, None, None, None, {})
    facts = Facts(snapshot, arch, "the server's GPU", trace, notes=(RAN,))
    return json.render(Report(__version__, facts, ()))


def _judged(trace: Trace) -> Trace:
    """What ran, runs; what raised, fails; the rest is unknown."""
    return replace(
        trace,
        layers=tuple(_layer(layer) for layer in trace.layers),
        paths=tuple(_path(path) for path in trace.paths),
    )


def _layer(layer: Layer) -> Layer:
    if layer.error is not None:
        return replace(layer, verdict=Verdict.FAILS, reason=f"{RAN}: {layer.error.type}")
    if layer.kernel is not None:
        return replace(layer, verdict=Verdict.RUNS, reason=RAN)
    return layer


def _path(path: HotPath) -> HotPath:
    if path.error is not None:
        return replace(path, verdict=Verdict.FAILS, reason=f"{RAN}: {path.error.type}")
    if path.kernel is not None or (path.choice is not None and not path.reason):
        return replace(path, verdict=Verdict.RUNS, reason=RAN)
    return path


def arguments_of(server_args: Any) -> dict[str, Any]:
    """The arguments that a trace reports, as they are now."""
    from dsv4doctor.trace.worker.launch import plain
    from dsv4doctor.trace.worker.serving import FIELDS, resolved

    view = resolved(server_args)
    return {name: plain(getattr(view, name)) for name in FIELDS if hasattr(view, name)}


def _arch() -> Arch:
    import torch

    return Arch(*torch.cuda.get_device_capability())


def _tree() -> SglangTree:
    import sglang

    root = Path(next(iter(sglang.__path__))).parent
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "unknown"
    return SglangTree(str(root), found, "installed")
