"""The worker's main: confine, simulate the GPU, import SGLang once, fork for every launch.

Reads one request (JSON) from the file that it is given; writes events, one JSON object a line, to
the file descriptor it is told.  Whatever the traced code prints goes to standard error.
"""

import gc
import importlib
import json
import os
import re
import signal
import site
import sys
import sysconfig
import time
import traceback
import warnings

from . import confinement, lean, ourselves, requirements, stand_ins
from .import_probes import imports_of
from .recorder import RECORDER, calling_frame
from .stand_in_objects import make


def main():
    confinement.die_with_parent()
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    events = os.fdopen(int(request["events_fd"]), "w", buffering=1)
    os.dup2(2, 1)  # SGLang's prints must not reach whoever reads our standard output
    try:
        Worker(request, events).run()
    except BaseException as error:
        emit(events, event="failure", job=None, message=describe(error), trace=_trace())
        events.flush()
        os._exit(1)
    events.flush()
    os._exit(0)  # no atexit handlers of the traced code


def emit(events, **fields):
    events.write(json.dumps(fields) + "\n")


def describe(error):
    return f"{type(error).__name__}: {error}"[:2000]


def _trace():
    return traceback.format_exc()[-6000:]


_LAUNCHED = (
    "entrypoints/engine.py",
    "entrypoints/http_server.py",
    "managers/scheduler.py",
    "managers/tokenizer_manager.py",
    "managers/detokenizer_manager.py",
)
"""What a server imports beside what is traced, where the release has it; read, and never run."""


