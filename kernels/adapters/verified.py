"""Ours where it was verified on this GPU, SGLang's own otherwise.

For the operations that SGLang computes rightly on sm_12x, only slower: without a stamp the server
runs as before, and its log says once what to do.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from dsv4doctor.errors import DoctorError
from dsv4doctor.kernels import verify

logger = logging.getLogger(__name__)


@functools.cache
def verified(operation: str, name: str) -> Callable[..., Any] | None:
    """The adapter function `name` of `operation`, or None: the caller's own path is meant.

    None off sm_12x, silently, and without a valid stamp for the current GPU, with a warning.
    Decided once in a process.
    """
    if torch.cuda.get_device_capability()[0] != 12:
        return None
    try:
        verify.require_stamp(operation, f"cuda:{torch.cuda.current_device()}")
    except DoctorError as error:
        logger.warning("dsv4doctor: %s. Until then SGLang's own, slower path is used.", error)
        return None
    module = importlib.import_module(f"dsv4doctor.kernels.adapters.{operation}")
    function: Callable[..., Any] = getattr(module, name)
    return function
