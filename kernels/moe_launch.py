"""Launching the grouped products of `grouped_gemm` for one MoE layer, and its configurations."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from dsv4doctor.errors import UsageError
from dsv4doctor.kernels.fp4 import E4M3_UNLIFT
from dsv4doctor.kernels.grouped_gemm import (
    CHUNK,
    Config,
    _count_kernel,
    _product_kernel,
    _route_kernel,
    _sum_kernel,
)

COLUMNS = 1024
"""int64 words that one program of the routing launch reorders."""

EARLY_START = True
"""Lets each launch of a call begin while the one before it drains (sm_90 and later)."""

EARLY_FROM = 9
"""Pairs from which `EARLY_START` holds: on the H200, TP1, a call takes 44.9 us instead of 40.3 with
6 pairs, but 60.0 instead of 63.2 with 12, and 330 instead of 337 with 96."""


@dataclass(frozen=True)
class Plan:
    """The two products' configurations for one size of batch."""

    gate_up: Config
    down: Config
    gate_up_narrow: Config | None = None
    """Instead of `gate_up` for an intermediate size of at most `NARROW`."""

    def gate_up_for(self, intermediate: int) -> Config:
        narrow = self.gate_up_narrow if intermediate <= NARROW else None
        return narrow or self.gate_up


NARROW = 1024


# Pairs per expert up to which a plan is used -> the plan.
#
# sm_90: the best of about 70 configurations, product by product, on an H200 with V4-Flash at TP1
# (docs/benchmarks/moe_sweep.py; us of gate/up and down): 1 token 21 and 12 with 64 rows; 16 tokens
# 203 and 104 with 128 rows, 208 and 110 with 64; 256 tokens 721 and 382 with tiles of 8 pairs, 819
# and 417 with 16; 512: 899 and 471 with 16; 1024: 1073 and 535 with 32; 2048: 1489 and 721 with 64;
# 4096: 2223 and 1152 with 128.  (128, 128, 128) with 4 warps takes 1018 for the last, but spills.
# At TP4, 16 tokens, gate/up takes 57 with 64 rows and 60 with 128, down 37 and 33.
# sm_120: compiled for and not run on.  The same shapes up to 16 pairs, which use mma.sync on both
# (up to 8); above, what fits in 99 KiB and in registers.
_ROOMY_32 = Config(128, 32, 128, 4, 4)
_ROOMY_64 = Config(64, 64, 64, 4, 3)
_ROOMY_128 = Config(128, 128, 128, 8, 4)
PLANS: Mapping[str, Sequence[tuple[float, Plan]]] = {
    "sm_90": (
        (0.07, Plan(Config(64, 8, 256, 4, 3), Config(64, 8, 256, 4, 3))),
        (8, Plan(Config(128, 8, 256, 4, 3), Config(128, 8, 256, 4, 3), Config(64, 8, 256, 4, 3))),
        (16, Plan(Config(64, 16, 256, 4, 3), Config(128, 16, 256, 4, 3))),
        (32, Plan(Config(64, 32, 256, 4, 3), Config(128, 32, 256, 4, 3, _ROOMY_32))),
        (64, Plan(Config(256, 64, 128, 8, 3), Config(256, 64, 128, 8, 3))),
        (math.inf, Plan(*[Config(256, 128, 128, 8, 3, _ROOMY_128)] * 2)),
    ),
    "sm_120": (
        (0.07, Plan(Config(64, 8, 256, 4, 3), Config(64, 8, 256, 4, 3))),
        (8, Plan(Config(128, 8, 256, 4, 3), Config(128, 8, 256, 4, 3), Config(64, 8, 256, 4, 3))),
        (16, Plan(Config(64, 16, 256, 4, 3), Config(64, 16, 256, 4, 3))),
        (32, Plan(Config(64, 32, 128, 4, 3), Config(64, 32, 128, 4, 3))),
        (64, Plan(*[Config(128, 64, 64, 8, 3, _ROOMY_64)] * 2)),
        (math.inf, Plan(Config(128, 128, 64, 8, 3), Config(128, 128, 64, 8, 3))),
    ),
    "interpreter": ((math.inf, Plan(Config(32, 16, 64, 4, 1), Config(32, 16, 64, 4, 1))),),
}
PLANS_OF_ARCH = {"sm_90": "sm_90", "sm_120": "sm_120", "sm_121": "sm_120"}

OWN = 16
"""Pairs that one program of the routing launch places where each counts all of them itself."""

OWN_COUNTED = {"sm_90": 64, "sm_120": 32, "interpreter": 32}
"""The same behind a count.  64 against the 512 bins of 256 experts spill on sm_120 (41 local loads
in the code); 32 take 128 registers there."""


