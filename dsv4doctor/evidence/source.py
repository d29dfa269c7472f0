"""A Python package read as source: its functions, who they call, what they were decorated with.

Nothing is imported.  Modules are parsed when they are first asked for.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAX_BYTES = 4 << 20
_MAX_HOPS = 6


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    functions: dict[str, ast.FunctionDef]
    imports: dict[str, tuple[str, str | None]]
    """Local name -> (module, name in it); None: the module itself."""
    stars: tuple[str, ...]
    """Modules of which everything is imported."""
    values: dict[str, ast.expr]
    """Names that are assigned once at the top."""

    @property
    def package(self) -> str:
        """The package that its relative imports start from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Function:
    module: Module
    node: ast.FunctionDef

    @property
    def key(self) -> str:
        return f"{self.module.name}.{self.node.name}"


class Package:
    """The package in the folder `root`, whose name is the folder's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.name = root.name
        self.module = functools.cache(self._module)

    def _module(self, name: str) -> Module | None:
        """The module of that dotted name; None: there is none, or it cannot be parsed."""
        parts = name.split(".")
        if parts[0] != self.name or not all(part.isidentifier() for part in parts):
            return None
        base = self.root.joinpath(*parts[1:])
        for path in (base / "__init__.py", base.with_suffix(".py")):
            try:
                if path.is_file() and path.stat().st_size <= _MAX_BYTES:
                    return _parsed(name, path)
            except OSError:
                return None
        return None

    def function(self, dotted: str) -> Function | None:
        """The function that `dotted` names, through re-exports."""
        module, _, name = dotted.rpartition(".")
        return self._find(module, name, _MAX_HOPS)

    def _find(self, module_name: str, name: str, hops: int) -> Function | None:
        module = self.module(module_name)
        if module is None or hops == 0:
            return None
        if name in module.functions:
            return Function(module, module.functions[name])
        if name in module.imports:
            origin, inner = module.imports[name]
            return self._find(origin, inner, hops - 1) if inner else None
        found = (self._find(star, name, hops - 1) for star in module.stars)
        return next((function for function in found if function is not None), None)

    def offered(self, module_name: str) -> Iterator[str]:
        """The functions' names in a module, its own and re-exported ones.

        By their spelling: a name with a capital letter at its start is taken for a class.
        """
        module = self.module(module_name)
        if module is None:
            return
        names = [*module.functions, *module.imports]
        for star in module.stars:
            inner = self.module(star)
            names += inner.functions if inner else ()
        yield from (name for name in dict.fromkeys(names) if not name.lstrip("_")[:1].isupper())

    def called(self, function: Function) -> Iterator[Function]:
        """The functions of this package that `function` calls by name, each once."""
        inner: dict[str, tuple[str, str | None]] = {}
        names: dict[str, None] = {}
        for node in ast.walk(function.node):
            if isinstance(node, ast.ImportFrom):
                origin = _absolute(function.module.package, node)
                inner.update({a.asname or a.name: (origin, a.name) for a in node.names})
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names[node.func.id] = None
        for name in names:
            module, original = inner.get(name, (function.module.name, name))
            found = self._find(module, original, _MAX_HOPS) if original else None
            if found is not None and found.node is not function.node:
                yield found

    def relative(self, path: Path) -> str:
        """`path` as a reader names it: from the package's own folder on."""
        return str(path.relative_to(self.root.parent))


def _parsed(name: str, path: Path) -> Module | None:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    module = Module(name, path, {}, {}, (), {})
    stars: list[str] = []
    for node in _top_level(tree.body):
        if isinstance(node, ast.FunctionDef):
            module.functions[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            origin = _absolute(module.package, node)
            for alias in node.names:
                if alias.name == "*":
                    stars.append(origin)
                else:
                    module.imports[alias.asname or alias.name] = (origin, alias.name)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                module.values[target.id] = node.value
    return Module(name, path, module.functions, module.imports, tuple(stars), module.values)


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under a try or an if included."""
    for node in body:
        yield node
        if isinstance(node, ast.Try):
            yield from _top_level(node.body)
        elif isinstance(node, ast.If):
            yield from _top_level(node.body)
            yield from _top_level(node.orelse)


def _absolute(package: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - (node.level - 1)])
    return f"{base}.{node.module}" if node.module else base


def integers(node: ast.expr, module: Module) -> tuple[int, ...] | None:
    """The whole numbers in a list, tuple or set, or in the constant that a name stands for."""
    if isinstance(node, ast.Name):
        value = module.values.get(node.id)
        if value is None or isinstance(value, ast.Name):
            return None
        return integers(value, module)
    if isinstance(node, ast.Call) and len(node.args) == 1:  # frozenset([...])
        return integers(node.args[0], module)
    if not isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return None
    found = [item.value for item in node.elts if isinstance(item, ast.Constant)]
    numbers = [value for value in found if isinstance(value, int)]
    return tuple(numbers) if len(numbers) == len(node.elts) else None
