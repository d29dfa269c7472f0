"""Every registered kernel keeps the contract of kernels/registry.py."""

import ast
from collections import Counter

import pytest

from dsv4doctor.kernels import catalog, registry

NAMES = pytest.mark.parametrize("name", registry.OPERATIONS)


@NAMES
def test_what_is_listed_is_what_is_loaded(name: str) -> None:
    assert catalog.meta(name) == registry.load(name).META
    assert catalog.meta(name).name == name


@NAMES
def test_checks_are_named_and_strict(name: str) -> None:
    checks = registry.load(name).checks("cpu")
    assert any(check.quick for check in checks)
    assert max(Counter(check.name for check in checks).values()) == 1
    assert all(0 <= check.bar <= 1e-2 for check in checks)


@NAMES
def test_an_adapter_asks_for_the_stamp(name: str) -> None:
    adapters = catalog.FOLDER / "adapters"
    files = [path for path in catalog.source_files(name) if path.parent == adapters]
    assert adapters / f"{name}.py" in files
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    called = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    assert any(function.endswith("require_stamp") for function in called)
