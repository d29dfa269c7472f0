"""Ours where it was verified, SGLang's own otherwise, and the log says so once."""

import logging

import pytest
import torch

from dsv4doctor.errors import DoctorError
from dsv4doctor.kernels import verify
from dsv4doctor.kernels.adapters import dense_glue
from dsv4doctor.kernels.adapters.verified import verified


@pytest.fixture
def on_sm120(monkeypatch):
    verified.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (12, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield monkeypatch
    verified.cache_clear()


def test_a_verified_kernel_is_taken(on_sm120):
    asked = []
    on_sm120.setattr(verify, "require_stamp", lambda *args: asked.append(args))
    assert verified("dense_glue", "hc_pre_torch_impl") is dense_glue.hc_pre_torch_impl
    assert asked == [("dense_glue", "cuda:0")]


def test_without_a_stamp_the_log_says_once_what_to_run(on_sm120, caplog):
    def refuse(name, device):
        raise DoctorError(f"kernel {name} was never verified: run `dsv4doctor kernels verify`")

    on_sm120.setattr(verify, "require_stamp", refuse)
    with caplog.at_level(logging.WARNING):
        assert verified("dense_glue", "hc_pre_torch_impl") is None
        assert verified("dense_glue", "hc_pre_torch_impl") is None
    [record] = caplog.records
    assert "dsv4doctor kernels verify" in record.getMessage()
    assert "SGLang's own" in record.getMessage()


def test_off_sm12x_nothing_is_asked_and_nothing_said(on_sm120, caplog):
    on_sm120.setattr(torch.cuda, "get_device_capability", lambda *args: (10, 0))
    on_sm120.setattr(verify, "require_stamp", lambda *args: pytest.fail("asked"))
    assert verified("dense_glue", "hc_pre_torch_impl") is None
    assert caplog.records == []
