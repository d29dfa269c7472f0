"""Times the routed experts' configurations, and the whole call against its floors, on one GPU.

    PYTHONPATH=. python docs/benchmarks/moe_sweep.py [STAGE ...]

Stages: checks, shapes, decode, middle, prefill, parts, bench; all of them without an argument.
With "nvfp4" sweeps and parts are of NVFP4 instead of MXFP4.

The two products are timed apart (CUDA-graph medians), so that each gets its own configuration.
The kernels are compiled beforehand by several processes.  Prints tables; the last is the summary.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from dataclasses import replace

import torch

from dsv4doctor.kernels import moe_cases, moe_launch
from dsv4doctor.kernels.moe_cases import FLASH, Layer
from dsv4doctor.kernels.moe_launch import Config
from dsv4doctor.kernels.timing import event_median_us, graph_median_us

DECODE = [
    *(Config(64, 8, 256, 4, s) for s in (2, 3, 4)),
    *(Config(64, 8, 512, 4, s) for s in (2, 3)),
    *(Config(32, 8, 512, 2, s) for s in (2, 3, 4)),
    *(Config(32, 8, 256, 2, s) for s in (3, 4, 6)),
    *(Config(128, 8, 256, w, 3) for w in (4, 8)),
    *(Config(16, 8, 512, 1, s) for s in (3, 4)),
    Config(64, 8, 1024, 4, 2),
    Config(32, 8, 1024, 2, 2),
    Config(32, 8, 512, 4, 3),
    Config(64, 8, 128, 4, 6),
]
MIDDLE = [
    Config(64, 8, 256, 4, 3),
    *(Config(64, 16, 256, 4, s) for s in (3, 4)),
    Config(64, 16, 512, 4, 2),
    Config(128, 16, 256, 4, 3),
    Config(32, 16, 256, 2, 4),
    Config(64, 32, 256, 4, 3),
    Config(128, 32, 256, 4, 3),
    Config(128, 32, 128, 4, 4),
    Config(128, 64, 128, 4, 3),
    Config(128, 64, 128, 8, 3),
    Config(128, 64, 256, 8, 2),
    Config(256, 64, 128, 8, 3),
    Config(128, 128, 128, 8, 4),
    Config(256, 128, 128, 8, 3),
]
PREFILL = [
    *(Config(256, 128, 128, 8, s) for s in (2, 3)),
    *(Config(128, 128, 128, 4, s) for s in (2, 3)),
    *(Config(128, 128, 128, 8, s) for s in (3, 4)),
    Config(64, 128, 128, 4, 3),
    Config(128, 64, 128, 4, 3),
    Config(256, 64, 128, 8, 3),
]
STAGES = {
    "decode": (DECODE, [(1, 1), (1, 2), (1, 16), (1, 64), (4, 16), (4, 64)]),
    "middle": (MIDDLE, [(1, 128), (1, 256), (1, 512), (1, 1024), (1, 2048)]),
    "prefill": (PREFILL, [(1, 4096)]),
}


def show(config: Config) -> str:
    return (
        f"n{config.block_n} t{config.block_t} k{config.block_k} "
        f"w{config.num_warps} s{config.num_stages}"
    )


class Bench:
    """One layer with one set of weights; times its two products."""

    def __init__(self, layer: Layer, group: int) -> None:
        self.layer = layer
        self.experts = moe_cases.random_experts(layer, group, "cuda", small_scales=group == 32)

    def calls(self, tokens: int, config: Config, gated: bool) -> list:
        layer = self.layer
        made = []
        for _ in range(8 if tokens <= 64 else 1):
            ids, _ = moe_cases.random_routing(layer, tokens, "cuda")
            x = torch.randn((tokens, layer.hidden), device="cuda").bfloat16()
            routing = moe_launch._route(x, ids, self.experts, 0, config.block_t)
            pairs = ids.numel()
            h = torch.randn((pairs, layer.intermediate), device="cuda").bfloat16()
            out = h if gated else x.new_empty((pairs, layer.hidden))
            inputs = routing.split if gated else h
            made.append(
                lambda a=inputs, b=out, r=routing: moe_launch._product(
                    a, self.experts, gated, b, r, config, layer.topk, 10.0 if gated else None
                )
            )
        return made

    def time(self, tokens: int, config: Config, gated: bool) -> float:
        try:
            return graph_median_us(self.calls(tokens, config, gated), repeats=15)
        except Exception as error:
            print("   ", show(config), type(error).__name__, str(error)[:150])
            return float("nan")


def compile_one(task: tuple) -> None:
    group, tp, configs = task
    layer = Layer("compile", 8, 6, FLASH.hidden, FLASH.intermediate // tp)
    bench = Bench(layer, group)
    for config, gated in itertools.product(configs, (True, False)):
        try:
            bench.calls(2, config, gated)[0]()
        except Exception:
            continue


def compile_all(names: list[str], group: int) -> None:
    start = time.time()
    tasks = []
    for name in names:
        configs, cases = STAGES[name]
        for tp in sorted({tp for tp, _ in cases}):
            tasks += [(group, tp, configs[i::6]) for i in range(6)]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compile_one, tasks, chunksize=1)
    print(f"compiled in {time.time() - start:.0f} s", flush=True)


def ceilings() -> tuple[float, float]:
    """Bytes per us of a copy (read plus written), FLOP per us of a bf16 product."""
    a = torch.randn(2**30, device="cuda")
    b = torch.empty_like(a)
    ways = {
        "copy in a graph": graph_median_us(lambda: b.copy_(a)),
        "copy": event_median_us(lambda: b.copy_(a)),
        "add 1": graph_median_us(lambda: torch.add(a, 1, out=b)),
    }
    rates = {name: 2 * a.numel() * 4 / us for name, us in ways.items()}
    print({name: f"{rate / 1e6:.2f} TB/s" for name, rate in rates.items()})
    copy = max(rates.values())
    read = a.numel() * 4 / graph_median_us(lambda: a.sum())
    print(f"reading alone {read / 1e6:.2f} TB/s")
    x, y = (torch.randn((8192, 8192), device="cuda").bfloat16() for _ in range(2))
    product = 2 * 8192**3 / graph_median_us(lambda: x @ y)
    print(f"copy {copy / 1e6:.2f} TB/s, bf16 product {product / 1e6:.0f} TFLOP/s", flush=True)
    return copy, product


def sweep(name: str, group: int, copy: float, product: float) -> None:
    # Launches of one product that overlap each other would flatter it.
    moe_launch.EARLY_START = False
    configs, cases = STAGES[name]
    for tp in sorted({tp for tp, _ in cases}):
        layer = FLASH.slice(tp)
        bench = Bench(layer, group)
        per_expert = moe_cases.expert_bytes(bench.experts)
        for tokens in (t for p, t in cases if p == tp):
            ids, _ = moe_cases.random_routing(layer, tokens, "cuda")
            selected = len(ids.unique())
            for gated, share in ((True, 2 / 3), (False, 1 / 3)):
                flops = 6.0 * tokens * layer.topk * layer.hidden * layer.intermediate * share
                times = sorted((bench.time(tokens, c, gated), i) for i, c in enumerate(configs))
                moved, work = selected * per_expert * share / copy, flops / product
                best = [
                    f"{show(configs[i])}: {us:.1f} us {moved / us:.0%} {work / us:.0%}"
                    for us, i in times[:5]
                ]
                kind = "gate/up" if gated else "down"
                print(f"tp{tp} T{tokens} {kind}: " + " | ".join(best), flush=True)


def shapes(group: int) -> None:
    """The error for every model's slice at every TP size, and for the largest batch."""
    for layer in (FLASH, moe_cases.PRO, moe_cases.V41, moe_cases.DRAFT):
        for tp in (1, 2, 4, 8):
            # The whole number of experts where one rank holds an eighth of each.
            here = layer.slice(tp)
            here = here if tp == 8 else replace(here, experts=40)
            errors = [
                moe_cases.layer_error(here, group, tokens, "cuda", absent=0.1)
                for tokens in (1, 33, 900)
            ]
            row = ", ".join(f"{error:.2e}" for error in errors)
            print(f"group {group} {here.name}, 1, 33 and 900 tokens: {row}", flush=True)
    error = moe_cases.layer_error(FLASH.slice(8), group, 8192, "cuda")
    print(f"group {group} {FLASH.slice(8).name}, 8192 tokens: {error:.2e}", flush=True)


