"""What a FlashInfer release says of the GPUs it is for, from its wheel.

The wheel is fetched without dependencies, its sources are read, and only what they say is kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from packaging.version import InvalidVersion, Version

from dsv4doctor.errors import UndeterminedError
from dsv4doctor.evidence import reader_key
from dsv4doctor.evidence.flashinfer import read_declarations
from dsv4doctor.facts.cache import load_entry, save_entry
from dsv4doctor.models import KernelEvidence

_FETCH_SECONDS = 600.0
_MAX_BYTES = 512 << 20
"""Of the sources that are unpacked."""


def of_release(version: str, cache: Path) -> KernelEvidence:
    """The declarations of flashinfer-python `version`, from `cache` or read from its wheel.

    Raises UndeterminedError when it cannot be fetched.
    """
    try:
        name = str(Version(version))
    except InvalidVersion as error:
        raise UndeterminedError(f"FlashInfer {version}: not a version") from error
    entry = cache / "evidence" / f"flashinfer-{name}-{reader_key()}.json"
    known = load_entry(entry, KernelEvidence)
    if known is not None:
        return known
    with tempfile.TemporaryDirectory(prefix="dsv4doctor-") as scratch:
        wheel = _download(name, Path(scratch))
        folder = Path(scratch) / "sources"
        try:
            unpack_sources(wheel, folder)
        except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise UndeterminedError(f"{wheel.name}: cannot be read ({error})") from error
        found = read_declarations(folder / "flashinfer")
    evidence = KernelEvidence(name, None if found else "its sources say nothing of GPUs", found)
    save_entry(entry, evidence)
    return evidence


def unpack_sources(wheel: Path, target: Path) -> None:
    """Of a FlashInfer wheel, the Python files and the launchers of prebuilt kernels."""
    with zipfile.ZipFile(wheel) as archive:
        left = _MAX_BYTES
        for member in _sources(archive):
            left -= member.file_size
            if left < 0:
                raise RuntimeError("more sources than FlashInfer has")
            archive.extract(member, target)


def _sources(archive: zipfile.ZipFile) -> Iterator[zipfile.ZipInfo]:
    for member in archive.infolist():
        path = PurePosixPath(member.filename)
        launcher = path.parts[1:3] == ("data", "csrc") and path.name.startswith("trtllm_")
        wanted = path.suffix == ".py" and "data" not in path.parts[:2]
        inside = path.parts[:1] == ("flashinfer",) and ".." not in path.parts
        if inside and (wanted or (launcher and path.suffix == ".cu")):
            yield member


def _download(version: str, scratch: Path) -> Path:
    target = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--progress-bar=off", "--no-input", "--disable-pip-version-check"]
    command += [f"--dest={target}", f"flashinfer-python=={version}"]
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_FETCH_SECONDS,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UndeterminedError(f"FlashInfer {version} could not be fetched: {error}") from error
    wheels = sorted(target.glob("*.whl"))
    if ended.returncode != 0 or len(wheels) != 1:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        reason = next((line for line in lines if line.startswith("ERROR")), "pip failed")
        raise UndeterminedError(
            f"FlashInfer {version} could not be fetched: {reason[:160]}",
            "check pip's index and proxy settings (`pip config list`)",
        )
    return wheels[0]
