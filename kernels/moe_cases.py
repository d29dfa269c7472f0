"""Inputs, self-checks and benchmark rows of the routed experts, for both weight formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from dsv4doctor.kernels.fp4 import E4M3_UNLIFT, block_scale, decode_e2m1
from dsv4doctor.kernels.moe_launch import Experts, Plan, run_experts
from dsv4doctor.kernels.reference import moe as reference
from dsv4doctor.kernels.registry import BenchCase, Check


@dataclass(frozen=True)
class Layer:
    """One rank's share of a model's routed experts."""

    name: str
    experts: int
    topk: int
    hidden: int
    intermediate: int

    def slice(self, tp: int) -> Layer:
        """The share of one of `tp` tensor-parallel ranks."""
        inter = self.intermediate // tp
        return replace(self, name=f"{self.name} TP{tp}", intermediate=inter)


FLASH = Layer("V4-Flash", 256, 6, 4096, 2048)
PRO = Layer("V4-Pro", 384, 6, 7168, 3072)
V41 = Layer("V4.1-Flash", 384, 6, 5120, 2304)
DRAFT = Layer("V4.1-Flash draft", 128, 3, 5120, 2304)


def random_experts(
    layer: Layer, group: int, device: str, small_scales: bool = False, odd_scales: bool = False
) -> Experts:
    """Fresh weights whose products are of order one; `odd_scales`: over the format's range."""
    e, h, i = layer.experts, layer.hidden, layer.intermediate

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)

    def scales(rows: int, k: int) -> torch.Tensor:
        # E2M1 codes have a mean square of 6.4; about half an octave either way.
        if group == 32:
            centre = 127 - round(0.5 * torch.tensor(6.4 * k).log2().item())
            low, high = (centre - 1, centre + 2) if not odd_scales else (0, centre + 2)
            shape = (e, rows, k // group)
            return torch.randint(low, high, shape, dtype=torch.uint8, device=device)
        value = torch.rand((e, rows, k // group), device=device) * 200 + 20
        if odd_scales:
            value = torch.where(torch.rand_like(value) < 0.5, value, value * 2**-14)
        return value.to(torch.float8_e4m3fn)

    def globals_(k: int, *shape: int) -> torch.Tensor | None:
        if group == 32:
            return None
        return (torch.rand(shape, device=device) + 0.5) / (140 * (6.4 * k) ** 0.5)

    return Experts(
        codes(e, 2 * i, h // 2), scales(2 * i, h), codes(e, h, i // 2), scales(h, i), group,
        globals_(h, e, 2), globals_(i, e), small_scales,
    )  # fmt: skip


def random_routing(layer: Layer, tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts per token, uniformly, and weights that sum to one."""
    ids = torch.rand((tokens, layer.experts), device=device).topk(layer.topk).indices.int()
    weights = torch.rand((tokens, layer.topk), device=device) + 0.1
    return ids.contiguous(), weights / weights.sum(1, keepdim=True)


def dense_weights(experts: Experts, index: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (w13, w2) of some experts, by the reference's tables."""
    values = reference.ue8m0_values if experts.group == 32 else reference.e4m3_values
    w13 = reference.dequantise(experts.w13[index], values(experts.w13_scale[index]))
    w2 = reference.dequantise(experts.w2[index], values(experts.w2_scale[index]))
    if experts.w13_global is not None and experts.w2_global is not None:
        halves = experts.w13_global[index].repeat_interleave(experts.intermediate, dim=1)
        w13 = w13 * halves[:, :, None]
        w2 = w2 * experts.w2_global[index][:, None, None]
    return w13, w2


def reference_output(
    x: torch.Tensor, experts: Experts, ids: torch.Tensor, weights: torch.Tensor,
    limit: float | None,
) -> torch.Tensor:  # fmt: skip
    """The float32 result, a few experts at a time to bound the memory."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for first in range(0, experts.count, 16):
        w13, w2 = dense_weights(experts, slice(first, first + 16))
        out += reference.experts(x, w13, w2, ids, weights, limit, first)
    return out


def relative_error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """||out - wanted|| / ||wanted||; inf where a NaN is on one side only."""
    if not torch.equal(out.isnan(), wanted.isnan()):
        return float("inf")
    good = ~wanted.isnan()
    difference = torch.where(good, out.double() - wanted.double(), 0.0)
    return (difference.norm() / torch.where(good, wanted.double(), 0.0).norm()).item()


def layer_error(
    layer: Layer, group: int, tokens: int, device: str, *, limit: float | None = 10.0,
    absent: float = 0.0, small_scales: bool = False, odd_scales: bool = False,
    plan: Plan | None = None,
) -> float:  # fmt: skip
    """The relative error on fresh random inputs, with a poisoned output.

    `absent`: share of the pairs whose id is -1.
    """
    experts = random_experts(layer, group, device, small_scales, odd_scales)
    ids, weights = random_routing(layer, tokens, device)
    ids = torch.where(torch.rand(ids.shape, device=device) < absent, -1, ids)
    x = torch.randn((tokens, layer.hidden), device=device).bfloat16()
    out = torch.full_like(x, float("nan"))
    run_experts(x, experts, ids, weights, swiglu_limit=limit, out=out, plan=plan)
    return relative_error(out, reference_output(x, experts, ids, weights, limit))


def replay_error(layer: Layer, group: int, tokens: int, device: str) -> float:
    """The relative error after the inputs of a captured call were replaced.

    Without a GPU there is nothing to capture, and the call is made again.
    """
    experts = random_experts(layer, group, device)
    ids, weights = random_routing(layer, tokens, device)
    x = torch.randn((tokens, layer.hidden), device=device).bfloat16()
    out = torch.full_like(x, float("nan"))

    def call() -> None:
        run_experts(x, experts, ids, weights, swiglu_limit=10.0, out=out)

    call()
    again = call
    if x.is_cuda:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        again = graph.replay
    new_ids, new_weights = random_routing(layer, tokens, device)
    new_ids[::3] = new_ids[0, 0]
    ids.copy_(new_ids)
    weights.copy_(new_weights)
    x.normal_()
    out.fill_(float("nan"))
    again()
    return relative_error(out, reference_output(x, experts, ids, weights, 10.0))


@triton.jit
def _decode_kernel(
    codes_ptr, scale_ptr, out_ptr, E4M3: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Row r, every pair of nibbles, with scale byte r."""
    row = tl.program_id(0)
    column = tl.arange(0, 128)
    codes = tl.load(codes_ptr + column)[None, :]
    byte = tl.load(scale_ptr + row + tl.zeros((1, 128), tl.int32))
    value = decode_e2m1(codes, block_scale(byte, E4M3, WIDE), WIDE, ASM)
    tl.store(out_ptr + row * 512 + tl.arange(0, 512)[None, :], value)


def decode_mismatches(group: int, wide: bool, device: str) -> int:
    """How many of 256 scale bytes x 256 bytes of two codes decode to other bits than the tables.

    Compares bf16 bits with the tables' float32 product rounded to bf16, NaN as NaN.
    """
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    last = 256 if wide or group == 16 else 129
    byte = torch.arange(last, dtype=torch.uint8, device=device)
    out = torch.full((last, 512), float("nan"), dtype=torch.bfloat16, device=device)
    is_gpu = torch.device(device).type == "cuda"
    _decode_kernel[(last,)](codes.view(torch.int16), byte, out, group == 16, wide, is_gpu)
    values = reference.ue8m0_values(byte) if group == 32 else reference.e4m3_values(byte)
    wanted = reference.e2m1_values(codes)[None, :] * values[:, None]
    if group == 16:
        wanted = wanted / E4M3_UNLIFT
    order = torch.arange(512, device=device).reshape(128, 4).T.flatten()
    wanted = wanted[:, order].bfloat16()
    same = (out.view(torch.int16) == wanted.view(torch.int16)) | (out.isnan() & wanted.isnan())
    return int((~same).sum())


def checks(group: int, bar: float) -> list[Check]:
    """The numeric self-checks of one weight format."""
    small = Layer("small", 16, 4, 512, 256)
    ragged = Layer("ragged", 12, 3, 352, 288)

    def decode(device: str) -> float:
        wides = (True, False) if group == 32 else (False,)
        return float(sum(decode_mismatches(group, wide, device) for wide in wides))

    def of(layer: Layer, tokens: int, **options: object) -> Callable[[str], float]:
        return lambda device: layer_error(layer, group, tokens, device, **options)  # type: ignore[arg-type]

    return [
        Check("decode, all codes and scales, bit for bit", 0.0, decode),
        Check("1 token", bar, of(small, 1)),
        Check("70 tokens, a third of the pairs elsewhere", bar, of(small, 70, absent=0.33)),
        Check(
            "40 tokens, captured once and replayed with others, an expert named again",
            bar,
            lambda device: replay_error(small, group, 40, device),
        ),
        Check("600 tokens, no limit", bar, of(small, 600, limit=None), quick=False),
        Check("33 tokens, sizes of no block's multiple", bar, of(ragged, 33)),
        Check("64 tokens, scales over the whole range", bar, of(small, 64, odd_scales=True)),
        Check("64 tokens, small scales", bar, of(small, 64, small_scales=True), quick=False),
        Check("V4-Flash TP8, 1500 tokens", bar, of(FLASH.slice(8), 1500), quick=False),
    ]


def bench_cases(group: int, device: str) -> Iterator[BenchCase]:
    """Rows for V4-Flash: decode at TP1 and TP4, prefill at TP1."""
    for tp, batches in ((1, (1, 2, 4, 8, 16, 32, 64, 4096)), (4, (16, 32, 64, 4096))):
        layer = FLASH.slice(tp)
        experts = random_experts(layer, group, device, small_scales=group == 32)
        for tokens in batches:
            yield bench_case(layer, experts, tokens, device)
        del experts


def expert_bytes(experts: Experts) -> int:
    """Bytes of one expert's weights and scales."""
    parts = (experts.w13, experts.w13_scale, experts.w2, experts.w2_scale)
    return sum(part[0].numel() * part.element_size() for part in parts)


def bench_case(layer: Layer, experts: Experts, tokens: int, device: str) -> BenchCase:
    """One batch; small batches rotate over routings that do not share their experts' bytes."""
    sets = [random_routing(layer, tokens, device) for _ in range(8 if tokens <= 64 else 1)]
    x = torch.randn((tokens, layer.hidden), device=device).bfloat16()

    def ours(ids: torch.Tensor, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: run_experts(x, experts, ids, weights, swiglu_limit=10.0)

    def peer(ids: torch.Tensor, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
        return DequantiseThenMatmul(experts, ids, weights, x)

    selected = sum(len(ids.unique()) for ids, _ in sets) / len(sets)
    flops = 6.0 * tokens * layer.topk * layer.hidden * layer.intermediate
    name = "dequantise, then bf16 grouped matmul"
    return BenchCase(
        name=f"{layer.name}, {tokens} tokens",
        ours=ours(*sets[0]),
        peers={name: peer(*sets[0])},
        bytes_moved=selected * expert_bytes(experts) + 4.0 * tokens * layer.hidden,
        flops=flops,
        notes=f"{selected:.1f} experts selected",
        extra={"experts_selected": selected},
        ours_rotation=tuple(ours(*each) for each in sets[1:]),
        peers_rotation={name: tuple(peer(*each) for each in sets[1:])},
    )


class DequantiseThenMatmul:
    """The way without a 4-bit kernel: the selected experts to bf16, then two grouped products.

    Knows the selected experts beforehand, which flatters it.  Only sm_90 and later; bf16.
    """

    def __init__(
        self, experts: Experts, ids: torch.Tensor, weights: torch.Tensor, x: torch.Tensor
    ) -> None:
        flat = ids.flatten().long()
        self.order = flat.argsort(stable=True)
        self.selected, counts = flat.unique(return_counts=True)
        self.ends = counts.cumsum(0).int()
        self.token = self.order // ids.shape[1]
        self.weights = weights.flatten()[self.order][:, None]
        self.experts, self.x = experts, x
        table = reference.e2m1_values(
            torch.arange(256, dtype=torch.uint8, device=x.device)[:, None]
        )
        self.table = table.bfloat16().view(torch.int32).flatten()

    def __call__(self) -> torch.Tensor:
        e = self.experts
        both = torch._grouped_mm(
            self.x[self.token], self._dense(e.w13, e.w13_scale).transpose(1, 2), self.ends
        )
        gate, up = both.chunk(2, dim=-1)
        h = torch.nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
        y = torch._grouped_mm(h, self._dense(e.w2, e.w2_scale).transpose(1, 2), self.ends)
        return torch.zeros_like(self.x).index_add_(0, self.token, (y * self.weights).bfloat16())

    def _dense(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        picked = codes.view(torch.uint8)[self.selected]
        words = self.table[picked.int()].view(torch.bfloat16)
        kind = torch.float8_e8m0fnu if self.experts.group == 32 else torch.float8_e4m3fn
        factor = scale.view(torch.uint8)[self.selected].view(kind).to(torch.bfloat16)
        e, rows, k = words.shape
        return (words.view(e, rows, -1, self.experts.group) * factor[..., None]).view(e, rows, k)
