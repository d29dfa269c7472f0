"""Serves a launch as far as a CPU can, with the recorder loaded by SGLang's own plugin loader.

`python recording_driver.py REQUEST`, a JSON object with what a trace worker is asked (see
dsv4doctor/trace/protocol.py) and "arguments".  Real are SGLang's plugin loader, its ModelRunner
class around `load_model`, its model classes, their construction and their first forwards; made up
are the GPU and what is native, by the stand-ins of the trace worker.  What the recorder writes is
at DSV4DOCTOR_RECORD.
"""

import io
import json
import sys

import torch

from dsv4doctor.trace.worker import launch, serve, serving


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    jobs = [{"arguments": request["arguments"]}]
    worker = serve.Worker({**request, "jobs": jobs}, io.StringIO())
    worker._install_stand_ins()
    worker._import_torch()
    worker._import_sglang()
    job = {"arguments": request["arguments"], "with_path": False, "with_paths": True}
    result = Served(job, lambda text: None).run()
    if result["errors"] or result["usage_error"]:
        raise SystemExit(json.dumps([result["errors"], result["usage_error"]]))


class Served(launch._Launch):
    """A launch whose models are loaded through ModelRunner.load_model."""

    def _arguments(self):
        resolved = super()._arguments()
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.plugins import load_plugins

        served = self

        def load_model(runner):
            runner.model = served.build(runner)

        ModelRunner.load_model = load_model  # in the place of reading weights
        load_plugins()
        assert ModelRunner.load_model is not load_model, "SGLang's loader did not load the plugin"
        self.runner_class = ModelRunner
        return resolved

    def build(self, runner):
        from dsv4doctor.trace.worker.tensors import Redirect

        with Redirect("cpu"):
            config = serving.model_config(self.server_args, self.view, runner.is_draft_worker)
            if not runner.is_draft_worker:
                serving.prepare_layers(self.server_args, config)
            quantization, load_config = serving.quant_config(config)
        runner.config = config
        return serving.build_model(config, load_config, quantization)

    def _build(self, role, switched):
        from dsv4doctor.trace.worker.attention import Harness
        from dsv4doctor.trace.worker.tensors import Redirect

        runner = object.__new__(self.runner_class)
        runner.__dict__.update(
            server_args=self.server_args, is_draft_worker=role == "draft", tp_rank=0, pp_rank=0
        )
        runner.load_model()
        with torch.device("meta"), Redirect("meta"):
            harness = Harness(self.server_args, self.view, runner.config, role == "draft")
            runner.token_to_kv_pool = harness.pool
            first_forwards(runner.model, harness, runner.config)


def first_forwards(model, harness, config):
    """Every routed-expert layer once, every other class of layer once."""
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    from dsv4doctor.trace.worker import forward, paths

    for layer in model.modules():
        if isinstance(layer, FusedMoE):
            answered(layer.quant_method.process_weights_after_loading, layer)
            answered(forward._apply, layer)
    paths._without_warm_up()
    mixing, _ = paths.mixing_layers(model)
    hidden = torch.empty(8, mixing.hc_mult, config.hidden_size, dtype=torch.bfloat16)
    answered(paths._hc_pre, mixing, hidden)
    answered(paths._hc_post, mixing, hidden)
    for [(_, attention), *_] in paths.attention_classes(model).values():
        for kind, tokens in (("decode", 8), ("prefill", 256)):
            answered(paths._run_attention, harness, kind, tokens, attention, config)


def answered(function, *args):
    """Stand-ins only answer like kernels while calls are recorded; here, around the recorder."""
    from dsv4doctor.trace.worker.recorder import RECORDER

    RECORDER.start()
    try:
        function(*args)
    finally:
        RECORDER.stop()


if __name__ == "__main__":
    main()
