"""Tensors without memory: "cuda" becomes "meta", and meta tensors answer like data.

Value-dependent questions get made-up answers (`.item()` is 1, `allclose` is True): a branch that
hangs on weights' values is not decided by a trace.
"""

import re
import types

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from .recorder import RECORDER, calling_frame
from .stand_in_objects import make

_IS_CUDA = torch.Tensor.is_cuda.__get__
_NUMBERS = {
    torch.Tensor.item,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
}
_FACTORIES = {
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.arange,
    torch.tensor,
    torch.rand,
    torch.randn,
    torch.empty_strided,
}
# Ops whose Python body leads on to the kernel; on meta tensors torch would run only the fake.
_FOLLOWED = re.compile(r"fused_experts|fused_marlin_moe|fused_moe")
_FOLLOWED_IN_PATHS = re.compile(r"gemm|scaled_mm|mla|mhc")
# Namespaces of native extensions.
_NATIVE = {"sgl_kernel", "_C", "_moe_C", "flashinfer", "sgl_flash_mla", "tilelang"}
_BODIES = {}


class Redirect(TorchFunctionMode):
    """Sends tensor creation meant for the GPU to `device` ("cpu" or "meta")."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function == _IS_CUDA:  # each access makes another one
            return True
        is_op = isinstance(function, (OpOverload, OpOverloadPacket))
        if is_op and RECORDER.active:
            followed, result = self._op(function, args, kwargs)
            if followed:
                return result
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if first is not None:
            answered, result = self._answer(function, first, args)
            if answered:
                return result
            if function is torch.Tensor.to:
                args = tuple(self._destination(arg, first) for arg in args)
        self._device_argument(function, first, kwargs)
        result = function(*args, **kwargs)
        if is_op and RECORDER.active and isinstance(result, tuple):
            result = _sized_scales(function, first, result)
        return result

    def _op(self, function, args, kwargs):
        """Record a custom op; run its Python body when it leads on to the kernel."""
        name = str(getattr(function, "_qualified_op_name", function))
        if not name.startswith(("aten", "prim")):
            RECORDER.note("torch.ops." + name.replace("::", "."), calling_frame())
        key = (name if "::" in name else name.replace(".", "::", 1)).split(".")[0]
        body = _BODIES.get(key)
        if body is None:
            return False, None
        if _FOLLOWED.search(name):
            with self:
                return True, body(*args, **kwargs)
        if RECORDER.stacks and _FOLLOWED_IN_PATHS.search(name):
            try:
                with self:
                    return True, body(*args, **kwargs)
            except Exception:  # the op's fake has an answer too
                return False, None
        return False, None

    def _answer(self, function, tensor, args):
        """(True, value) for a question that has no answer without data."""
        meta = tensor.device.type == "meta"
        if function is torch.Tensor.cuda:
            return True, tensor
        if meta and function in (torch.Tensor.cpu, torch.Tensor.pin_memory):
            return True, tensor
        if function in (torch.allclose, torch.equal):
            return True, True
        if not meta:
            return False, None
        if function in _NUMBERS:
            return True, 1
        if function is torch.Tensor.__bool__:
            return True, True
        if function is torch.Tensor.tolist:
            return True, [0] * (tensor.shape[0] if tensor.dim() else 1)
        return False, None

    def _destination(self, argument, tensor):
        if not isinstance(argument, (str, torch.device)):
            return argument
        if str(argument).startswith("cuda") or tensor.device.type == "meta":
            return self.device
        return argument

    def _device_argument(self, function, tensor, kwargs):
        device = kwargs.get("device")
        if device is not None:
            name = str(device)
            stays = tensor is not None and tensor.device.type == "meta" and self.device == "meta"
            if name.startswith("cuda") or (name == "cpu" and stays):
                kwargs["device"] = self.device
        elif function in _FACTORIES and self.device == "meta" and RECORDER.active:
            kwargs["device"] = "meta"
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False


def _sized_scales(function, tensor, result):
    """Quantize ops' fakes may give a one-element scale; give it the block count of MX formats."""
    if tensor is None or tensor.dim() != 2 or "quantize" not in str(function):
        return result
    blocks = tensor.shape[0] * (tensor.shape[1] // 32)
    return tuple(
        torch.empty(blocks, dtype=torch.uint8, device="meta")
        if isinstance(part, torch.Tensor) and part.numel() == 1
        else part
        for part in result
    )


def prepare():
    """Keep custom ops' Python bodies, and let missing native ops be recorded."""
    library_impl = torch.library.Library.impl

    def impl(self, op_name, function, *args, **kwargs):
        key = args[0] if args else kwargs.get("dispatch_key", "")
        if (
            isinstance(op_name, str)
            and isinstance(function, types.FunctionType)
            and key in ("CUDA", "CPU", "", "CompositeExplicitAutograd")
        ):
            _BODIES[f"{self.ns}::{op_name.split('::')[-1]}"] = function
        return library_impl(self, op_name, function, *args, **kwargs)

    torch.library.Library.impl = impl

    register_fake = torch.library.register_fake

    def lenient_register_fake(op, function=None, **kwargs):
        if function is None:
            return lambda decorated: lenient_register_fake(op, decorated, **kwargs) or decorated
        try:
            return register_fake(op, function, **kwargs)
        except RuntimeError:  # the op itself is native and absent here
            return function

    torch.library.register_fake = lenient_register_fake

    namespace_getattr = torch._ops._OpNamespace.__getattr__

    def getattr_or_stand_in(self, name):
        try:
            return namespace_getattr(self, name)
        except AttributeError:
            if self.name in _NATIVE and not name.startswith("__"):
                return make(f"torch.ops.{self.name}.{name}")
            raise

    torch._ops._OpNamespace.__getattr__ = getattr_or_stand_in

    from_dlpack = torch.from_dlpack

    def from_dlpack_or_meta(tensor, **kwargs):
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
            return tensor
        return from_dlpack(tensor, **kwargs)

    torch.from_dlpack = from_dlpack_or_meta
