"""What a server really calls while one function runs, seen by Python's profiling hook.

The same data as a trace records with its stand-ins: native entry points by name, SGLang's own
functions, the flags that were read.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, ClassVar

from dsv4doctor.recording.plugin import complain
from dsv4doctor.trace.worker.calls import Calls
from dsv4doctor.trace.worker.recorder import RECORDER

NATIVE = frozenset(
    (
        *("flashinfer", "sgl_kernel", "deep_gemm", "deep_gemm_cpp", "flash_mla", "flash_attn"),
        *("tilelang", "humming", "cutlass", "quack"),
    )
)
"""Packages whose functions are entry points into native code."""
_PLUMBING = frozenset({"wrapper", "wrapped", "inner", "decorator", "decorated", "_wrapper"})
"""Names of the functions that decorators leave in the place of what they decorate."""


class ServerCalls(Calls):  # type: ignore[misc]
    """Runs a function under the profiling hook; see Calls."""

    jits: ClassVar[dict[Any, str]] = {}
    """What makes a module compiled at run time -> "jit:" and its names; for the whole process."""

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        try:
            self._look(frame, event, argument)
        except Exception as error:  # it would be raised in the server's own code
            sys.setprofile(None)
            complain(error)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        super()._on_event(frame, event, argument)
        if event == "call":
            self._python(frame)
        elif event == "c_call":
            self._builtin(frame, argument)

    def _python(self, frame: FrameType) -> None:
        code = frame.f_code
        name, file = code.co_name, code.co_filename
        if name == "run" and file.endswith("triton/runtime/jit.py"):
            self._note(_triton(frame.f_locals.get("self")), frame)
        elif name == "__call__" and file.endswith("torch/_ops.py"):
            self._note(_op(frame.f_locals.get("self")), frame)
        elif name == "__call__" and "/tilelang/jit/" in file:
            self._note(_tilelang(frame.f_locals.get("self")), frame)
        elif name == "load_jit" and "/sglang/" in file and frame.f_back is not None:
            words = [word for word in frame.f_locals.get("args", ()) if isinstance(word, str)]
            self.jits[frame.f_back.f_code] = "jit:" + ".".join(words)[:120]
        elif name == "wrapper" and "/sglang/" in file:
            maker = getattr(frame.f_locals.get("fn"), "__code__", None)
            self._note(self.jits.get(maker), frame)
        elif name not in _PLUMBING and not name.startswith(("<", "__")):
            module = frame.f_globals.get("__name__", "")
            if module.partition(".")[0] in NATIVE and _is_entry(frame):
                self._note(f"{module}.{_as_called(frame)}", frame)

    def _builtin(self, frame: FrameType, function: Any) -> None:
        module = getattr(function, "__module__", None) or ""
        if module.partition(".")[0] in NATIVE and _is_entry(frame, itself=True):
            self._note(f"{module}.{function.__name__}", frame)

    @staticmethod
    def _note(symbol: str | None, frame: FrameType) -> None:
        if symbol is not None:
            RECORDER.note(symbol, _sglang_frame(frame))


def _is_entry(frame: FrameType, itself: bool = False) -> bool:
    """True when SGLang called this function, with nothing but decorators in between."""
    above = frame if itself else frame.f_back
    while above is not None and "/sglang/" not in above.f_code.co_filename:
        if above.f_code.co_name not in _PLUMBING:
            return False
        above = above.f_back
    return above is not None


def _sglang_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and "/sglang/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame


def _as_called(frame: FrameType) -> str:
    """The function's name as SGLang wrote it, which a trace has too.

    DeepGEMM's fp8_gemm_nt is another name of its fp8_fp4_gemm_nt.
    """
    code, caller = frame.f_code, _sglang_frame(frame)
    written = () if caller is None else caller.f_code.co_names
    if code.co_name in written:
        return code.co_name
    for name in written:
        if getattr(frame.f_globals.get(name), "__code__", None) is code:
            return name
    return code.co_name


def _triton(function: Any) -> str | None:
    inner = getattr(function, "fn", None)
    if inner is None:
        return None
    return f"triton:{inner.__module__}.{inner.__name__}"


def _tilelang(kernel: Any) -> str | None:
    function = getattr(kernel, "func", None)
    # TileLang 0.1.8 wraps it once more, in an object with TileLang's own __module__
    function = getattr(function, "orig_func", function)
    if function is None or not hasattr(function, "__name__"):
        return None
    return f"tilelang:{function.__module__}.{function.__name__}"


def _op(packet: Any) -> str | None:
    name = getattr(packet, "_qualified_op_name", None)
    if name is None or name.startswith(("aten", "prim", "_")):
        return None
    return "torch.ops." + str(name).replace("::", ".")


def profiled() -> bool:
    """True where somebody else has the profiling hook: it is left to them."""
    return sys.getprofile() is not None
