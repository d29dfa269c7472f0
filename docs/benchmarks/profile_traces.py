"""Real traces for `dsv4doctor profile`: SGLang's fallback code against this project's kernels.

    PYTHONPATH=. python docs/benchmarks/profile_traces.py SGLANG_FOLDER OUT

On one GPU, with torch and Triton; of SGLANG_FOLDER (an unpacked wheel, see kernels bench) only the
fallback functions are taken.  Each of the two traces holds the same operations of a decode step
for 64 requests, with the marks that SGLang puts around a step.  OUT gets the traces and
checks.json: what `profile` makes of each beside what its events say, added up without any code of
that command.

The independent sums take the whole file through `json.load`.  A kernel's operation is found by its
correlation id: the launch lies inside the operation's annotation on the CPU.  The time that every
category covers is counted on the cut-up axis of all starts and ends with numpy.  Ends with 1 when
a sum differs by more than a nanosecond an event (the file's times are decimal microseconds).
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsv4doctor.kernels import registry, upstream
from dsv4doctor.profiling.build import read_profile
from dsv4doctor.profiling.types import CATEGORIES

OPERATIONS = {
    "sparse_mla_decode": "B=64 H=64, 128 + 512 rows",
    "indexer_logits": "B=64 limit 8192 there 512, kept",
    "dense_glue": "mix T=64 K=16384",
    "moe_mxfp4": "64 tokens",
}
"""Kernel -> what the name of its benchmark row holds."""
STEPS = 5
Step = dict[str, Callable[[], Any]]


def steps() -> dict[str, Step]:
    """ "upstream" and "ours" -> the operations that both have, as calls on the same inputs."""
    found: dict[str, Step] = {"upstream": {}, "ours": {}}
    for name, wanted in OPERATIONS.items():
        for case in registry.load(name).bench_cases("cuda"):
            if wanted not in case.name or not case.peers:
                continue
            peer, call = next(iter(case.peers.items()))
            print(f"{name}: {case.name}, against {peer}")
            found["upstream"][name], found["ours"][name] = call, case.ours
            break
        else:
            print(f"{name}: no row {wanted!r} with a fallback here: {upstream.problems}")
    return found


def record(step: Step, path: Path) -> None:
    """A trace of STEPS decode steps, after one that compiles."""
    for call in step.values():
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profiler:
        for _ in range(STEPS):
            with torch.profiler.record_function("step[DECODE bs=64]"):
                for name, call in step.items():
                    with torch.profiler.record_function(f"operation {name}"):
                        call()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


# ------------------------------------------------------------------- the independent sums


def events_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(json.load(file)["traceEvents"])


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def on_gpu(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def by_name(events: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Kernel -> how often, and its durations in ns added up."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for one in on_gpu(events):
        found[one["name"]][0] += 1
        found[one["name"]][1] += ns(one["dur"])
    return dict(found)


def by_operation(events: list[dict[str, Any]], category: dict[str, str]) -> dict[str, Any]:
    """Operation -> category -> ns: by who launched the kernel."""
    marks = [
        (one["ts"], one["ts"] + one["dur"], one["name"].removeprefix("operation "))
        for one in events
        if one.get("cat") == "user_annotation" and one["name"].startswith("operation ")
    ]
    launched = {
        one["args"]["correlation"]: one["ts"]
        for one in events
        if one.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for one in on_gpu(events):
        when = launched.get(one["args"]["correlation"], -1.0)
        inside = [name for start, end, name in marks if start <= when <= end]
        found[inside[0] if inside else "(none)"][category[one["name"]]] += ns(one["dur"])
    return {name: dict(each) for name, each in found.items()}


def covered(events: list[dict[str, Any]], category: dict[str, str]) -> dict[str, int]:
    """Category -> ns in which it has the highest claim, and "idle"."""
    rows = on_gpu(events)
    start = np.array([ns(one["ts"]) for one in rows])
    end = np.array([ns(one["ts"] + one["dur"]) for one in rows])
    kind = np.array([CATEGORIES.index(category[one["name"]]) for one in rows])
    axis = np.unique(np.concatenate((start, end)))
    claim = np.full(len(axis) - 1, len(CATEGORIES))
    for low, high, place in zip(
        np.searchsorted(axis, start), np.searchsorted(axis, end), kind, strict=True
    ):
        np.minimum(claim[low:high], place, out=claim[low:high])
    lengths = np.diff(axis)
    names = (*CATEGORIES, "idle")
    return {name: int(lengths[claim == place].sum()) for place, name in enumerate(names)}


def check(path: Path) -> dict[str, Any]:
    """The profile of one trace beside the independent sums, and where they differ."""
    events = events_of(path)
    profile = read_profile(str(path))
    category = {kernel.name: kernel.category for kernel in profile.kernels}
    allowed = len(on_gpu(events))
    wrong = []
    names = by_name(events)
    told = {kernel.name: [kernel.count, kernel.total_ns] for kernel in profile.kernels}
    for name in names.keys() | told.keys():
        one, other = names.get(name, [0, 0]), told.get(name, [0, 0])
        if one[0] != other[0] or abs(one[1] - other[1]) > one[0]:
            wrong.append(f"{name}: {one} in the trace, {other} in the profile")
    shares = covered(events, category)
    for name, wanted in shares.items():
        found = profile.by_category[name]
        if abs(found - wanted) > allowed:
            wrong.append(f"{name}: {wanted} ns in the trace, {found} in the profile")
    return {
        "gpu_events": allowed,
        "kernels": len(names),
        "covered_ns": shares,
        "profile_ns": dict(profile.by_category),
        "by_operation": by_operation(events, category),
        "unknown_kernels": sorted(name for name, kind in category.items() if kind == "unknown"),
        "differences": wrong,
    }


def main(tree: Path, out: Path) -> int:
    version = upstream.use_tree(tree)
    found: dict[str, Any] = {
        "sglang": version,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    for name, step in steps().items():
        path = out / f"{name}.trace.json.gz"
        record(step, path)
        found[name] = check(path)
    (out / "checks.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return 1 if any(found[name]["differences"] for name in ("upstream", "ours")) else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2])))
