"""Bounded tests on this machine's GPUs (`--level full`): an all-reduce of two ranks with and
without peer-to-peer, and copies.

Each runs in processes of its own, in the serving environment's interpreter, and is killed at its
deadline: a hang is a result.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from dsv4doctor.models import GpuFacts, Measurement

WORKER = Path(__file__).with_name("measure_worker.py")
SECONDS = 60.0
"""For each test, with the import of torch and the set-up of the ranks."""
_MEGABYTES = 64
_GRACE = 5.0
_SAID = 500
"""Characters kept of an error: NCCL's own reason is at its end, behind torch's words."""
_UNAVAILABLE = 3
_COPIES = ("copy to GPU", "copy from GPU", "copy between GPUs")


@dataclass(frozen=True)
class Bench:
    """How the tests are run; other values than these are for tests of the harness."""

    backend: str = "nccl"
    devices: tuple[str, ...] = ("cuda:0", "cuda:1")
    megabytes: int = _MEGABYTES
    seconds: float = SECONDS
    worker: Path = WORKER


@dataclass(frozen=True)
class _Ended:
    codes: tuple[int | None, ...]
    """One a process; None: it was killed at the deadline."""
    lines: tuple[dict[str, Any], ...]
    """What they wrote, of all processes."""
    complaint: str
    """What the first that failed said of it, else its last line on standard error."""


def measure(
    interpreter: Path,
    variables: Mapping[str, str],
    gpus: GpuFacts,
    progress: Callable[[str], None] | None = None,
    bench: Bench | None = None,
) -> tuple[tuple[Measurement, ...], str | None]:
    """What was measured on the first two GPUs that a launch with `variables` can see, and why
    nothing was, if so.  Takes four times `bench.seconds` at most; never raises."""
    chosen = _visible(variables, gpus)
    if not chosen:
        return (), "--level full: nothing was measured, no GPU on this machine"
    setting = bench or Bench()
    setting = replace(setting, devices=setting.devices[: len(chosen)])
    environment = {
        **variables,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order
        "CUDA_VISIBLE_DEVICES": ",".join(chosen),
    }
    found: list[Measurement] = []
    for name, switches in _tests(len(chosen)):
        if progress is not None:
            progress(f"measuring: {name}")
        if name == "copies":
            results = _copies(interpreter, environment, setting)
        else:
            results = _all_reduce(name, interpreter, {**environment, **switches}, setting)
        if isinstance(results, str):
            return (), f"--level full: nothing was measured, {results}"
        found += results
    return tuple(found), None


def _tests(gpus: int) -> list[tuple[str, dict[str, str]]]:
    ranks: list[tuple[str, dict[str, str]]] = [
        ("all-reduce", {"NCCL_P2P_DISABLE": "0"}),
        ("all-reduce without P2P", {"NCCL_P2P_DISABLE": "1"}),
    ]
    return [*(ranks if gpus > 1 else []), ("copies", {})]


def _visible(variables: Mapping[str, str], gpus: GpuFacts) -> list[str]:
    everyone = [str(gpu.index) for gpu in gpus.gpus]
    said = [name.strip() for name in variables.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    wanted = [name for name in said if name in everyone or name.startswith(("GPU-", "MIG-"))]
    return (wanted or everyone)[:2] if everyone else []


def _all_reduce(
    name: str, interpreter: Path, environment: Mapping[str, str], bench: Bench
) -> list[Measurement] | str:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words = ["all-reduce", bench.backend, str(bench.megabytes)]
        commands = [
            [str(interpreter), str(bench.worker), *words, str(rank), f"{folder}/store"]
            for rank in (0, 1)
        ]
        ended = _run(commands, environment, bench.seconds)
    unavailable = _unavailable(ended)
    if unavailable is not None:
        return unavailable
    rates = [line["rate"] for line in ended.lines if "rate" in line]
    return [_judged(name, ended, min(rates) if len(rates) == 2 else None, bench)]


def _copies(
    interpreter: Path, environment: Mapping[str, str], bench: Bench
) -> list[Measurement] | str:
    words = ["copies", ",".join(bench.devices), str(bench.megabytes)]
    command = [str(interpreter), str(bench.worker), *words]
    ended = _run([command], environment, bench.seconds)
    unavailable = _unavailable(ended)
    if unavailable is not None:
        return unavailable
    rates = {line["name"]: line["rate"] for line in ended.lines if "rate" in line}
    begun = [line["begun"] for line in ended.lines if "begun" in line] or [_COPIES[0]]
    return [
        Measurement(name, "ok", round(rates[name], 2))
        if name in rates
        else _judged(name, ended, None, bench)
        for name in begun
    ]


def _judged(name: str, ended: _Ended, rate: float | None, bench: Bench) -> Measurement:
    if rate is not None and all(code == 0 for code in ended.codes):
        return Measurement(name, "ok", round(rate, 2))
    if None not in ended.codes or any(code not in (0, None) for code in ended.codes):
        return Measurement(name, "failed", None, ended.complaint or "it ended without a result")
    return Measurement(name, "hang", None, f"no answer in {bench.seconds:.0f} s")


def _unavailable(ended: _Ended) -> str | None:
    """Why nothing can be measured with this interpreter."""
    if _UNAVAILABLE in ended.codes:
        said = [str(line["unavailable"]) for line in ended.lines if "unavailable" in line]
        return said[0] if said else "torch cannot be used"
    return None if ended.codes else ended.complaint


# ------------------------------------------------------------------------------ processes


def _run(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], seconds: float
) -> _Ended:
    """All commands at once, none of them longer than `seconds`."""
    started: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile()) for _ in commands]
        errors = [files.enter_context(tempfile.TemporaryFile()) for _ in commands]
        try:
            for command, output, error in zip(commands, outputs, errors, strict=True):
                started.append(_start(command, environment, output, error))
            _wait(started, seconds)
        except OSError as problem:
            return _Ended((), (), f"{commands[0][0]} cannot be started ({problem.strerror})")
        finally:
            codes = tuple(_stopped(process) for process in started)
        lines = tuple(line for output in outputs for line in _lines(output))
        failed = [index for index, code in enumerate(codes) if code not in (0, None)]
        said = [" ".join(str(line["failed"]).split()) for line in lines if "failed" in line]
        complaint = _last_line(errors[failed[0]]) if failed else ""
        return _Ended(codes, lines, said[0][:_SAID] if said else complaint)


def _start(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes], error: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=error,
        start_new_session=True,
    )


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until all have ended, the time is up, or one has failed and the rest had a moment."""
    end = time.monotonic() + seconds
    has_failed = False
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            return
        if not has_failed and any(code not in (0, None) for code in codes):
            has_failed = True
            end = min(end, time.monotonic() + _GRACE)
        time.sleep(0.05)


def _stopped(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit code; None where it had to be killed.  One that cannot even be killed (a GPU that
    does not answer) is left behind."""
    code = process.poll()
    if code is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    return code


def _lines(output: IO[bytes]) -> list[dict[str, Any]]:
    output.seek(0)
    found = []
    for line in output.read(1 << 20).splitlines():
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict):
                found.append(said)
    return found


def _last_line(error: IO[bytes]) -> str:
    error.seek(0)
    lines = error.read(1 << 20).decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "no message")