def parts(group: int) -> None:
    """The launches of a call, each in a graph of its own, and the whole."""
    for tp, tokens in (
        (1, 1),
        (1, 2),
        (1, 4),
        (1, 16),
        (1, 64),
        (4, 1),
        (4, 16),
        (1, 1024),
        (1, 4096),
    ):
        times = parts_of(Bench(FLASH.slice(tp), group), tokens)
        row = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
        print(f"tp{tp} T{tokens}: {row}", flush=True)


def parts_of(bench: Bench, tokens: int) -> dict[str, float]:
    layer = bench.layer
    x = torch.randn((tokens, layer.hidden), device="cuda").bfloat16()
    sets = [moe_cases.random_routing(layer, tokens, "cuda") for _ in range(8)]
    plans = moe_launch.plans_for(x.device)
    plan = moe_launch.choose(plans, tokens * layer.topk, layer.experts)
    ids, block_t = sets[0][0], plan.gate_up.block_t
    calls = [
        lambda i=i, w=w: moe_launch.run_experts(x, bench.experts, i, w, swiglu_limit=10.0)
        for i, w in sets
    ]
    moe_launch.EARLY_START = False
    times = {
        "route": graph_median_us(lambda: moe_launch._route(x, ids, bench.experts, 0, block_t)),
        "gate/up": graph_median_us(bench.calls(tokens, plan.gate_up_for(layer.intermediate), True)),
        "down": graph_median_us(bench.calls(tokens, plan.down, False)),
        "all": graph_median_us(calls),
    }
    moe_launch.EARLY_START = True
    times["all, early start"] = graph_median_us(calls)
    return times


