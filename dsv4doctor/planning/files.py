"""Writes a plan's files: all of them, or none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from dsv4doctor.errors import UsageError
from dsv4doctor.outputs import refuse_place
from dsv4doctor.terminal import can_be_written

_HINT = "give another folder with --out"


def check_folder(out: Path, names: tuple[str, ...] = (), force: bool = False) -> None:
    """UsageError for a folder that cannot be written, before the work is done, for one that
    nothing is written into, and for `names` that are there already without `force`."""
    refuse_place(out, "--out")
    # not Path.exists: it raises for what we may not look at
    if os.path.lexists(out) and not os.path.isdir(out):
        raise UsageError(f"--out {out}: not a folder", _HINT)
    holder = out
    while not os.path.exists(holder):
        if holder.parent == holder:
            raise UsageError(f"--out {out}: no such place", _HINT)
        holder = holder.parent
    if not os.path.isdir(holder) or not can_be_written(str(holder)):
        raise UsageError(f"--out {out}: {holder} cannot be written", _HINT)
    there = [name for name in names if os.path.lexists(out / name)]
    if there and not force:
        raise UsageError(
            f"--out {out}: {', '.join(sorted(there))} already there",
            "write over with --force, or give another folder",
        )


def write(out: Path, files: Mapping[str, str], force: bool) -> None:
    """Each file appears whole; scripts may be run.  UsageError where one cannot be written."""
    check_folder(out, tuple(files), force)
    staged: list[tuple[Path, Path]] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            scratch = out / f".{name}.{os.getpid()}"
            staged.append((scratch, out / name))
            _stage(scratch, text, name.endswith(".sh"))
        for scratch, target in staged:
            os.replace(scratch, target)
    except OSError as error:
        named = error.filename or out
        raise UsageError(f"{named}: cannot be written ({error.strerror})", _HINT) from error
    finally:
        for scratch, _ in staged:
            with contextlib.suppress(OSError):
                scratch.unlink()


def _stage(scratch: Path, text: str, is_script: bool) -> None:
    with open(scratch, "x", encoding="utf-8") as file:
        file.write(text)
    if is_script:
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(scratch, 0o777 & ~umask)
