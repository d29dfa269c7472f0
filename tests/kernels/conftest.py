"""Kernel tests: on the GPU where there is one, through Triton's interpreter elsewhere."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined, so before any kernel file is imported.
    os.environ["TRITON_INTERPRET"] = "1"


def _accept_arrays_of_one_element() -> None:
    """Lets the interpreter use `range(tensor)` with NumPy 2.4 and later.

    It calls int() on an array of shape (1,), which NumPy no longer takes.
    """
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


_accept_arrays_of_one_element()


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run in this session."""
    return "cuda" if torch.cuda.is_available() else "cpu"
