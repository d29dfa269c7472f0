"""FlashInfer's own declarations of the GPUs that its functions are for.

Read from the installed tree as source: the compute-capability decorators, the generations that the
JIT compiles a function's module for, what its launcher checks, which prebuilt kernels it takes, and
which of them are installed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4doctor.evidence import cuda_source, manifest
from dsv4doctor.evidence.source import Function, Package, integers
from dsv4doctor.models import Declaration, Location

MODULES = (
    *("fused_moe", "mla", "mla._sparse_mla_sm120", "mhc", "deep_gemm", "gemm", "attn_scores"),
    "quantization",
)
"""Whose functions SGLang's DeepSeek-V4 calls."""

_DECORATOR = "supported_compute_capability"
_BACKENDS = "backend_requirement"
_GETTER = re.compile(r"_?(get|gen|load|build)_\w+")
_FLAGS = re.compile(r"sm(\d+)([af]?)_nvcc_flags")
_MAX_DEPTH = 5
_MAX_SOURCE_BYTES = 4 << 20


def read_declarations(root: Path, cubins: Path | None = None) -> tuple[Declaration, ...]:
    """What the FlashInfer in the folder `root` says of its public functions, in their order.

    `cubins` is the folder of its prebuilt kernels, where there is one.
    """
    package = Package(root)
    reader = _Reader(package, cubins)
    found: list[Declaration] = []
    for module in MODULES:
        for name in package.offered(f"{package.name}.{module}"):
            private = name.startswith("_") and not module.endswith("sm120")
            if private or _GETTER.fullmatch(name):
                continue
            found += reader.of(f"{package.name}.{module}.{name}")
    return tuple(found)


@dataclass(frozen=True)
class _Compiled:
    """What one function that makes a JIT module compiles it for."""

    function: Function
    admits: tuple[str, ...]
    at: Location
    prebuilt: bool
    sources: tuple[str, ...]
    artifacts: tuple[str, ...]
    """The sets of prebuilt kernels that it names."""


