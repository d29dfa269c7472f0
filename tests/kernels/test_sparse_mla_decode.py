"""The sparse MLA decode against its float32 reference."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4doctor.errors import UsageError
from dsv4doctor.kernels import mla_cases
from dsv4doctor.kernels import sparse_mla_decode as kernel
from dsv4doctor.kernels.mla_cases import relative_error
from dsv4doctor.kernels.reference import sparse_mla_decode as reference

BAR = kernel.META.error_bar


def both(case, **options):
    """(out, lse, wanted out, wanted lse)."""
    want = reference.sparse_mla_decode(*case.args, **case.kwargs)
    return (*kernel.sparse_mla_decode(*case.args, **case.kwargs, **options), *want)


def test_e4m3_reference_is_torch_own():
    codes = torch.arange(256, dtype=torch.uint8)
    own = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(reference.e4m3_value(codes).nan_to_num(7e9), own.nan_to_num(7e9))


def test_ue8m0_reference_is_torch_own():
    codes = torch.arange(256, dtype=torch.uint8)
    own = codes.view(torch.float8_e8m0fnu).float()
    assert torch.equal(reference.ue8m0_value(codes).nan_to_num(7e38), own.nan_to_num(7e38))


def test_every_code_and_scale_decodes_to_the_bit(device):
    cache = mla_cases.all_codes_cache(device)
    raw = cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1)).cpu()
    rows = raw[:, : 64 * 576].reshape(-1, 576)[:, :448]
    pairs = {(int(code), row) for row in range(256) for code in rows[row].unique()}
    assert len(pairs) == 256 * 256
    assert mla_cases.wrong_bits(device) == 0


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize(
    ("rows", "heads", "topk", "extra", "page_size", "extra_page_size"),
    [
        pytest.param(1, 16, 128, 64, 256, 64, id="one row, 256 and 64 a page"),
        pytest.param(3, 5, 40, 70, 128, 2, id="unaligned lists, 128 and 2 a page"),
        pytest.param(2, 33, 33, 0, 64, 64, id="one list, heads over a group"),
        pytest.param(4, 64, 1, 1, 64, 128, id="lists of one"),
        pytest.param(2, 1, 20, 20, 1, 64, id="one head, one row a page"),
    ],
)
def test_matches_the_reference(
    device, rows, heads, topk, extra, page_size, extra_page_size, splits
):
    case = reference.random_case(
        rows, heads, topk, extra, page_size, extra_page_size, pool=512, device=device, seed=rows
    )
    out, lse, want, want_lse = both(case, splits=splits)
    assert relative_error(out, want) < BAR
    assert relative_error(lse, want_lse) < 1e-4


@pytest.mark.parametrize("splits", [1, 2])
def test_a_row_without_cache_rows_gives_zero(device, splits):
    case = reference.random_case(3, 16, 40, 40, pool=256, device=device)
    case.args[3].zero_()
    case.args[2][1] = -1
    case.kwargs["extra_lengths"].zero_()
    out, lse = kernel.sparse_mla_decode(*case.args, **case.kwargs, splits=splits)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


def test_a_row_listed_twice_counts_twice(device):
    case = reference.random_case(1, 16, 2, pool=128, full=True, device=device)
    once = case.args[2].clone()
    once[:, 1] = -1
    twice = once.clone()
    twice[:, 1] = once[:, 0]
    q, cache, _, lengths = case.args
    _, single = kernel.sparse_mla_decode(q, cache, once, lengths)
    _, double = kernel.sparse_mla_decode(q, cache, twice, lengths)
    torch.testing.assert_close(double - single, torch.full_like(single, math.log(2)))


def test_what_the_lists_do_not_name_is_not_read(device):
    """NaN in every cache row but the named ones, and behind each list's length."""
    case = reference.random_case(2, 16, 40, pool=256, full=True, device=device)
    q, cache, index, lengths = case.args
    index[:] = torch.arange(40, device=device, dtype=torch.int32) + 128
    index[:, 20:] = 5
    lengths[:] = 20
    want, _ = reference.sparse_mla_decode(q, cache, index, lengths)
    cache[0] = 0xFF
    out, _ = kernel.sparse_mla_decode(q, cache, index, lengths)
    assert relative_error(out, want) < BAR


@pytest.mark.parametrize("splits", [1, 2])
def test_a_nan_scale_reaches_the_output(device, splits):
    case = reference.random_case(2, 16, 64, pool=128, page_size=64, full=True, device=device)
    q, cache, index, lengths = case.args
    index[:] = torch.arange(64, device=device, dtype=torch.int32)
    index[1] += 64
    pages = cache.as_strided((2, cache.stride(0)), (cache.stride(0), 1))
    pages[0, 64 * 576 + 3] = 255
    out, lse = kernel.sparse_mla_decode(q, cache, index, lengths, splits=splits)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("scale", [0, 1, 60, 127, 139])
