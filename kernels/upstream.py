"""SGLang's own implementations, unchanged, for `bench` to measure against.

`use_tree` points at an unpacked SGLang; without it the installed one is used, if any.  A tree
needs none of SGLang's dependencies: the package's own start-up is passed over, and a file is
asked only for what it is needed for.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dsv4doctor.errors import UsageError

problems: dict[str, str] = {}
"""What could not be brought, and why; `bench` prints it and stores it with the results."""


def use_tree(root: Path) -> str:
    """Makes `sglang` mean the tree at `root`, the folder that holds `sglang/` (or that itself).

    Returns the tree's version, "unknown" if it does not say.  Raises UsageError when there is no
    SGLang in the folder or another one was imported already.
    """
    root = root.resolve()
    package = root if (root / "srt").is_dir() else root / "sglang"
    if not (package / "srt").is_dir():
        raise UsageError(
            f"--sglang {root}: no sglang/srt in this folder",
            "give the folder that holds sglang/, e.g. an unpacked wheel or site-packages",
        )
    if "sglang" in sys.modules:
        raise UsageError(f"--sglang {root}: another SGLang is loaded already")
    spec = importlib.machinery.ModuleSpec("sglang", None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    sys.modules["sglang"] = importlib.util.module_from_spec(spec)
    return _version(package)


def installed_version() -> str | None:
    """The version of the SGLang that is installed; None: there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def _version(package: Path) -> str:
    for info in sorted(package.parent.glob("sglang-*.dist-info")):
        return info.name.removeprefix("sglang-").removesuffix(".dist-info")
    return "unknown"


def module(name: str) -> ModuleType | None:
    """`sglang.<name>` imported as a whole; None (and an entry in `problems`) if that fails."""
    try:
        return importlib.import_module(f"sglang.{name}")
    except Exception as error:
        problems[name] = f"{type(error).__name__}: {error}"
        return None


def functions(
    name: str, *wanted: str, given: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """The functions `wanted` of `sglang.<name>`, without importing the rest of that file.

    Takes along the file's top-level definitions that they refer to, and those of its imports
    that succeed here; `given` stands in for further names.  None (and an entry in `problems`)
    if the file or a function is missing, or running a definition fails.
    """
    try:
        path = _source_of(name)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        body = _needed(tree, set(wanted) - set(given or ()))
        namespace: dict[str, Any] = {"__name__": f"sglang.{name}", **(given or {})}
        flags = __future__.annotations.compiler_flag if _postponed(tree) else 0
        for statement in body:
            _run(statement, path, flags, namespace)
        return {each: namespace[each] for each in wanted}
    except Exception as error:
        problems[name] = f"{type(error).__name__}: {error}"
        return None


def _source_of(name: str) -> Path:
    """The file of `sglang.<name>`; imports `sglang` only, no package between."""
    folders = list(importlib.import_module("sglang").__path__)
    for folder in folders:
        path = Path(folder).joinpath(*name.split(".")).with_suffix(".py")
        if path.is_file():
            return path
    raise FileNotFoundError(f"no {name.replace('.', '/')}.py in {', '.join(folders)}")


def _needed(tree: ast.Module, wanted: set[str]) -> list[ast.stmt]:
    """The imports, and the definitions that `wanted` reach, in the file's order."""
    defined: dict[str, ast.stmt] = {}
    for statement in tree.body:
        for name in _bound(statement):
            defined[name] = statement
    missing = wanted - defined.keys()
    if missing:
        raise LookupError(f"no {', '.join(sorted(missing))} in the file")
    keep: set[int] = set()
    queue = list(wanted)
    while queue:
        statement = defined[queue.pop()]
        if id(statement) in keep:
            continue
        keep.add(id(statement))
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        queue.extend(names & defined.keys())
    return [s for s in tree.body if id(s) in keep or isinstance(s, ast.Import | ast.ImportFrom)]


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a top-level definition or assignment binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


def _postponed(tree: ast.Module) -> bool:
    return any(isinstance(s, ast.ImportFrom) and s.module == "__future__" for s in tree.body)


def _run(statement: ast.stmt, path: Path, flags: int, namespace: dict[str, Any]) -> None:
    """Executes one statement; an import that fails leaves its names undefined."""
    code = compile(ast.Module([statement], []), str(path), "exec", flags, dont_inherit=True)
    try:
        exec(code, namespace)
    except ImportError:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            raise
