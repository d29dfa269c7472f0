"""What is installed in an interpreter and says which GPUs its kernels are for.

Kept in the cache by the state of the files read, so that a second look costs next to nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from dsv4doctor.evidence import reader_key
from dsv4doctor.evidence.fatbin import read_library
from dsv4doctor.evidence.flashinfer import MODULES, read_declarations
from dsv4doctor.facts.cache import load_entry, save_entry
from dsv4doctor.models import KernelEvidence, NativeLibrary

PACKAGES = ("flashinfer", "flashinfer_cubin", "sgl_kernel", "deep_gemm", "flash_mla")
"""Import names of the packages that are looked into."""

_LIBRARY_SUFFIX = ".so"
_MAX_LIBRARIES = 200


def gather(
    folders: Mapping[str, str], versions: Mapping[str, str], cache: Path | None
) -> KernelEvidence:
    """`folders`: import name -> the package's folder, as far as it is installed; `versions`:
    distribution -> version.  Nothing is imported, and nothing that cannot be read is in the way.
    """
    flashinfer = Path(folders["flashinfer"]) if "flashinfer" in folders else None
    libraries = tuple(
        found
        for name in PACKAGES[2:]
        if name in folders
        for found in _libraries(Path(folders[name]), cache)
    )
    if flashinfer is None:
        return KernelEvidence(libraries=libraries)
    cubins = Path(folders["flashinfer_cubin"]) / "cubins" if "flashinfer_cubin" in folders else None
    version = versions.get("flashinfer-python", "unknown")
    read = _declarations(flashinfer, cubins, version, cache)
    return replace(read, libraries=libraries)


# ------------------------------------------------------------------------------ FlashInfer


def _declarations(
    folder: Path, cubins: Path | None, version: str, cache: Path | None
) -> KernelEvidence:
    states = [str(folder), str(cubins), *_python_states(folder)]
    if cubins is not None:
        states += _states(cubins, suffix="")
    entry = _entry(cache, "flashinfer", version, *states)
    known = load_entry(entry, KernelEvidence) if entry else None
    if known is not None:
        return known
    found = read_declarations(folder, cubins)
    problem = None if found else "its sources say nothing of the GPUs they are for"
    evidence = KernelEvidence(version, problem, found)
    if entry is not None:
        save_entry(entry, evidence)
    return evidence


def _python_states(folder: Path) -> Iterator[str]:
    """The state of the sources that are read, or of the folders they lie in."""
    places = [folder / "jit", *(folder / name.replace(".", "/") for name in MODULES)]
    for place in places:
        for path in (place, place.with_suffix(".py")):
            yield from _states(path)


def _states(path: Path, suffix: str = ".py") -> Iterator[str]:
    try:
        if path.is_dir():
            with os.scandir(path) as entries:
                for item in sorted(entries, key=lambda entry: entry.name):
                    if item.name.endswith(suffix):
                        yield _state(item.path, item.stat())
        else:
            yield _state(str(path), path.stat())
    except OSError:
        return


def _state(path: str, status: os.stat_result) -> str:
    return f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ino}"


# ------------------------------------------------------------------------------ libraries


def _libraries(folder: Path, cache: Path | None) -> Iterator[NativeLibrary]:
    """The native libraries below `folder`, named from its parent on."""
    paths: list[Path] = []
    for inner, _, files in os.walk(folder):
        paths += [Path(inner) / name for name in files if name.endswith(_LIBRARY_SUFFIX)]
    for path in sorted(paths)[:_MAX_LIBRARIES]:
        try:
            state = _state(str(path), path.stat())
        except OSError:
            continue
        entry = _entry(cache, "library", state)
        known = load_entry(entry, NativeLibrary) if entry else None
        if known is None:
            known = replace(read_library(path), path=str(path.relative_to(folder.parent)))
            if entry is not None:
                save_entry(entry, known)
        yield known


def _entry(cache: Path | None, kind: str, *states: str) -> Path | None:
    if cache is None:
        return None
    digest = hashlib.sha256("\n".join((reader_key(), kind, *states)).encode("utf-8", "replace"))
    return cache / "evidence" / f"{kind}-{digest.hexdigest()[:32]}.json"
