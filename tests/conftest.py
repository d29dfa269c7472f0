"""Fixtures that more than one test file uses."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SPECS = Path(__file__).parent / "checkpoints"


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_checkpoint", SPECS / "make_checkpoint.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CheckpointBuilder = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointBuilder:
    """`checkpoint(name, experts=None, variant=None)`: the folder of a header-only checkpoint.

    `name` is that of a spec in tests/checkpoints, e.g. "nvidia__DeepSeek-V4-Flash-NVFP4".
    `experts` keeps the first ones of each layer only.  A folder is built once a session: copy
    it before changing it.
    """
    generator = _generator()
    built: dict[tuple[str, int | None, str | None], Path] = {}

    def build(name: str, experts: int | None = None, variant: str | None = None) -> Path:
        key = (name, experts, variant)
        if key not in built:
            spec = json.loads((SPECS / f"{name}.json").read_text(encoding="utf-8"))
            if variant is not None:
                spec = generator.apply_variant(spec, variant)
            folder = tmp_path_factory.mktemp("checkpoint") / name
            generator.build(spec, folder, experts)
            built[key] = folder
        return built[key]

    return build
