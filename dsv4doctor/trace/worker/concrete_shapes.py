"""torch.fx.experimental.symbolic_shapes for sizes that are plain integers.

A trace has no symbolic sizes, so every question about one has its plain answer, and importing the
real module (with sympy, a third of torch's own import time) is not worth it.  What is not listed
here raises when called: an error in the trace, never a silent wrong answer.
"""

import importlib.machinery
import sys
import types

NAME = "torch.fx.experimental.symbolic_shapes"


def _truth(value, *args, **kwargs):
    return bool(value)


def _same(value, *args, **kwargs):
    return value


def _nothing(*args, **kwargs):
    return None


_ANSWERS = {
    **dict.fromkeys(
        (
            "definitely_true",
            "expect_true",
            "guard_bool",
            "guard_or_false",
            "guard_or_true",
            "guard_scalar",
            "guard_size_oblivious",
            "statically_known_true",
            "check_consistent",
        ),
        _truth,
    ),
    **dict.fromkeys(
        ("guard_int", "guarding_hint_or_throw", "hint_int", "optimization_hint", "size_hint"), _same
    ),
    **dict.fromkeys(
        ("constrain_range", "_constrain_range_for_size", "_advise_is_size", "_advise_is_bounded"),
        _nothing,
    ),
    "definitely_false": lambda value, *args: not value,
    "statically_known_false": lambda value, *args: not value,
    "sym_and": lambda *values: all(values),
    "sym_or": lambda *values: any(values),
    "sym_eq": lambda first, second: first == second,
    "is_nested_int": lambda value: False,
    "is_symbolic": lambda value: False,
    "is_concrete_int": lambda value: True,
    "is_concrete_bool": lambda value: True,
    "has_guarding_hint": lambda value: True,
    "has_hint": lambda value: True,
    "free_symbols": lambda value: set(),
    "free_unbacked_symbols": lambda value: set(),
    "has_free_symbols": lambda value: False,
    "has_free_unbacked_symbols": lambda value: False,
}


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(self, *args, **kwargs):
            raise RuntimeError(f"{NAME}.{name} is not there in a trace")

        return type(name, (), {"__init__": absent})


def install():
    """Put the answers in the place of the real module, unless that is already imported."""
    if NAME in sys.modules:
        return
    module = _Module(NAME)
    module.__dict__.update(_ANSWERS)
    module.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
    sys.modules[NAME] = module
