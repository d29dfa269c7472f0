"""The decoding of 4-bit weights and their scales, against the formats' definitions."""

import pytest
import torch

from dsv4doctor.kernels import moe_cases
from dsv4doctor.kernels.reference import moe as reference

ALL = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("group", "wide"), [(32, True), (32, False), (16, False)], ids=["ue8m0", "ue8m0-small", "e4m3"]
)
def test_every_code_with_every_scale_decodes_to_the_tables_bits(group, wide, device):
    assert moe_cases.decode_mismatches(group, wide, device) == 0


def test_reference_scales_are_those_of_torchs_own_types():
    e8m0 = ALL.view(torch.float8_e8m0fnu).float()
    assert torch.equal(reference.ue8m0_values(ALL)[1:255], e8m0[1:255])
    assert reference.ue8m0_values(ALL)[0] == 2.0**-127
    assert reference.ue8m0_values(ALL)[255].isnan()
    e4m3 = ALL.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(reference.e4m3_values(ALL), e4m3, rtol=0, atol=0, equal_nan=True)


def test_reference_codes_are_e2m1_with_the_low_nibble_first():
    def value(code):
        exponent, mantissa = (code >> 1) & 3, code & 1
        size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        return -size if code & 8 else size

    wanted = [[value(byte & 15), value(byte >> 4)] for byte in range(256)]
    assert reference.e2m1_values(ALL[:, None]).tolist() == wanted
