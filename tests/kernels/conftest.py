"""Kernel tests: on the GPU where there is one, through Triton's interpreter elsewhere."""

from __future__ import annotations

import os

import numpy as np
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


def _convert_floats_as_the_hardware_does() -> None:
    """Conversions through torch: the interpreter's own turn E4M3 NaN into 480, round halves away
    from zero and lose bf16 subnormals."""
    from triton.runtime import interpreter

    types = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "bf16": torch.bfloat16}
    types |= {"fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
    original = interpreter._convert_float

    def convert(array, source, target, rounding_mode):
        if str(source) not in types or str(target) not in types:
            return original(array, source, target, rounding_mode)
        value = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        value = value.view(types[str(source)]).to(types[str(target)])
        bits = value.view(torch.uint8).numpy()
        return bits.view(f"uint{target.primitive_bitwidth}").reshape(array.shape)

    interpreter._convert_float = convert


def _multiply_bf16_as_numbers() -> None:
    """`tl.dot` of bf16 operands in float32: the interpreter multiplies their bit patterns."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def widened(operand):
        if str(operand.dtype.scalar) != "bf16":
            return operand
        wide = interpreter._convert_float(operand.data, tl.bfloat16, tl.float32, None)
        return interpreter.TensorHandle(wide.view(np.float32), tl.float32)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return original(self, widened(a), widened(b), d, input_precision, max_num_imprecise_acc)

    interpreter.InterpreterBuilder.create_dot = create_dot


_accept_arrays_of_one_element()
_convert_floats_as_the_hardware_does()
_multiply_bf16_as_numbers()


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Every test sees the numbers that it saw before, alone or among others."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run in this session."""
    return "cuda" if torch.cuda.is_available() else "cpu"
