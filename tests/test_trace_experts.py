"""What becomes of routed experts off the usual paths: another dispatcher, an unread clamp."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tracing import request, traced

from dsv4doctor.models import Arch, Role, SglangTree
from dsv4doctor.trace.session import trace_launches
from dsv4doctor.verdicts import drops_clamp

pytestmark = pytest.mark.wheels

SM_100 = Arch(10, 0)
RUNNER = "--moe-runner-backend"
A2A = "--moe-a2a-backend"

Tree = Callable[[str], SglangTree]
Checkpoint = Callable[..., Path]


def test_the_clamp_that_nothing_reads(sglang_tree: Tree, checkpoint: Checkpoint) -> None:
    """FP8 experts under flashinfer_trtllm_routed get it from 0.5.20 on; under triton always."""
    name, variant = "sgl-project__DeepSeek-V4-Flash-FP8", "model-type-deepseek-v4"
    fp8 = checkpoint(name, experts=1, variant=variant)
    launches = [
        request(sglang_tree(version), fp8, (RUNNER, backend), SM_100)
        for version in ("0.5.17", "0.5.19", "0.5.20")
        for backend in ("flashinfer_trtllm_routed", "triton")
    ]
    outcomes = [traced(outcome) for outcome in trace_launches(launches, use_cache=False)]
    layers = [outcome.of(Role.MAIN)[-1] for outcome in outcomes]
    assert all(layer.kernel is not None for layer in layers)
    assert [layer.clamp_read for layer in layers] == [False, True, False, True, True, True]
    assert [drops_clamp(layer, "") for layer in layers] == [True, False, True, False, False, False]


@pytest.mark.parametrize(
    ("version", "backend", "environment"),
    [
        ("0.5.23", "deepep", {}),
        (
            "0.5.23",
            "megamoe",
            {"SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK": "16384"},
        ),
    ],
)
def test_experts_behind_a_dispatcher_of_their_own_are_unknown(
    version: str,
    backend: str,
    environment: dict[str, str],
    sglang_tree: Tree,
    checkpoint: Checkpoint,
) -> None:
    """Tokens laid out as without a dispatcher would break there, and say nothing of a server."""
    stock = checkpoint("deepseek-ai__DeepSeek-V4-Flash", experts=1)
    launch = request(sglang_tree(version), stock, (A2A, backend), SM_100, environment)
    outcome = traced(trace_launches([launch], use_cache=False)[0])
    layer = outcome.of(Role.MAIN)[-1]
    assert layer.quant_method == "Fp8MoEMethod"
    assert layer.error is None
    assert layer.kernel is None
    assert f"moe_a2a_backend {backend}" in layer.reason


def test_deep_gemm_is_followed_past_its_block_size(
    sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    stock = checkpoint("deepseek-ai__DeepSeek-V4-Flash", experts=1)
    launch = request(sglang_tree("0.5.23"), stock, (RUNNER, "deep_gemm"), SM_100)
    outcome = traced(trace_launches([launch], use_cache=False)[0])
    assert outcome.of(Role.MAIN)[-1].kernel is not None


def test_layers_whose_routing_is_left_to_the_kernel(
    sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    """flashinfer_trtllm in 0.5.19: the first three layers route by a hash, the others do not."""
    hybrid = checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4", experts=1)
    launch = request(sglang_tree("0.5.19"), hybrid, (RUNNER, "flashinfer_trtllm"), SM_100)
    layers = traced(trace_launches([launch], use_cache=False)[0]).of(Role.MAIN)
    kernels = [layer.kernel.symbol.rpartition(".")[2] for layer in layers if layer.kernel]
    assert kernels[:3] == ["trtllm_fp4_block_scale_routed_moe"] * 3
    assert kernels[3:] == ["trtllm_fp4_block_scale_moe"] * 40


def test_a_check_for_the_gpu_is_passed_and_the_next_one_counts(
    sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    """Tensors of a trace are on the GPU for SGLang's asserts; sizes are what they are."""
    stock = checkpoint("deepseek-ai__DeepSeek-V4-Flash", experts=1)
    launch = request(sglang_tree("0.5.19"), stock, (RUNNER, "deep_gemm"), SM_100)
    layer = traced(trace_launches([launch], use_cache=False)[0]).of(Role.MAIN)[-1]
    assert layer.error is not None
    assert layer.error.message.startswith("DSV4 JIT activation requires N % 4 == 0")


def test_the_first_layer_is_not_stopped_by_the_memory_of_the_machine(
    sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    """0.5.14 asks psutil for it before DeepGEMM's first product, and psutil is a stand-in."""
    name, variant = "sgl-project__DeepSeek-V4-Flash-FP8", "model-type-deepseek-v4"
    fp8 = checkpoint(name, experts=1, variant=variant)
    launch = request(sglang_tree("0.5.14"), fp8, (RUNNER, "deep_gemm"), Arch(12, 1))
    layer = traced(trace_launches([launch], use_cache=False)[0]).of(Role.MAIN)[0]
    assert layer.kernel is not None
    assert layer.kernel.symbol == "deep_gemm.fp8_m_grouped_gemm_nt_masked"


def test_a_name_that_a_module_has_on_other_gpus_only(
    sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    """0.5.18 leaves DeepGEMM out on sm_120, and its runner calls it all the same."""
    stock = checkpoint("deepseek-ai__DeepSeek-V4-Flash", experts=1)
    launch = request(sglang_tree("0.5.18"), stock, (RUNNER, "deep_gemm"))
    layer = traced(trace_launches([launch], use_cache=False)[0]).of(Role.MAIN)[-1]
    assert layer.error is not None
    assert "no attribute 'get_mn_major_tma_aligned_tensor'" in layer.error.message


def test_a_package_that_only_the_borrowed_environment_lacks_is_no_failure(
    sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    """0.5.17 does not require DeepEP, and its serving images hold it."""
    stock = checkpoint("deepseek-ai__DeepSeek-V4-Flash", experts=1)
    launch = request(sglang_tree("0.5.17"), stock, (A2A, "deepep"), SM_100)
    outcome = traced(trace_launches([launch], use_cache=False)[0])
    assert outcome.errors == ()
    [reason] = outcome.unresolved
    assert "DeepEP is not installed" in reason
    assert "the Python that traced lacks it" in reason
    own = replace(launch, tree=SglangTree(launch.tree.root, "0.5.17", "installed"))
    [error] = traced(trace_launches([own], use_cache=False)[0]).errors
    assert error.type == "ImportError"
