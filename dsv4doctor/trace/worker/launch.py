"""One launch: resolve the arguments, build main and draft, run each kind of layer once."""

import ast
import contextlib
import linecache
import os
import time

from . import clamp, elsewhere, forward, lean, serving
from .argument_watch import ArgumentWatch, environment_watch
from .layer_watch import LayerWatch
from .path_watch import PathWatch
from .recorder import RECORDER
from .tensors import Redirect


class Stopped(Exception):
    """SGLang raised while resolving or building: a result, carried out of the phase."""

    def __init__(self, phase, error):
        super().__init__(phase)
        self.phase = phase
        self.error = error


def trace_launch(job, progress):
    """The result of one job, as plain data (see trace/protocol.py for its fields)."""
    return _Launch(job, progress).run()


class _Launch:
    def __init__(self, job, progress):
        self.job = job
        self.progress = progress
        self.path = PathWatch() if job["with_path"] else None
        self.result = {
            "resolved_args": {},
            "arg_changes": [],
            "environment_overwritten": {},
            "layers": [],
            "paths": [],
            "errors": [],
            "undetermined": [],
            "steps": [],
            "leniencies": [],
            "usage_error": None,
            "timings": {},
        }

    def run(self):
        self.written = written = environment_watch(lambda name: name in os.environ or "_" in name)
        if self.path is not None:
            self.path.__enter__()
        try:
            self._phases()
        except Stopped as stopped:
            self.result["errors"].append(describe_error(stopped.phase, stopped.error))
        finally:
            if self.path is not None:
                self.path.__exit__(None, None, None)
                self.result["steps"] = self.path.result()
        self.result["environment_overwritten"] = {
            name: list(values) for name, values in written.items()
        }
        return self.result

    def _phases(self):
        if not self._timed("arguments", self._arguments):
            return
        self._timed("main", lambda: self._model("main"))
        if self.view.speculative_algorithm:
            self._timed("draft", lambda: self._model("draft"))

    def _timed(self, phase, function):
        self.progress(
            {"arguments": "resolving arguments"}.get(phase, f"building the {phase} model")
        )
        if self.path is not None:
            self.path.phase = phase
        started = time.perf_counter()
        try:
            return function()
        except Stopped:
            raise
        except Exception as error:
            raise Stopped(phase, error) from error
        finally:
            self.result["timings"][phase] = round(time.perf_counter() - started, 3)

    def _arguments(self):
        watch = ArgumentWatch(serving.FIELDS)
        machine = contextlib.nullcontext()
        if self.job.get("elsewhere"):
            machine = elsewhere.Machine(self.job["arguments"])
        with Redirect("cpu"):
            try:
                with machine as stood_in, watch, _captured() as said:
                    server_args = serving.parse_arguments(self.job["arguments"])
                    refusal = self._refusal(server_args)
            except SystemExit:
                self.result["usage_error"] = said.getvalue()
                return False
            finally:
                self.result["leniencies"] += stood_in.leniencies() if stood_in else []
            self.server_args, self.view = server_args, serving.resolved(server_args)
            self.result["arg_changes"] = watch.finish(server_args)
            self.result["resolved_args"] = {
                name: plain(getattr(self.view, name))
                for name in serving.FIELDS
                if hasattr(self.view, name)
            }
            if refusal is not None:
                raise Stopped("arguments", refusal)
            if self.job.get("with_paths"):
                from .calls import reread_constants

                reread_constants(self.written)
            serving.publish(server_args)
            serving.form_groups(self.view)
        return True

    def _refusal(self, server_args):
        """The exception with which SGLang's own check refuses the arguments; None: it does not.

        What the check asks of a stand-in is made up, so then it says nothing either way.
        """
        check, refusal = serving.argument_check(server_args), None
        if check is None:
            self.result["leniencies"].append(_NO_CHECK)
            return None
        RECORDER.start()
        try:
            check()
        except Exception as error:
            refusal = error
        calls = RECORDER.stop()
        if calls:
            self.result["undetermined"].append(_made_up(calls[0]))
            return None
        if refusal is None:
            return None
        error = describe_error("arguments", refusal)
        if error["by_sglang"]:
            return refusal
        self.result["errors"].append(error)
        return None

    def _model(self, role):
        draft = role == "draft"
        contexts = []
        if draft:
            contexts = serving.draft_contexts(
                serving.draft_worker_file(self.server_args, self.view)
            )
        with serving.draft_scope(contexts):
            self._build(role, "speculative_moe_backend_context" in contexts)

    def _build(self, role, switched):
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

        with Redirect("cpu"):
            config = serving.model_config(self.server_args, self.view, role == "draft")
            if role == "main":
                serving.prepare_layers(self.server_args, config)
            quantization, load_config = serving.quant_config(config)
        clamp.watch()
        watch = LayerWatch(FusedMoE, switched, self.path)
        with watch:
            model = serving.build_model(config, load_config, quantization)
        reader = LayerReader(role, watch, self._speculative_default())
        for name, module in model.named_modules():
            if isinstance(module, FusedMoE):
                self.result["layers"].append(reader.read(name, module, _router(model, name)))
        self.model = model  # kept: the draft of a release may look at the target
        if self.job.get("with_paths"):
            started = time.perf_counter()
            self._read_paths(role, model, config)
            seconds = time.perf_counter() - started
            self.result["timings"][f"{role} paths"] = round(seconds, 3)

    def _read_paths(self, role, model, config):
        from . import paths, windows

        for path in paths.Reader(role, model, config, self.server_args, self.view).read():
            error = path["error"]
            if error is not None:
                path["error"] = describe_error(f"{role} {path['name']}", error)
                # What SGLang raises before its dispatch may hang on values that are made up.
                path["error"]["by_sglang"] &= windows.raised_inside(error, path["name"])
            self.result["paths"].append(path)

    def _speculative_default(self):
        """True when --speculative-moe-runner-backend was not given and follows the main one."""
        return "--speculative-moe-runner-backend" not in lean.named_flags(self.job["arguments"])


