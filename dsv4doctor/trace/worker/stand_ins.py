"""Stand-ins for packages that cannot load here, or that dispatch never looks at.

A stand-in imports, can be subclassed, decorated with, entered, compared and called.  While a
forward is being traced, a call on one is recorded and returns tensors of the shape of its first
tensor argument.  What SGLang does *not* declare and the interpreter does not have stays an
ImportError, as it would be on the real machine, unless nothing on the way catches it.  In the
interpreter that serves, what SGLang declares and is not there is such a package too.
"""

import dis
import enum
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import linecache
import os
import re
import sys
import types

from . import no_triton
from .recorder import RECORDER, calling_frame, location

# Import names of distributions whose name does not say.
IMPORT_NAMES = {
    "apache-tvm-ffi": ("tvm_ffi",),
    "av": ("av",),
    "cuda-python": ("cuda",),
    "cuda-tile": ("cuda",),
    "decord2": ("decord",),
    "flash-attn-4": ("flash_attn",),
    "flashinfer-python": ("flashinfer",),
    "ipython": ("IPython",),
    "humming-kernels": ("humming",),
    "nvidia-cutlass-dsl": ("cutlass",),
    "nvidia-ml-py": ("pynvml",),
    "nvshmem4py-cu13": ("nvshmem",),
    "pillow": ("PIL",),
    "python-dateutil": ("dateutil",),
    "python-multipart": ("multipart",),
    "pyzmq": ("zmq",),
    "quack-kernels": ("quack",),
    "sgl-deep-ep": ("deep_ep",),
    "sgl-deep-gemm": ("deep_gemm",),
    "sgl-flash-mla": ("flash_mla",),
    "sglang-kernel": ("sgl_kernel",),
    "sgl-kernel": ("sgl_kernel",),
    "tilelang": ("tilelang", "tvm"),
}

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

# SGLang looks members of these up by value, so a stand-in has to be a real enum.  The numbers
# are FlashInfer 0.7.2's (flashinfer/tllm_enums.py); they are only ever given back to it.
_ENUMS = {
    "ActivationType": enum.IntEnum(
        "ActivationType",
        "Gelu Relu Silu Swiglu Geglu SwigluBias Relu2 SwigluStep GegluTanh Identity Situ "
        "InvalidType ClampedRelu2",
        start=0,
    ),
}


class StandInType(type):
    """A class that stands for whatever a package exports under a name."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        member = make(f"{cls.symbol}.{name}")
        setattr(cls, name, member)
        return member

    def __call__(cls, *args, **kwargs):
        if cls.__dict__.get("is_stand_in") is not True:  # a class of SGLang's that derives from one
            return type.__call__(cls, *args, **kwargs)
        if not RECORDER.active:
            decorated = _decorated(args, kwargs)
            return decorated if decorated is not None else type.__call__(cls)
        result = called(cls.symbol, args, kwargs)
        return type.__call__(cls) if result is None else result

    def __new__(metaclass, name, bases, namespace, **kwargs):
        return super().__new__(metaclass, name, bases, namespace)

    def __init__(cls, name, bases, namespace, **kwargs):
        super().__init__(name, bases, namespace)

    def __instancecheck__(cls, instance):
        """What a package's function gives may be any of its classes."""
        if type.__instancecheck__(cls, instance):
            return True
        given = type(instance)
        both = given.__dict__.get("is_stand_in") and cls.__dict__.get("is_stand_in")
        return bool(both) and given.symbol.split(".")[0] == cls.symbol.split(".")[0]

    def __repr__(cls):
        return f"<StandIn {cls.symbol}>"

    def __int__(cls):
        return 0

    def __index__(cls):
        return 0

    def __bool__(cls):
        return True

    def __iter__(cls):
        return iter(())

    def __len__(cls):
        return 0

    def __contains__(cls, item):
        return False

    def __getitem__(cls, item):
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __add__ = __radd__ = __or__
    __truediv__ = __floordiv__ = __or__  # psutil's bytes in other units

    def __lt__(cls, other):
        return False

    def __le__(cls, other):
        return False

    def __gt__(cls, other):
        return True

    def __ge__(cls, other):
        return True


