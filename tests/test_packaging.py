"""The package list in pyproject.toml is the folders that hold Python files."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in 3.11")
def test_every_package_is_listed() -> None:
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "dsv4doctor").rglob("*.py")
    }
    found |= {
        "dsv4doctor." + ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("rules", "kernels", "fixes")
        for path in (ROOT / top).rglob("*.py")
    }
    # A link is followed by rglob from Python 3.13 on only when asked; both spellings are equal.
    assert sorted(found) == sorted(listed)


def test_kernels_is_no_top_level_package() -> None:
    """With an __init__.py it would hide Hugging Face's `kernels`, which SGLang imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
