"""The hot paths beside the routed experts: which kernel each reaches, and what chose it.

SGLang's own layers are run once per class of layer, on tensors without memory, with its own
attention backend and KV pool.  A call belongs to a path by the SGLang functions it was made from.
"""

import sys

import torch

from . import forward
from .attention import REQUESTS, Harness, other_backends
from .calls import Calls
from .serving import call
from .stand_in_objects import make
from .tensors import Redirect
from .windows import DENSE, INDEXER, MHC, MLA, WO_A, path_entry, raised_inside, runner_of

DSPARK = "DSparkAttention"
_DSPARK = "run as a plain batch; the block of a DSpark draft reads more keys, and was not run"
_FUSED = "between layers post and pre are fused into one kernel, and that was not run"
ATTENTION = ("sparse-mla-decode", "sparse-mla-prefill")
_OUTPUT = ".wo_a"
"""The projection that no layer's own method multiplies: the attention does."""


# ------------------------------------------------------------------------ one model


class Reader:
    """Reads one built model's paths off; `found` is a list of plain dicts."""

    def __init__(self, role, model, config, server_args, view):
        self.role = role
        self.model = model
        self.config = config
        self.server_args = server_args
        self.view = view
        self.found = []

    def read(self):
        _without_warm_up()
        for names, section in (
            (("dense-fp8",), self._dense),
            (("mhc-pre", "mhc-post"), self._mhc),
            (("kv-cache", *ATTENTION), self._attention),
        ):
            try:
                with torch.device("meta"), Redirect("meta"):
                    section()
            except Exception as error:  # one path that cannot be read leaves the others alone
                for name in names:
                    self._add(name, (), error=error)
        if self.role == "main":
            self._all_reduce()
        return self.found

    def _add(self, *args, **fields):
        self.found.append(self._path(*args, **fields))

    def _path(self, name, layers, kernel=None, calls=None, *args, **fields):
        path = path_entry(self.role, name, layers, kernel, calls, *args, **fields)
        error = calls.error if kernel is not None else None
        # After a kernel only SGLang's own word counts: the rest may have broken on a stand-in.
        if error is not None and forward.sglang_location(error)[1] and raised_inside(error, name):
            path["error"] = error
        return path

    # ---- dense FP8

    def _dense(self):
        classes = {}
        for name, module in self.model.named_modules():
            method = getattr(module, "quant_method", None)
            weight = getattr(module, "weight", None)
            if method is None or weight is None or "Linear" not in type(method).__name__:
                continue
            if not _is_fp8(weight) or name.endswith(_OUTPUT):
                continue
            parameters = tuple(
                (key, tuple(value.shape), str(value.dtype))
                for key, value in module.named_parameters(recurse=False)
            )
            key = (type(method).__name__, parameters)
            classes.setdefault(key, []).append((name, module))
        merged = {}
        for (method, parameters), modules in classes.items():
            calls = Calls(lambda module=modules[0][1]: _run_linear(module))
            kernel, where = DENSE.kernel(calls)
            shape = dict((name, shape) for name, shape, _ in parameters)["weight"]
            symbol = kernel["symbol"] if kernel else repr(calls.error)
            merged.setdefault((method, symbol), []).append((modules, kernel, where, calls, shape))
        for (method, _), parts in merged.items():
            names = [name for modules, *_ in parts for name, _ in modules]
            _, kernel, where, calls, _ = parts[0]
            shapes = ", ".join(sorted({"x".join(map(str, part[4])) for part in parts}))
            self._add(
                "dense-fp8",
                names,
                kernel,
                calls,
                where,
                DENSE,
                detail=f"{method}; weights {shapes}",
                **({"choice": runner_of(calls)} if kernel and runner_of(calls) else {}),
            )

    # ---- mHC

    def _mhc(self):
        layer, names = mixing_layers(self.model)
        if layer is None:
            return
        hidden = torch.empty(8, layer.hc_mult, self.config.hidden_size, dtype=torch.bfloat16)
        for path, run in (
            ("mhc-pre", lambda: _hc_pre(layer, hidden)),
            ("mhc-post", lambda: _hc_post(layer, hidden)),
        ):
            calls = Calls(run)
            kernel, where = MHC.kernel(calls)
            fused = getattr(layer, "use_fused_mhc_post_pre", False)
            self._add(
                path,
                names,
                kernel,
                calls,
                where,
                MHC,
                detail=_torch_parts(calls),
                reason=_FUSED if fused else "",
            )

    # ---- attention, indexer, KV cache

    def _attention(self):
        classes = attention_classes(self.model)
        if not classes:
            for path in ATTENTION:
                reason = "this model's attention is built of classes that a trace does not run"
                self._add(path, (), reason=reason)
            return
        made = []
        draft = self.role == "draft"
        calls = Calls(lambda: made.append(Harness(self.server_args, self.view, self.config, draft)))
        names = [name for modules in classes.values() for name, _ in modules]
        if not made:
            for path in ("kv-cache", *ATTENTION):
                self._add(path, names, calls=calls)
            return
        [harness] = made
        self._kv_cache(harness, names)
        others = other_backends(self.view, draft)
        if others:
            own = self.view.attention_backend
            reason = f"SGLang takes {' and '.join(others)} here, and only {own} alone can be run"
            for path in (*ATTENTION, *_indexer_paths(classes)):
                self._add(path, names, reason=reason)
            return
        for modules in classes.values():
            self._one_class(harness, modules)

    def _one_class(self, harness, modules):
        """Decode, a short prompt, and a chunk of a long one where that goes another way."""
        found = {}
        for kind, tokens in (("decode", REQUESTS), *(("prefill", n) for n in harness.prompts())):
            for path in self._one_attention(harness, kind, tokens, modules):
                before = found.get(path["name"])
                if before is None or before["kernel"] != path["kernel"]:
                    found[path["name"]] = path
                    self.found.append(path)
                elif kind == "prefill":
                    before["detail"] += f"; {path['detail'].rpartition('; ')[2]} too"

    def _one_attention(self, harness, kind, tokens, modules):
        names = [name for name, _ in modules]
        attention = modules[0][1]
        calls = Calls(lambda: _run_attention(harness, kind, tokens, attention, self.config))
        ratio = getattr(attention, "compress_ratio", 0)
        caveat = _DSPARK if type(attention).__name__ == DSPARK else ""
        size = f"batch of {tokens}" if kind == "decode" else f"{tokens} tokens"
        if getattr(attention, "indexer", None) is not None:
            kernel, where = INDEXER.kernel(calls)
            detail = f"{_width(harness)}; {size}" if kernel else size
            yield self._path(f"indexer-{kind}", names, kernel, calls, where, INDEXER, detail=detail)
        kernel, where = MLA.kernel(calls)
        detail = f"compress ratio {ratio}; {size}"
        yield self._path(
            f"sparse-mla-{kind}", names, kernel, calls, where, MLA, detail=detail, reason=caveat
        )
        output = getattr(attention, "wo_a", None)
        if kind == "decode" and _is_fp8(getattr(output, "weight", None)):
            kernel, where = WO_A.kernel(calls)
            layers = [f"{name}{_OUTPUT}" for name in names]
            yield self._path(
                "dense-fp8", layers, kernel, calls, where, WO_A, detail="in the attention's forward"
            )

    def _kv_cache(self, harness, names):
        pool = getattr(harness.pool, "swa_kv_pool", None)
        detail, choice = layout_of(harness.pool)
        self._add(
            "kv-cache",
            names,
            choice=choice,
            detail=detail,
            reason="" if pool is not None else "the pool has no window part",
            flags=["kv_cache_dtype", "page_size"],
        )

    # ---- all-reduce

    def _all_reduce(self):
        view, flags = self.view, ["disable_custom_all_reduce"]
        if view.tp_size == 1:
            return  # there is none
        if getattr(view, "disable_custom_all_reduce", False):
            choice, reason = "nccl", ""
        else:
            choice = None
            reason = (
                "SGLang asks the GPUs for NVLink and peer access before it takes its custom "
                "all-reduce; a trace has no topology"
            )
        self._add("all-reduce", [], choice=choice, reason=reason, flags=flags)


