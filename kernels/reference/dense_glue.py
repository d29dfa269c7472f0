"""References of the dense glue, in float64 where that is what accuracy is measured against."""

from __future__ import annotations

import torch


def hc_mix(x, fn, eps):
    """float64 [rows, mixes]."""
    wide = x.double()
    return wide @ fn.double().T * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def bmm_nt(a, b):
    """float64 [batch, M, N]."""
    return a.double() @ b.double().transpose(1, 2)