@functools.cache
def _plans_name(device: torch.device) -> str:
    """Which of `PLANS` is for the GPU at `device`; the interpreter's for "cpu".

    Raises UsageError for a GPU that none was made for.
    """
    if device.type == "cpu":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    name = PLANS_OF_ARCH.get(f"sm_{major}{minor}")
    if name is None:
        raise UsageError(
            f"routed experts: no configuration for sm_{major}{minor}",
            f"these kernels are built for {', '.join(PLANS_OF_ARCH)}",
        )
    return name


def plans_for(device: torch.device) -> Sequence[tuple[float, Plan]]:
    """The plans of the GPU at `device`; of the interpreter for "cpu".  UsageError if none."""
    return PLANS[_plans_name(device)]


def choose(plans: Sequence[tuple[float, Plan]], pairs: int, experts: int) -> Plan:
    """The plan for `pairs` pairs spread over `experts` experts."""
    return next(plan for limit, plan in plans if pairs <= limit * experts)


@dataclass(frozen=True)
class Experts:
    """The weights of one layer's experts, as loaded; see the launch functions for the shapes."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    group: int
    """Codes per block scale: 32 (UE8M0) or 16 (E4M3)."""
    w13_global: torch.Tensor | None = None
    w2_global: torch.Tensor | None = None
    small_scales: bool = False
    """No UE8M0 byte is above 128."""

    @property
    def count(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        return self.w2.shape[1]

    @property
    def intermediate(self) -> int:
        return self.w13.shape[1] // 2

    def check(self, x: torch.Tensor) -> None:
        """Raises ValueError naming the tensor whose shape, type or layout does not fit."""
        e, hidden, inter = self.count, self.hidden, self.intermediate
        if hidden % 32 or inter % 32:
            raise ValueError(f"hidden {hidden} and intermediate {inter} must be multiples of 32")
        _expect("x", x, (None, hidden), (torch.bfloat16,), contiguous=False)
        codes = (torch.int8, torch.uint8)
        _expect("w13", self.w13, (e, 2 * inter, hidden // 2), codes)
        _expect("w2", self.w2, (e, hidden, inter // 2), codes)
        kind = (torch.uint8, torch.float8_e8m0fnu if self.group == 32 else torch.float8_e4m3fn)
        _expect("w13_scale", self.w13_scale, (e, 2 * inter, hidden // self.group), kind)
        _expect("w2_scale", self.w2_scale, (e, hidden, inter // self.group), kind)
        if self.group == 16:
            _expect("w13_global", self.w13_global, (e, 2), (torch.float32,))
            _expect("w2_global", self.w2_global, (e,), (torch.float32,))


def _expect(
    name: str,
    tensor: torch.Tensor | None,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    contiguous: bool = True,
) -> None:
    if tensor is None:
        raise ValueError(f"{name} is missing")
    if tensor.dim() != len(shape) or any(
        want is not None and have != want for have, want in zip(tensor.shape, shape, strict=True)
    ):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, wanted {shape}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, wanted {' or '.join(map(str, dtypes))}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")


def tile_bound(pairs: int, experts: int, block_t: int) -> int:
    """The most tiles that `pairs` pairs can need, however they are spread."""
    return min(pairs, min(experts, pairs) + pairs // block_t)


def run_experts(
    x: torch.Tensor,
    experts: Experts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    swiglu_limit: float | None = None,
    expert_offset: int = 0,
    factor: float = 1.0,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """The routed experts' sum for every token; what `mxfp4_moe` and `nvfp4_moe` launch."""
    experts.check(x)
    tokens, topk = topk_ids.shape
    _expect("topk_ids", topk_ids, (x.shape[0], None), (torch.int32, torch.int64))
    _expect("topk_weights", topk_weights, (tokens, topk), (torch.float32,))
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _expect("out", out, (tokens, experts.hidden), (torch.bfloat16,), contiguous=False)
    if out.stride(1) != 1:
        raise ValueError(f"out has rows with a stride of {out.stride(1)}, wanted 1")
    if tokens == 0:
        return out
    if x.stride(1) != 1 or x.stride(0) % 4 or x.data_ptr() % 8:
        x = x.contiguous()
    pairs = tokens * topk
    plan = plan or choose(plans_for(x.device), pairs, experts.count)
    routing = _route(x, topk_ids, experts, expert_offset, plan.gate_up.block_t)
    h = x.new_empty((pairs, experts.intermediate))
    y = x.new_empty((pairs, experts.hidden))
    limit = None if swiglu_limit is None else float(swiglu_limit)
    gate_up = plan.gate_up_for(experts.intermediate)
    _product(routing.split, experts, True, h, routing, gate_up, topk, limit)
    _product(h, experts, False, y, routing, plan.down, topk, None)
    block = min(512, triton.next_power_of_2(experts.hidden))
    _sum_kernel[(tokens, triton.cdiv(experts.hidden, block))](
        y, topk_ids, topk_weights, out, experts.hidden, topk, expert_offset, experts.count,
        factor, out.stride(0), BLOCK=block, PAIRS=triton.next_power_of_2(topk),
        num_warps=4, **_early(x, pairs, True),
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Routing:
    """What the routing launch leaves behind."""

    split: torch.Tensor
    pairs: torch.Tensor
    tile_expert: torch.Tensor
    tile_rows: torch.Tensor


def _route(
    x: torch.Tensor, topk_ids: torch.Tensor, experts: Experts, offset: int, block_t: int
) -> Routing:
    tokens, hidden = x.shape
    count = topk_ids.numel()
    tiles = tile_bound(count, experts.count, block_t)
    bins = triton.next_power_of_2(experts.count + 1)
    chunks = triton.cdiv(count, CHUNK) if count > CHUNK else 0
    ints = torch.empty(tiles * (block_t + 2) + chunks * bins, dtype=torch.int32, device=x.device)
    pairs, tile_expert, tile_rows, counts = ints.split(
        [tiles * block_t, tiles, tiles, chunks * bins]
    )
    split = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if chunks:
        _count_kernel[(chunks,)](
            topk_ids, counts, count, offset, experts.count, CHUNK=CHUNK, BINS=bins,
            num_warps=4, **_early(x, count, False),
        )  # fmt: skip
    own = OWN_COUNTED[_plans_name(x.device)] if chunks else OWN
    place = triton.cdiv(count, own)
    blocks = triton.cdiv(hidden // 4, COLUMNS)
    _route_kernel[(place + tokens * blocks,)](
        topk_ids, counts, x, split, pairs, tile_expert, tile_rows,
        chunks, count, offset, experts.count, tiles, place, hidden // 4, blocks, x.stride(0),
        BLOCK_T=block_t, CHUNK=128 if count <= 128 else CHUNK, COUNTED=chunks > 0, OWN=own,
        BINS=bins, COLUMNS=COLUMNS, num_warps=4, **_early(x, count, chunks > 0),
    )  # fmt: skip
    return Routing(split, pairs, tile_expert, tile_rows)


def _early(x: torch.Tensor, pairs: int, behind_ours: bool) -> dict[str, bool]:
    """Launch options; only a kernel that follows one of ours may start before that ends."""
    if not (EARLY_START and x.is_cuda and pairs >= EARLY_FROM):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": behind_ours}


def _product(
    x: torch.Tensor, experts: Experts, gated: bool, out: torch.Tensor, routing: Routing,
    config: Config, topk: int, limit: float | None,
) -> None:  # fmt: skip
    w, scale, factor = (
        (experts.w13, experts.w13_scale, experts.w13_global)
        if gated
        else (experts.w2, experts.w2_scale, experts.w2_global)
    )
    rows, k = out.shape[1], x.shape[1]
    options = product_options(experts.group, gated, limit is not None, experts.small_scales, k)
    config = config.fitting(options["WIDE"], k)
    blocks = triton.cdiv(rows, config.block_n // 2 if gated else config.block_n)
    units = k // experts.group // options["SCALE_ALIGN"]
    _product_kernel[(routing.tile_expert.numel() * blocks,)](
        x, w.view(torch.int16), scale.view(torch.uint8), factor, out,
        routing.pairs, routing.tile_expert, routing.tile_rows,
        rows, k // 32, units, topk, limit or 0.0, E4M3_UNLIFT if experts.group == 16 else 1.0,
        **options, **block_options(config, k), ASM=x.is_cuda,
        num_warps=config.num_warps, num_stages=config.num_stages, **_early(x, out.shape[0], True),
    )  # fmt: skip


def product_options(
    group: int, gated: bool, limited: bool, small_scales: bool, k: int
) -> dict[str, Any]:
    """The compile-time choices that follow from the layer."""
    return {
        "GATED": gated,
        "HAS_LIMIT": limited,
        "E4M3": group == 16,
        "WIDE": group == 32 and not small_scales,
        "HAS_GLOBAL": group == 16,
        "SCALE_ALIGN": math.gcd(k // group, 16),
    }


def block_options(config: Config, k: int) -> dict[str, Any]:
    """The compile-time choices that follow from the configuration."""
    return {
        "EVEN_K": k % config.block_k == 0,
        "BLOCK_N": config.block_n,
        "BLOCK_T": config.block_t,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
    }
