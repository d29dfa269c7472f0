"""SGLang's quant method for NVFP4 experts, on our kernel.

Stands in for `ModelOptNvFp4FusedMoEMethod` where SGLang constructs it:
`nvfp4_moe_method(quant_config)`.  It derives from that class, because `FusedMoE` asks by class
whether the routed scaling factor is in the top-k weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsv4doctor.errors import UsageError
from dsv4doctor.kernels.adapters import moe_common
from dsv4doctor.kernels.moe_launch import Experts

GROUP = 16


def nvfp4_moe_method(quant_config: Any) -> Any:
    """A quant method with SGLang's constructor argument, a `ModelOptFp4Config`."""
    return method_class()(quant_config)


@functools.cache
def method_class() -> type:
    """The class of `nvfp4_moe_method`; a subclass of SGLang's method.

    SGLang's loader looks for "ModelOpt" in its name.
    """
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod

    return type("Dsv4DoctorModelOptNvFp4MoEMethod", (_NvFp4Method, ModelOptNvFp4FusedMoEMethod), {})


def _in_checkpoint_order(layer: Any, loader: Callable[..., Any] | None) -> Any:
    """SGLang's loader without its exchange of w1 and w3 for TRT-LLM's kernel.

    Which tensors it exchanges for a ModelOpt method under that runner differs between releases.
    """

    @functools.wraps(loader or (lambda: None))
    def load(*args: Any, **kwargs: Any) -> Any:
        before = getattr(layer, "use_flashinfer_trtllm_moe", False)
        layer.use_flashinfer_trtllm_moe = False
        try:
            return loader(*args, **kwargs)
        finally:
            layer.use_flashinfer_trtllm_moe = before

    return load if loader else None


class _NvFp4Method(moe_common.Method):
    """Weights as the checkpoint has them: w13 [gate; up], E4M3 scales, nothing swizzled."""

    operation = "moe_nvfp4"
    where = "NVFP4 experts"
    enable_flashinfer_cutlass_moe = False
    enable_flashinfer_cutedsl_moe = False
    enable_flashinfer_trtllm_moe = False
    use_flashinfer_trtllm_weight_layout = False

    def __init__(self, quant_config: Any) -> None:
        # SGLang's own constructor refuses GPUs and backends that do not concern this kernel.
        if not quant_config.is_checkpoint_nvfp4_serialized:
            raise UsageError("routed experts: the checkpoint holds no NVFP4 weights")
        if quant_config.group_size != GROUP:
            raise UsageError(f"routed experts: NVFP4 groups of {quant_config.group_size}, not 16")
        self.quant_config = quant_config

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers the eight parameters of a ModelOpt NVFP4 layer, in their stored types."""
        from sglang.srt.layers.parameter import ModelWeightParameter, PerTensorScaleParameter

        h, i = hidden_size, intermediate_size_per_partition
        moe_common.check_sizes(h, i, self.where)
        layer.intermediate_size_per_partition = i
        layer.params_dtype = params_dtype
        layer.quant_config = self.quant_config
        loader = _in_checkpoint_order(layer, extra_weight_attrs.get("weight_loader"))

        def block(name: str, *shape: int, dtype: torch.dtype) -> None:
            data = torch.empty(shape, dtype=dtype)
            parameter = ModelWeightParameter(
                data=data, input_dim=1, output_dim=2, weight_loader=loader
            )
            layer.register_parameter(name, parameter)

        def scalar(name: str, *shape: int) -> Any:
            data = torch.ones(shape, dtype=torch.float32)  # the default is bf16 in a server
            parameter = PerTensorScaleParameter(data=data, weight_loader=loader)
            layer.register_parameter(name, parameter)
            return parameter

        e = layer.num_local_experts
        for name, rows, k in (("w13", 2 * i, h), ("w2", h, i)):
            block(f"{name}_weight", e, rows, k // 2, dtype=torch.uint8)
            block(f"{name}_weight_scale", e, rows, k // GROUP, dtype=torch.float8_e4m3fn)
        scalar("w13_weight_scale_2", e, 2)
        scalar("w2_weight_scale_2", e)
        # For activations in FP4; loaded because the checkpoint has them, and not used.
        for name, shape in (("w13", (layer.num_experts, 2)), ("w2", (layer.num_experts,))):
            scalar(f"{name}_input_scale", *shape)._sglang_require_global_experts = True

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leaves every tensor as loaded."""
        dispatcher = getattr(layer, "dispatcher", None)
        if hasattr(dispatcher, "set_quant_config"):
            dispatcher.set_quant_config({"input_global_scale": None})

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        experts = Experts(
            layer.w13_weight.data,
            layer.w13_weight_scale.data,
            layer.w2_weight.data,
            layer.w2_weight_scale.data,
            GROUP,
            layer.w13_weight_scale_2.data,
            layer.w2_weight_scale_2.data,
        )
        return moe_common.apply_experts(layer, dispatch_output, experts, self._limit)