def test_scales_at_the_ends_of_their_range(device, scale):
    """2^-127 (subnormal) to 2^12; large ones with q small enough for a soft distribution."""
    case = reference.random_case(2, 16, 64, pool=128, page_size=64, full=True, device=device)
    q, cache, index, lengths = case.args
    pages = cache.as_strided((2, cache.stride(0)), (cache.stride(0), 1))
    pages[:, 64 * 576 : 64 * 584] = scale
    q *= 2.0 ** -max(0, scale - 124)
    want, want_lse = reference.sparse_mla_decode(q, cache, index, lengths)
    out, lse = kernel.sparse_mla_decode(q, cache, index, lengths)
    assert relative_error(out, want) < BAR
    assert relative_error(lse, want_lse) < 1e-3


@pytest.mark.parametrize("config", kernel.CONFIGS[9] + kernel.CONFIGS[12], ids=str)
def test_every_configuration(device, config):
    case = reference.random_case(2, 64, 70, 90, pool=256, device=device)
    out, lse, want, want_lse = both(case, config=config, splits=2)
    assert relative_error(out, want) < BAR
    assert relative_error(lse, want_lse) < 1e-4


def test_the_output_is_written_whole(device, monkeypatch):
    """Memory that comes back full of NaN must not show."""
    case = reference.random_case(3, 20, 40, pool=256, device=device)
    empty = torch.empty

    def poisoned(*args, **kwargs):
        return empty(*args, **kwargs).fill_(math.nan)

    want, _ = reference.sparse_mla_decode(*case.args, **case.kwargs)
    monkeypatch.setattr(torch, "empty", poisoned)
    out, lse = kernel.sparse_mla_decode(*case.args, **case.kwargs, splits=2)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    assert relative_error(out, want) < BAR


def test_no_rows(device):
    case = reference.random_case(1, 16, 8, pool=128, device=device)
    q, cache, index, lengths = case.args
    out, lse = kernel.sparse_mla_decode(q[:0], cache, index[:0], lengths[:0])
    assert out.shape == (0, 16, 512)
    assert lse.shape == (0, 16)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        pytest.param({"q": lambda q: q.float()}, "q:", id="q in float32"),
        pytest.param({"q": lambda q: q[..., :448]}, "q:", id="q of 448"),
        pytest.param({"indices": lambda i: i.long()}, "indices:", id="int64 indices"),
        pytest.param({"lengths": lambda n: n[:1]}, "lengths:", id="a length missing"),
        pytest.param({"cache": lambda c: c.view(-1)[:584]}, "cache:", id="cache without pages"),
        pytest.param({"cache": lambda c: c[..., :528]}, "528", id="rows as V4.1 has them"),
    ],
)
def test_refuses_what_it_does_not_take(device, change, names):
    case = reference.random_case(2, 16, 8, pool=128, page_size=2, device=device)
    args = dict(zip(("q", "cache", "indices", "lengths"), case.args, strict=True))
    for name, alter in change.items():
        args[name] = alter(args[name].contiguous())
    with pytest.raises(ValueError, match=names):
        kernel.sparse_mla_decode(**args)


def test_splits_fill_the_gpu_once():
    small, large = kernel.CONFIGS[9]
    assert kernel.split_count(rows=1, config=small, num_heads=16, tiles=20, sms=132) == 20
    assert kernel.split_count(rows=64, config=small, num_heads=16, tiles=20, sms=132) == 4
    assert kernel.split_count(rows=64, config=large, num_heads=64, tiles=10, sms=132) == 2
    assert kernel.split_count(rows=500, config=large, num_heads=128, tiles=10, sms=132) == 1
    merged = kernel.Config(32, 32, 8, 2, min_splits=2)
    assert kernel.split_count(rows=500, config=merged, num_heads=128, tiles=1, sms=132) == 2


def test_few_rows_take_the_smaller_head_groups():
    small, large = kernel.CONFIGS[9]
    assert kernel.config_for(num_heads=64, rows=1, major=9, sms=132) == small
    assert kernel.config_for(num_heads=64, rows=64, major=9, sms=132) == large
    assert kernel.config_for(num_heads=16, rows=64, major=9, sms=132) == small
    with pytest.raises(UsageError, match=r"8\.x"):
        kernel.config_for(num_heads=16, rows=1, major=8, sms=100)
