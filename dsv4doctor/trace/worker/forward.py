"""From a layer's quant method on to the first MoE kernel: weights, then one forward, on meta."""

import linecache
import re
import types

import torch

from . import clamp
from .recorder import RECORDER, location
from .tensors import Redirect

BORROWED = False  # whether the interpreter is another one than the server's
TOKENS = 8  # a decode batch; the choices that hang on the token count are made for this one

_KERNEL = re.compile(
    r"fused_experts|trtllm_\w*moe|cutlass_fused_moe|fused_moe|moe_wna16_marlin|marlin_gemm"
    r"|marlin_moe|grouped|group_gemm|group_mm|cutlass_fp4|cute_?dsl|humming|matmul_ogs"
    r"|mega_?moe|block_scale\w*moe|m_grouped",
    re.IGNORECASE,
)
_HELPER = re.compile(
    r"quant|topk|align|permute|shuffle|interleave|repack|sum_reduce|scale_factor|silu"
    r"|act_and_mul|workspace|tune|Activation|RoutingMethod|Enum|Gated|get_"
    r"|^_(route|count)_kernel$",  # of our own grouped products
    re.IGNORECASE,
)


def run_layer(layer, router=None):
    """{"kernel", "why_no_kernel", "error", "clamp_read"} of one FusedMoE built on meta tensors.

    router: the module that chooses the experts of each token; without one they are chosen.
    """
    outcome = {"kernel": None, "why_no_kernel": None, "error": None, "clamp_read": None}
    method = layer.quant_method
    if hasattr(method, "process_weights_after_loading"):
        error, _ = _phase(lambda: method.process_weights_after_loading(layer))
        if error is not None:
            return {**outcome, "error": error, "phase": "weights"}
    dispatcher = _other_dispatcher()
    if dispatcher is not None:
        outcome["why_no_kernel"] = (
            f"these experts get their tokens from the dispatcher of moe_a2a_backend {dispatcher}, "
            "in a layout of its own, and no forward through it is traced"
        )
        return outcome
    unrouted = _unrouted(layer, router)
    error, calls = _phase(lambda: _apply(layer, unrouted))
    kernel = first_kernel(calls, finished=error is None)
    outcome["kernel"] = kernel
    outcome["clamp_read"] = clamp.was_read(layer) if error is None else None
    # After a kernel only SGLang's own word counts: the rest may have broken on a stand-in.
    if error is not None and (kernel is None or sglang_location(error)[1]):
        return {**outcome, "error": error, "phase": "forward"}
    if kernel is None:
        outcome["why_no_kernel"] = "the forward returned without a kernel that is known as MoE"
    return outcome


def _other_dispatcher():
    """The all-to-all backend that hands the tokens over, if one does; a draft has its own."""
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    backend = get_moe_a2a_backend()
    name = str(getattr(backend, "value", backend))
    return None if name == "none" else name


def _phase(function):
    RECORDER.start()
    error = None
    try:
        with torch.device("meta"), Redirect("meta"):
            function()
    except Exception as raised:
        error = raised
    return error, RECORDER.stop()


def _unrouted(layer, router):
    """What a router hands on when it leaves the routing to the kernel; None: it does not."""
    if not hasattr(router, "forward_cuda"):
        return None
    found = []
    _phase(lambda: found.append(router.forward_cuda(*_tokens(layer))))
    return found[0] if found and type(found[0]).__name__ == "BypassedTopKOutput" else None


def _tokens(layer):
    hidden = torch.empty(TOKENS, layer.hidden_size, dtype=torch.bfloat16)
    return hidden, torch.empty(TOKENS, layer.num_experts, dtype=torch.float32)


def _apply(layer, unrouted=None):
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from .serving import call

    hidden, logits = _tokens(layer)
    topk = unrouted or StandardTopKOutput(
        topk_weights=torch.empty(TOKENS, layer.top_k, dtype=torch.float32),
        topk_ids=torch.empty(TOKENS, layer.top_k, dtype=torch.int32),
        router_logits=logits,
    )
    dispatched = call(
        StandardDispatchOutput,
        hidden_states=hidden,
        hidden_states_scale=None,
        topk_output=topk,
        hidden_states_original=None,
    )
    return layer.quant_method.apply(layer, dispatched)


def first_kernel(calls, finished):
    """The first launch that computes experts; SGLang's own op around one only as a last resort."""
    candidates = []
    for entry in calls:
        name = entry["symbol"].rsplit(".", 1)[-1]
        if _KERNEL.search(entry["symbol"]) and not _HELPER.search(name):
            candidates.append(entry)
    launches = [entry for entry in candidates if not _is_wrapper(entry["symbol"])]
    if launches:
        return launches[0]
    return candidates[0] if candidates and finished else None


def _is_wrapper(symbol):
    return symbol.startswith("torch.ops.sglang.")


def sglang_location(error):
    """Where SGLang's code was when `error` was raised; and whether SGLang itself raised it.

    Returns (location, raised_by_sglang, innermost_file).  What counts as raised by SGLang: a raise
    or an assert of its own; a name that one of its modules does not have; an attribute that a
    layer, its quant method or its config lacks; a package that the serving interpreter lacks.
    Anything else that breaks in its frames may have broken on a stand-in.
    """
    innermost, inside = None, None
    trace = error.__traceback__
    while trace is not None:
        innermost = trace
        if "/sglang/" in trace.tb_frame.f_code.co_filename:
            inside = trace
        trace = trace.tb_next
    if inside is None:
        filename = innermost.tb_frame.f_code.co_filename if innermost else None
        return None, False, filename
    where = location(inside.tb_frame)
    where["line"] = inside.tb_lineno
    filename = innermost.tb_frame.f_code.co_filename
    statement = linecache.getline(filename, innermost.tb_lineno).strip()
    own = inside is innermost and (
        (statement.startswith("raise") and not _is_missing_here(error))
        or isinstance(error, AssertionError)  # an assert fails in its own frame
        or (isinstance(error, ImportError) and (error.name or "").startswith("sglang."))
        or (isinstance(error, ModuleNotFoundError) and not BORROWED)
        or _lacks_attribute(error, innermost.tb_frame, statement)
        or _lacks_name(error)
    )
    return where, own, filename


def _is_missing_here(error):
    """True for a package that only the environment which is borrowed for the trace may lack."""
    ours = (getattr(error, "name", None) or "").startswith("sglang")
    return BORROWED and isinstance(error, ImportError) and not ours


_OF_A_LAYER = {"FusedMoE", "QuantizeMethodBase", "QuantizationConfig"}


def _lacks_attribute(error, frame, statement):
    """True when a layer, its quant method or its config lacks an attribute, or has None for it.

    Those are built as in a server.  Other objects may only be missing what a trace does not set
    up, such as the buffers of data-parallel attention.
    """
    if not isinstance(error, AttributeError) or isinstance(error.obj, type):
        return False
    if error.obj is None:  # self.runner.backend while self.runner is None
        owner = frame.f_locals.get("self")
        chain = rf"\bself\.\w+\.{error.name}\b"
        return _of_a_layer(owner) and re.search(chain, statement) is not None
    return _of_a_layer(error.obj)


def _lacks_name(error):
    """True when a module of SGLang's lacks a name, as deep_gemm_wrapper's do on some GPUs."""
    module = error.obj if isinstance(error, AttributeError) else None
    return type(module) is types.ModuleType and module.__name__.startswith("sglang.")


def _of_a_layer(value):
    return any(cls.__name__ in _OF_A_LAYER for cls in type(value).__mro__)