class LayerReader:
    """Reads a built FusedMoE off; equal layers are run once."""

    def __init__(self, role, watch, speculative_follows_main):
        self.role = role
        self.watch = watch
        self.follows = speculative_follows_main
        self.outcomes = {}

    def read(self, name, layer, router):
        """`router` chooses the experts of each token; None: it was not found."""
        method = layer.quant_method
        seen = self.watch.found.get(id(layer), {"decided_at": None, "flags_consulted": []})
        flags = list(seen["flags_consulted"])
        if self.follows and "speculative_moe_runner_backend" in flags:
            flags.append("moe_runner_backend")
        runner = getattr(method, "runner", None)
        read = {
            "name": name,
            "role": self.role,
            "quant_method": type(method).__name__,
            "runner_backend": backend_of(runner),
            "decided_at": seen["decided_at"],
            "flags_consulted": flags,
            "weights": _dtype_of_weights(layer),
        }
        # Of the runners only TensorRT-LLM's can be left the routing.
        router = router if "trtllm" in (read["runner_backend"] or "") else None
        dispatch = (read["quant_method"], read["runner_backend"], read["decided_at"])
        key = repr([*dispatch, type(router).__name__]) + _shape(layer)
        if key not in self.outcomes:
            outcome = forward.run_layer(layer, router)
            error = outcome.pop("error")
            phase = outcome.pop("phase", None)
            outcome["error"] = describe_error(f"{self.role} {phase}", error) if error else None
            self.outcomes[key] = outcome
        return {**read, **self.outcomes[key]}


_NO_CHECK = (
    "this SGLang has no check_server_args: what its server refuses before it loads anything was "
    "not asked"
)


def _made_up(call):
    """Why a check that made this call decides nothing."""
    at = call["at"]
    where = f" in {os.path.basename(at['file'])}:{at['line']}" if at else ""
    return (
        f"arguments: SGLang's own check of them calls {call['symbol']}{where}, which a trace "
        "stands in for"
    )


def _router(model, name):
    """The module beside a layer's experts that chooses among them."""
    return getattr(model.get_submodule(name.rpartition(".")[0]), "topk", None)


def backend_of(runner):
    backend = getattr(runner, "runner_backend", None)
    return None if backend is None else str(getattr(backend, "value", backend))


def _dtype_of_weights(layer):
    """What the checkpoint's values are copied into; None where it goes by another name."""
    weight = dict(layer.named_parameters(recurse=False)).get("w13_weight")
    return None if weight is None else str(weight.dtype).removeprefix("torch.")


def _shape(layer):
    """Parameter names, shapes and dtypes: what a forward can depend on."""
    return repr(
        [
            (name, tuple(parameter.shape), str(parameter.dtype))
            for name, parameter in layer.named_parameters(recurse=False)
        ]
    )


def describe_error(phase, error):
    """An exception as data: `by_sglang` is True only when SGLang's own line raised it."""
    where, raised_by_sglang, innermost = forward.sglang_location(error)
    message = (str(error) or _condition(error))[:1000]
    artefact = "StandIn" in message or "stand-in" in message.lower()
    return {
        "phase": phase,
        "type": type(error).__name__,
        "message": message,
        "at": where,
        "by_sglang": raised_by_sglang and not artefact,
        "innermost": innermost,
    }


def _condition(error):
    """What a failed assert without a message asserts; "" of any other exception."""
    trace = error.__traceback__
    if trace is None or not isinstance(error, AssertionError):
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    lines = linecache.getlines(trace.tb_frame.f_code.co_filename)
    try:
        nodes = ast.walk(ast.parse("".join(lines)))
    except SyntaxError:
        return ""
    for node in nodes:
        if isinstance(node, ast.Assert) and node.lineno <= trace.tb_lineno <= node.end_lineno:
            return "assert " + ast.unparse(node.test)
    return ""


def plain(value):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):  # --numa-node has one for each GPU
        return [plain(one) for one in value]
    return str(getattr(value, "value", value))


class _captured:
    """What argparse writes to standard error."""

    def __enter__(self):
        import io
        import sys

        self.stream, self.saved = io.StringIO(), sys.stderr
        sys.stderr = self.stream
        return self.stream

    def __exit__(self, *exc):
        import sys

        sys.stderr = self.saved
