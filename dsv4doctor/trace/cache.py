"""Traces by content: an identical one is read back, and any changed byte misses.

The key covers the SGLang tree, the checkpoint's config and headers, the flags, the environment,
the GPU, the interpreter's packages and our own code.  Hashing a tree takes most of a second, so
its content hash is remembered beside a list of its files' size, times and inode; only when that
list differs is the tree read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4doctor import __version__, jsonio
from dsv4doctor.errors import UsageError
from dsv4doctor.facts.cache import load_entry, save_entry, write_whole
from dsv4doctor.facts.hub import hub_cache
from dsv4doctor.facts.tree import requirements
from dsv4doctor.models import SglangTree, Trace
from dsv4doctor.wheels import default_cache

if TYPE_CHECKING:
    from dsv4doctor.trace.request import TraceRequest

_CODE = ("facts", "kernels", "models", "trace")
"""Our own packages that a trace comes from."""


def folder() -> Path:
    """Where dsv4doctor keeps what it can make again."""
    return default_cache()


def key(request: TraceRequest, hashes: dict[Path, str] | None = None) -> str:
    """sha256 over everything that a trace depends on.

    `hashes` keeps those of the folders, for the keys of requests that are traced together.
    """
    kept: dict[Path, str] = {} if hashes is None else hashes

    def content(folder: Path) -> str:
        try:
            if folder not in kept:
                kept[folder] = content_hash(folder)
            return kept[folder]
        except OSError as error:
            raise UsageError(
                f"{error.filename or folder}: cannot be read ({error.strerror})",
                "a tree that is traced has to be readable as a whole",
            ) from error

    ours = Path(__file__).parent.parent
    described = {
        "tool": __version__,
        "code": [content(ours / name) for name in _CODE],
        "tree": content(Path(request.tree.root) / "sglang"),
        "version": request.tree.version,
        "metadata": metadata_text(request.tree),
        "checkpoint": request.checkpoint.content_key,
        "arguments": request.arguments(),
        "named_files": named_files(request.launch.flags, request.all_variables()),
        "environment": request.variables(),
        "arch": request.arch.name,
        "gpu": jsonio.to_plain(request.gpu) if request.gpu else None,
        "gpu_count": request.gpu_count,
        "elsewhere": request.elsewhere,
        "interpreter": str(request.interpreter),
        "packages": packages(request.interpreter),
        "serving": not request.tree.borrowed,
        "own_packages": own_packages(request),
        "with_path": request.with_path,
        "with_paths": request.with_paths,
        "whole": request.whole,
        "modules": request.modules,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def load(trace_key: str, tree: SglangTree) -> Trace | None:
    """The trace kept under a key; None when there is none or it cannot be read.

    `tree` is where the same content lies this time.
    """
    kept = load_entry(_entry(trace_key), Trace)
    return None if kept is None else replace(kept, cached=True, sglang=tree)


def store(trace_key: str, trace: Trace) -> None:
    """Keep a trace; a cache that cannot be written is no reason to fail."""
    save_entry(_entry(trace_key), trace)


def _entry(trace_key: str) -> Path:
    return folder() / "traces" / f"{trace_key}.json"


def metadata_text(tree: SglangTree) -> str:
    """What SGLang requires, as Requires-Dist lines: from its METADATA or its pyproject.toml."""
    return "\n".join(f"Requires-Dist: {requirement}" for requirement in requirements(tree))


# ------------------------------------------------------------------------ trees


def content_hash(root: Path) -> str:
    """sha256 over the names and bytes of all files below `root`, compiled Python aside."""
    states = list(_states(str(root)))
    manifest = hashlib.sha256(repr(states).encode()).hexdigest()
    name = hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:24]
    remembered = folder() / "trees" / f"{name}.json"
    try:
        known: dict[str, Any] = json.loads(remembered.read_bytes())
        if known["manifest"] == manifest:
            return str(known["content"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = hashlib.sha256()
    for relative, *_ in states:
        digest.update(os.fsencode(relative) + b"\0")
        digest.update(hashlib.sha256((root / relative).read_bytes()).digest())
    content = digest.hexdigest()
    with contextlib.suppress(OSError):
        write_whole(remembered, json.dumps({"manifest": manifest, "content": content}))
    return content


def _states(
    root: str, prefix: str = "", above: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[tuple[str, int, int, int, int]]:
    """(path, size, modified, changed, inode) of every file, in a fixed order.

    Links are followed, but not back into a folder that is being read.
    """
    folder = os.path.join(root, prefix)
    here = os.stat(folder)
    identity = (here.st_dev, here.st_ino)
    if identity in above:
        return
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        relative = prefix + entry.name
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _states(root, relative + "/", above | {identity})
        elif entry.is_file() and not entry.name.endswith(".pyc"):
            state = entry.stat()
            yield relative, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino


def named_files(flags: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Content of what flags, and SGLang's --config files, point at: files, chat templates, a
    draft's own folder or what the Hugging Face cache has of it."""
    hub, contents = hub_cache(environment), {}
    for word in _words(flags):
        path = Path(word)
        repository = hub / f"models--{word.replace('/', '--')}"
        try:
            if path.is_file():
                contents[word] = _digest(path)
            elif (path / "config.json").is_file():
                contents[word] = _model_hash(path)
            elif _MODEL_ID.fullmatch(word) and repository.is_dir():
                snapshots = sorted((repository / "snapshots").iterdir())
                main = _digest(repository / "refs" / "main")
                contents[word] = main + "".join(map(_model_hash, snapshots))
        except (OSError, ValueError):
            continue
    return contents


