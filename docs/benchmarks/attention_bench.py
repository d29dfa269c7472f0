"""Checks and times the attention and glue kernels; writes the results file of `kernels bench`.

    PYTHONPATH=. python docs/benchmarks/attention_bench.py SGLANG_FOLDER RESULTS.json

For a machine that has torch and Triton but not the rest of what the command line needs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dsv4doctor.kernels import bench, registry, stamps, upstream, verify

OPERATIONS = ("sparse_mla_decode", "indexer_logits", "dense_glue")


def main(tree: Path, target: Path) -> None:
    version = upstream.use_tree(tree)
    for name in OPERATIONS:
        for result in verify.run_checks(name, registry.load(name)):
            print(name, result.check, result.error, "ok" if result.passed else result.failure)
    rates = bench.measure_rates()
    rows = []
    for name in OPERATIONS:
        for row in bench.run_cases(name, registry.load(name), rates):
            rows.append(row)
            ratios = {peer: round(ratio, 1) for peer, ratio in row.ratios.items()}
            print(name, row.case, row.ours_us, row.peers_us, ratios, row.of_floor, row.failures)
    found = bench.document(rows, rates, stamps.current_platform(), version)
    found["command"] = ["docs/benchmarks/attention_bench.py", "SGLANG_FOLDER", "RESULTS.json"]
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