def attention_classes(model):
    """{(class name, compress ratio): [(name, module)]} of a model's attention."""
    classes = {}
    for name, module in model.named_modules():
        if hasattr(module, "attn_mqa") or type(module).__name__ == DSPARK:
            key = (type(module).__name__, getattr(module, "compress_ratio", 0))
            classes.setdefault(key, []).append((name, module))
    return classes


def _is_fp8(weight):
    return isinstance(weight, torch.Tensor) and weight.element_size() == 1


def _indexer_paths(classes):
    modules = [module for found in classes.values() for _, module in found]
    indexed = any(getattr(module, "indexer", None) is not None for module in modules)
    return ("indexer-decode", "indexer-prefill") if indexed else ()


def mixing_layers(model):
    """(the first layer with hyper-connections or None, the names of all of its class)."""
    for module in model.modules():
        if callable(getattr(module, "hc_pre", None)) and hasattr(module, "hc_attn_fn"):
            kind = type(module)
            return module, [name for name, other in model.named_modules() if type(other) is kind]
    return None, []


def layout_of(pool):
    """(detail, choice) of a KV pool: bytes and page sizes as it says them itself."""
    parts = []
    window = getattr(pool, "swa_kv_pool", None)
    choice = None
    if window is not None:
        buffer = window.kv_buffer[0]
        width = getattr(window, "kv_cache_total_dim", None)
        choice = str(getattr(window, "store_dtype", None) or buffer.dtype).removeprefix("torch.")
        parts.append(f"window: {width} bytes a token, pages of {window.page_size}")
    for ratio in (4, 128):
        part = getattr(pool, f"c{ratio}_kv_pool", None)
        if part is not None and getattr(part, "layer_num", 1):
            parts.append(
                f"1 in {ratio}: {getattr(part, 'kv_cache_total_dim', None)} bytes, "
                f"pages of {part.page_size}"
            )
    index = getattr(pool, "c4_indexer_kv_pool", None)
    if index is not None and getattr(index, "index_k_with_scale_buffer", None):
        buffer = index.index_k_with_scale_buffer[0]
        parts.append(f"indexer: {buffer.shape[-1] // index.page_size} bytes a key")
    dtype = str(getattr(pool, "dtype", "")).removeprefix("torch.")
    return "; ".join(parts), dtype or choice


