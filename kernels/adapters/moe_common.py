"""What the SGLang adapters of the routed experts share.  Imports SGLang when called."""

from __future__ import annotations

from typing import Any

import torch

from dsv4doctor.errors import UsageError
from dsv4doctor.kernels.moe_launch import Experts, run_experts
from dsv4doctor.kernels.verify import require_stamp


class Method:
    """What both quant methods share: weights as the checkpoint has them, and no runner."""

    operation: str
    """Our kernel."""
    where: str
    """The layer, in an error."""
    load_up_proj_weight_first = False
    runner = None
    _limit: float | None = None

    def get_moe_runner_backend(self, layer: Any) -> None:
        """None: a direct kernel that takes standard top-k output with local ids."""
        return None

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Raises UnverifiedKernelError on a GPU where the kernel was not verified: before the
        weights are loaded, which takes minutes."""
        require_stamp(self.operation, device_of(layer))
        check_runner(moe_runner_config, self.where)
        self.moe_runner_config = moe_runner_config
        self._limit = moe_runner_config.swiglu_limit


def check_runner(config: Any, where: str) -> None:
    """Raises UsageError for a runner configuration that these kernels do not compute."""
    wanted = {
        "activation": "silu",
        "is_gated": True,
        "apply_router_weight_on_input": False,
        "no_combine": False,
        "gemm1_alpha": None,
    }
    for name, value in wanted.items():
        have = getattr(config, name, value)
        if have != value:
            raise UsageError(
                f"{where}: {name} is {have!r}, our routed experts compute {value!r} only",
                "take the dsv4doctor fix for this layer back",
            )


def device_of(layer: Any) -> str:
    """The GPU that a layer's weights are made on; the current one for weights made elsewhere."""
    device = layer.w13_weight.device
    return str(device) if device.type == "cuda" else "cuda"


def expert_offset(layer: Any) -> int:
    """Number of the layer's first expert in the ids that its dispatcher hands over.

    0 where the dispatcher has made them local (others are -1 then).
    """
    if getattr(layer, "moe_ep_size", 1) == 1:
        return 0
    dispatcher = getattr(layer, "dispatcher", None)
    if not getattr(dispatcher, "skip_local_expert_mapping", False):
        return 0
    return int(layer.moe_ep_rank * layer.num_local_experts)


def new_parameter(layer: Any, name: str, data: torch.Tensor, attributes: dict[str, Any]) -> None:
    """Registers a parameter that SGLang's loader fills."""
    parameter = torch.nn.Parameter(data, requires_grad=False)
    layer.register_parameter(name, parameter)
    for key, value in attributes.items():
        setattr(parameter, key, value)


def check_sizes(hidden: int, intermediate: int, where: str) -> None:
    """Raises UsageError for a slice that the kernels cannot take."""
    if hidden % 32 or intermediate % 32:
        raise UsageError(
            f"{where}: hidden size {hidden} and intermediate size per rank {intermediate} must be "
            "multiples of 32",
            "choose another --tp-size, or --ep-size",
        )


def apply_experts(layer: Any, dispatch_output: Any, experts: Experts, limit: float | None) -> Any:
    """Runs the experts on what SGLang's dispatcher hands over; gives its StandardCombineInput.

    Raises UsageError for a top-k output without ids and weights.
    """
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

    x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
    ids, weights = getattr(topk, "topk_ids", None), getattr(topk, "topk_weights", None)
    if ids is None or weights is None:
        raise UsageError(
            f"routed experts: top-k output {type(topk).__name__} has no expert ids",
            "start the server with --moe-runner-backend marlin or flashinfer_trtllm_routed",
        )
    out = run_experts(
        x,
        experts,
        ids.contiguous(),
        weights.float().contiguous(),
        swiglu_limit=limit,
        expert_offset=expert_offset(layer),
    )
    return StandardCombineInput(hidden_states=out)
