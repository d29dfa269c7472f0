"""An overlay's sitecustomize: imports the overlay's modules from it, in any Python from 3.8 on.

Copied into the overlay.  Standard library only, and nothing of dsv4doctor: it runs at the start of
every Python that inherits PYTHONPATH.  The `sitecustomize` that would have run without it runs
after it.
"""

# mypy: ignore-errors
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import types

_HERE = os.path.dirname(os.path.abspath(__file__))
_OVERLAY = os.path.dirname(_HERE)


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs the overlay's source under the module's own name, file and data.

    Nothing compiled is written: it would lie beside the tree's own.
    """

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.overlaid = source

    def get_data(self, path: str) -> bytes:
        if path == self.path:
            path = self.overlaid
        with open(path, "rb") as file:
            return file.read()

    def get_code(self, fullname: str) -> types.CodeType:
        # The overlay's own name: tracebacks and inspect.getsource read that file.
        source = self.get_data(self.overlaid)
        return compile(source, self.overlaid, "exec", dont_inherit=True)


class _Finder:
    """Answers for the overlay's modules only."""

    def __init__(self, modules: list) -> None:
        self.modules = {module["name"]: module for module in modules}

    def find_spec(self, fullname: str, path=None, target=None):
        module = self.modules.get(fullname)
        if module is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None:
            return None
        with open(spec.origin, "rb") as file:
            found = hashlib.sha256(file.read()).hexdigest()
        if found != module["made_from"]:
            _stop(
                f"{spec.origin}: not the file that the overlay {_OVERLAY} was made from. "
                "Make it again: dsv4doctor fix --overlay DIR ..."
            )
        source = os.path.join(_OVERLAY, "modules", *module["file"].split("/"))
        spec.loader = _Loader(fullname, spec.origin, source)
        spec.cached = None
        return spec


class _Doctor:
    """dsv4doctor and what its kernels import, for a Python that has none of it."""

    def __init__(self, files: list):
        self.files = {}
        for file in files:
            folder, name = os.path.split(file)
            is_package = name == "__init__.py"
            self.files[os.path.basename(folder) if is_package else name[: -len(".py")]] = file

    def find_spec(self, fullname: str, path=None, target=None):
        file = self.files.get(fullname)
        if file is None or not os.path.isfile(file):
            return None
        folder, name = os.path.split(file)
        inside = [folder] if name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, file, submodule_search_locations=inside
        )


def _stop(line):
    # Not an exception: SGLang, and `site` itself, catch what an import raises and go on without.
    sys.stderr.write(f"dsv4doctor: {line}\n")
    sys.stderr.flush()
    os._exit(4)


def _install():
    try:
        with open(os.path.join(_OVERLAY, "overlay.json"), encoding="utf-8") as file:
            modules = json.load(file)["modules"]
    except (OSError, ValueError, KeyError) as error:
        _stop(f"{_OVERLAY}: not a whole overlay ({error})")
    sys.meta_path.insert(0, _Finder(modules))
    sys.meta_path.append(_Doctor(os.environ.get("DSV4DOCTOR_MODULES", "").split(os.pathsep)))


def _run_next():
    """The sitecustomize that this one hides."""
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_install()
_run_next()
