"""Traces as the torch profiler writes them: kineto's layout, order of members and names.

The layout is that of a file that torch 2.13 wrote on a CPU; the GPU events' members are those of
kineto's output_json.cpp and its CUPTI activities.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BASE_NS = 5_113_673_939_000_000
"""Profilers count from long ago: the numbers are as large as real ones."""


def event(category: str, name: str, pid: Any, tid: Any, start: int, length: int, args: str) -> str:
    """One complete event; times in ns."""
    return (
        f'  {{\n    "ph": "X",\n    "cat": "{category}",\n    "name": {json.dumps(name)},\n'
        f'    "pid": {json.dumps(pid)},\n    "tid": {json.dumps(tid)},\n'
        f'    "ts": {microseconds(start)},\n    "dur": {microseconds(length)}\n    ,\n'
        f'    "args": {{\n      {args}\n    }}\n  }}'
    )


def kernel(
    name: str, start: int, length: int, device: int = 0, stream: int = 7, pid: Any = None
) -> str:
    category = "kernel"
    args = (
        f'"External id": 5,"queued": 0, "device": {device}, "context": 1, "stream": {stream}, '
        '"correlation": 77, "registers per thread": 32, "shared memory": 0, '
        '"blocks per SM": 0.5, "warps per SM": 4.0, "grid": [66, 1, 1], "block": [128, 1, 1], '
        '"est. achieved occupancy %": 5'
    )
    if name.startswith(("Memcpy ", "Memset ")):
        category = "gpu_memcpy" if name.startswith("Memcpy") else "gpu_memset"
        args = (
            f'"device": {device}, "context": 1, "stream": {stream}, "correlation": 78, '
            '"bytes": 4096, "memory bandwidth (GB/s)": 1.5'
        )
    place = device if pid is None else pid
    return event(category, name, place, stream, BASE_NS + start, length, args)


def mark(name: str, start: int, length: int, number: int, device: int = 0, stream: int = 7) -> str:
    """An annotation on the GPU's side."""
    args = f'"External id": {number}'
    return event("gpu_user_annotation", name, device, stream, BASE_NS + start, length, args)


def cpu_event(name: str, start: int, length: int, category: str = "cpu_op") -> str:
    args = '"External id": 3,"Record function id": 0, "Ev Idx": 2'
    return event(category, name, 8781, 8781, BASE_NS + start, length, args)


def flow(start: int) -> str:
    at = microseconds(BASE_NS + start)
    return (
        '  {\n    "ph": "s",\n    "id": 77,\n    "pid": 8781,\n    "tid": 8781,\n'
        f'    "ts": {at},\n    "cat": "ac2g",\n    "name": "ac2g"\n  }}'
    )


def microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def document(events: Iterable[str], rank: int | None = None, gpu: str = "NVIDIA H200") -> str:
    group = ""
    if rank is not None:
        group = (
            f'"distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": 4, '
            '"pg_count": 1, "pg_config": [{"pg_name": "0"}], "nccl_version": "2.27.3"},\n'
        )
    return (
        ' {\n    "schemaVersion": 1,\n    "deviceProperties": [\n    {\n'
        f'      "id": 0, "name": "{gpu}", "totalGlobalMem": 150000000000,\n'
        '      "computeMajor": 9, "computeMinor": 0, "numSms": 132\n    }\n    ],\n'
        f'      {group}"with_stack": 1,\n    "displayTimeUnit": "ms",\n'
        '    "baseTimeNanoseconds": 1790857026000000000,\n    "traceEvents": [\n    \n'
        + ",\n".join(events)
        + '\n  ],"traceName": "trace.json" }\n'
    )


def write(path: Path, events: Sequence[str], **head: Any) -> str:
    text = document(events, **head).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)
