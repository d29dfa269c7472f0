"""An SGLang source tree: where it is, its version, what it requires.  Nothing is imported."""

from __future__ import annotations

import ast
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from dsv4doctor.errors import UsageError
from dsv4doctor.models import SglangTree

# A checkout declares what it requires in pyproject.toml only.  tomllib is in Python 3.11;
# before that its backport is a dependency (pure Python, requires nothing).
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_tree(path: Path, origin: str = "folder") -> SglangTree:
    """The SGLang at `path`: a site-packages, an unpacked wheel, a checkout, or `sglang/` itself.

    Raises UsageError when there is none, or one without DeepSeek-V4.
    """
    root = _find_root(path)
    version = read_version(root)
    if not (root / "sglang" / "srt" / "models" / "deepseek_v4.py").is_file():
        raise UsageError(
            f"SGLang {version} at {path} has no DeepSeek-V4 (first in 0.5.12)",
            "give a newer tree, or a version: --sglang 0.5.23",
        )
    return SglangTree(root=str(root), version=version, origin=origin)


def _find_root(path: Path) -> Path:
    """The folder to be put on sys.path, absolute."""
    hint = "give a site-packages, a checkout, the sglang folder, or a version: --sglang 0.5.23"
    try:
        full = path.expanduser().absolute()
        if full.is_file():
            raise UsageError(f"{path}: a file, not an SGLang tree", hint)
        if not full.is_dir():
            raise UsageError(f"{path}: no such folder", hint)
        for root in (full, full / "python", full.parent if full.name == "sglang" else full):
            if (root / "sglang" / "srt").is_dir():
                return root
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"{path}: {error}", hint) from error
    raise UsageError(f"{path}: no sglang/srt in this folder", hint)


def read_version(root: Path) -> str:
    """From the distribution's metadata, else from version.py or _version.py, else "unknown"."""
    distribution = _distribution(root)
    version = None if distribution is None else _version(distribution)
    return version or _written_version(root) or "unknown"


def mixed(root: Path) -> tuple[str, ...]:
    """What to say of a tree with the metadata of several releases; empty: there is one at most."""
    found = sorted({version for one in _distributions(root) if (version := _version(one))})
    if len(found) < 2:
        return ()
    written = _written_version(root)
    if written in found:
        of = f"its code is of {written}, and what that has not may be left of another"
    else:
        of = "which of them its code is of is not known"
    return (f"several SGLang releases were unpacked into {root} ({', '.join(found)}): {of}",)


def requirements(tree: SglangTree) -> tuple[Requirement, ...]:
    """What that SGLang declares, from its METADATA or a checkout's pyproject.toml.

    Optional extras are left out; markers are kept.  Empty when the tree declares nothing.
    """
    distribution = _distribution(Path(tree.root))
    if distribution is not None and distribution.requires:
        lines = distribution.requires
    else:
        lines = _project_dependencies(Path(tree.root) / "pyproject.toml")
    found: list[Requirement] = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # one that pip would not understand either constrains nothing
        if requirement.marker is None or "extra" not in str(requirement.marker):
            found.append(requirement)
    return tuple(found)


def _distribution(root: Path) -> metadata.Distribution | None:
    """Of several, the one of the code: a release was unpacked over another."""
    found = _distributions(root)
    if len(found) > 1:
        written = _written_version(root)
        found.sort(key=lambda one: _version(one) != written)
    return next(iter(found), None)


def _distributions(root: Path) -> list[metadata.Distribution]:
    return list(metadata.distributions(name="sglang", path=[str(root)]))


def _version(distribution: metadata.Distribution) -> str | None:
    # A damaged METADATA gives None here, whatever its annotation says.
    version: Any = distribution.version
    return version if isinstance(version, str) else None


def _written_version(root: Path) -> str | None:
    """What the code itself says."""
    names = ("version.py", "_version.py")
    found = (_assigned_version(root / "sglang" / name) for name in names)
    return next((version for version in found if version is not None), None)


def _assigned_version(path: Path) -> str | None:
    """The string that a module assigns to `__version__` at its top level, unconditionally."""
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for statement in module.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            if "__version__" in names and isinstance(statement.value.value, str):
                return statement.value.value
    return None


def _project_dependencies(path: Path) -> list[str]:
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return []
    dependencies = project.get("dependencies", []) if isinstance(project, dict) else []
    return [line for line in dependencies if isinstance(line, str)]
