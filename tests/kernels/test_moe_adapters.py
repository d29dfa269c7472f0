"""The quant methods of the routed experts, in real SGLang trees and filled by SGLang's loader."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4doctor.errors import DoctorError, UsageError
from dsv4doctor.kernels.adapters import moe_common, moe_flashinfer, moe_mxfp4, moe_nvfp4

PROGRAM = Path(__file__).with_name("moe_in_sglang.py")


@pytest.fixture(scope="session")
def in_sglang(sglang_tree):
    """`in_sglang(version, format, ...)`: what moe_in_sglang.py prints."""

    def run(version, *arguments):
        tree = sglang_tree(version).root
        command = [sys.executable, "-W", "ignore", str(PROGRAM), tree, *map(str, arguments)]
        no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # the layer is small, and on the CPU
        done = subprocess.run(
            command, env=no_gpu, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


# format, TP rank, TP size, EP rank, EP size, and whether the server runs with flashinfer_trtllm,
# which leaves expert ids global and makes the loader exchange w1 and w3 of NVFP4 layers.
PLACES = {
    "mxfp4-tp": ("mxfp4", 1, 2, 0, 1, 0),
    "mxfp4-ep-global-ids": ("mxfp4", 0, 1, 1, 2, 1),
    "nvfp4-tp": ("nvfp4", 1, 2, 0, 1, 0),
    "nvfp4-ep-global-ids": ("nvfp4", 1, 2, 1, 2, 1),
    "nvfp4-ep-local-ids": ("nvfp4", 0, 1, 1, 2, 0),
}


@pytest.mark.wheels
@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_a_rank_computes_its_share_of_the_checkpoint(in_sglang, version, place):
    result = in_sglang(version, *place)
    assert result["error"] < 1e-2
    assert result["result"] == "StandardCombineInput"
    base = "Mxfp4MarlinMoEMethod" if place[0] == "mxfp4" else "ModelOptNvFp4FusedMoEMethod"
    assert base in result["mro"]
    assert result["runner"] == result["backend"] == "None"


@pytest.mark.wheels
def test_no_byte_is_held_beyond_the_checkpoints(in_sglang):
    hidden, inter, experts = 64, 128, 6
    codes = experts * 3 * hidden * inter // 2
    mxfp4 = in_sglang("0.5.14", *PLACES["mxfp4-ep-global-ids"])["bytes"]
    assert mxfp4 == codes // 2 + codes // 2 // 16
    nvfp4 = in_sglang("0.5.14", *PLACES["nvfp4-ep-local-ids"])["bytes"]
    per_expert = 4 * 3
    assert (
        nvfp4 == codes // 2 + codes // 2 // 8 + per_expert * (experts // 2) + per_expert * experts
    )


@pytest.mark.parametrize(
    ("name", "value"), [("activation", "gelu"), ("is_gated", False), ("gemm1_alpha", 1.702)]
)
def test_a_layer_of_another_kind_is_refused(name, value):
    with pytest.raises(UsageError, match=name):
        moe_common.check_runner(SimpleNamespace(**{name: value}), "layer 3")


def test_a_slice_of_no_multiple_of_32_is_refused():
    with pytest.raises(UsageError, match="144"):
        moe_common.check_sizes(5120, 144, "layer 3")


@pytest.mark.parametrize(
    "method", [moe_mxfp4._Mxfp4Method, moe_nvfp4._NvFp4Method], ids=["mxfp4", "nvfp4"]
)
def test_an_unverified_kernel_stops_the_model_build(method, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("DSV4DOCTOR_ALLOW_UNVERIFIED", raising=False)
    layer = SimpleNamespace(w13_weight=torch.zeros(1))
    with pytest.raises(DoctorError):
        method.create_moe_runner(
            SimpleNamespace(operation=method.operation), layer, SimpleNamespace()
        )


def test_top_k_output_without_ids_is_refused(monkeypatch):
    module = SimpleNamespace(StandardCombineInput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.moe.token_dispatcher.standard", module)
    given = SimpleNamespace(hidden_states=torch.zeros((1, 32)), topk_output=object())
    with pytest.raises(UsageError, match="no expert ids"):
        moe_common.apply_experts(SimpleNamespace(), given, None, None)


def test_flashinfer_is_taken_for_what_its_function_accepts():
    def old(input, quant_scales, input_sf=None, output=None):
        raise AssertionError

    def newer(input, quant_scales, input_sf=None, output=None, swiglu_limit=None):
        raise AssertionError

    def newest(
        input, quant_scales, input_sf=None, output=None, swiglu_limit=None,
        use_mxfp8_act_scaling=False,
    ):  # fmt: skip
        raise AssertionError

    assert "swiglu_limit" in moe_flashinfer.refusal("nvfp4", old)
    assert moe_flashinfer.refusal("nvfp4", newer) == ""
    assert "use_mxfp8_act_scaling" in moe_flashinfer.refusal("mxfp4", newer)
    assert moe_flashinfer.refusal("mxfp4", newest) == ""


def test_flashinfer_is_called_with_names_it_has(monkeypatch):
    """Every keyword that we pass is one of cutlass_fused_moe's, as of FlashInfer 0.6.12."""
    taken = {
        "input", "token_selected_experts", "token_final_scales", "fc1_expert_weights",
        "fc2_expert_weights", "output_dtype", "quant_scales", "fc1_expert_biases",
        "fc2_expert_biases", "input_sf", "swiglu_alpha", "swiglu_beta", "swiglu_limit", "tp_size",
        "tp_rank", "ep_size", "ep_rank", "cluster_size", "cluster_rank", "output",
        "enable_alltoall", "use_deepseek_fp8_block_scale", "use_w4_group_scaling",
        "use_mxfp8_act_scaling", "min_latency_mode", "use_packed_weights",
        "tune_max_num_tokens", "enable_pdl", "activation_type", "swizzled_input_sf",
    }  # fmt: skip
    calls = []
    flashinfer = SimpleNamespace(mxfp8_quantize=lambda x, **options: (x, x))
    fused = SimpleNamespace(cutlass_fused_moe=lambda **given: calls.append(given))
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", fused)
    x, codes, scale = torch.zeros((2, 64)), torch.zeros((3, 64, 32)), torch.zeros((3, 64, 4))
    ids, weights, ones = torch.zeros((2, 1)), torch.ones((2, 1)), torch.ones(3)
    for limit in (ones * 10, None):
        moe_flashinfer.mxfp4_cutlass_moe(
            x, codes, scale, codes, scale, ids, weights, ones, limit, ep_size=2, ep_rank=1
        )
        moe_flashinfer.nvfp4_cutlass_moe(
            x, codes, codes, [ones, scale, ones, ones, scale, ones], ids, weights, limit
        )
    assert all(set(call) <= taken for call in calls)
    assert [call.get("swiglu_limit") is None for call in calls] == [False, False, True, True]


def test_weights_that_captured_graphs_cannot_decode_are_refused(monkeypatch):
    def layer(byte):
        scale = torch.full((1, 4, 2), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        parameter = SimpleNamespace(data=scale, is_cuda=False)
        names = ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")
        return SimpleNamespace(**dict.fromkeys(names, parameter))

    given = []
    monkeypatch.setattr(moe_common, "apply_experts", lambda *args: given.append(args[2]))
    method = object.__new__(moe_mxfp4._Mxfp4Method)
    method.where, method._limit, method._in_graph = "model.decoder.mlp.experts", 7.0, False
    for byte in (128, 129, 128):
        method.process_weights_after_loading(layer(byte))
        method.apply(layer(byte), None)
    assert [experts.small_scales for experts in given] == [True, False, True]
    monkeypatch.setattr(moe_mxfp4, "_is_captured", lambda layer: True)
    for byte in (129, 129, 128):  # a graph that decodes large scales decodes all
        method.process_weights_after_loading(layer(byte))
        if byte == 129:
            method.apply(layer(byte), None)
    method.apply(layer(128), None)
    method.process_weights_after_loading(layer(127))
    with pytest.raises(RuntimeError, match="restart the server"):
        method.process_weights_after_loading(layer(129))
