"""The indexer logits against their float32 reference."""

from __future__ import annotations

import math

import pytest
import torch

from dsv4doctor.kernels import indexer_logits as kernel
from dsv4doctor.kernels.mla_cases import relative_error
from dsv4doctor.kernels.reference import indexer_logits as reference

BAR = kernel.META.error_bar


def inputs(device, rows=3, heads=64, width=320, lengths=(0, 70, 320), pool=16, seed=0):
    return reference.random_inputs(rows, heads, width, list(lengths), pool, device, seed)


@pytest.mark.parametrize(
    ("heads", "width", "lengths"),
    [
        pytest.param(64, 320, (0, 1, 63, 64, 65, 320), id="around the page's end"),
        pytest.param(32, 1000, (1000, 999), id="32 heads, width no multiple of a page"),
        pytest.param(20, 128, (5, 0, 0, 0, 0, 0, 0, 128), id="20 heads, empty rows between"),
        pytest.param(1, 64, (64,), id="one head"),
        pytest.param(64, 128, (0, 0), id="nothing there"),
    ],
)
def test_matches_the_reference(device, heads, width, lengths):
    given = inputs(device, len(lengths), heads, width, lengths)
    assert relative_error(kernel.indexer_logits(*given), reference.indexer_logits(*given)) < BAR


@pytest.mark.parametrize("config", [kernel.CONFIGS[9], kernel.CONFIGS[12]], ids=str)
def test_every_configuration(device, config):
    given = inputs(device, 4, 64, 500, (500, 1, 0, 130))
    out = kernel.indexer_logits(*given, config=config)
    assert relative_error(out, reference.indexer_logits(*given)) < BAR


def test_more_rows_than_one_launch_takes(device, monkeypatch):
    monkeypatch.setattr(kernel, "MAX_ROWS", 16)
    lengths = [(37 * row) % 129 for row in range(40)]
    given = inputs(device, 40, 32, 128, lengths)
    buffer = kernel.LogitsBuffer.empty(40, 128, device)
    want = reference.indexer_logits(*given)
    assert relative_error(kernel.indexer_logits(*given, out=buffer), want) < BAR
    assert buffer.filled.tolist() == lengths


def test_fp8_and_scale_extremes(device):
    """The largest and the smallest codes, exact powers of two as scales."""
    q, cache, weights, lengths, table, width = inputs(device, 2, 32, 128, (128, 128))
    q.view(torch.uint8)[0] = 0x7E  # 448
    q.view(torch.uint8)[1] = 0x01  # 2^-9
    flat = cache.view(cache.shape[0], -1)
    flat[:, 8192:] = torch.tensor([2.0**-60], device=device).view(torch.uint8).repeat(64)
    weights.abs_()
    given = (q, cache, weights, lengths, table, width)
    assert relative_error(kernel.indexer_logits(*given), reference.indexer_logits(*given)) < BAR


def test_a_nan_key_gives_nan_at_its_token_only(device):
    q, cache, weights, lengths, table, width = inputs(device, 1, 32, 128, (100,), pool=8)
    table[0, :2] = torch.tensor([3, 4], dtype=torch.int32, device=device)
    cache.view(8, -1)[3, 5 * 128 + 1] = 0x7F
    out = kernel.indexer_logits(q, cache, weights, lengths, table, width)
    assert out[0].isnan().nonzero().flatten().tolist() == [5]


def test_lengths_beyond_the_table_or_the_width_are_cut(device):
    q, cache, weights, lengths, table, _ = inputs(device, 2, 32, 256, (256, 256))
    lengths += 1000
    out = kernel.indexer_logits(q, cache, weights, lengths, table[:, :2].contiguous(), 200)
    assert out[:, :128].isfinite().all()
    assert (out[:, 128:] == -math.inf).all()
    narrow = kernel.indexer_logits(q, cache, weights, lengths, table, 100)
    assert narrow.shape == (2, 100)
    assert narrow.isfinite().all()


def test_a_page_table_whose_columns_are_apart(device):
    q, cache, weights, lengths, table, width = inputs(device)
    apart = table.repeat_interleave(2, 1)[:, ::2]
    assert apart.stride(1) == 2
    out = kernel.indexer_logits(q, cache, weights, lengths, apart, width)
    want = reference.indexer_logits(q, cache, weights, lengths, table, width)
    assert relative_error(out, want) < BAR


def test_a_given_tensor_is_written_whole(device):
    given = inputs(device)
    out = torch.full((3, 320), math.nan, device=device)
    assert kernel.indexer_logits(*given, out=out) is out
    assert relative_error(out, reference.indexer_logits(*given)) < BAR


def test_a_kept_buffer_forgets_the_previous_call(device):
    buffer = kernel.LogitsBuffer.empty(4, 320, device)
    for seed, lengths in enumerate([(320, 320, 320), (0, 70, 319), (100, 0, 1), (320, 5, 0)]):
        given = inputs(device, lengths=lengths, seed=seed)
        out = kernel.indexer_logits(*given, out=buffer)
        assert relative_error(out, reference.indexer_logits(*given)) < BAR
    assert (buffer.logits[3] == -math.inf).all()


def test_a_kept_buffer_writes_no_more_tail_than_was_filled(device):
    """A mark far behind every length survives: the cost does not follow the width."""
    buffer = kernel.LogitsBuffer.empty(3, 320, device)
    buffer.logits[:, 200] = 9.0
    for lengths in [(100, 3, 60), (10, 0, 199)]:
        kernel.indexer_logits(*inputs(device, lengths=lengths), out=buffer)
    assert (buffer.logits[:, 200] == 9.0).all()


@pytest.mark.parametrize("width", [4096, 4095, 9000])
@pytest.mark.parametrize("length", [0, 1, 4095, 4096])
def test_the_fill_at_the_ends_of_its_blocks(device, width, length):
    length = min(length, width)
    given = inputs(device, 1, 1, width, (length,), pool=4)
    out = torch.full((1, width + 8), 7.0, device=device)
    kernel.indexer_logits(*given, out=out[:, :width])
    assert relative_error(out[:, :width], reference.indexer_logits(*given)) < BAR
    assert (out[:, width:] == 7.0).all()


@pytest.mark.parametrize(
    ("place", "alter", "names"),
    [
        pytest.param(0, lambda q: q.float(), "q:", id="q in float32"),
        pytest.param(1, lambda c: c[:, :32], "cache:", id="pages of 32"),
        pytest.param(2, lambda w: w[:, :3], "weights", id="weights of 3 heads"),
        pytest.param(4, lambda t: t.long(), "page_table:", id="int64 table"),
    ],
)
def test_refuses_what_it_does_not_take(device, place, alter, names):
    given = list(inputs(device))
    given[place] = alter(given[place])
    with pytest.raises(ValueError, match=names):
        kernel.indexer_logits(*given)
