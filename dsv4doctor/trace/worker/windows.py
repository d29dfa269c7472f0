"""Which of SGLang's functions a hot path is, and which calls inside it are its kernel."""

import re
from typing import NamedTuple

from .calls import chosen, flags_of, inside, maker


class Window(NamedTuple):
    """A path's dispatch: `place(entry)` is where in an entry's stack it stands, or None."""

    place: object
    wanted: re.Pattern
    helper: re.Pattern

    def kernel(self, calls):
        """(kernel, dispatch place) of the path among `calls`."""
        return chosen(calls, self.wanted, self.helper, self.place)

    def flags(self, calls):
        return flags_of(calls, self.place)


def _in_linear(entry):
    return inside(entry, names="apply")


def _in_hc(entry):
    return inside(entry, names="hc_pre|hc_post")


def _in_indexer(entry):
    return inside(entry, names=r"forward_c4_indexer|forward_\w*indexer\w*")


_BACKEND_FILES = tuple(
    f"layers/attention/deepseek_v4{name}_backend.py" for name in ("", "_trtllm", "_mega")
)


_MODEL_FILES = tuple(f"models/deepseek_v4{name}.py" for name in ("", "_nextn", "_dspark"))


def _in_backend(entry):
    if inside(entry, names=r"init_forward_metadata\w*|_build_forward_metadata"):
        return None
    entry_point = inside(
        entry,
        names="_?forward(_attention|_prefill_sparse\\w*|_trtllm|_mega\\w*)?",
        files=_BACKEND_FILES,
    )
    dispatcher = inside(entry, names=r"flash_mla_with_kvcache\w*")
    return dispatcher or entry_point


DENSE = Window(
    _in_linear,
    re.compile(r"gemm|_mm\b|_mm_|matmul|scaled_mm|bmm|cutlass", re.I),
    re.compile(r"quant(?!_matmul)|config|layout|transform|swizzle|interleave", re.I),
)
WO_A = Window(
    lambda entry: inside(entry, names=r"\w*forward\w*", files=_MODEL_FILES),
    re.compile(r"fp8_einsum|wo_a", re.I),
    re.compile(r"quant|config|enabled|eligible|transform|layout", re.I),
)
"""The attention's output projection in FP8, which its forward multiplies by itself."""
MHC = Window(
    _in_hc,
    re.compile(r"hc_|mhc|sinkhorn", re.I),
    re.compile(r"prewarm|enabled|_ops$|params|_norm$", re.I),
)
INDEXER = Window(
    _in_indexer,
    re.compile(r"mqa_logits|indexer_logits|index_logits|fp8_index", re.I),
    re.compile("metadata"),
)
MLA = Window(
    _in_backend,
    re.compile(
        r"mla|sparse_(decode|prefill|fwd)|swapab|trtllm\w*(decode|prefill)|decode_attention", re.I
    ),
    re.compile(
        r"metadata|quant|store|_split|pack|rope|gather|copy|combine|norm|capab|supports|get"
        r"|page_ind|init|meta|topk|view|can_use|reindex|use_sparse",
        re.I,
    ),
)


def window_of(path):
    """The window of a path by its name; None where it has none."""
    for prefix, window in _BY_NAME.items():
        if path.startswith(prefix):
            return window
    return None


_BY_NAME = {"dense-fp8": DENSE, "mhc": MHC, "indexer": INDEXER, "sparse-mla": MLA}


def raised_inside(error, path):
    """True when an exception came out of the path's own dispatch."""
    window = window_of(path)
    trace, stack = error.__traceback__, []
    while trace is not None:
        code = trace.tb_frame.f_code
        stack.insert(0, (code.co_name, code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return window is not None and window.place({"stack": stack}) is not None


def runner_of(calls):
    """The FP8 GEMM runner that a quant method called, by the name of SGLang's function."""
    for entry in calls.functions:
        name = entry["symbol"].rsplit(".", 1)[-1]
        match = re.match(r"(\w+?)_(?:w8a8|mxfp8|fp8)\w*linear", name)
        if match and _in_linear(entry):
            return match[1].replace("deepgemm", "deep_gemm")
    return None


def path_entry(
    role, name, layers, kernel=None, calls=None, where=None, window=None, error=None, **fields
):
    """A path as plain data, see trace/protocol.py; `calls` are those that `kernel` is from."""
    reason = fields.get("reason", "")
    if kernel is not None:
        fields.setdefault("choice", maker(kernel))
        fields.setdefault("flags", window.flags(calls))
    elif calls is not None:
        error = calls.error
        if error is None:
            reason = "it came to its end without a kernel that is known as this path's"
    return {
        "name": name,
        "role": role,
        "layers": list(layers),
        "choice": fields.get("choice"),
        "kernel": kernel,
        "decided_at": where,
        "flags_consulted": fields.get("flags", []),
        "reason": reason,
        "detail": fields.get("detail", ""),
        "error": error,
    }
