"""How fast `diagnose` reads: MB/s on one core, and peak memory.

    python tests/benchmarks/bench_diagnose.py [MEGABYTES] [--cpu N]

Writes a realistic log (start, traffic, a crash at the end; and one with container prefixes) to a
scratch folder, reads it in a fresh process, and fails below 80 MB/s or above 200 MB of memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from log_writer import healthy, traffic

BAR = 80.0
MEMORY_BAR = 200.0
_CRASH = (
    "[2026-11-29 15:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    "RuntimeError: No supported CUDA architectures found for major versions [10].\n"
)
_READ = """
import resource, sys, time
from dsv4doctor.diagnose.run import diagnose
started = time.perf_counter()
found = diagnose(sys.argv[1])
seconds = time.perf_counter() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(found.size / 1e6, seconds, peak, *(match.signature.id for match in found.matches))
"""


def write(path: Path, megabytes: int, prefix: str) -> None:
    """A log of about that size, every line behind `prefix`."""
    head = "".join(f"{prefix}{line}\n" for line in healthy("0.5.23").splitlines())
    block = "".join(f"{prefix}{line}\n" for line in traffic(60_000, seed=7))
    with path.open("w", encoding="utf-8") as file:
        file.write(head)
        while file.tell() < megabytes * 1_000_000:
            file.write(block)
        file.writelines(f"{prefix}{line}\n" for line in _CRASH.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("megabytes", nargs="?", type=int, default=400)
    parser.add_argument("--cpu", type=int, help="Pin to this core.")
    options = parser.parse_args()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    kinds = {"plain": "", "kubernetes": "2026-11-29T14:00:00.123456789Z stderr F "}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for kind, prefix in kinds.items():
            log = Path(folder) / f"{kind}.log"
            write(log, options.megabytes, prefix)
            done = subprocess.run(
                [sys.executable, "-c", _READ, str(log)], capture_output=True, text=True, check=True
            )
            size, seconds, peak, *found = done.stdout.split()
            rate = float(size) / float(seconds)
            print(
                f"{kind}: {float(size):.0f} MB, {rate:.0f} MB/s, peak {float(peak):.0f} MB {found}"
            )
            failed |= rate < BAR or float(peak) > MEMORY_BAR or found != ["LOG402"]
            log.unlink()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
