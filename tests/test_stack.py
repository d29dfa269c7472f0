"""Packages and SGLang trees: real wheels, real environments, and what is none."""

import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.stack import compare, read_stack
from dsv4doctor.facts.tree import mixed, read_tree, requirements
from dsv4doctor.models import Package, SglangTree, Stack

Trees = Callable[[str], SglangTree]


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def small_tree(root: Path, version_file: str | None = None, model: bool = True) -> Path:
    """A checkout's `sglang` folder below `root`."""
    write(root / "sglang" / "__init__.py", "raise SystemExit('imported')\n")
    write(root / "sglang" / "srt" / "__init__.py")
    if model:
        write(root / "sglang" / "srt" / "models" / "deepseek_v4.py")
    if version_file is not None:
        write(root / "sglang" / "version.py", version_file)
    return root


def distribution(site: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    write(folder / "METADATA", "\n".join(lines) + "\n")
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> tuple[Path, Path]:
    """A fresh virtual environment: its Python and its site-packages."""
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    return folder / "bin" / "python", site


# ------------------------------------------------------------------------------ trees


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("version", "torch", "flashinfer"),
    [("0.5.14", "==2.11.0", "==0.6.12"), ("0.5.23", "==2.14.1", "==0.7.2")],
)
def test_real_wheels(sglang_tree: Trees, version: str, torch: str, flashinfer: str) -> None:
    tree = sglang_tree(version)
    assert (tree.version, tree.origin, tree.borrowed) == (version, "wheel", True)
    assert read_tree(Path(tree.root)) == SglangTree(tree.root, version, "folder")
    assert read_tree(Path(tree.root) / "sglang").root == tree.root
    declared = {requirement.name: requirement for requirement in requirements(tree)}
    assert str(declared["torch"].specifier) == torch
    assert str(declared["flashinfer_python"].specifier) == flashinfer
    assert "diffusers" not in declared


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = '0.5.14'\n", "0.5.14"),
        ("__version__ = version = '0.5.23'\n", "0.5.23"),
        ("try:\n    from x import y\nexcept ImportError:\n    __version__ = '0.0.0'\n", "unknown"),
        ("__version__ = (\n", "unknown"),
        (None, "unknown"),
    ],
)
def test_version_written_in_the_source(tmp_path: Path, text: str | None, version: str) -> None:
    assert read_tree(small_tree(tmp_path, text)).version == version


def test_generated_version_file(tmp_path: Path) -> None:
    small_tree(tmp_path, "from sglang._version import __version__\n")
    write(tmp_path / "sglang" / "_version.py", "__version__ = '0.5.24.dev3'\n")
    assert read_tree(tmp_path).version == "0.5.24.dev3"


@pytest.mark.parametrize("code", ["0.5.14", "0.5.16", "0.5.23"])
def test_the_release_unpacked_last_is_named_of_several(tmp_path: Path, code: str) -> None:
    small_tree(tmp_path, f"__version__ = '{code}'\n")
    for version in ("0.5.14", "0.5.16", "0.5.23"):
        distribution(tmp_path, "sglang", version, (f"torch=={version}",))
    tree = read_tree(tmp_path)
    assert tree.version == code
    assert [str(one) for one in requirements(tree)] == [f"torch=={code}"]
    (said,) = mixed(tmp_path)
    assert f"several SGLang releases were unpacked into {tmp_path} (0.5.14, 0.5.16, 0.5.23)" in said
    assert f"its code is of {code}" in said
    write(tmp_path / "sglang" / "version.py")
    (said,) = mixed(tmp_path)
    assert "which of them its code is of is not known" in said
    for version in ("0.5.16", "0.5.23"):
        shutil.rmtree(tmp_path / f"sglang-{version}.dist-info")
    assert mixed(tmp_path) == ()


