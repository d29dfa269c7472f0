"""Runs a routed-experts adapter in a real SGLang tree, on a small layer; a program of its own.

    python moe_in_sglang.py TREE FORMAT TP_RANK TP_SIZE EP_RANK EP_SIZE TRTLLM(0 or 1)

SGLang's own loader fills the adapter's parameters from checkpoint tensors, SGLang's own dispatch
types carry the inputs.  Prints one JSON object.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(sys.argv[1])
FORMAT = sys.argv[2]
TP_RANK, TP_SIZE, EP_RANK, EP_SIZE, TRTLLM = map(int, sys.argv[3:])
EXPERTS, TOPK, HIDDEN, INTER, TOKENS = 6, 3, 64, 128, 5
LIMIT = 1.5


def prepare():
    """The interpreter's repairs of conftest.py, and stand-ins for what SGLang cannot load here."""
    spec = importlib.util.spec_from_file_location("conf", Path(__file__).with_name("conftest.py"))
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    import transformers  # noqa: F401

    from dsv4doctor.trace.worker import hugging_face, lean, requirements, stand_ins

    hugging_face.prepare()
    metadata = next(ROOT.glob("sglang-*.dist-info")) / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    inert = lean.inert_for(str(ROOT), [])
    finder = stand_ins.StandIns(requirements.declared_packages(text), inert)
    sys.path.insert(0, str(ROOT))
    sys.meta_path.insert(0, finder)
    stand_ins.answer_versions(finder, text)


def checkpoint():
    """name -> tensor of every expert, as a checkpoint stores them."""
    group, found = (32 if FORMAT == "mxfp4" else 16), {}
    for expert in range(EXPERTS):
        for name, rows, k in (("w1", INTER, HIDDEN), ("w3", INTER, HIDDEN), ("w2", HIDDEN, INTER)):
            codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8)
            if group == 32:
                scale = torch.randint(120, 124, (rows, k // 32), dtype=torch.uint8)
                found[expert, name] = {
                    "weight": codes.view(torch.int8),
                    "weight_scale_inv": scale.view(torch.float8_e8m0fnu),
                }
                continue
            found[expert, name] = {
                "weight": codes,
                "weight_scale": (torch.rand((rows, k // 16)) * 200).to(torch.float8_e4m3fn),
                "weight_scale_2": torch.rand(()) / 1000 + 1e-4,
                "input_scale": torch.rand(()),
            }
    return found


def make_layer(method, fused_moe, config):
    """A `FusedMoE` that skipped its constructor, which wants a running server."""
    layer = fused_moe.__new__(fused_moe)
    torch.nn.Module.__init__(layer)
    local = EXPERTS // EP_SIZE
    values = {
        "quant_method": method, "moe_runner_config": config, "hidden_size": HIDDEN,
        "num_experts": EXPERTS, "num_local_experts": local, "moe_ep_size": EP_SIZE,
        "moe_ep_rank": EP_RANK, "moe_tp_rank": TP_RANK, "moe_tp_size": TP_SIZE,
        "use_flashinfer_trtllm_moe": bool(TRTLLM), "use_triton_kernels": False,
        "use_presharded_weights": False, "use_padded_loading": False,
        "num_fused_shared_experts": 0, "_has_fused_shared": False,
        "quant_config": getattr(method, "quant_config", None), "runner_backend": None,
        "intermediate_size_per_partition": INTER // TP_SIZE,
        "dispatcher": SimpleNamespace(
            skip_local_expert_mapping=bool(TRTLLM), set_quant_config=lambda config: None
        ),
    }  # fmt: skip
    for name, value in values.items():
        layer.__dict__[name] = value
    return layer


def load(layer, stored):
    for (expert, name), tensors in stored.items():
        local = expert - EP_RANK * layer.num_local_experts
        for kind, tensor in tensors.items():
            target = f"{'w2' if name == 'w2' else 'w13'}_{kind}"
            param = getattr(layer, target)
            index = expert if kind == "input_scale" else local
            if 0 <= index < param.shape[0]:
                param.weight_loader(param, tensor, f"experts.{target}", name, index)


def wanted(stored, x, ids, weights):
    """The rank's share in float32, from the checkpoint's tensors."""
    from dsv4doctor.kernels.reference import moe

    def dense(expert, name):
        one = stored[expert, name]
        if FORMAT == "mxfp4":
            return moe.dequantise(one["weight"], moe.ue8m0_values(one["weight_scale_inv"]))
        scale = moe.e4m3_values(one["weight_scale"]) * one["weight_scale_2"]
        return moe.dequantise(one["weight"], scale)

    rows = slice(TP_RANK * INTER // TP_SIZE, (TP_RANK + 1) * INTER // TP_SIZE)
    local = EXPERTS // EP_SIZE
    first = EP_RANK * local
    mine = range(first, first + local)
    w13 = torch.stack([torch.cat((dense(e, "w1")[rows], dense(e, "w3")[rows])) for e in mine])
    w2 = torch.stack([dense(e, "w2")[:, rows] for e in mine])
    return moe.experts(x, w13, w2, ids, weights, LIMIT, first)


def run():
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from dsv4doctor.kernels.adapters import moe_common, moe_mxfp4, moe_nvfp4

    moe_common.require_stamp = lambda name, device: None
    if FORMAT == "mxfp4":
        method = moe_mxfp4.mxfp4_moe_method(object(), "model.layers.0.mlp.experts")
    else:
        quantisation = SimpleNamespace(
            is_checkpoint_nvfp4_serialized=True, group_size=16, get_name=lambda: "modelopt_fp4"
        )
        method = moe_nvfp4.nvfp4_moe_method(quantisation)
    config = MoeRunnerConfig(swiglu_limit=LIMIT, num_experts=EXPERTS, top_k=TOPK)
    layer = make_layer(method, FusedMoE, config)
    inter = INTER // TP_SIZE
    loader = layer._weight_loader_impl
    method.create_weights(
        layer, layer.num_local_experts, HIDDEN, inter, torch.bfloat16, weight_loader=loader
    )
    method.create_moe_runner(layer, config)
    torch.manual_seed(0)
    stored = checkpoint()
    load(layer, stored)
    method.process_weights_after_loading(layer)
    ids = torch.rand((TOKENS, EXPERTS)).topk(TOPK).indices.int()
    weights = torch.rand((TOKENS, TOPK))
    x = torch.randn((TOKENS, HIDDEN)).bfloat16()
    handed = ids
    if not TRTLLM and EP_SIZE > 1:
        local = ids - EP_RANK * layer.num_local_experts
        handed = torch.where((local >= 0) & (local < layer.num_local_experts), local, -1)
    topk = StandardTopKOutput(topk_weights=weights, topk_ids=handed, router_logits=None)
    given = method.apply(layer, StandardDispatchOutput(x, None, topk))
    reference = wanted(stored, x, ids, weights)
    error = (given.hidden_states.float() - reference).norm() / reference.norm()
    names = [each.__name__ for each in type(method).__mro__]
    bytes_held = sum(p.numel() * p.element_size() for p in layer.parameters())
    print(json.dumps({
        "error": error.item(), "mro": names, "result": type(given).__name__,
        "bytes": bytes_held, "runner": str(method.runner),
        "backend": str(method.get_moe_runner_backend(layer)),
    }))  # fmt: skip


prepare()
run()
