"""SGLang's own attention backend, KV pool and forward batch, on tensors without memory.

What a model runner hands to them is given by name; a name that a release asks for and that is not
here is an AttributeError, and the path is unknown with that reason.
"""

import inspect
import types

import torch

from .serving import call, optional

REQUESTS = 8
"""A decode batch: one token each."""
PROMPT = 256
"""Tokens of a short prompt; more than the 64 up to which sm_12x takes its decode kernel."""
UNCHUNKED = 16384
"""Tokens of a long prompt where prefill is not cut into chunks."""
_PAGES = 64


class Harness:
    """An attention backend of this launch with its pool, and batches to run through it."""

    def __init__(self, server_args, view, config, draft):
        self.view = view
        self.config = config
        self.context = int(config.context_len)
        self.pool = _pool(view, config, draft)
        if hasattr(self.pool, "register_mapping"):  # the allocator does it in a server
            full = view.page_size * (_PAGES + 1)
            self.pool.register_mapping(torch.zeros(full, dtype=torch.int64))
        request_pool = types.SimpleNamespace(
            req_to_token=torch.zeros(REQUESTS + 1, self.context + 4, dtype=torch.int32),
            size=REQUESTS,
        )
        self.runner = types.SimpleNamespace(
            device="cuda",
            gpu_id=0,
            dtype=torch.bfloat16,
            model_config=config,
            page_size=view.page_size,
            req_to_token_pool=request_pool,
            token_to_kv_pool=self.pool,
            hisparse_coordinator=None,
            server_args=server_args,
            spec_algorithm=_algorithm(view),
            is_draft_worker=draft,
            tp_size=view.tp_size,
        )
        backends = optional("sglang.srt.layers.attention.attention_registry", "ATTENTION_BACKENDS")
        self.backend = backends[view.attention_backend](self.runner)

    def prompts(self):
        """Prompt lengths worth a look: a short one, and one that fills a prefill chunk."""
        chunk = getattr(self.view, "chunked_prefill_size", None) or UNCHUNKED
        chunk = min(chunk if chunk > 0 else UNCHUNKED, self.context)
        return (PROMPT, chunk) if chunk > PROMPT else (PROMPT,)

    def batch(self, kind, tokens):
        """A ForwardBatch: `tokens` requests of one token each ("decode"), or one prompt."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        decode = kind == "decode"
        requests = tokens if decode else 1
        # Under CUDA graphs a decode's metadata is as wide as the context limit.
        length = self.context if decode else tokens
        lengths = torch.full((requests,), length, dtype=torch.int64, device="meta")
        given = {
            "forward_mode": ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            "batch_size": requests,
            "input_ids": torch.zeros(tokens, dtype=torch.int64),
            "req_pool_indices": torch.zeros(requests, dtype=torch.int64),
            "seq_lens": lengths,
            "out_cache_loc": torch.zeros(tokens, dtype=torch.int64),
            "seq_lens_sum": length * requests,
            "seq_lens_cpu": _host([length] * requests),
            "orig_seq_lens": lengths,
            "positions": torch.zeros(tokens, dtype=torch.int64),
            "req_to_token_pool": self.runner.req_to_token_pool,
            "token_to_kv_pool": self.pool,
            "attn_backend": self.backend,
            "spec_algorithm": self.runner.spec_algorithm,
            "num_token_non_padded_cpu": tokens,
        }
        if not decode:
            given.update(
                extend_num_tokens=tokens,
                extend_seq_lens=torch.full((1,), tokens, dtype=torch.int32),
                extend_prefix_lens=torch.zeros(1, dtype=torch.int32),
                extend_start_loc=torch.zeros(1, dtype=torch.int32),
                extend_seq_lens_cpu=[tokens],
                extend_prefix_lens_cpu=[0],
            )
        return call(ForwardBatch, **given)

    def prepare(self, batch):
        """The backend's own metadata for a batch."""
        self.backend.init_forward_metadata(batch)

    def context_of(self, batch):
        """SGLang's forward context around a layer, in the releases that have one."""
        module = optional("sglang.srt.model_executor.forward_context")
        if module is None:
            import contextlib

            return contextlib.nullcontext()
        names = inspect.signature(module.ForwardContext).parameters
        given = {"attn_backend": self.backend, "forward_batch": batch}
        return module.forward_context(
            module.ForwardContext(**{name: given[name] for name in names if name in given})
        )


def other_backends(view, draft):
    """The attention backends that a server takes and that a Harness does not build."""
    own = getattr(view, "speculative_draft_attention_backend", None) if draft else None
    names = ("prefill_attention_backend", "decode_attention_backend")
    taken = [own] if own else [getattr(view, name, None) for name in names]
    return [name for name in dict.fromkeys(taken) if name not in (None, view.attention_backend)]


def _host(values):
    """A tensor that has its values, whatever the device mode says."""
    with torch._C.DisableTorchFunction():
        return torch.tensor(values, dtype=torch.int64, device="cpu")


def _algorithm(view):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SpeculativeAlgorithm.from_string(view.speculative_algorithm)


def _pool(view, config, draft):
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools

    page, size = view.page_size, view.page_size * _PAGES
    ratios = list(getattr(config, "compress_ratios", None) or [])
    layers = config.num_hidden_layers
    if draft:
        nextn = optional("sglang.srt.models.deepseek_v4_nextn", "COMPRESS_RATIO_NEXTN_LAYER")
        layers = getattr(config, "num_nextn_predict_layers", None) or 1
        ratios = [nextn or 0] * layers
    given = {
        "max_num_reqs": REQUESTS,
        "num_req_slots": REQUESTS + 1,
        "swa_size": size,
        "full_size": size,
        "c4_size": size // 4,
        "c128_size": size // 128,
        "c4_state_pool_size": size,
        "c128_state_pool_size": size,
        "page_size": page,
        "swa_page_size": page,
        "sliding_window": getattr(config, "window_size", 128),
        "dtype": _kv_dtype(view),
        "state_dtype": torch.float32,
        "c4_state_dtype": torch.float32,
        "c128_state_dtype": torch.float32,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "indexer_head_dim": config.index_head_dim,
        "layer_num": layers,
        "device": "cuda",
        "enable_memory_saver": False,
        "compression_ratios": ratios,
        "start_layer": 0,
        "end_layer": layers,
        "is_draft_worker": draft,
    }
    select = optional("sglang.srt.mem_cache.kv_cache_configurator", "select_dsv4_kv_layout")
    if select is not None:
        given["kv_layout"], given["compressed_kv_layout"] = select()
    return call(pools.DeepSeekV4TokenToKVPool, **given)


def _kv_dtype(view):
    return {"fp8_e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}.get(
        str(view.kv_cache_dtype), torch.float8_e4m3fn
    )
