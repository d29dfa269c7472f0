"""The adapters against SGLang's own functions, on the same inputs."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from dsv4doctor.errors import DoctorError
from dsv4doctor.kernels import upstream
from dsv4doctor.kernels.adapters import dense_glue, indexer_logits, sparse_mla_decode
from dsv4doctor.kernels.mla_cases import relative_error
from dsv4doctor.kernels.reference import indexer_logits as logits_reference
from dsv4doctor.kernels.reference import sparse_mla_decode as decode_reference

MODULES = (dense_glue, indexer_logits, sparse_mla_decode)


@pytest.fixture
def verified(monkeypatch):
    """The adapters as they are after `kernels verify` passed."""
    for module in MODULES:
        monkeypatch.setattr(module, "require_stamp", lambda name, device: None)
        monkeypatch.setattr(module, "_allowed", set())


@pytest.fixture
def fetched(sglang_tree, monkeypatch):
    """`fetched(module, name)`: a function of SGLang 0.5.14."""
    monkeypatch.setitem(sys.modules, "sglang", None)
    del sys.modules["sglang"]
    upstream.use_tree(Path(sglang_tree("0.5.14").root))

    def get(module, name):
        given = {"FP8_DTYPE": torch.float8_e4m3fn}
        found = upstream.functions(module, name, given=given)
        assert found is not None, upstream.problems
        return found[name]

    return get


def decode_keywords(device, batch=3, queries=1, extra=70):
    """The keywords that SGLang's backend passes."""
    case = decode_reference.random_case(
        batch * queries, 16, 40, extra, 256, 64, 512, device=device, seed=5
    )
    q, cache, index, lengths = case.args
    keywords = {
        "q": q.view(batch, queries, 16, 512),
        "k_cache": cache.view(torch.float8_e4m3fn),
        "head_dim_v": 512,
        "softmax_scale": 0.05,
        "indices": index.view(batch, queries, -1),
        "topk_length": lengths[:batch],
        "attn_sink": case.kwargs["sink"],
        "extra_k_cache": None,
        "extra_indices_in_kvcache": None,
        "extra_topk_length": None,
    }
    if extra:
        keywords["extra_k_cache"] = case.kwargs["extra_cache"].view(torch.float8_e4m3fn)
        keywords["extra_indices_in_kvcache"] = case.kwargs["extra_indices"].view(batch, queries, -1)
        keywords["extra_topk_length"] = case.kwargs["extra_lengths"][:batch]
    return keywords


def upstream_decode(call, keywords):
    """SGLang's torch path of `flash_mla_with_kvcache_sm120`."""
    names = ("q", "k_cache", "indices", "topk_length", "attn_sink", "head_dim_v", "softmax_scale")
    more = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
    return call(*(keywords[name] for name in (*names, *more)))


@pytest.mark.wheels
@pytest.mark.parametrize(("batch", "queries", "extra"), [(3, 1, 70), (2, 2, 30), (3, 1, 0)])
def test_decode_is_what_sglang_computes(device, verified, fetched, batch, queries, extra):
    keywords = decode_keywords(device, batch, queries, extra)
    call = fetched("srt.layers.attention.flash_mla_sm120", "_sm120_sparse_decode_fwd")
    want, want_lse = upstream_decode(call, keywords)
    out, lse = sparse_mla_decode.flash_mla_with_kvcache_sm120(**keywords)
    assert (out.shape, out.dtype) == (want.shape, want.dtype)
    assert (lse.shape, lse.dtype) == (want_lse.shape, want_lse.dtype)
    assert relative_error(out, want) < 1e-2
    assert relative_error(lse, want_lse) < 1e-4


def test_decode_without_the_optional_keywords(device, verified):
    keywords = decode_keywords(device, extra=0)
    few = {name: keywords[name] for name in ("q", "k_cache", "indices")}
    out, lse = sparse_mla_decode.flash_mla_with_kvcache_sm120(**few, head_dim_v=448)
    full, _ = decode_reference.sparse_mla_decode(
        keywords["q"][:, 0], keywords["k_cache"], keywords["indices"][:, 0]
    )
    assert out.shape == (3, 1, 16, 448)
    assert relative_error(out[:, 0], full[..., :448]) < 1e-2
    assert lse.shape == (3, 16, 1)


