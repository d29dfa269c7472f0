"""A tree that a server runs from is not changed under it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patching_trees import BOTH, contents, job

from dsv4doctor.errors import PatchRefusedError
from dsv4doctor.models import SglangTree
from dsv4doctor.patching import restore, work
from dsv4doctor.patching.running import users_of
from dsv4doctor.patching.view import Asked

_SERVER = "import sys, time; print('up', flush=True); time.sleep(60)"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for fix in BOTH:
        for name in fix.files:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("# a file of a tree\n")
    (root / "sglang" / "__init__.py").write_text("")
    (root / "sglang" / "launch_server.py").write_text(_SERVER)
    return root


def _started(process: subprocess.Popen[str]) -> Iterator[int]:
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "up\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(params=["working folder", "PYTHONPATH", "its own name", "mapped library"])
def server(request: pytest.FixtureRequest, root: Path, tmp_path: Path) -> Iterator[int]:
    """A process that runs from the tree, found in the way that the parameter says."""
    command = [sys.executable, "-m", "sglang.launch_server", "--tp", "4"]
    variables = {**os.environ, "PYTHONPATH": str(root)}
    where = tmp_path
    if request.param == "working folder":
        where, variables = root, dict(os.environ)
    elif request.param == "its own name":
        code = f"import sys; sys.argv = ['sglang::scheduler_TP0']; {_SERVER}"
        command = ["sglang::scheduler_TP0", "-c", code]
    elif request.param == "mapped library":
        library = root / "sglang" / "core.so"
        library.write_bytes(b"\0" * 4096)
        code = (
            f"import mmap; f = open({str(library)!r}, 'rb'); "
            f"m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); {_SERVER}"
        )
        command, variables = [sys.executable, "-c", code], dict(os.environ)
    process = subprocess.Popen(
        command,
        executable=sys.executable,
        cwd=where,
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield from _started(process)


def test_it_is_found_and_the_tree_left_alone(server: int, root: Path, tmp_path: Path) -> None:
    assert [one.pid for one in users_of(root)] == [server]
    before = contents(root)
    tree = SglangTree(str(root), "0.5.14", "folder")
    with pytest.raises(PatchRefusedError, match=f"process {server}") as refused:
        work.apply(job(tree, tmp_path / "state"))
    assert refused.value.hint == "stop it first, or give --force"
    assert contents(root) == before
    forced = work.apply(job(tree, tmp_path / "state", force=True))
    assert f"process {server}" in forced.notes[0]
    with pytest.raises(PatchRefusedError, match=f"process {server}"):
        restore.revert(job(tree, tmp_path / "state").store, BOTH, Asked())
    restore.revert(job(tree, tmp_path / "state").store, BOTH, Asked(force=True))
    assert contents(root) == before


def test_processes_of_other_trees_are_not_counted(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(root, other)
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang.launch_server"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(other)},
        stdout=subprocess.PIPE,
        text=True,
    )
    for pid in _started(process):
        assert users_of(root) == ()
        assert [one.pid for one in users_of(other)] == [pid]


def test_where_there_is_no_proc(root: Path, tmp_path: Path) -> None:
    assert users_of(root, tmp_path / "none") == ()