_MODEL_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_CONFIG_BYTES = 1 << 20
_QUOTED = re.compile(r"""'([^'\n]*)'|"([^"\n]*)\"""")
_VALUE = re.compile(r"(?:^\s*-|:)\s+(\S.*?)\s*(?:\s#.*)?$", re.MULTILINE)
_WORD = re.compile(r"[^\s,\[\]{}'\"]+")


def _words(flags: Sequence[str]) -> list[str]:
    """The flags' values, and whatever can be one in a --config file."""
    words = [flag.partition("=")[2] if flag.startswith("--") else flag for flag in flags]
    for before, named in itertools.pairwise(flags):
        if before == "--config":
            with contextlib.suppress(OSError, ValueError), open(named, "rb") as file:
                text = file.read(_CONFIG_BYTES).decode("utf-8", "replace")
                quoted = (one or other for one, other in _QUOTED.findall(text))
                words += [*quoted, *_VALUE.findall(text), *_WORD.findall(text)]
    return list(dict.fromkeys(word for word in words if word))


def _model_hash(folder: Path) -> str:
    """sha256 over a model folder's JSON files and shard headers."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if not path.is_file():
            continue
        if path.suffix == ".json":
            digest.update(os.fsencode(path.name) + _digest(path).encode())
        elif path.suffix == ".safetensors":
            with path.open("rb") as file:
                start = file.read(8)
                digest.update(os.fsencode(path.name) + start)
                digest.update(file.read(min(int.from_bytes(start, "little"), 100 << 20)))
    return digest.hexdigest()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def own_packages(request: TraceRequest) -> list[list[str]]:
    """What lies in the folders that only the launch or its user names."""
    folders = [Path(folder) for folder in request.python_path()]
    base = request.user_base()
    if base is not None:
        folders += sorted(Path(base).glob("lib/python3*/site-packages"))
    found = []
    for folder in folders:
        with contextlib.suppress(OSError):
            found.append([str(folder), *sorted(os.listdir(folder))])
    return found


def packages(interpreter: Path) -> list[str]:
    """The distributions beside an interpreter, by the names of their metadata folders.

    Read from the folder names of its site-packages, so that no process has to be started.  A
    system's Python has them under /usr/local too: there pip puts what a container installs.
    """
    names: list[str] = []
    prefix = interpreter.parent.parent
    for root in (prefix, prefix / "local"):
        for site in sorted(root.glob("lib*/python3*/*-packages")):
            names += sorted(info.name for info in site.glob("*.dist-info"))
    return names
