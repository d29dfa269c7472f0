"""Fixtures that more than one test file uses."""

import fcntl
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

from dsv4doctor.models import SglangTree
from dsv4doctor.wheels import default_cache, fetch_tree

# The same examples each time, and none too slow on a busy machine: main stays green.  New examples
# are looked for with --hypothesis-profile=default.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")

SPECS = Path(__file__).parent / "checkpoints"


@pytest.fixture(scope="session")
def checkpoint_generator() -> ModuleType:
    """tests/checkpoints/make_checkpoint.py as a module."""
    spec = importlib.util.spec_from_file_location("make_checkpoint", SPECS / "make_checkpoint.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CheckpointBuilder = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(
    checkpoint_generator: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CheckpointBuilder]:
    """`checkpoint(name, experts=None, variant=None)`: the folder of a header-only checkpoint.

    `name` is that of a spec in tests/checkpoints, e.g. "nvidia__DeepSeek-V4-Flash-NVFP4".
    `experts` keeps the first ones of each layer only.  A folder is built once a session: copy
    it with `copy_checkpoint` before changing it.
    """
    built: dict[tuple[str, int | None, str | None], Path] = {}

    def build(name: str, experts: int | None = None, variant: str | None = None) -> Path:
        key = (name, experts, variant)
        if key not in built:
            spec = json.loads((SPECS / f"{name}.json").read_text(encoding="utf-8"))
            if variant is not None:
                spec = checkpoint_generator.apply_variant(spec, variant)
            folder = tmp_path_factory.mktemp("checkpoint") / name
            checkpoint_generator.build(spec, folder, experts)
            built[key] = folder
        return built[key]

    yield build
    for folder in built.values():
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def copy_checkpoint() -> Callable[[Path, Path], Path]:
    """`copy_checkpoint(folder, target)`: a copy that keeps the holes; gives `target`.

    shutil alone would write them out: over 100 GB for a checkpoint.
    """

    def copy_file(source: str, target: str) -> None:
        size = os.path.getsize(source)
        with open(source, "rb") as file:
            start = file.read(8)
            is_shard = source.endswith(".safetensors")
            start += file.read(int.from_bytes(start, "little") if is_shard else size)
        with open(target, "wb") as file:
            file.write(start)
            file.truncate(size)

    def copy(folder: Path, target: Path) -> Path:
        shutil.copytree(folder, target, copy_function=copy_file)
        return target

    return copy


@pytest.fixture(scope="session")
def sglang_tree() -> Callable[[str], SglangTree]:
    """`sglang_tree(version)`: the real, read-only tree of that release from the user's cache.

    Fetched from the package index the first time; test processes wait for one another.
    """

    def fetch(version: str) -> SglangTree:
        cache = default_cache()
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".tests-{version}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return fetch_tree(version, cache)

    return fetch


def pytest_report_header() -> str | None:
    """Says which tests this machine cannot run."""
    return None if shutil.which("chromium") else "no chromium here: its tests are left out"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without chromium its tests are deselected, and counted as such in the last line."""
    if shutil.which("chromium"):
        return
    left_out = [item for item in items if item.get_closest_marker("chromium")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
