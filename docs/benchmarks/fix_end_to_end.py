"""A patched SGLang, end to end: its own FusedMoE, its own loader, forward on dsv4doctor's kernels.

    python docs/benchmarks/fix_end_to_end.py --sglang FOLDER --model FOLDER [--device cuda]

FOLDER of --sglang is an unpacked wheel (0.5.14 to 0.5.23), that of --model a hybrid NVFP4
checkpoint of which only the configuration is read.  A copy of the tree is patched (FIX101 and
FIX102, --kernel triton) and told that its GPU is an sm_120.  It resolves a launch with EAGLE,
builds a routed-expert layer of the main model (NVFP4) and one of the draft (MXFP4), fills both
from random checkpoint tensors through `weight_loader`, and runs `forward`.  The outputs are held
against plain float32 torch.  Packages of SGLang that are missing are stood in for.

On "cpu" the kernels run through Triton's interpreter, which proves shapes, loading and
arithmetic, and nothing about a GPU; that needs a checkout (tests/kernels/conftest.py repairs the
interpreter).  Prints one JSON object; the exit code is 1 when an error is above the kernel's bar.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

EAGLE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"),
)
CHECKOUT = Path(__file__).resolve().parents[2]
EXPERTS, TOPK, TOKENS, LIMIT = 8, 3, 5, 1.5


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sglang", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--intermediate", type=int, default=128)
    return parser.parse_args()


def patch(tree: Path, target: Path) -> list[str]:
    """A copy of `tree` in `target` with the two fixes; what they say of themselves."""
    from dsv4doctor import fixes
    from dsv4doctor.fixes.fix import Change, Choice

    shutil.copytree(tree, target)
    said = []
    for fix in fixes.ALL:
        if fix.id not in ("FIX101", "FIX102"):
            continue
        files = {name: target / name for name in fix.files if (target / name).is_file()}
        sources = {name: path.read_text("utf-8") for name, path in files.items()}
        outcome = fix.plan(sources, Choice("triton"))
        assert isinstance(outcome, Change), outcome
        for name, text in outcome.sources.items():
            (target / name).chmod(0o644)
            (target / name).write_text(text, "utf-8")
        said.append(f"{fix.id}: {outcome.summary}")
    return said


def prepare(tree: Path, device: str) -> None:
    """The GPU that SGLang is told of, and stand-ins for what is not installed."""
    if device == "cpu":
        path = CHECKOUT / "tests" / "kernels" / "conftest.py"
        spec = importlib.util.spec_from_file_location("interpreter_repairs", path)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    import torch

    from dsv4doctor.trace.worker import gpu, hugging_face, lean, requirements, stand_ins, tensors

    tensors.prepare()  # native operations that are missing are no obstacle to an import
    if device == "cpu":
        gpu.simulate(gpu.Board((12, 0)), 1)
    else:
        real = torch.cuda.get_device_properties(0)
        print(f"on {real.name}, sm_{real.major}{real.minor}, told as sm_120", file=sys.stderr)
        from triton.runtime import driver

        driver.active.get_current_target()  # Triton keeps the function that tells the real GPU
        torch.cuda.get_device_capability = lambda *args, **kwargs: (12, 0)
    import transformers  # noqa: F401

    hugging_face.prepare()
    metadata = next(tree.glob("sglang-*.dist-info")) / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    # The expert location is asked for by the loader: that part of SGLang is the real one.
    inert = lean.inert_for(str(tree), ["--enable-eplb"])
    finder = stand_ins.StandIns(requirements.declared_packages(text), inert)
    sys.path.insert(0, str(tree))
    sys.meta_path.insert(0, finder)
    stand_ins.answer_versions(finder, text)
    lean.without_other_models()


def resolve(model: Path):
    """SGLang's own arguments, groups and hybrid quantization configuration for the launch."""
    from dsv4doctor.trace.worker import serving
    from dsv4doctor.trace.worker.tensors import Redirect

    with Redirect("cpu"):
        import sglang.srt.models.deepseek_v4  # noqa: F401

        arguments = serving.parse_arguments(["--model-path", str(model), *EAGLE])
        view = serving.resolved(arguments)
        serving.publish(arguments)
        serving.form_groups(view)
        config = serving.model_config(arguments, view, False)
        serving.prepare_layers(arguments, config)
        quantization, _ = serving.quant_config(config)
    return view, quantization