class _Instance:
    """What a call on a stand-in gives outside a recorded forward."""

    def __init_subclass__(cls, **kwargs):
        """Whatever a real base class would take (TypedDict's total, pydantic's config)."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        if not RECORDER.active:
            return _decorated(args, kwargs)
        result = called(type(self).symbol, args, kwargs)
        return self if result is None else result

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return make(f"{type(self).symbol}.{name}")

    def __getitem__(self, item):
        return self

    def __setitem__(self, item, value):
        pass

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    def __int__(self):
        return 0

    __index__ = __int__

    def __bool__(self):
        return True

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


_RAISED = re.compile(r"(Error|Exception|Timeout|Exceeded|NotFound)$")


def make(symbol):
    """A stand-in for `symbol`, a dotted name; an exception class for one that is raised."""
    if _RAISED.search(symbol):
        return type(symbol.rsplit(".", 1)[-1], (Exception,), {"symbol": symbol})
    return StandInType(
        symbol.rsplit(".", 1)[-1], (_Instance,), {"symbol": symbol, "is_stand_in": True}
    )


def _decorated(args, kwargs):
    return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else None


# ------------------------------------------------------------------------ recorded calls


def called(symbol, args, kwargs):
    """Record a native call and make up its result from the tensors it was given."""
    import torch

    frame = calling_frame(3)
    RECORDER.note(symbol, frame)
    tensors = list(_tensors([*args, *kwargs.values()], torch.Tensor))
    count = _unpacked(frame)
    if count > 1:
        return tuple(_result(symbol, tensors, torch) for _ in range(count))
    return _result(symbol, tensors, torch)


def _result(symbol, tensors, torch):
    name = symbol.rsplit(".", 1)[-1]
    if name.endswith(("indices", "indices_with_cache")):
        return torch.arange(tensors[0].shape[0], device="meta") if tensors else None
    if "workspace" in name and not tensors:
        return 1 << 20
    if name == "get_num_sms":
        return torch.cuda.get_device_properties(0).multi_processor_count
    if "mk_alignment" in name:  # rows per block of DeepGEMM's grouped products
        return 128
    if not tensors:
        return None
    if "scale_interleave" in name:  # FlashInfer gives the swizzled scales back flat
        return torch.empty(tensors[0].numel(), dtype=tensors[0].dtype, device="meta")
    # DeepGEMM packs four exponents into an integer.
    if "packed_ue8m0" in name or name == "transform_sf_into_required_layout":
        *rows, columns = tensors[0].shape
        return torch.empty(*rows, (columns + 3) // 4, dtype=torch.int32, device="meta")
    return torch.empty_like(tensors[0], device="meta")


def _tensors(values, tensor_type):
    for value in values:
        if isinstance(value, tensor_type):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value, tensor_type)


_UNPACKED = {}


def _unpacked(frame):
    """How many values the calling statement unpacks the result into."""
    if frame is None:
        return 1
    key = (frame.f_code, frame.f_lasti)
    if key not in _UNPACKED:
        _UNPACKED[key] = _read_unpacked(frame)
    return _UNPACKED[key]


def _read_unpacked(frame):
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset <= frame.f_lasti:
            continue
        if instruction.opname in ("CACHE", "NOP", "EXTENDED_ARG"):
            continue
        return instruction.argval if instruction.opname == "UNPACK_SEQUENCE" else 1
    return 1


class TilelangKernel:
    """What `tilelang.jit` makes of a function: a call is recorded, and its body never runs."""

    def __init__(self, function):
        self.__name__ = function.__name__
        self.symbol = f"tilelang:{function.__module__}.{function.__name__}"

    def __call__(self, *args, **kwargs):
        """The kernel itself for a call that only gives sizes, as for a factory of kernels."""
        if not RECORDER.active:
            return self
        result = called(self.symbol, args, kwargs)
        return self if result is None else result


def tilelang_jit(function=None, **options):
    return TilelangKernel if function is None else TilelangKernel(function)


# ------------------------------------------------------------------------ modules


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
        if name in _ENUMS and self.__name__.startswith("flashinfer"):
            return _ENUMS[name]
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
        if _is_probe() or not self._nobody_catches():
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
                if at is not None and not registry and _inside_try(file, frame.f_lineno):
                    return at, True
                at = at or location(frame)
            frame = frame.f_back
        return at, False

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
        return frame is not None and not _inside_try(frame.f_code.co_filename, frame.f_lineno)


_REGISTRY = os.path.join("srt", "models", "registry.py")


def _package_of(symbol):
    """The import name of the package that a kernel is of, or that compiles it."""
    compiler, colon, _ = symbol.partition(":")
    if colon:
        return "tvm_ffi" if compiler == "jit" else compiler
    if symbol.startswith("torch.ops.sglang.trtllm"):  # SGLang's own op around FlashInfer's
        return "flashinfer"
    return symbol.removeprefix("torch.ops.").partition(".")[0]


def _is_probe():
    """True inside importlib.util.find_spec: the caller asks, and handles a no."""
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        if frame.f_code.co_name == "find_spec" and "util" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _inside_try(filename, line):
    """True when `line` of a source file stands in a try that can catch an ImportError.

    Read by indentation: parsing SGLang's largest files would cost more than importing them.
    """
    lines = linecache.getlines(filename)
    if not 0 < line <= len(lines):
        return False
    indentation = _indentation(lines[line - 1])
    for above in range(line - 2, -1, -1):
        text = lines[above].strip()
        depth = _indentation(lines[above])
        if not text or text.startswith("#") or depth >= indentation:
            continue
        indentation = depth
        if text.startswith("try:") and _catches_import_error(lines, above, depth):
            return True
    return False


def _catches_import_error(lines, start, depth):
    """True when the try at `start` has an except clause that an ImportError reaches."""
    for text in lines[start + 1 :]:
        stripped = text.strip()
        if not stripped or _indentation(text) > depth:
            continue
        if not stripped.startswith("except"):
            return False
        if _IMPORT_ERRORS.search(stripped):
            return True
    return False


_IMPORT_ERRORS = re.compile(
    r"except\s*:|\b(ImportError|ModuleNotFoundError|Exception|BaseException)\b"
)


def _indentation(text):
    return len(text) - len(text.lstrip())


def usual_packages():
    """Import names that every release requires, for a tree whose requirements cannot be read."""
    usual = {"deep_gemm", "torchao", "xgrammar", "compressed_tensors", "einops", "psutil", "orjson"}
    return usual.union(*IMPORT_NAMES.values())


def declared_packages(metadata_text):
    """Import name -> pinned version of what a METADATA text requires without extras.

    A package that is not pinned maps to the lowest version allowed, or None.
    """
    declared = {}
    for line in metadata_text.splitlines():
        if line.startswith("Requires-Dist:") and "extra ==" not in line:
            name, pin = _name_and_pin(line)
            for root in IMPORT_NAMES.get(name, (name.replace("-", "_"),)):
                declared[root] = pin
    return declared


def _name_and_pin(line):
    """("flashinfer-python", "0.6.12") of a Requires-Dist line; the pin is the lowest version."""
    requirement = line.split(":", 1)[1].split(";")[0].strip()
    name = re.split(r"[<>=!;\[ (~]", requirement)[0].lower().replace("_", "-")
    pin = re.search(r"[=~>]=\s*([0-9][0-9A-Za-z.]*)", requirement)
    return name, pin.group(1) if pin else None


def requirements_by_root(metadata_text):
    """Import name -> the requirement, without extras and markers, that brings it."""
    found = {}
    for line in metadata_text.splitlines():
        if line.startswith("Requires-Dist:") and "extra ==" not in line:
            requirement = line.split(":", 1)[1].split(";")[0].strip()
            name, _ = _name_and_pin(line)
            for root in IMPORT_NAMES.get(name, (name.replace("-", "_"),)):
                found.setdefault(root, re.sub(r"\[.*?\]", "", requirement))
    return found


def answer_versions(stand_ins, metadata_text):
    """Make importlib.metadata.version agree with the stand-ins for what is declared but absent."""
    original = importlib.metadata.version
    pins = {}
    for line in metadata_text.splitlines():
        if line.startswith("Requires-Dist:") and "extra ==" not in line:
            name, pin = _name_and_pin(line)
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
