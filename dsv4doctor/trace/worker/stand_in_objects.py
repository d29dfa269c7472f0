"""What a stand-in's members are: subclassed, decorated with, entered, compared and called at will.

While a forward is being traced, a call is recorded and returns tensors of the shape of its first
tensor argument.
"""

import dis
import enum
import re

from .recorder import RECORDER, calling_frame

# SGLang looks members of these up by value, so a stand-in has to be a real enum.  The numbers
# are FlashInfer 0.7.2's (flashinfer/tllm_enums.py); they are only ever given back to it.
ENUMS = {
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