def checkpoint(kind: str, hidden: int, inter: int):
    """(expert, name) -> tensors, as a checkpoint stores them."""
    import torch

    found = {}
    for expert in range(EXPERTS):
        for name, rows, k in (("w1", inter, hidden), ("w3", inter, hidden), ("w2", hidden, inter)):
            codes = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8)
            if kind == "mxfp4":
                scale = torch.randint(120, 124, (rows, k // 32), dtype=torch.uint8)
                found[expert, name] = {
                    "weight": codes.view(torch.int8),
                    "weight_scale_inv": scale.view(torch.float8_e8m0fnu),
                }
            else:
                found[expert, name] = {
                    "weight": codes,
                    "weight_scale": (torch.rand((rows, k // 16)) * 200).to(torch.float8_e4m3fn),
                    "weight_scale_2": torch.rand(()) / 1000 + 1e-4,
                    "input_scale": torch.rand(()),
                }
    return found


def reference(kind: str, stored, x, ids, weights):
    import torch

    from dsv4doctor.kernels.reference import moe

    def dense(expert, name):
        one = stored[expert, name]
        if kind == "mxfp4":
            return moe.dequantise(one["weight"], moe.ue8m0_values(one["weight_scale_inv"]))
        scale = moe.e4m3_values(one["weight_scale"]) * one["weight_scale_2"]
        return moe.dequantise(one["weight"], scale)

    w13 = [torch.cat((dense(e, "w1"), dense(e, "w3"))) for e in range(EXPERTS)]
    w2 = [dense(e, "w2") for e in range(EXPERTS)]
    return moe.experts(x, torch.stack(w13), torch.stack(w2), ids, weights, LIMIT)


def build(quantization, prefix: str, draft: bool, arguments: argparse.Namespace):
    """SGLang's FusedMoE for a layer of the main model or the draft, by its own constructor."""
    import torch
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    from dsv4doctor.trace.worker.serving import draft_scope
    from dsv4doctor.trace.worker.tensors import Redirect

    names = [name for name in ("speculative_moe_backend_context",) if hasattr(utils, name)]
    torch.set_default_dtype(torch.bfloat16)  # as SGLang does while it builds a model
    try:
        with draft_scope(names if draft else []), torch.device(arguments.device):
            redirect = Redirect("cpu") if arguments.device == "cpu" else torch.no_grad()
            with redirect:
                return FusedMoE(
                    num_experts=EXPERTS,
                    hidden_size=arguments.hidden,
                    intermediate_size=arguments.intermediate,
                    layer_id=0,
                    top_k=TOPK,
                    quant_config=quantization,
                    prefix=prefix,
                    swiglu_limit=LIMIT,
                )
    finally:
        torch.set_default_dtype(torch.float32)


def load(layer, stored, prefix: str) -> None:
    """Every tensor through the parameter's own loader, as `load_weights` calls it."""
    for (expert, name), tensors in stored.items():
        for kind, tensor in tensors.items():
            target = f"{'w2' if name == 'w2' else 'w13'}_{kind}"
            param = getattr(layer, target)
            weight = f"{prefix}.{target}"
            param.weight_loader(param, tensor, weight, shard_id=name, expert_id=expert)


def run_layer(quantization, kind: str, prefix: str, arguments: argparse.Namespace):
    import torch
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from dsv4doctor.kernels import catalog

    layer = build(quantization, prefix, kind == "mxfp4", arguments)
    torch.manual_seed(0)
    stored = checkpoint(kind, arguments.hidden, arguments.intermediate)
    load(layer, stored, prefix)
    layer.quant_method.process_weights_after_loading(layer)
    ids = torch.rand((TOKENS, EXPERTS)).topk(TOPK).indices.int()
    weights = torch.rand((TOKENS, TOPK))
    x = torch.randn((TOKENS, arguments.hidden)).bfloat16()
    wanted = reference(kind, stored, x, ids, weights)
    device = arguments.device
    topk = StandardTopKOutput(weights.to(device), ids.to(device), None)
    out = layer.forward(x.to(device), topk).float().cpu()
    bar = catalog.meta(f"moe_{kind}").error_bar
    error = ((out - wanted).norm() / wanted.norm()).item()
    return {
        "prefix": prefix,
        "quant_method": type(layer.quant_method).__name__,
        "tensors_loaded": sum(map(len, stored.values())),
        "relative_error": error,
        "bar": bar,
        "passed": bool(torch.isfinite(out).all()) and error <= bar,
    }


def main() -> int:
    arguments = parse()
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["DSV4DOCTOR_IN_TRACE"] = "1"  # no GPU, so no stamp to ask for
    else:
        os.environ["DSV4DOCTOR_ALLOW_UNVERIFIED"] = "1"  # its GPU is told as another than it is
    for name in list(os.environ):
        if name.startswith("SGLANG_"):
            del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="dsv4doctor-") as scratch:
        tree = Path(scratch) / "tree"
        patches = patch(arguments.sglang, tree)
        prepare(tree, arguments.device)
        view, quantization = resolve(arguments.model)
        layers = [
            run_layer(quantization, "nvfp4", "model.layers.0.mlp.experts", arguments),
            run_layer(quantization, "mxfp4", "model.decoder.mlp.experts", arguments),
        ]
        version = next(tree.glob("sglang-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    result = {
        "sglang": version.removesuffix(".dist-info"),
        "device": arguments.device,
        "patches": patches,
        "moe_runner_backend": view.moe_runner_backend,
        "hidden": arguments.hidden,
        "intermediate": arguments.intermediate,
        "layers": layers,
    }
    print(json.dumps(result, indent=2))
    return 0 if all(layer["passed"] for layer in layers) else 1


if __name__ == "__main__":
    raise SystemExit(main())
