"""Measures the trace against its bars: `make bench`.

Every figure is the median of several whole processes, the machine being whatever it is; only the
ratios and the bars' own limits mean something.  A bar that is missed makes the run fail.

    python tests/benchmarks/bench_trace.py MODEL [--sglang VERSION] [--runs N]
"""

import argparse
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

FLAGS = (
    "--tp 4 --moe-runner-backend triton --speculative-moe-runner-backend triton "
    "--speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 2"
)


# Installed packages have their bytecode; a setting of the machine must not take it away here.
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
}


@dataclass(frozen=True)
class Bar:
    name: str
    measured: float
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        return self.measured <= self.limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sglang", default="0.5.14")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    bars = measure(options.model, options.sglang, options.runs)
    for bar in bars:
        verdict = "ok" if bar.met else "MISSED"
        print(f"{bar.name:58} {bar.measured:8.2f} {bar.unit:6} bar {bar.limit:g}  {verdict}")
    return 0 if all(bar.met for bar in bars) else 1


def measure(model: Path, sglang: str, runs: int) -> list[Bar]:
    doctor = [sys.executable, "-m", "dsv4doctor"]
    target = [str(model), "--sglang", sglang, "--arch", "sm_120", "--fail-on", "never"]
    trace = [*doctor, "trace-moe", *target, "--no-cache", "--", *shlex.split(FLAGS)]
    repeated = [*doctor, "trace-moe", *target, "--", *shlex.split(FLAGS)]
    imports = [sys.executable, "-c", "import torch, transformers"]
    for command in (trace, repeated, imports):  # bytecode, page cache, trace cache
        seconds(command)
    pairs = [(seconds(trace), seconds(imports)) for _ in range(runs)]
    print("cold trace s:", " ".join(f"{one:.2f}" for one, _ in pairs))
    print("import torch, transformers s:", " ".join(f"{other:.2f}" for _, other in pairs))
    return [
        Bar(
            "cold trace / import torch, transformers",
            statistics.median(one / other for one, other in pairs),
            2.0,
            "x",
        ),
        Bar("peak memory of the largest process of a cold trace", peak_mb(trace), 700, "MB"),
        Bar("repeated identical trace", median(repeated, runs), 0.5, "s"),
        Bar("dsv4doctor --help", median([*doctor, "--help"], runs), 0.2, "s"),
        Bar("reading every shard header", headers(model, runs), 1.0, "s"),
    ]


def seconds(command: list[str]) -> float:
    """Wall time of one whole process, which has to succeed."""
    started = time.perf_counter()
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT
    )
    return time.perf_counter() - started


def median(command: list[str], runs: int) -> float:
    return statistics.median(seconds(command) for _ in range(runs))


def peak_mb(command: list[str]) -> float:
    """Peak resident memory of the largest process that `command` starts, in MB."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, *command],
        check=True,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    ).stdout
    unit = 1 if sys.platform == "darwin" else 1024
    return int(output) * unit / 1e6


def headers(model: Path, runs: int) -> float:
    """Reading a checkpoint's config, index and headers in this process, uncached."""
    from dsv4doctor.facts.checkpoint import read_checkpoint

    times = []
    for _ in range(runs):
        started = time.perf_counter()
        read_checkpoint(model)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
