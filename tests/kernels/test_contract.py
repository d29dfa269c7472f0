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
    adapter = catalog.FOLDER / "adapters" / f"{name}.py"
    assert adapter in catalog.source_files(name)
    tree = ast.parse(adapter.read_text(encoding="utf-8"))
    called = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert any(function.endswith("require_stamp") for function in called)
