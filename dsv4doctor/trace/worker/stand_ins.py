"""Stand-ins for packages that cannot load here, or that dispatch never looks at.

What SGLang does *not* declare and the interpreter does not have stays an
ImportError, as it would be on the real machine, unless nothing on the way catches it.  In the
interpreter that serves, what SGLang declares and is not there is such a package too.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types

from . import no_triton
from .import_probes import inside_try, is_probe
from .recorder import RECORDER, location
from .requirements import IMPORT_NAMES, name_and_pin
from .stand_in_objects import ENUMS, make, tilelang_jit

# Imported for real.  Everything else that is not SGLang or the standard library is stood in for.
REAL = {
    "torch",
    "torchgen",
    "triton",
    "transformers",
    "numpy",
    "packaging",
    "regex",
    "yaml",
    "typing_extensions",
    "typing_inspection",
    "annotated_types",
    "huggingface_hub",
    "safetensors",
    "tokenizers",
    "filelock",
    "tqdm",
    "msgspec",
    "sglang",
    "dsv4doctor",  # a patched SGLang imports its adapters
    "jinja2",
    "markupsafe",
    "fsspec",
    "functorch",
}

_ANY_VERSION = "99.0.0"  # of a package that is declared without a version


class StandInModule(types.ModuleType):
    """A package whose every attribute is a stand-in."""

    __path__ = ()

    def __call__(self, *args, **kwargs):
        if self.__name__ == "tilelang.jit":  # a package and a decorator
            return tilelang_jit(*args, **kwargs)
        raise TypeError(f"module {self.__name__} is not callable")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "tilelang" and name == "jit":
            return tilelang_jit
        if name in ENUMS and self.__name__.startswith("flashinfer"):
            return ENUMS[name]
        if self.__name__ == "triton" and name in no_triton.EXPORTS:
            return no_triton.EXPORTS[name]
        member = make(f"{self.__name__}.{name}")
        setattr(self, name, member)
        return member


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for third-party packages, and for parts of SGLang that are left out.

    declared: import name -> version that SGLang's own metadata asks for (None: any).
    inert: `inert(module_name) -> bool`, the modules that dispatch never looks at.
    bytecode: folder for SGLang's compiled modules; an unpacked wheel has none and may be
        read-only.  Everybody else's lie beside their sources as usual.
    serving: the folder that holds `sglang/` where this interpreter is the one that serves; else
        None, and what SGLang declares is taken to be there.
    """

    def __init__(self, declared, inert, bytecode=None, serving=None):
        self.declared = declared
        self.inert = inert
        self.bytecode = bytecode
        self.sources = None if serving is None else os.path.join(serving, "sglang") + os.sep
        self.fatal = {}  # roots whose import stops the server that this interpreter serves -> where
        self.installed = {}
        self.used = set()  # third-party roots that SGLang imported
        self.absent = set()  # roots that SGLang imports, does not require, and that are not there
        self.refused = set()  # roots that are not there, as SGLang was told

    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        sys.pycache_prefix = self.bytecode if root == "sglang" else None
        if root in sys.stdlib_module_names or root.startswith("_sysconfigdata"):
            return None
        if self.inert(name):
            return self._spec(name)
        if root in REAL and (root != "triton" or self._is_installed(root)):
            return None
        if isinstance(sys.modules.get(root), StandInModule):
            return self._spec(name)
        if not self._asked_by_sglang():
            return None
        declared = root in self.declared
        if self._is_installed(root) or (declared and self.sources is None):
            self.used.add(root)
            return self._spec(name)
        if is_probe() or not self._nobody_catches():
            self.refused.add(root)
            return None
        if self.sources is not None:
            at, caught = self._importing()
            if caught or RECORDER.active:  # one layer fails, and says so itself
                self.refused.add(root)
                return None
            if at is not None:
                self.fatal.setdefault(root, at)
        (self.used if declared else self.absent).add(root)
        return self._spec(name)

    def _spec(self, name):
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = StandInModule(spec.name)
        root = spec.name.partition(".")[0]
        module.__version__ = self._version(root) or self.declared.get(root) or _ANY_VERSION
        return module

    def exec_module(self, module):
        pass

    def missing(self):
        """Third-party packages that SGLang imported, declares, and that are not installed."""
        return sorted(root for root in self.used if not self._is_installed(root))

    def _importing(self):
        """(SGLang's line that imports, whether SGLang catches the error further out).

        The model registry catches it too, and then lacks the model that is to be served.
        """
        at, within_model = None, False
        frame = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(self.sources):
                within_model = within_model or os.path.basename(file).startswith("deepseek_v4")
                registry = within_model and file.endswith(_REGISTRY)
                if at is not None and not registry and inside_try(file, frame.f_lineno):
                    return at, True
                at = at or location(frame)
            frame = frame.f_back
        return at, False

    def is_lacking(self, root):
        """True for an import name that SGLang declares and that is not there."""
        return root in self.declared and not self._is_installed(root)

    def lacked(self, symbol):
        """The root of the package that a kernel needs and that is not there, or None."""
        root = _package_of(symbol)
        is_package = root in self.declared or root in self.absent or root == "triton"
        return root if is_package and not self._is_installed(root) else None

    @staticmethod
    def _version(root):
        """The installed version of the distribution behind an import name."""
        names = [name for name, roots in IMPORT_NAMES.items() if root in roots]
        for name in (root, *names):
            try:
                return importlib.metadata.distribution(name).version
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def _is_installed(self, root):
        if root not in self.installed:
            finders = [finder for finder in sys.meta_path if finder is not self]
            self.installed[root] = any(
                finder.find_spec(root, None) is not None
                for finder in finders
                if hasattr(finder, "find_spec")
            )
        return self.installed[root]

    @staticmethod
    def _asked_by_sglang():
        """Other packages see the interpreter as it is: their own probes decide what they load."""
        frame = sys._getframe(2)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        return frame is not None and "/sglang/" in frame.f_code.co_filename

    @staticmethod
    def _nobody_catches():
        """True when the import stands in no try: SGLang takes the package for granted.

        Only the import statement itself counts.  A try further out, such as the one around every
        file of the model registry, would turn a package that a serving environment always has
        into a model that is quietly missing.
        """
        frame = sys._getframe(2)
        while frame is not None and "/sglang/" not in frame.f_code.co_filename:
            frame = frame.f_back
        return frame is not None and not inside_try(frame.f_code.co_filename, frame.f_lineno)


_REGISTRY = os.path.join("srt", "models", "registry.py")


def _package_of(symbol):
    """The import name of the package that a kernel is of, or that compiles it."""
    compiler, colon, _ = symbol.partition(":")
    if colon:
        return "tvm_ffi" if compiler == "jit" else compiler
    if symbol.startswith("torch.ops.sglang.trtllm"):  # SGLang's own op around FlashInfer's
        return "flashinfer"
    return symbol.removeprefix("torch.ops.").partition(".")[0]


def answer_versions(stand_ins, metadata_text):
    """Make importlib.metadata.version agree with the stand-ins for what is declared but absent."""
    original = importlib.metadata.version
    pins = {}
    for line in metadata_text.splitlines():
        if line.startswith("Requires-Dist:") and "extra ==" not in line:
            name, pin = name_and_pin(line)
            pins[name] = pin

    def version(name):
        try:
            return original(name)
        except importlib.metadata.PackageNotFoundError:
            normalised = name.lower().replace("_", "-")
            if normalised in pins:
                return pins[normalised] or _ANY_VERSION
            root = name.replace("-", "_")
            if root in stand_ins.used and root in stand_ins.declared:
                return stand_ins.declared[root] or _ANY_VERSION
            raise

    importlib.metadata.version = version
