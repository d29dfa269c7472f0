"""Processes on this machine that have an SGLang tree loaded.

Read from /proc, without rights of its own: a process of another user may not be seen.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Running:
    pid: int
    command: str


def users_of(root: Path, proc: Path = _PROC) -> tuple[Running, ...]:
    """The SGLang processes that run from the tree whose `sglang/` lies in `root`."""
    site = os.path.realpath(root)
    package = os.path.realpath(root / "sglang")
    found = []
    try:
        numbers = sorted(int(name) for name in os.listdir(proc) if name.isdigit())
    except OSError:
        return ()
    for pid in numbers:
        if pid != os.getpid():
            words = _words(proc / str(pid) / "cmdline")
            if words and _uses(proc / str(pid), words, site, package):
                found.append(Running(pid, " ".join(words)[:120]))
    return tuple(found)


def _words(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [word for word in os.fsdecode(path.read_bytes()).split("\0") if word]
    return []


def _uses(process: Path, words: list[str], site: str, package: str) -> bool:
    mapped = _mapped(process / "maps")
    if any(path.startswith(package + os.sep) for path in mapped):
        return True
    if not _is_sglang(words):
        return False
    if any(path.startswith(site + os.sep) for path in mapped):
        return True
    return _finds(process, words, site)


def _is_sglang(words: list[str]) -> bool:
    """SGLang's commands, modules, and the names it gives its own processes (`sglang::...`)."""
    if any("dsv4doctor" in os.path.basename(word) for word in words[:3]):
        return False
    names = [os.path.basename(word) for word in words[:12]]
    return any(name == "sglang" or name.startswith(("sglang.", "sglang::")) for name in names)


def _mapped(path: Path) -> set[str]:
    with contextlib.suppress(OSError), path.open("rb") as lines:
        paths = (line[line.find(b"/") :].strip() for line in lines if b"/" in line)
        return {os.fsdecode(path) for path in paths}
    return set()


def _finds(process: Path, words: list[str], site: str) -> bool:
    """Whether its Python, PYTHONPATH or working folder lead to `site`."""
    places = [os.path.dirname(os.path.dirname(os.path.abspath(words[0])))]
    with contextlib.suppress(OSError):
        places.append(os.readlink(process / "cwd"))
    for variable in _words(process / "environ"):
        name, _, value = variable.partition("=")
        if name in ("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"):
            places += value.split(os.pathsep)
    real = {os.path.realpath(place) for place in places if place and place != os.sep}
    prefixes = {place for place in real if _is_prefix(place, site)}
    return site in real or os.path.join(site, "sglang") in real or bool(prefixes)


def _is_prefix(place: str, site: str) -> bool:
    """True for the environment that `site` is the site-packages of."""
    inner = os.path.relpath(site, place).split(os.sep)
    return inner[0] in ("lib", "lib64") and inner[-1] in ("site-packages", "dist-packages")
