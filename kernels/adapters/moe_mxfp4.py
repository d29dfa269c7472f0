"""SGLang's quant method for MXFP4 experts, on our kernel.

Stands in for `Mxfp4FlashinferTrtllmMoEMethod` and `Mxfp4MarlinMoEMethod` where SGLang constructs
them (`Fp8Config.get_quant_method`, and `ModelOptFp4Config.get_quant_method` for draft layers):
`mxfp4_moe_method(fp8_method, prefix)`.

It derives from the Marlin method, because `maybe_fuse_routed_scale_and_shared_add` asks by class
who leaves the routed scaling factor to it, and because the TRT-LLM method's class also opens
paths with FP8 inputs and a deferred sum.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dsv4doctor.kernels.adapters import moe_common
from dsv4doctor.kernels.moe_launch import Experts

GROUP = 32


def mxfp4_moe_method(fp8_method: Any, prefix: str) -> Any:
    """A quant method with SGLang's constructor arguments."""
    return method_class()(fp8_method, prefix)


@functools.cache
def method_class() -> type:
    """The class of `mxfp4_moe_method`; a subclass of SGLang's `Mxfp4MarlinMoEMethod`."""
    from sglang.srt.layers.quantization.mxfp4_marlin_moe import Mxfp4MarlinMoEMethod

    return type("Dsv4DoctorMxfp4MoEMethod", (_Mxfp4Method, Mxfp4MarlinMoEMethod), {})


class _Mxfp4Method(moe_common.Method):
    """Weights as the checkpoint has them: w13 [gate; up], E8M0 scales, nothing repacked."""

    operation = "moe_mxfp4"

    def __init__(self, fp8_method: Any, prefix: str) -> None:
        super().__init__(fp8_method, prefix)
        self.where = prefix
        self._small_scales = False
        self._in_graph = False
        """A CUDA graph holds the kernel for small scales."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers w13_weight, w2_weight and their `_scale_inv`, in their stored types."""
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoeWeightScaleSupported

        e, h, i = num_experts, hidden_size, intermediate_size_per_partition
        moe_common.check_sizes(h, i, self.where)
        scale_attrs = dict(extra_weight_attrs)
        scale_attrs["quant_method"] = FusedMoeWeightScaleSupported.BLOCK.value
        scale_attrs["format_ue8m0"] = False
        for name, rows, k in (("w13", 2 * i, h), ("w2", h, i)):
            codes = torch.empty((e, rows, k // 2), dtype=torch.int8)
            moe_common.new_parameter(layer, f"{name}_weight", codes, extra_weight_attrs)
            ones = torch.full((e, rows, k // GROUP), 127, dtype=torch.uint8)
            scale = ones.view(torch.float8_e8m0fnu)
            moe_common.new_parameter(layer, f"{name}_weight_scale_inv", scale, scale_attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Looks at the scales once; changes no tensor, so it can be called after each reload.

        Raises RuntimeError for scales above 2 where a captured graph decodes none above it.
        """
        scales = (layer.w13_weight_scale_inv, layer.w2_weight_scale_inv)
        are_small = all(int(s.data.view(torch.uint8).max()) <= 128 for s in scales)
        if self._in_graph and not are_small:
            raise RuntimeError(
                f"dsv4doctor: {self.where}: the new weights have scales above 2, which the "
                "captured CUDA graphs cannot decode; restart the server with them"
            )
        self._small_scales = are_small
        layer._dsv4_mxfp4_backend = "dsv4doctor"

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        self._in_graph |= self._small_scales and _is_captured(layer)
        experts = Experts(
            layer.w13_weight.data,
            layer.w13_weight_scale_inv.data,
            layer.w2_weight.data,
            layer.w2_weight_scale_inv.data,
            GROUP,
            small_scales=self._small_scales,
        )
        return moe_common.apply_experts(layer, dispatch_output, experts, self._limit)


def _is_captured(layer: Any) -> bool:
    """A CUDA graph is being made of what runs now."""
    return layer.w13_weight.is_cuda and torch.cuda.is_current_stream_capturing()