def test_no_queries_and_a_sink_whose_heads_are_apart(device, verified):
    keywords = decode_keywords(device)
    apart = {**keywords, "attn_sink": keywords["attn_sink"].repeat_interleave(2)[::2]}
    want, _ = sparse_mla_decode.flash_mla_with_kvcache_sm120(**keywords)
    out, _ = sparse_mla_decode.flash_mla_with_kvcache_sm120(**apart)
    assert torch.equal(out, want)
    listed = ("q", "indices", "topk_length", "extra_indices_in_kvcache", "extra_topk_length")
    none = {**keywords, **{name: keywords[name][:0] for name in listed}}
    out, lse = sparse_mla_decode.flash_mla_with_kvcache_sm120(**none)
    assert (out.shape, lse.shape) == ((0, 1, 16, 512), (0, 16, 1))


@pytest.mark.wheels
@pytest.mark.parametrize("width", [192, 150])
def test_logits_are_what_sglang_computes(device, verified, fetched, width):
    call = fetched("srt.layers.attention.dsv4.indexer", "fp8_paged_mqa_logits_torch_sm120")
    q, cache, weights, lengths, table, _ = logits_reference.random_inputs(
        3, 64, 192, [0, 100, 150], 16, device
    )
    table = table.clamp(max=15)
    args = (q.unsqueeze(1), cache, weights, lengths.unsqueeze(1), table, None, width, False)
    want = call(*args)
    out = indexer_logits.fp8_paged_mqa_logits_torch_sm120(*args)
    assert (out.shape, out.dtype) == (want.shape, want.dtype)
    assert torch.equal(out == -math.inf, want == -math.inf)
    assert relative_error(out, want) < 1e-2


def test_two_calls_of_the_drop_in_give_two_tensors(device, verified):
    q, cache, weights, lengths, table, width = logits_reference.random_inputs(
        1, 32, 64, [64], 4, device
    )
    args = (q.unsqueeze(1), cache, weights, lengths, table, None, width, False)
    first = indexer_logits.fp8_paged_mqa_logits_torch_sm120(*args)
    kept = first.clone()
    lengths.zero_()
    second = indexer_logits.fp8_paged_mqa_logits_torch_sm120(*args)
    assert torch.equal(first, kept)
    assert (second == -math.inf).all()


def test_glue_is_what_the_float32_path_computes(device, verified):
    x = torch.randn((5, 4, 64), device=device).bfloat16()
    fn = torch.randn((24, 256), device=device)
    wide = x.flatten(1).float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    want = (torch.nn.functional.linear(wide, fn) * scale).unsqueeze(1)
    flat, mixes = dense_glue.hc_pre_torch_impl(x, fn, 1e-6)
    assert mixes.shape == want.shape
    assert relative_error(mixes, want) < 1e-4
    assert torch.equal(flat.float(), wide)
    keys, q = torch.randn((2, 70, 128), device=device), torch.randn((2, 64, 128), device=device)
    assert relative_error(dense_glue.indexer_bmm(keys, q), keys @ q.transpose(1, 2)) < 5e-3


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.split(".")[-1])
def test_an_unverified_kernel_does_not_serve(device, module, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("DSV4DOCTOR_ALLOW_UNVERIFIED", raising=False)
    monkeypatch.setattr(module, "_allowed", set())
    calls = {
        dense_glue: lambda: dense_glue.indexer_bmm(
            torch.zeros((1, 1, 16), device=device), torch.zeros((1, 1, 16), device=device)
        ),
        indexer_logits: lambda: indexer_logits.fp8_paged_mqa_logits_torch_sm120(
            torch.zeros((1, 1, 1, 128), device=device), None, None, None, None, None, 1
        ),
        sparse_mla_decode: lambda: sparse_mla_decode.flash_mla_with_kvcache_sm120(
            **decode_keywords(device)
        ),
    }
    with pytest.raises(DoctorError):
        calls[module]()
