"""transformers without what a trace never needs: optional packages, remote code, the network."""

import sys

from .stand_ins import StandInModule


def prepare():
    import transformers.utils.import_utils as import_utils

    available = import_utils._is_package_available

    def really_available(package, return_version=False, **kwargs):
        if isinstance(sys.modules.get(package.split(".")[0]), StandInModule):
            return (False, "N/A") if return_version else (False, None)
        return available(package, return_version=return_version, **kwargs)

    import_utils._is_package_available = really_available
    import_utils.requires_backends = lambda *args, **kwargs: None
    _quiet_dummies(import_utils)
    _no_remote_code()


def _quiet_dummies(import_utils):
    """Classes that transformers replaces for want of a package are inert, not raising."""

    def attribute(cls, name):
        try:
            return type.__getattribute__(cls, name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return lambda *args, **kwargs: None

    import_utils.DummyObject.__getattribute__ = attribute


def _no_remote_code():
    """A checkpoint's own Python is never run, also under --trust-remote-code."""

    def refuse(*args, **kwargs):
        raise RuntimeError("the checkpoint asks for its own Python code, which a trace never runs")

    import transformers.dynamic_module_utils as dynamic

    dynamic.get_class_from_dynamic_module = refuse
    for module in list(sys.modules.values()):
        of_transformers = getattr(module, "__name__", "").startswith("transformers.")
        if of_transformers and "get_class_from_dynamic_module" in module.__dict__:
            module.get_class_from_dynamic_module = refuse
