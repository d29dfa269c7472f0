"""Fetching SGLang releases into a cache: for real, interrupted, twice at once, and in vain."""

import os
import signal
import stat
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsv4doctor.errors import UndeterminedError, UsageError
from dsv4doctor.models import SglangTree
from dsv4doctor.wheels import default_cache, fetch_tree, unpack

SMALL = "0.5.12.post1"
FETCH = (
    "import sys; from pathlib import Path; from dsv4doctor.wheels import fetch_tree;"
    f"fetch_tree({SMALL!r}, Path(sys.argv[1]))"
)


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "sglang").iterdir())


@pytest.fixture
def writable_afterwards(tmp_path: Path) -> Iterator[Path]:
    """A cache that pytest can delete again, though the trees in it are read-only."""
    yield tmp_path / "cache"
    for folder, _, _ in os.walk(tmp_path):
        os.chmod(folder, 0o755)


@pytest.mark.wheels
def test_fetch_reports_progress_and_is_kept(writable_afterwards: Path) -> None:
    cache = writable_afterwards
    seen: list[tuple[int, int | None]] = []
    tree = fetch_tree(SMALL, cache, lambda done, total: seen.append((done, total)))
    root = cache / "sglang" / SMALL
    assert tree == SglangTree(str(root), SMALL, "wheel")
    assert all(0 < done <= (total or done) for done, total in seen)
    for path in (root, root / "sglang", root / "sglang" / "__init__.py"):
        assert not path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)
    assert left_over(cache) == [SMALL]

    # From now on neither pip nor a network is needed.
    again = fetch_tree("0.5.12-post1", cache, python="/nonexistent/python")
    assert again == tree


@pytest.mark.wheels
def test_two_at_once(writable_afterwards: Path) -> None:
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(fetch_tree, (SMALL, SMALL), (writable_afterwards,) * 2)
    assert first == second
    assert left_over(writable_afterwards) == [SMALL]


@pytest.mark.wheels
def test_killed_while_unpacking_leaves_nothing_under_the_name(writable_afterwards: Path) -> None:
    cache = writable_afterwards
    process = subprocess.Popen([sys.executable, "-c", FETCH, str(cache)])
    deadline = time.monotonic() + 60
    while not list(cache.glob("sglang/.incomplete-*/tree/sglang/srt")):
        assert process.poll() is None, "finished before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (scratch,) = left_over(cache)
    assert scratch.startswith(".incomplete-")

    # The next one starts over, and clears what is a day old.
    old = time.time() - 2 * 24 * 3600
    os.utime(cache / "sglang" / scratch, (old, old))
    assert fetch_tree(SMALL, cache).version == SMALL
    assert left_over(cache) == [SMALL]


@pytest.mark.wheels
def test_version_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--sglang 0\.5\.999: .* no such release") as caught:
        fetch_tree("0.5.999", tmp_path)
    assert "0.5.23" in (caught.value.hint or "")
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("version", ["", "0.5.*", "latest", "--help", "0.5.23; rm", "../x"])
def test_version_that_is_none(tmp_path: Path, version: str) -> None:
    with pytest.raises(UsageError, match="not a version"):
        fetch_tree(version, tmp_path, python="/nonexistent/python")
    assert list(tmp_path.iterdir()) == []


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(UndeterminedError, match="cannot be reached") as caught:
        fetch_tree("0.5.23", tmp_path)
    assert "\n" not in caught.value.message
    assert left_over(tmp_path) == []


def index_with(folder: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pip take SGLang 9.9 from a local folder only, with these files in the wheel."""
    name = "sglang-9.9-cp311-cp311-manylinux_2_34_aarch64.whl"
    metadata = {"METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\n"}
    metadata["WHEEL"] = "Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_2_34_aarch64\n"
    metadata["RECORD"] = ""
    folder.mkdir()
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, text in metadata.items():
            archive.writestr(f"sglang-9.9.dist-info/{path}", text)
        for path, text in files.items():
            archive.writestr(path, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_wheel_for_another_machine_is_taken(
    tmp_path: Path, writable_afterwards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"sglang/srt/models/deepseek_v4.py": ""}
    index_with(tmp_path / "links", files, monkeypatch)
    assert fetch_tree("9.9", writable_afterwards).version == "9.9"


def test_release_without_the_model_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_with(tmp_path / "links", {"sglang/srt/models/deepseek_v2.py": ""}, monkeypatch)
    message = r"--sglang 9.9: SGLang 9.9 has no DeepSeek-V4"
    with pytest.raises(UsageError, match=message):
        fetch_tree("9.9", tmp_path / "cache")
    assert left_over(tmp_path / "cache") == []


@pytest.mark.parametrize(
    "path", ["../evil", "/evil", "sglang/../../evil", "a\\..\\evil", "c:/evil"]
)
def test_paths_outside_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    index_with(tmp_path / "links", {"sglang/srt/models/deepseek_v4.py": "", path: "x"}, monkeypatch)
    (wheel,) = (tmp_path / "links").iterdir()
    with pytest.raises(UndeterminedError, match="unsafe path"):
        unpack(wheel, tmp_path / "tree")
    assert list(tmp_path.rglob("evil")) == []
    assert not (tmp_path / "tree").exists()


def test_links_are_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        link = zipfile.ZipInfo("sglang/link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc")
    with pytest.raises(UndeterminedError, match="unsafe path"):
        unpack(wheel, tmp_path / "tree")


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04" + b"\0" * 100])
def test_damaged_wheels(tmp_path: Path, content: bytes) -> None:
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(content)
    with pytest.raises(UndeterminedError, match="damaged"):
        unpack(wheel, tmp_path / "tree")


def test_no_pip(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = str(tmp_path / "env" / "bin" / "python")
    with pytest.raises(UsageError, match="has no pip") as caught:
        fetch_tree("0.5.23", tmp_path / "cache", python=python)
    assert "pip install pip" in (caught.value.hint or "")


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written") as caught:
        fetch_tree("0.5.23", tmp_path / "file")
    assert "DSV4DOCTOR_CACHE" in (caught.value.hint or "")


def test_where_the_cache_is() -> None:
    assert default_cache({"DSV4DOCTOR_CACHE": "/x/y"}) == Path("/x/y")
    assert default_cache({}).name == "dsv4doctor"
