"""SGLang releases as source trees: fetched without dependencies, kept in a cache.

pip is the downloader, because it honours the user's index, proxy and certificates.  Only the
Python source in the wheel is read, so it need not fit this machine: releases up to 0.5.10 are
`py3-none-any`, later ones are built for each CPython from 3.10 on and `manylinux_2_34` on
x86_64 and aarch64, with the same source in all of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

import platformdirs
from packaging.version import InvalidVersion, Version

from dsv4doctor.errors import UndeterminedError, UsageError
from dsv4doctor.facts.tree import read_tree
from dsv4doctor.models import SglangTree

Progress = Callable[[int, "int | None"], None]
"""Called with the bytes so far and, when pip has said it, the total."""

_PYTHONS = ("3.11", "3.13")
"""Whose wheel is taken; the second for a release that has dropped the first."""
_PLATFORMS = tuple(
    f"manylinux_2_{minor}_{machine}"
    for machine in ("x86_64", "aarch64")
    for minor in (39, 35, 34, 31, 28, 17)
)
_MAX_UNPACKED_BYTES = 4 << 30
_MAX_MEMBERS = 200_000
_NO_ROOM_BYTES = 1 << 20
_ABANDONED_SECONDS = 24 * 3600
_SCRATCH_PREFIX = ".incomplete-"
_SIZE = re.compile(r"Downloading \S*sglang-\S+\.whl (?:\S+ )?\((\d+(?:\.\d+)?) ([kMG]?B)\)")
_UNITS = {"B": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3}


def default_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Where dsv4doctor keeps what it can fetch again: $DSV4DOCTOR_CACHE, or the user's cache.

    Raises UsageError when it names a home folder that there is not, and for a user without one.
    """
    chosen = environment.get("DSV4DOCTOR_CACHE")
    if not chosen:
        with contextlib.suppress(RuntimeError):
            folder = platformdirs.user_cache_path("dsv4doctor")
            if folder.is_absolute():
                return folder
        raise UsageError(
            "this user has no home folder", "set HOME, or DSV4DOCTOR_CACHE to a folder"
        )
    named = os.path.expanduser(chosen)
    if named.startswith("~"):
        raise UsageError(f"DSV4DOCTOR_CACHE {chosen}: no such user", "set it to a folder")
    return Path(named)


def fetch_tree(
    version: str,
    cache: Path,
    progress: Progress | None = None,
    python: str = sys.executable,
) -> SglangTree:
    """The source tree of the SGLang release `version`, from `cache` or fetched into it.

    The tree is read-only and complete: it appears under its name in one step.  `python` is an
    interpreter with pip.  Raises UsageError for a version that does not exist or has no
    DeepSeek-V4 and when there is no pip, UndeterminedError when it cannot be fetched.
    """
    try:
        name = str(Version(version))
    except InvalidVersion as error:
        raise UsageError(
            f"--sglang {version}: not a version", "write it like 0.5.23, or give a folder"
        ) from error
    target = cache.absolute() / "sglang" / name
    if os.path.isdir(target):  # unlike Path.is_dir, false for what cannot be looked at
        return read_tree(target, origin="wheel")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=target.parent))
    except OSError as error:
        raise UsageError(
            f"{target.parent}: cannot be written ({error.strerror})",
            "set DSV4DOCTOR_CACHE to a folder that can",
        ) from error
    try:
        wheel = _download(name, scratch, progress, python)
        unpacked = scratch / "tree"
        unpack(wheel, unpacked)
        _check(unpacked, name)
        _publish(unpacked, target)
    except OSError as error:
        hint = "make room there, or set DSV4DOCTOR_CACHE to another folder"
        raise UndeterminedError(f"{target}: cannot be unpacked ({error.strerror})", hint) from error
    finally:
        _remove(scratch)
    return read_tree(target, origin="wheel")


def _check(unpacked: Path, version: str) -> None:
    try:
        read_tree(unpacked, origin="wheel")
    except UsageError as error:
        # Its message names the scratch folder.
        message = error.message.replace(f" at {unpacked}", "")
        raise UsageError(f"--sglang {version}: {message}", error.hint) from error


def unpack(wheel: Path, target: Path) -> None:
    """The wheel's files below `target`, a new folder, read-only but for `target` itself.

    Raises UndeterminedError for an archive that is damaged, or would write outside `target`.
    """
    hint = "fetch it again; if that does not help, the package index serves a bad file"
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = archive.infolist()
            size = sum(member.file_size for member in members)
            if len(members) > _MAX_MEMBERS or size > _MAX_UNPACKED_BYTES:
                raise UndeterminedError(f"{wheel.name}: too large to be an SGLang wheel", hint)
            for member in members:
                if not _is_safe(member):
                    raise UndeterminedError(
                        f"{wheel.name}: holds the unsafe path {member.filename!r}", hint
                    )
            archive.extractall(target)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise UndeterminedError(f"{wheel.name}: a damaged wheel ({error})", hint) from error
    for folder, _, files in os.walk(target, topdown=False):
        for file in files:
            os.chmod(os.path.join(folder, file), 0o444)
        if folder != str(target):
            os.chmod(folder, 0o555)


