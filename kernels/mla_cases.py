"""Compile cases, self-checks and benchmark rows of the sparse MLA decode."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from dsv4doctor.kernels import mla_kernels, upstream
from dsv4doctor.kernels import sparse_mla_decode as kernel
from dsv4doctor.kernels.reference import sparse_mla_decode as reference
from dsv4doctor.kernels.registry import BenchCase, Check, CompileCase
from dsv4doctor.kernels.sparse_mla_decode import HEAD_DIM, dequantise_rows, sparse_mla_decode

_SHAPES: tuple[dict[str, int | bool], ...] = (
    {"rows": 1, "heads": 16, "topk": 128, "extra_topk": 512, "page_size": 256, "full": True},
    {"rows": 5, "heads": 64, "topk": 100, "extra_topk": 333, "page_size": 64, "extra_page_size": 2},
    {"rows": 64, "heads": 128, "topk": 128, "extra_topk": 512, "page_size": 128},
    {"rows": 300, "heads": 8, "topk": 61, "page_size": 256},
)
_SMALL: tuple[dict[str, int | bool], ...] = (
    {"rows": 3, "heads": 10, "topk": 40, "extra_topk": 70, "page_size": 64, "pool": 256},
    {"rows": 2, "heads": 16, "topk": 33, "page_size": 128, "pool": 256},
)


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """||out - want|| / ||want|| over the finite elements; infinite if any other one differs."""
    finite = torch.isfinite(want)
    if not torch.equal(out[~finite].float(), want[~finite].float()):
        return math.inf
    difference = (out.double() - want.double())[finite].norm()
    return (difference / want.double()[finite].norm().clamp(min=1e-300)).item()


def all_codes_cache(device: str) -> torch.Tensor:
    """A cache of 256 rows: every E4M3 code in every row, the row's number as its scales."""
    codes = torch.arange(448, device=device).to(torch.uint8).repeat(256, 1)
    codes[128:] += 64  # 448 columns hold each code at least once in every group of rows
    scales = torch.arange(256, device=device).to(torch.uint8)[:, None].repeat(1, 7)
    rotary = torch.randn((256, 64), device=device).bfloat16()
    return reference.pack(codes, scales, rotary, 64)


def wrong_bits(device: str) -> float:
    """How many of the dequantised elements differ in any bit; NaN matches NaN."""
    cache = all_codes_cache(device)
    index = torch.arange(-1, 256, dtype=torch.int32, device=device)
    out, want = dequantise_rows(cache, index), reference.rows_of(cache, index).bfloat16()
    same = (out.view(torch.int16) == want.view(torch.int16)) | (out.isnan() & want.isnan())
    return float((~same).sum().item())


def _error(shape: dict[str, int | bool], splits: int | None) -> Callable[[str], float]:
    def run(device: str) -> float:
        case = reference.random_case(**shape, device=device, seed=torch.seed() % 2**31)
        want, want_lse = reference.sparse_mla_decode(*case.args, **case.kwargs)
        out, lse = sparse_mla_decode(*case.args, **case.kwargs, splits=splits)
        return max(relative_error(out, want), relative_error(lse, want_lse))

    return run