def table(group: int, copy: float, product: float) -> list[str]:
    rows = []
    for case in moe_cases.bench_cases(group, "cuda"):
        ours = graph_median_us((case.ours, *case.ours_rotation))
        peer, fn = next(iter(case.peers.items()))
        try:
            # One call of the peer is long and moves gigabytes: nothing to rotate.
            theirs = graph_median_us(fn, repeats=5)
        except Exception as error:
            theirs = float("nan")
            print(case.name, peer, type(error).__name__, str(error)[:200])
        rows.append(
            f"{case.name}: {ours:.1f} us, bytes {case.bytes_moved / ours / copy:.0%}, "
            f"flops {case.flops / ours / product:.0%}, peer {theirs:.0f} us = {theirs / ours:.1f}x"
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    wanted = sys.argv[1:] or ["checks", "shapes", *STAGES, "parts", "bench"]
    groups = [32, 16] if "nvfp4" not in wanted else [16]
    start = time.time()
    if "checks" in wanted:
        for group in (32, 16):
            for check in moe_cases.checks(group, 1e-2):
                print(f"group {group} {check.name}: {check.run('cuda'):.2e} (bar {check.bar})")
        print(f"{time.time() - start:.0f} s", flush=True)
    if "shapes" in wanted:
        for group in (32, 16):
            shapes(group)
        print(f"{time.time() - start:.0f} s", flush=True)
    copy, product = ceilings()
    names = [name for name in STAGES if name in wanted]
    if names:
        compile_all(names, groups[0])
        for name in names:
            sweep(name, groups[0], copy, product)
            print(f"{time.time() - start:.0f} s", flush=True)
    if "parts" in wanted:
        parts(groups[0])
    moe_launch.EARLY_START = True
    if "bench" in wanted:
        for group in groups:
            print(f"group {group}")
            table(group, copy, product)
            print(f"{time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