class Worker:
    """One SGLang tree on one simulated GPU, with one environment."""

    def __init__(self, request, events):
        self.request = request
        self.events = events
        self.started = time.perf_counter()
        self.timings = {}

    def run(self):
        request = self.request
        warnings.filterwarnings("ignore")
        gc.disable()  # everything imported stays; collecting it costs a tenth of the time
        self._confine()
        self._install_stand_ins()
        self._phase("importing torch")
        self._import_torch()
        self._phase("importing SGLang")
        self._import_sglang()
        self._import_modules(request.get("modules", ()))
        self._mark("imports")
        for job in request["jobs"]:
            self._fork(job)

    def _phase(self, text):
        emit(self.events, event="phase", text=text)

    def _mark(self, name):
        self.timings[name] = round(time.perf_counter() - self.started, 3)

    def _confine(self):
        request = self.request
        caches = [request["bytecode"]] if request.get("bytecode") else []
        sys.dont_write_bytecode = not caches
        lean.keep_whole_bytecode_only()
        confinement.confine(request["scratch"], caches)
        if request.get("memory_bytes"):
            confinement.limit_memory(request["memory_bytes"])
        if not self.request.get("verbose"):
            import logging

            logging.disable(logging.CRITICAL)

    def _install_stand_ins(self):
        request = self.request
        metadata = request["metadata"]
        declared = requirements.declared_packages(metadata)
        self.assumed = not declared
        if self.assumed:
            declared = dict.fromkeys(requirements.usual_packages())
        arguments = [argument for job in request["jobs"] for argument in job["arguments"]]
        inert = lean.inert_for(request["tree"], arguments, request.get("whole", False))
        self.inert = inert
        serving = request["tree"] if request["serving"] else None
        self.stand_ins = stand_ins.StandIns(declared, inert, request.get("bytecode"), serving)
        self.requirements = requirements.requirements_by_root(metadata)
        self._add_own_folders()
        sys.path.insert(0, request["tree"])
        sys.meta_path.insert(0, self.stand_ins)
        ourselves.lend(request.get("dsv4doctor"))
        stand_ins.answer_versions(self.stand_ins, metadata)

    def _add_own_folders(self):
        """Find what the server finds beyond this interpreter's own packages, behind those."""
        sys.path += [folder for folder in self.request["python_path"] if folder not in sys.path]
        base = self.request["user_base"]
        if base and not _is_isolated():
            folder = sysconfig.get_path("purelib", "posix_user", {"userbase": base})
            if os.path.isdir(folder):
                site.addsitedir(folder)

    def _import_torch(self):
        import torch

        from . import gpu, tensors

        torch.set_num_threads(1)
        if not self.request.get("whole"):
            lean.without_compiler()
        capability = tuple(self.request["capability"])
        known = self.request.get("gpu") or {}
        board = gpu.Board(capability, known.get("name"), known.get("memory_bytes"))
        gpu.simulate(board, known.get("count") or 8)
        tensors.prepare()

        def launched(symbol, args):
            frame = calling_frame(3)
            RECORDER.note(symbol, frame)

        gpu.simulate_triton(board, launched)
        import transformers  # noqa: F401

        from . import hugging_face

        hugging_face.prepare()
        lean.scan_transformers_once()

    def _import_sglang(self):
        from .tensors import Redirect

        lean.without_other_models()
        with Redirect("cpu"):
            import sglang.srt.server_args
            from sglang.srt.model_loader import loader  # noqa: F401
            from sglang.srt.models.registry import ModelRegistry

            if "DeepseekV4ForCausalLM" not in ModelRegistry.get_supported_archs():
                # The registry swallows a failed import: let it be seen, as the trace's own failure.
                import sglang.srt.models.deepseek_v4  # noqa: F401

                raise ImportError("SGLang's model registry has no DeepseekV4ForCausalLM")
        lean.without_token_hashes()
        self._record_jit_kernels()

    def _import_modules(self, names):
        """Import each, or compile the ones that a trace leaves out; an error names its module."""
        from .tensors import Redirect

        fatal, self.stand_ins.fatal = self.stand_ins.fatal, {}  # a server need not import them
        for name in names:
            try:
                if self.inert(name):
                    path = os.path.join(self.request["tree"], *name.split("."))
                    path = path + ".py" if os.path.isfile(path + ".py") else path + "/__init__.py"
                    with open(path, "rb") as source:
                        compile(source.read(), path, "exec", dont_inherit=True)
                else:
                    with Redirect("cpu"):
                        importlib.import_module(name)
            except Exception as error:
                raise ImportError(f"{name}: {describe(error)}") from error
        self.stand_ins.fatal = fatal

    @staticmethod
    def _record_jit_kernels():
        """SGLang compiles some CUDA kernels at run time: record them instead."""

        def recorded(*args, **kwargs):
            names = [str(arg) for arg in args if isinstance(arg, str)]
            return make("jit:" + ".".join(names)[:120])

        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("sglang."):
                for name in ("load_jit", "load_inline"):
                    if name in module.__dict__:
                        setattr(module, name, recorded)

    def _fork(self, job):
        """Trace one launch in a child; a child that dies takes only its own result along."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            confinement.die_with_parent()
            os.close(read)
            status = self._child(job, write)
            os._exit(status)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        if text and os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            self.events.write(text)
        else:
            emit(self.events, event="failure", job=job["id"], message=_death(status), trace=None)

    def _leniencies(self):
        """What stood in for something that is missing where the server is to run."""
        missing = self.stand_ins.missing() if self.request["serving"] else []
        assumed = (
            "nothing beside this SGLang tells what it requires: the usual packages are assumed"
        )
        return [
            *([assumed] if self.assumed else []),
            *(f"{root} is required by SGLang and not installed, stood in for" for root in missing),
            *(
                f"{root} is not installed; SGLang imports it, stood in for"
                for root in sorted(self.stand_ins.absent)
            ),
        ]

    def _missing(self):
        """What SGLang imports as it starts, with nothing that catches it, and is not there."""
        fatal = dict(self.stand_ins.fatal)
        for name in _LAUNCHED if self.request["serving"] else ():
            file = os.path.join(self.request["tree"], "sglang", "srt", *name.split("/"))
            for root, line in imports_of(file):
                if self.stand_ins.is_lacking(root):
                    at = {"file": file, "line": line, "function": "<module>"}
                    fatal.setdefault(root, at)
        return [
            {"package": root, "requirement": self.requirements.get(root), "at": at}
            for root, at in fatal.items()
        ]

    def refused(self):
        """What SGLang requires, asked for and did not get, as requirements."""
        known = self.requirements if self.request["serving"] else {}
        return sorted({known[root] for root in self.stand_ins.refused if root in known})

    def _qualify(self, result):
        """A kernel of a package that is not there is no promise, unless SGLang requires it and
        another machine serves."""
        if self.request["serving"]:
            for layer in result["layers"]:
                layer["lacks"] = self._lack(layer["kernel"])
        for path in result["paths"]:
            said = self._lack(path["kernel"])
            path["reason"] = "; ".join(filter(None, (path["reason"], said)))

    def _lack(self, kernel):
        """That the kernel's package is not there, in words; None: nothing to say."""
        if kernel is None:
            return None
        if self.request["serving"]:
            root = self.stand_ins.lacked(kernel["symbol"])
            if root is None:
                return None
            wanted = self.requirements.get(root)
            install = f" (pip install '{wanted}')" if wanted else ", and SGLang does not require it"
            return f"it takes {root}, which is not installed here{install}"
        root = kernel["symbol"].partition(".")[0]
        if root in self.stand_ins.absent:
            return f"{root} is not installed here, and SGLang does not require it"
        return None

    def _child(self, job, write):
        from . import forward
        from .launch import trace_launch

        forward.BORROWED = not self.request["serving"]
        with os.fdopen(write, "w") as pipe:
            try:
                result = trace_launch(job, self._phase)
                result["timings"] = {**self.timings, **result["timings"]}
                result["leniencies"] += self._leniencies()
                result["missing"], result["refused"] = self._missing(), self.refused()
                self._qualify(result)
                line = {"event": "result", "job": job["id"], "result": result}
            except BaseException as error:
                line = {
                    "event": "failure",
                    "job": job["id"],
                    "message": describe(error),
                    "trace": _trace(),
                }
            pipe.write(json.dumps(line) + "\n")
        return 0


def _is_isolated():
    """True in a virtual environment that sees neither the system's packages nor the user's."""
    if sys.prefix == sys.base_prefix:
        return False
    try:
        with open(os.path.join(sys.prefix, "pyvenv.cfg"), encoding="utf-8") as file:
            return not re.search(r"(?im)^include-system-site-packages\s*=\s*true", file.read())
    except OSError:
        return True


def _death(status):
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"the trace was killed by {signal.Signals(number).name}"
    return f"the trace ended early (exit {os.WEXITSTATUS(status)})"