class _Reader:
    def __init__(self, package: Package, cubins: Path | None) -> None:
        self.package = package
        self.cubins = cubins
        self.artifacts = manifest.artifact_paths(package.root) if cubins else {}
        self.compiled: dict[str, tuple[_Compiled, ...]] = {}
        self.texts: dict[str, str] = {}

    def of(self, symbol: str) -> Iterator[Declaration]:
        function = self.package.function(symbol)
        if function is None:
            return
        by_backend = _has_backends(function)
        for one in self._decorated(symbol, function):
            yield replace(one, by_backend=by_backend)
        # A backend may compile nothing: what others compile for is then no no either.
        for getter in () if by_backend else self.package.called(function):
            if _GETTER.fullmatch(getter.node.name):
                yield from self._jit(symbol, getter)

    # -------------------------------------------------------------------- decorators

    def _decorated(self, symbol: str, function: Function) -> Iterator[Declaration]:
        admits: list[str] = []
        line = function.node.lineno
        for node in function.node.decorator_list:
            for checked, where in self._checks(node, function):
                found = _capabilities(checked, where)
                if found is not None:
                    admits += found
                    line = checked.lineno
        if admits:
            message = f"{function.node.name} does not support compute capability {{sm}}"
            place = Location(self.package.relative(function.module.path), line)
            unique = tuple(sorted(set(admits), key=_number))
            yield Declaration(symbol, "decorator", unique, place, refusal=message)

    def _checks(
        self, decorator: ast.expr, function: Function
    ) -> Iterator[tuple[ast.Call, Function]]:
        """The capability decorators of a function, and of its backends' own checks."""
        if not isinstance(decorator, ast.Call):
            return
        name = _name(decorator.func)
        if name == _DECORATOR:
            yield decorator, function
        elif name == _BACKENDS:
            for node in ast.walk(decorator):
                if isinstance(node, ast.Name):
                    check = self.package.function(f"{function.module.name}.{node.id}")
                    for inner in check.node.decorator_list if check else ():
                        if isinstance(inner, ast.Call) and _name(inner.func) == _DECORATOR:
                            assert check is not None
                            yield inner, check

    # -------------------------------------------------------------------- JIT modules

    def _jit(self, symbol: str, getter: Function) -> Iterator[Declaration]:
        """What the module behind one getter is compiled for, and what its sources say."""
        made = self._made_by(getter, _MAX_DEPTH, frozenset())
        if not made:
            return
        admits = sorted({name for one in made for name in one.admits}, key=_number)
        prebuilt = all(one.prebuilt for one in made)
        refusal = f"No supported CUDA architectures found for major versions {_majors(made)}"
        yield Declaration(symbol, "jit", tuple(admits), made[0].at, prebuilt, refusal)
        if prebuilt:
            for source in dict.fromkeys(name for one in made for name in one.sources):
                yield from self._source(symbol, source)
            for artifact in dict.fromkeys(name for one in made for name in one.artifacts):
                yield from self._manifest(symbol, artifact)

    def _made_by(self, function: Function, depth: int, above: frozenset[str]) -> list[_Compiled]:
        if function.key in self.compiled:
            return list(self.compiled[function.key])
        own = self._compiled(function)
        found: list[_Compiled] = [own] if own else []
        if own is None and depth > 0:
            for inner in self.package.called(function):
                if _GETTER.fullmatch(inner.node.name) and inner.key not in above:
                    found += self._made_by(inner, depth - 1, above | {function.key})
        self.compiled[function.key] = tuple(found)
        return found

    def _compiled(self, function: Function) -> _Compiled | None:
        admits: list[str] = []
        sources: list[str] = []
        artifacts: list[str] = []
        line = function.node.lineno
        prebuilt = False
        for node in ast.walk(function.node):
            if isinstance(node, ast.keyword) and node.arg == "supported_major_versions":
                majors = integers(node.value, function.module)
                if majors:
                    admits += [f"{major}.x" for major in majors]
                    line = node.value.lineno
            elif isinstance(node, ast.Name):
                flags = _FLAGS.fullmatch(node.id)
                if flags is not None:
                    admits.append(_dotted(int(flags[1])))
                prebuilt = prebuilt or node.id in ("get_artifact", "ArtifactPath")
            elif isinstance(node, ast.Attribute) and _name(node.value) == "ArtifactPath":
                artifacts.append(node.attr)
            elif isinstance(node, ast.Constant) and str(node.value).endswith(".cu"):
                sources.append(str(node.value))
        if not admits:
            return None
        place = Location(self.package.relative(function.module.path), line)
        return _Compiled(function, tuple(admits), place, prebuilt, tuple(sources), tuple(artifacts))

    # -------------------------------------------------------------------- CUDA sources

    def _source(self, symbol: str, name: str) -> Iterator[Declaration]:
        file = f"{self.package.name}/data/csrc/{name}"
        text = self._text(name)
        for one in cuda_source.said(text):
            yield Declaration(
                symbol, one.kind, one.admits, Location(file, one.line), refusal=one.refusal
            )
        late = cuda_source.late_failure(text)
        if late is not None and "isArchCompatible" not in text:
            yield Declaration(symbol, "failure", (), Location(file, 1), refusal=late)

    def _manifest(self, symbol: str, artifact: str) -> Iterator[Declaration]:
        folder = self.artifacts.get(artifact)
        if self.cubins is None or folder is None:
            return
        path = manifest.manifest(self.cubins, folder)
        admits = manifest.capabilities(path) if path is not None else ()
        if path is not None and admits:
            file = str(path.relative_to(self.cubins.parent.parent))
            yield Declaration(symbol, "manifest", admits, Location(file, 1))

    def _text(self, name: str) -> str:
        if name not in self.texts:
            path = self.package.root / "data" / "csrc" / name
            try:
                small = path.is_file() and path.stat().st_size <= _MAX_SOURCE_BYTES
                self.texts[name] = path.read_text("utf-8", "replace") if small else ""
            except OSError:
                self.texts[name] = ""
        return self.texts[name]


def _has_backends(function: Function) -> bool:
    arguments = function.node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    decorated = (
        _name(node.func) == _BACKENDS
        for node in function.node.decorator_list
        if isinstance(node, ast.Call)
    )
    return any(argument.arg == "backend" for argument in named) or any(decorated)


def _capabilities(decorator: ast.Call, function: Function) -> list[str] | None:
    numbers = integers(decorator.args[0], function.module) if decorator.args else None
    return None if numbers is None else [_dotted(number) for number in numbers]


def _dotted(number: int) -> str:
    return f"{number // 10}.{number % 10}"


def _number(capability: str) -> tuple[int, str]:
    major, _, minor = capability.partition(".")
    return int(major), minor


def _majors(made: list[_Compiled]) -> list[int]:
    names = {name for one in made for name in one.admits if name.endswith(".x")}
    return sorted(int(name.partition(".")[0]) for name in names)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
