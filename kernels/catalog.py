"""What the kernel files say of themselves, read without importing them."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsv4doctor.errors import UndeterminedError, UsageError
from dsv4doctor.kernels.registry import OPERATIONS, KernelMeta

PACKAGE = "dsv4doctor.kernels"
FOLDER = Path(__file__).parent


def select(only: Sequence[str]) -> tuple[str, ...]:
    """The operations named in `only`, all of them if it is empty.

    Raises UsageError for a name that is not registered.
    """
    unknown = [name for name in only if name not in OPERATIONS]
    if unknown:
        raise UsageError(
            f"--only {unknown[0]}: no such kernel", f"there are: {', '.join(OPERATIONS)}"
        )
    return tuple(name for name in OPERATIONS if not only or name in only)


def meta(name: str, folder: Path = FOLDER) -> KernelMeta:
    """The META of `folder/<name>.py`.

    Raises UndeterminedError when the file is missing or META is not one call with literals.
    """
    path = folder / f"{name}.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        call = next(
            statement.value
            for statement in tree.body
            if isinstance(statement, ast.Assign | ast.AnnAssign) and "META" in _targets(statement)
        )
        assert isinstance(call, ast.Call)
        return KernelMeta(**{str(word.arg): ast.literal_eval(word.value) for word in call.keywords})
    except (OSError, SyntaxError, StopIteration, AssertionError, ValueError, TypeError) as error:
        raise UndeterminedError(
            f"kernel {name}: {path.name} does not describe itself ({type(error).__name__})",
            "reinstall dsv4doctor: one of its files is missing or damaged",
        ) from error


def _targets(statement: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def offered(name: str, arch: str) -> bool:
    """Whether operation `name` is offered on `arch` ("sm_120") at all."""
    return arch in meta(name).archs


def source_hash(name: str, folder: Path = FOLDER) -> str:
    """sha256 over the kernel file, its adapter, and every file of kernels/ that they import."""
    digest = hashlib.sha256()
    for path in source_files(name, folder):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def source_files(name: str, folder: Path = FOLDER) -> tuple[Path, ...]:
    """The files behind operation `name`, sorted.  `registry` and the tools are left out: they
    do not change what a kernel computes."""
    seen: set[Path] = set()
    queue = [folder / f"{name}.py", folder / "adapters" / f"{name}.py"]
    while queue:
        path = queue.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        queue.extend(_imported(path, folder))
    return tuple(sorted(seen))


_TOOLS = ("registry", "catalog", "verify", "timing", "upstream", "stamps")


def _imported(path: Path, folder: Path) -> Iterator[Path]:
    """The files of ours that `path` imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.removeprefix(PACKAGE + ".").split(".")
            if name.startswith(PACKAGE + ".") and parts[0] not in _TOOLS:
                yield folder.joinpath(*parts).with_suffix(".py")
