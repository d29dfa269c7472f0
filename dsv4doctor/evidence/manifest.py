"""The GPUs that FlashInfer's prebuilt kernels are for, by the manifests in its cubin package."""

from __future__ import annotations

import ast
import re
from pathlib import Path

_FILE = "checksums.txt"
_MAX_BYTES = 32 << 20
_ARCH = re.compile(r"[_.]sm_?(\d{2,3})([af]?)\.cubin\b", re.IGNORECASE)
_CLASS = "ArtifactPath"


def artifact_paths(flashinfer: Path) -> dict[str, str]:
    """Name of an artifact, e.g. "TRTLLM_GEN_BMM" -> its folder below the cubins, as FlashInfer's
    own `artifacts.py` has them; empty when that cannot be read."""
    try:
        path = flashinfer / "artifacts.py"
        tree = ast.parse(path.read_bytes() if path.is_file() else b"")
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return {}
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == _CLASS:
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.value, ast.Constant):
                    name = item.target.id if isinstance(item.target, ast.Name) else ""
                    if isinstance(item.value.value, str):
                        found[name] = item.value.value
    return found


def manifest(cubins: Path, artifact: str) -> Path | None:
    """The list of an artifact's kernels in the folder `cubins`; None: it is not installed."""
    if ".." in Path(artifact).parts or Path(artifact).is_absolute():
        return None
    path = cubins / artifact / _FILE
    try:
        return path if path.is_file() and path.stat().st_size <= _MAX_BYTES else None
    except OSError:
        return None


def capabilities(path: Path) -> tuple[str, ...]:
    """The compute capabilities that the kernels listed in a manifest are for."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    found: set[tuple[int, int]] = set()
    for number, kind in set(_ARCH.findall(text)):
        major, minor = divmod(int(number), 10)
        found.add((major, minor))
        if kind.lower() == "f":
            found.update((major, later) for later in _FAMILY.get(major, ()) if later > minor)
    return tuple(f"{major}.{minor}" for major, minor in sorted(found))


_FAMILY = {10: (3,), 12: (1,)}
"""The later members of a family whose code runs on all of it."""