def _replay_error(device: str) -> float:
    """Captured once, then replayed on other queries, lists and lengths."""
    first, other = (
        reference.random_case(4, 64, 128, 512, device=device, seed=torch.seed() % 2**31)
        for _ in range(2)
    )
    sparse_mla_decode(*first.args, **first.kwargs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = sparse_mla_decode(*first.args, **first.kwargs)
    q, _, index, lengths = first.args
    new_q, _, new_index, new_lengths = other.args
    for old, new in ((q, new_q), (index, new_index), (lengths, new_lengths)):
        old.copy_(new)
    for name in ("extra_indices", "extra_lengths", "sink"):
        first.kwargs[name].copy_(other.kwargs[name])
    out.fill_(math.nan)
    graph.replay()
    want, want_lse = reference.sparse_mla_decode(*first.args, **first.kwargs)
    return max(relative_error(out, want), relative_error(lse, want_lse))


def checks(bar: float) -> Sequence[Check]:
    """Small shapes where the interpreter runs; each shape once as tuned and once split in 3."""
    result = [Check("every FP8 and UE8M0 code, bits", 0.0, wrong_bits)]
    if torch.cuda.is_available():
        result.append(Check("graph replayed with other lists", bar, _replay_error))
    for shape in _SHAPES if torch.cuda.is_available() else _SMALL:
        name = " ".join(f"{key}={value}" for key, value in shape.items())
        quick = shape["rows"] <= 5
        result.append(Check(name, bar, _error(shape, None), quick))
        result.append(Check(f"{name} split", bar, _error(shape, 3), quick))
    return result


@functools.cache
def _fetched(module: str, name: str) -> Callable[..., object] | None:
    found = upstream.functions(f"srt.layers.attention.{module}", name)
    return None if found is None else found[name]


def _upstream(case: reference.Case) -> dict[str, Callable[[], object]]:
    """SGLang's Triton kernel and torch path on the same inputs."""
    kernel = _fetched("flash_mla_sm120_triton", "flash_mla_sparse_decode_triton")
    plain = _fetched("flash_mla_sm120", "_sm120_sparse_decode_fwd")
    q, cache, index, lengths = case.args
    more = case.kwargs
    args = (
        q.unsqueeze(1), cache.view(torch.float8_e4m3fn), index.unsqueeze(1), lengths,
        more["sink"], HEAD_DIM, HEAD_DIM**-0.5, more["extra_cache"].view(torch.float8_e4m3fn),
        more["extra_indices"].unsqueeze(1), more["extra_lengths"],
    )  # fmt: skip
    peers: dict[str, Callable[[], object]] = {}
    if kernel is not None:
        peers["upstream triton"] = lambda: kernel(*args)
    if plain is not None:
        peers["upstream torch"] = lambda: plain(*args)
    return peers


def _ours(case: reference.Case) -> Callable[[], object]:
    return lambda: sparse_mla_decode(*case.args, **case.kwargs)


def bench_cases(device: str) -> Iterator[BenchCase]:
    """Caches of 65536 rows in pages of 256 and 64; each row on three sets of inputs in turn."""
    window, compressed = 128, 512
    for rows in (1, 16, 64):
        for heads in (16, 64):
            sets = [
                reference.random_case(
                    rows, heads, window, compressed, 256, 64, 65536, True, device, seed
                )
                for seed in range(3)
            ]
            peers = [_upstream(case) for case in sets]
            listed = rows * (window + compressed)
            yield BenchCase(
                name=f"B={rows} H={heads}, {window} + {compressed} rows",
                ours=_ours(sets[0]),
                peers=peers[0],
                bytes_moved=listed * 584 + 2 * rows * heads * HEAD_DIM * 2,
                flops=4 * listed * heads * HEAD_DIM,
                ours_rotation=tuple(_ours(case) for case in sets[1:]),
                peers_rotation={name: tuple(each[name] for each in peers[1:]) for name in peers[0]},
            )


_SIGNATURE = {
    "q_ptr": "*bf16", "kv_ptr": "*u8", "idx_ptr": "*i32", "len_ptr": "*i32", "xlen_ptr": "*i32",
    "sink_ptr": "*fp32", "out_ptr": "*bf16", "lse_ptr": "*fp32", "part_ptr": "*bf16",
    "part_lse_ptr": "*fp32", "scale_log2": "fp32", "xdelta": "i64", "xidx_delta": "i64",
}  # fmt: skip
_ALIGNED = (
    *(name for name in _SIGNATURE if name.endswith("_ptr")),
    "page_bytes", "xpage_bytes", "xdelta", "stride_qn", "stride_qh",
)  # fmt: skip


def _compile_case(name, function, constexprs, warps, stages) -> CompileCase:
    arguments = [each for each in function.arg_names if each not in constexprs]
    signature = {each: _SIGNATURE.get(each, "i32") for each in arguments}
    aligned = tuple(each for each in _ALIGNED if each in arguments)
    return CompileCase(name, function, signature, constexprs, warps, stages, aligned)


def compile_cases(arch: str) -> Sequence[CompileCase]:
    """The decode kernel with everything on, with and without split, and the merge."""
    cases = []
    for config in kernel.CONFIGS[9 if arch == "sm_90" else 12]:
        for split in (False, True)[config.min_splits - 1 :]:
            constexprs = {
                "HAS_LEN": True, "HAS_XLEN": True, "HAS_EXTRA": True, "HAS_SINK": True,
                "SPLIT": split, "BLOCK_H": config.block_h, "BLOCK_T": config.block_t,
            }  # fmt: skip
            name = f"decode H{config.block_h} T{config.block_t} W{config.num_warps}"
            name += f" S{config.num_stages}{' split' if split else ''}"
            warps, stages = config.num_warps, config.num_stages
            cases.append(_compile_case(name, mla_kernels.decode_kernel, constexprs, warps, stages))
    for block_d, splits, warps in ((HEAD_DIM, 2, 2), (128, 64, 1)):
        constexprs = {"HAS_SINK": True, "SPLITS_PAD": splits, "BLOCK_D": block_d}
        name = f"merge D{block_d} of {splits}"
        cases.append(_compile_case(name, mla_kernels.merge_kernel, constexprs, warps, 3))
    return cases
