"""What `kernels compile` compiles of the routed experts: every launch of one call."""

from __future__ import annotations

from typing import Any

from dsv4doctor.kernels.grouped_gemm import (
    CHUNK,
    Config,
    _count_kernel,
    _product_kernel,
    _route_kernel,
    _sum_kernel,
)
from dsv4doctor.kernels.moe_launch import (
    COLUMNS,
    OWN,
    OWN_COUNTED,
    PLANS,
    PLANS_OF_ARCH,
    block_options,
    product_options,
)
from dsv4doctor.kernels.registry import CompileCase

_POINTERS = {
    "x_ptr": "*bf16",
    "w_ptr": "*i16",
    "scale_ptr": "*u8",
    "global_ptr": "*fp32",
    "out_ptr": "*bf16",
    "pairs_ptr": "*i32",
    "tile_expert_ptr": "*i32",
    "tile_rows_ptr": "*i32",
}
_SCALARS = {"rows": "i32", "k_groups": "i32", "scale_units": "i32", "topk": "i32"} | {
    "limit": "fp32",
    "unlift": "fp32",
}


def compile_cases(group: int, arch: str) -> list[CompileCase]:
    """Both products in every configuration that a launch on `arch` can choose, and what goes
    before and after them.

    Full blocks of K; and ragged ones, which need no less of anything but time.
    """
    name = PLANS_OF_ARCH.get(arch)
    if name is None:
        return []
    cases = {case.name: case for case in _launch_cases(OWN_COUNTED[name])}
    for _, plan in PLANS[name]:
        narrow = [(True, plan.gate_up_narrow)] if plan.gate_up_narrow else []
        for gated, config in ((True, plan.gate_up), *narrow, (False, plan.down)):
            for small in (False, True) if group == 32 else (False,):
                for k in (config.block_k * 16, config.block_k * 16 + 32):
                    case = _compile_case(group, gated, small, k, config)
                    cases[case.name] = case
    return list(cases.values())


def _compile_case(group: int, gated: bool, small: bool, k: int, config: Config) -> CompileCase:
    options = product_options(group, gated, gated, small, k)
    ragged = k % config.block_k != 0
    config = config.fitting(options["WIDE"], k)
    constexprs = {
        **options,
        **block_options(config, k),
        "ASM": True,
        "PDL": True,
    }
    signature = {**_POINTERS, **_SCALARS, **dict.fromkeys(constexprs, "constexpr")}
    aligned = ["x_ptr", "w_ptr", "scale_ptr", "out_ptr", "pairs_ptr", "rows"]
    if k % 512 == 0:
        aligned.append("k_groups")
    parts = [
        "gate_up" if gated else "down",
        f"n{config.block_n}t{config.block_t}k{config.block_k}w{config.num_warps}s{config.num_stages}",
        *(["small_scales"] if small else []),
        *(["ragged_k"] if ragged else []),
    ]
    return CompileCase(
        name="-".join(parts),
        kernel=_product_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=tuple(aligned),
        options={"launch_pdl": True},
    )


_LAUNCH_TYPES = {
    "ids_ptr": "*i32",
    "counts_ptr": "*i32",
    "split_ptr": "*bf16",
    "y_ptr": "*bf16",
    "weights_ptr": "*fp32",
    "factor": "fp32",
    **_POINTERS,
}


def _launch_cases(own_counted: int) -> list[CompileCase]:
    """Counting, routing and the sum, for the bins of 256 and 384 experts."""
    bins = 512
    route = {"BLOCK_T": 128, "CHUNK": CHUNK, "BINS": bins, "COLUMNS": COLUMNS}
    alone = {**route, "COUNTED": False, "OWN": OWN}
    kernels: dict[str, tuple[Any, dict[str, Any]]] = {
        "count": (_count_kernel, {"CHUNK": CHUNK, "BINS": bins}),
        f"route-own{own_counted}-counted": (
            _route_kernel,
            {**route, "COUNTED": True, "OWN": own_counted},
        ),
        f"route-own{OWN}": (_route_kernel, alone),
        f"route-own{OWN}-few": (_route_kernel, {**alone, "CHUNK": 128}),
        "sum": (_sum_kernel, {"BLOCK": 512, "PAIRS": 8}),
    }
    return [_launch_case(name, *each) for name, each in kernels.items()]


def _launch_case(name: str, kernel: Any, constexprs: dict[str, Any]) -> CompileCase:
    constexprs = {**constexprs, "PDL": True}
    arguments = [each for each in kernel.arg_names if each not in constexprs]
    return CompileCase(
        name=name,
        kernel=kernel,
        signature={each: _LAUNCH_TYPES.get(each, "i32") for each in arguments},
        constexprs=constexprs,
        num_warps=4,
        num_stages=3,
        aligned=tuple(each for each in arguments if each.endswith("_ptr")),
        options={"launch_pdl": True},
    )
