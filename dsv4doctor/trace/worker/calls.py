"""What SGLang called while something ran: native entry points, its own functions, its flags."""

import linecache
import re
import sys

from .layer_watch import FLAG_READERS
from .recorder import RECORDER, location, stack_of

_VARIABLE_AT_IMPORT = re.compile(
    r"^(\w+)\s*=\s*[^=]{0,120}?(?:envs\.(\w+)\.get|environ\.get\(\s*[\"'](\w+)|getenv\(\s*[\"'](\w+))",
    re.M | re.S,
)


_OURS = {
    "triton:dsv4doctor.kernels.indexer_logits._logits_kernel": "indexer_logits",
    "triton:dsv4doctor.kernels.mla_kernels.decode_kernel": "sparse_decode",
    "triton:dsv4doctor.kernels.dense_glue._mix_kernel": "hc_mix",
}
"""The kernels of a patched SGLang's hot paths, by what they compute."""


class Calls:
    """Runs something and keeps, in order, what native code and which SGLang functions it called.

    `native` and `functions` hold {"symbol", "at", "stack"}; the stack is innermost first.
    `flags` holds (flag, stack).
    """

    def __init__(self, function):
        self.functions, self.flags, self.entered = [], [], set()
        self.error = None
        RECORDER.start(stacks=True)
        before = sys.getprofile()
        sys.setprofile(self._on_event)
        try:
            function()
        except Exception as error:
            self.error = error
        finally:
            sys.setprofile(before)
            self.native = RECORDER.stop()

    def _on_event(self, frame, event, argument):
        if event != "call":
            return
        code = frame.f_code
        filename = code.co_filename
        if "/sglang/" not in filename:
            return
        name = code.co_name
        self.entered.add(code)
        if filename.endswith("environ.py") and name == "get":
            variable = getattr(frame.f_locals.get("self"), "name", None)
            if isinstance(variable, str):
                self.flags.append((variable, stack_of(frame.f_back)))
        elif name in FLAG_READERS:
            self.flags.append((FLAG_READERS[name], stack_of(frame.f_back)))
        elif not name.startswith("<"):
            module = frame.f_globals.get("__name__", "")
            self.functions.append(
                {
                    "symbol": f"{module}.{name}",
                    "at": location(frame.f_back),
                    "stack": stack_of(frame.f_back),
                }
            )


def inside(entry, names=None, files=None):
    """The (name, file, line) of an entry's stack that is one of `names` or lies in `files`."""
    for name, file, line in entry["stack"]:
        if (names is None or re.fullmatch(names, name)) and (files is None or file.endswith(files)):
            return {"function": name, "file": file, "line": line}
    return None


def chosen(calls, wanted, helper, window):
    """(kernel, dispatch place): the first native call of a window, else SGLang's own function.

    SGLang's own op around a kernel counts only when nothing was recorded inside it.  A path in
    plain torch operations calls nothing native: there the last of SGLang's functions with a
    fitting name stands for the kernel, when what called it came to its end.
    """
    native = [(entry, place) for entry, place in _fitting(calls.native, wanted, helper, window)]
    launches = [pair for pair in native if not pair[0]["symbol"].startswith("torch.ops.sglang.")]
    for entry, place in launches or native:
        return _kernel(entry), place
    if calls.error is None:
        for entry, place in reversed(list(_fitting(calls.functions, wanted, helper, window))):
            return _kernel(entry), place
    return None, None


def _fitting(entries, wanted, helper, window):
    for entry in entries:
        place = window(entry)
        name = entry["symbol"].rsplit(".", 1)[-1]
        if name in ("forward", "default"):  # its own name comes before
            name = entry["symbol"]
        name = _OURS.get(entry["symbol"], name)
        if place and wanted.search(name) and not helper.search(name):
            yield entry, place


def _kernel(entry):
    return {"symbol": entry["symbol"], "at": entry["at"]}


def maker(kernel):
    """Whose kernel a symbol names, in the words of SGLang's own options."""
    symbol = kernel["symbol"]
    if symbol.startswith("triton:"):
        return "triton"
    if symbol.startswith("tilelang:"):
        return "tilelang"
    if symbol.startswith("jit:"):
        return "sglang CUDA (compiled at run time)"
    if symbol.startswith("torch.ops."):
        return symbol.split(".")[2]
    root = symbol.split(".")[0]
    if root == "sglang":
        return "torch"
    return "flashmla" if "flash_mla" in symbol and root in ("sgl_kernel", "flash_mla") else root


def flags_of(calls, window):
    """What was read inside a window: while it ran, or when the module it lies in was imported."""
    flags = []
    for flag, stack in calls.flags:
        if window({"stack": stack}) and flag not in flags:
            flags.append(flag)
    for code in calls.entered:
        entry = {"stack": [(code.co_name, code.co_filename, code.co_firstlineno)]}
        if window(entry) is None:
            continue
        for flag in _read_at_import(code):
            if flag not in flags:
                flags.append(flag)
    return flags


_AT_IMPORT = {}


def _read_at_import(code):
    """Environment variables behind the module-level names that a function uses."""
    filename = code.co_filename
    if filename not in _AT_IMPORT:
        text = "".join(linecache.getlines(filename))
        _AT_IMPORT[filename] = {
            match[1]: match[2] or match[3] or match[4]
            for match in _VARIABLE_AT_IMPORT.finditer(text)
        }
    names = _AT_IMPORT[filename]
    return [names[name] for name in code.co_names if name in names]


def reread_constants(written):
    """Assign again what SGLang's modules took from environment variables when they were imported.

    A scheduler process imports them after the arguments were resolved, and resolving sets some of
    those variables; here the import came first.
    """
    changed = set(written)
    for name, module in list(sys.modules.items()) if changed else ():
        file = getattr(module, "__file__", None)
        if file is None or not name.startswith(_CONSTANTS_IN):
            continue
        for match in _VARIABLE_AT_IMPORT.finditer("".join(linecache.getlines(file))):
            if changed & {match[2], match[3], match[4]} and match[1] in module.__dict__:
                _assign(module, match[1])


_CONSTANTS_IN = (
    "sglang.srt.models.deepseek_v4",
    "sglang.srt.layers.",
    "sglang.srt.mem_cache.",
    "sglang.kernels.ops.",
)


def _assign(module, name):
    lines = linecache.getlines(module.__file__)
    start = next(i for i, line in enumerate(lines) if re.match(rf"{name}\s*=", line))
    for end in range(start + 1, min(start + 12, len(lines))):
        try:
            code = compile("".join(lines[start:end]), module.__file__, "exec")
        except SyntaxError:  # the statement goes on
            continue
        exec(code, module.__dict__)
        return