def _width(harness):
    """How wide the indexer's logits are."""
    metadata = getattr(harness.backend.forward_metadata, "indexer_metadata", None)
    for name in ("max_c4_seq_len", "max_compressed_seq_len"):
        width = getattr(metadata, name, None)
        if width is not None:
            return f"max_seq_len {width} in this batch, context limit {harness.context} tokens"
    return ""


def _without_warm_up():
    """DeepGEMM's wrapper compiles a kernel for every row count before the first call; and what
    torch would build is recorded like everything else that is compiled at run time."""
    import torch.utils.cpp_extension as extension

    for name in ("load", "load_inline"):
        setattr(extension, name, lambda name, *args, **kwargs: make(f"jit:{name}"))
    for name, module in list(sys.modules.items()):
        if name.endswith("deep_gemm_wrapper.compile_utils"):
            module._ENABLE_JIT_DEEPGEMM_PRECOMPILE = False


def _run_linear(module):
    _process(module)
    dtype = torch.bfloat16
    size = getattr(module, "input_size_per_partition", None) or module.input_size
    return module.quant_method.apply(module, torch.empty(forward.TOKENS, size, dtype=dtype))


_PROCESSED = set()


def _process(module):
    method = getattr(module, "quant_method", None)
    if id(module) in _PROCESSED or "Linear" not in type(method).__name__:
        return
    _PROCESSED.add(id(module))
    if hasattr(method, "process_weights_after_loading"):
        method.process_weights_after_loading(module)


def _torch_parts(calls):
    """SGLang's functions in plain torch operations that a mixing step went through."""
    names = [entry["symbol"].rsplit(".", 1)[-1] for entry in calls.functions]
    parts = sorted({name for name in names if name.endswith("_torch_impl")})
    return f"in part plain torch: {', '.join(parts)}" if parts else ""


def _hc_pre(layer, hidden):
    return call(
        layer.hc_pre,
        x=hidden,
        hc_fn=layer.hc_attn_fn,
        hc_scale=layer.hc_attn_scale,
        hc_base=layer.hc_attn_base,
        norm=layer.input_layernorm,
    )


def _hc_post(layer, hidden):
    count, mult, size = hidden.shape
    return call(
        layer.hc_post,
        x=torch.empty(count, size, dtype=hidden.dtype),
        residual=hidden,
        post=torch.empty(count, mult, dtype=torch.float32),
        comb=torch.empty(count, mult, mult, dtype=torch.float32),
    )


def _run_attention(harness, kind, tokens, attention, config):
    for module in attention.modules():
        _process(module)
    batch = harness.batch(kind, tokens)
    harness.prepare(batch)
    hidden = torch.empty(tokens, config.hidden_size, dtype=torch.bfloat16)
    with harness.context_of(batch):
        return call(
            attention.forward,
            x=hidden,
            hidden_states=hidden,
            positions=batch.positions,
            forward_batch=batch,
        )