def _is_safe(member: zipfile.ZipInfo) -> bool:
    path = PurePosixPath(member.filename)
    is_link = stat.S_ISLNK(member.external_attr >> 16)
    odd = "\\" in member.filename or ":" in member.filename or "\0" in member.filename
    return not (is_link or odd or path.is_absolute() or ".." in path.parts)


def _publish(unpacked: Path, target: Path) -> None:
    """Give the finished tree its name, unless another process was first."""
    try:
        os.rename(unpacked, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return
    # Only now: a folder without write permission cannot be moved.
    target.chmod(0o555)


def _remove(folder: Path) -> None:
    """Delete a folder of ours, read-only parts included."""
    for inner, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(inner, 0o755)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Delete what a killed process left a day or more ago."""
    for folder in parent.glob(f"{_SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS:
                _remove(folder)


# ------------------------------------------------------------------------------ pip


def _download(version: str, scratch: Path, progress: Progress | None, python: str) -> Path:
    target = scratch / "wheel"
    output = ""
    for python_version in _PYTHONS:
        code, output = _run_pip(version, python_version, scratch, progress, python)
        wheels = sorted(target.glob("sglang-*.whl"))
        if code == 0 and len(wheels) == 1:
            return wheels[0]
        if "No matching distribution" not in output:
            break
    if _is_full(scratch, output):
        raise UndeterminedError(
            f"SGLang {version} could not be fetched: no space left in {scratch.parent}",
            "make room there, or set DSV4DOCTOR_CACHE to a folder with some 300 MB free",
        )
    raise _explain(version, output, python)


def _is_full(folder: Path, output: str) -> bool:
    """True where pip failed for want of space; on a full disk it cannot even say so."""
    said = any(text in output for text in ("No space left on device", "Disk quota exceeded"))
    with contextlib.suppress(OSError):
        return said or shutil.disk_usage(folder).free < _NO_ROOM_BYTES
    return said


def _run_pip(
    version: str, python_version: str, scratch: Path, progress: Progress | None, python: str
) -> tuple[int, str]:
    """pip's exit code and output.  pip writes below `scratch` only."""
    working = scratch / "pip"
    working.mkdir(exist_ok=True)
    command = [python, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--progress-bar=off", "--no-input", "--disable-pip-version-check"]
    command += ["--implementation=cp", f"--python-version={python_version}"]
    command += [f"--abi={abi}" for abi in (f"cp{python_version.replace('.', '')}", "abi3", "none")]
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    command += [f"--dest={scratch / 'wheel'}", f"sglang=={version}"]
    # pip loads into its temporary folder first: there the file can be watched as it grows.
    environment = {**os.environ, "TMPDIR": str(working), "PYTHONUNBUFFERED": "1"}
    log = scratch / "pip.log"
    try:
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=working,
            )
    except OSError as error:
        raise UsageError(f"{python}: cannot be started ({error.strerror})") from error
    try:
        code = _wait(process, working, log, progress)
    finally:
        process.kill()
        process.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")


def _wait(
    process: subprocess.Popen[bytes], working: Path, log: Path, progress: Progress | None
) -> int:
    total: int | None = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=0.1)
        if progress is None:
            continue
        if total is None:
            total = _announced_size(log.read_text(encoding="utf-8", errors="replace"))
        done = _bytes_below(working)
        if done:
            progress(done if total is None else min(done, total), total)


def _announced_size(output: str) -> int | None:
    """The wheel's size from pip's "Downloading sglang-0.5.23-...whl (39.1 MB)"."""
    match = _SIZE.search(output)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def _bytes_below(folder: Path) -> int:
    size = 0
    for inner, _, files in os.walk(folder):
        for file in files:
            # .metadata comes first, and pip moves files away while we look.
            if file.endswith(".whl"):
                with contextlib.suppress(OSError):
                    size += os.path.getsize(os.path.join(inner, file))
    return size


def _explain(version: str, output: str, python: str) -> UsageError | UndeterminedError:
    """pip's failure in one line and a way out."""
    by_hand = f"or unpack sglang-{version}-*.whl yourself and give the folder to --sglang"
    if "No module named pip" in output:
        return UsageError(
            f"{python} has no pip to fetch SGLang {version} with",
            f"install pip there (`uv pip install pip`, `python -m ensurepip`), {by_hand}",
        )
    listed = re.search(r"\(from versions: ([^)]*)\)", output)
    versions = _versions(listed[1]) if listed else []
    if versions and Version(version) not in versions:
        newest = ", ".join(str(known) for known in versions[-5:])
        return UsageError(
            f"--sglang {version}: the package index has no such release", f"the newest: {newest}"
        )
    errors = re.findall(r"^ERROR: (.+)$", output, re.MULTILINE)
    if "Could not find a version" in output and not versions:
        reason = "the package index cannot be reached, or does not have SGLang"
    elif errors:
        reason = re.sub(r"\(from versions: .*?\)", "", errors[0])[:160].strip()
    else:
        reason = "pip failed"
    return UndeterminedError(
        f"SGLang {version} could not be fetched: {reason}",
        f"check pip's index and proxy settings (`pip config list`), {by_hand}",
    )


def _versions(text: str) -> list[Version]:
    found: list[Version] = []
    for piece in text.split(","):
        with contextlib.suppress(InvalidVersion):
            found.append(Version(piece.strip()))
    return sorted(known for known in found if not known.is_prerelease)