def test_checkout(tmp_path: Path) -> None:
    repository = tmp_path / "sglang"
    small_tree(repository / "python", "__version__ = '0.5.24'\n")
    write(
        repository / "python" / "pyproject.toml",
        '[project]\nname = "sglang"\n'
        'dependencies = ["torch==2.14.1", "not ( valid", 3, "av; sys_platform == \'linux\'"]\n'
        '[project.optional-dependencies]\ntest = ["pytest"]\n',
    )
    for path in (repository, repository / "python", repository / "python" / "sglang"):
        tree = read_tree(path)
        assert tree == SglangTree(str(repository / "python"), "0.5.24", "folder")
    assert [requirement.name for requirement in requirements(tree)] == ["torch", "av"]


def test_tree_without_declarations(tmp_path: Path) -> None:
    tree = read_tree(small_tree(tmp_path))
    assert requirements(tree) == ()
    write(tmp_path / "pyproject.toml", "[project\n")
    assert requirements(tree) == ()
    write(tmp_path / "pyproject.toml", "project = 3\n")
    assert requirements(tree) == ()


def test_no_tree(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "file")
    small_tree(tmp_path / "renamed", model=False)
    for path, message in (
        (tmp_path / "missing", "no such folder"),
        (tmp_path / "empty", "no sglang/srt"),
        (tmp_path / "file", "a file"),
        (tmp_path / "renamed", r"SGLang unknown at .* has no DeepSeek-V4 \(first in 0.5.12\)"),
        (Path("a\0b"), "null|no such folder"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            read_tree(path)
        assert caught.value.hint


# ------------------------------------------------------------------------------ packages


def test_packages_against_requirements() -> None:
    declared = [
        Requirement(line)
        for line in (
            "torch==2.11.0",
            "flashinfer_python[cu13]==0.6.12",
            "transformers>=5.6",
            "transformers<5.9",
            "xgrammar",
            "tilelang==0.1.8; sys_platform == 'plan9'",
            "torchao==0.17.0; extra == 'x'",
            "triton>3; python_version < '3'",
        )
    ]
    installed = {
        "torch": "2.11.0+cu130",
        "transformers": "5.17.0",
        "triton": "3.6.0",
        "xgrammar": "0.2.1rc1",
        "tilelang": "odd",
        "requests": "2",
    }
    markers = {name: str(value) for name, value in default_environment().items()}
    assert compare(installed, declared, markers) == (
        Package("flashinfer-python", None, "==0.6.12", False),
        Package("torch", "2.11.0+cu130", "==2.11.0", True),
        Package("triton", "3.6.0", None, None),
        Package("transformers", "5.17.0", "<5.9,>=5.6", False),
        Package("tilelang", "odd", None, None),
        Package("xgrammar", "0.2.1rc1", "*", True),
    )
    odd = compare({"torch": "odd"}, declared[:1], markers)
    assert odd == (Package("torch", "odd", "==2.11.0", None),)


# ------------------------------------------------------------------------------ interpreters


def test_environment_without_sglang(environment: tuple[Path, Path]) -> None:
    python, site = environment
    distribution(site, "torch", "2.11.0")
    stack, tree = read_stack(python)
    assert tree is None
    here = sys.version.split()[0]
    assert stack == Stack(str(python), here, (Package("torch", "2.11.0", None, None),))


def test_only_a_metadata_header_counts(environment: tuple[Path, Path]) -> None:
    python, site = environment
    text = "Name: torch\nSummary: has\n  Name: folded\nVersion: 2.11.0\n\nName: x\nVersion: 9\n"
    write(site / "torch-2.11.0.dist-info" / "METADATA", text)
    write(site / "triton-3.6.0.egg-info" / "PKG-INFO", "Name: triton\r\nVersion: 3.6.0\r\n\r\n9")
    write(site / "kernels-1.0.egg-info", "Name: kernels\nVersion: 1.0\n")
    write(site / "torchao-1.0.dist-info" / "METADATA", "\nName: torchao\nVersion: 1.0\n")
    (site / "xgrammar-1.0.dist-info").mkdir()
    stack, _ = read_stack(python)
    found = {package.name: package.version for package in stack.packages}
    assert found == {"torch": "2.11.0", "triton": "3.6.0", "kernels": "1.0"}


def test_installed_sglang_is_found_and_not_imported(environment: tuple[Path, Path]) -> None:
    python, site = environment
    small_tree(site)
    distribution(site, "sglang", "0.5.14", ("torch==2.11.0", "xgrammar==0.2.1"))
    distribution(site, "torch", "2.12.0")
    stack, tree = read_stack(python)
    assert tree == SglangTree(str(site), "0.5.14", "installed")
    assert not tree.borrowed
    assert stack.packages == (
        Package("sglang", "0.5.14", None, None),
        Package("torch", "2.12.0", "==2.11.0", False),
        Package("xgrammar", None, "==0.2.1", False),
    )


def test_editable_sglang(environment: tuple[Path, Path], tmp_path: Path) -> None:
    python, site = environment
    checkout = small_tree(tmp_path / "repository" / "python")
    write(checkout / "pyproject.toml", '[project]\ndependencies = ["torch==2.14.1"]\n')
    info = distribution(site, "sglang", "0.5.24.dev1+g1")
    write(info / "direct_url.json", '{"dir_info": {"editable": true}, "url": "file:///x"}')
    write(site / "editable.pth", f"{checkout}\n")
    stack, tree = read_stack(python)
    assert tree == SglangTree(str(checkout), "0.5.24.dev1+g1", "installed")
    assert Package("torch", None, "==2.14.1", False) in stack.packages


def test_python_path_of_the_launch_comes_first(
    environment: tuple[Path, Path], tmp_path: Path
) -> None:
    python, site = environment
    small_tree(site)
    distribution(site, "sglang", "0.5.14")
    own = small_tree(tmp_path / "own", "__version__ = '0.5.99'\n")
    _, tree = read_stack(python, {"PYTHONPATH": str(own)})
    assert tree == SglangTree(str(own), "0.5.99", "installed")


def test_folder_it_is_started_in_does_not_count(
    environment: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small_tree(tmp_path / "here"))
    assert read_stack(environment[0])[1] is None


@pytest.mark.wheels
def test_against_another_tree(environment: tuple[Path, Path], sglang_tree: Trees) -> None:
    python, site = environment
    distribution(site, "transformers", "5.8.1")
    for version, satisfied in (("0.5.14", True), ("0.5.23", False)):
        stack, tree = read_stack(python, against=sglang_tree(version))
        assert tree is None
        found = {package.name: package for package in stack.packages}
        assert found["sglang"].version == version
        assert found["transformers"].satisfied is satisfied


def script(folder: Path, body: str) -> Path:
    path = write(folder / "python", f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo hello", "not a working Python .hello"),
        ("exit 3", "no output"),
        ("echo dsv4doctor-probe:{}", "not a working Python"),
        ("echo 'dsv4doctor-probe:[1'", "not a working Python"),
        ("yes", "not a working Python"),
        ("sleep 60 & sleep 60", "no answer within 1 s"),
    ],
)
def test_no_python(tmp_path: Path, body: str, message: str) -> None:
    started = time.perf_counter()
    with pytest.raises(UsageError, match=message) as caught:
        read_stack(script(tmp_path, body), deadline=1)
    assert str(tmp_path) in caught.value.message
    assert time.perf_counter() - started < 10


def test_no_interpreter(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", "not executable")
    for path, message in (
        (tmp_path / "missing", "no such interpreter"),
        (tmp_path, "a folder"),
        (plain, "cannot be started"),
        (Path("no-such-python-here"), "no such interpreter"),
    ):
        with pytest.raises(UsageError, match=message):
            read_stack(path)


def test_noise_from_the_environment_is_passed_over(environment: tuple[Path, Path]) -> None:
    python, site = environment
    write(site / "sitecustomize.py", "print('hello', end='')\n")
    assert read_stack(python)[0].packages == ()


def test_interpreter_named_on_the_path(environment: tuple[Path, Path]) -> None:
    python, _ = environment
    command = (
        "from pathlib import Path; from dsv4doctor.facts.stack import read_stack;"
        "print(read_stack(Path('python'))[0].interpreter)"
    )
    result = subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, "PATH": f"{python.parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == str(python)
