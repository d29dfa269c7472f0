"""The dense glue against float64, and the errors that its docstrings state."""

from __future__ import annotations

import pytest
import torch

from dsv4doctor.kernels.dense_glue import bmm_nt, hc_mix
from dsv4doctor.kernels.glue_cases import BMM_BARS, EPS, MIX_BARS
from dsv4doctor.kernels.mla_cases import relative_error
from dsv4doctor.kernels.reference import dense_glue as reference


@pytest.mark.parametrize("terms", [1, 2, 3])
@pytest.mark.parametrize(
    ("rows", "depth", "mixes"), [(1, 1024, 24), (17, 384, 4), (33, 128, 40), (5, 2048, 1)]
)
def test_mix_keeps_the_stated_error(device, rows, depth, mixes, terms):
    x = torch.randn((rows, depth), device=device).bfloat16()
    fn = torch.randn((mixes, depth), device=device)
    error = relative_error(hc_mix(x, fn, EPS, terms), reference.hc_mix(x, fn, EPS))
    assert error < MIX_BARS[terms]
    if terms == 1:
        assert error > MIX_BARS[2]  # one term is not enough: the split does the work


def test_a_mix_row_has_the_same_bits_alone_and_in_a_batch(device):
    x = torch.randn((40, 1024), device=device).bfloat16()
    fn = torch.randn((24, 1024), device=device)
    whole = hc_mix(x, fn, EPS)
    for row in (0, 15, 16, 39):
        assert torch.equal(hc_mix(x[row : row + 1], fn, EPS)[0], whole[row])


def test_mix_takes_rows_of_a_wider_tensor_and_none_at_all(device):
    wide = torch.randn((6, 512), device=device).bfloat16()
    fn = torch.randn((24, 256), device=device)
    out = hc_mix(wide[:, :256], fn, EPS)
    assert relative_error(out, reference.hc_mix(wide[:, :256], fn, EPS)) < MIX_BARS[2]
    assert hc_mix(wide[:0, :256], fn, EPS).shape == (0, 24)


def test_mix_of_zeros_is_zero(device):
    fn = torch.randn((24, 128), device=device)
    out = hc_mix(torch.zeros((2, 128), device=device).bfloat16(), fn, EPS)
    assert torch.equal(out, torch.zeros((2, 24), device=device))


@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 70, 33, 128), (3, 64, 64, 100)])
def test_bmm_keeps_the_stated_error(device, shape, terms):
    batch, rows, cols, depth = shape
    a = torch.randn((batch, rows, depth), device=device)
    b = torch.randn((batch, cols, depth), device=device)
    # A lone product has no others to average with: two operands rounded to bf16, 2**-8 each.
    bar = max(BMM_BARS[terms], 2**-7 if depth == 1 and terms == 1 else 0.0)
    assert relative_error(bmm_nt(a, b, terms), reference.bmm_nt(a, b)) < bar


def test_bmm_of_fp8_values_differs_by_the_order_of_summation_only(device):
    a = torch.randn((2, 50, 128), device=device).to(torch.float8_e4m3fn).float()
    b = torch.randn((2, 64, 128), device=device).to(torch.float8_e4m3fn).float()
    assert relative_error(bmm_nt(a, b), reference.bmm_nt(a, b)) < 1e-6


@pytest.mark.parametrize(
    ("x", "fn", "names"),
    [
        pytest.param(torch.zeros(2, 128), torch.zeros(24, 128), "x:", id="x in float32"),
        pytest.param(
            torch.zeros(2, 128, dtype=torch.bfloat16), torch.zeros(24, 64), "fn:", id="other K"
        ),
        pytest.param(
            torch.zeros(2, 100, dtype=torch.bfloat16), torch.zeros(24, 100), "K 100", id="odd K"
        ),
    ],
)
def test_mix_refuses_what_it_does_not_take(x, fn, names):
    with pytest.raises(ValueError, match=names):
        hc_mix(x, fn, EPS)


def test_bmm_refuses_other_depths():
    with pytest.raises(ValueError, match="want"):
        bmm_nt(torch.zeros(1, 2, 3), torch.zeros(1, 2, 4))
