"""Bytes: line ends, diffs, links, modes, compiled files, what is pristine."""

import errno
import json
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from patching_trees import BOTH, FP8, KV, ONE, QUANT, contents, job, part_of

from dsv4doctor.errors import PatchRefusedError, UsageError
from dsv4doctor.models import SglangTree
from dsv4doctor.patching import diff, disk, overlay, pristine, restore, shadow, text, work
from dsv4doctor.patching.journal import Journal, Original, Store
from dsv4doctor.patching.view import Asked

Tree = Callable[[str], SglangTree]
_LINES = st.lists(st.text(alphabet="ab \x0c\x1c\x85\u2028\ufeff\u00e9'\t", max_size=6), max_size=8)
_ENDS = st.sampled_from(["\n", "\r\n"])


@pytest.fixture
def tree(sglang_tree: Tree, tmp_path: Path) -> SglangTree:
    return part_of(sglang_tree("0.5.14"), tmp_path / "tree")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@st.composite
def sources(draw: st.DrawFn) -> bytes:
    """A file with any mix of line ends, with and without a last one."""
    lines = draw(_LINES)
    mixed = draw(st.booleans())
    end = draw(_ENDS)
    joined = "".join(line + (draw(_ENDS) if mixed else end) for line in lines)
    return (joined + draw(st.text(alphabet="ab", max_size=2))).encode()


# ------------------------------------------------------------------------------ text


@given(sources())
def test_text_comes_back_as_it_was(content: bytes) -> None:
    decoded = text.decode(content)
    assert "\r\n" not in decoded.body
    assert decoded.encode(decoded.body) == content


@example(b"", b"\xef\xbb\xbf\xef\xbb\xbf\n")
@given(sources(), sources())
def test_any_new_text_can_be_written(old: bytes, new: bytes) -> None:
    body = text.decode(new).body
    written = text.decode(text.decode(old).encode(body))
    assert written.body == body
    if b"\r\n" not in old:
        assert b"\r\n" not in text.decode(old).encode(body)


def test_new_lines_end_like_the_file() -> None:
    unix, windows = text.decode(b"a\nb\n"), text.decode(b"\xef\xbb\xbfa\r\nb")
    assert unix.encode("a\nnew\nb\n") == b"a\nnew\nb\n"
    assert windows.encode("a\nnew\nb") == b"\xef\xbb\xbfa\r\nnew\r\nb"
    mixed = text.decode(b"a\r\nb\nc\r\nd\r\n")
    assert mixed.encode("a\nb\nnew\nc\nd\n") == b"a\r\nb\nnew\r\nc\r\nd\r\n"


@settings(max_examples=40, deadline=None)
@given(sources(), sources())
def test_git_takes_any_diff(old: bytes, new: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sglang" / "srt" / "a.py"
        path.parent.mkdir(parents=True)
        path.write_bytes(old)
        patch = diff.unified({"sglang/srt/a.py": (old, new)})
        if old == new:
            assert patch == b""
            return
        command = ["git", "-c", "core.autocrlf=false", "apply", "-"]
        subprocess.run(command, cwd=folder, input=patch, check=True, stderr=subprocess.DEVNULL)
        assert path.read_bytes() == new


# ------------------------------------------------------------------------------ a tree's files


@pytest.mark.wheels
def test_windows_line_ends_stay(tree: SglangTree, state: Path) -> None:
    path = Path(tree.root) / FP8
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    before = path.read_bytes()
    wanted = job(tree, state)
    work.apply(wanted)
    assert path.read_bytes() == b"# FIX901: auto\r\n" + before
    restore.revert(wanted.store, BOTH, Asked())
    assert path.read_bytes() == before


@pytest.mark.wheels
def test_what_is_hard_linked_elsewhere_is_not_changed_there(
    tree: SglangTree, state: Path, tmp_path: Path
) -> None:
    """uv links site-packages to its cache: a write in place would change every environment."""
    other = tmp_path / "cache"
    shutil.copytree(tree.root, other, copy_function=os.link)
    before = contents(other)
    assert (other / FP8).stat().st_nlink == 2
    wanted = job(tree, state)
    work.apply(wanted)
    assert contents(other) == before
    restore.revert(wanted.store, BOTH, Asked())
    assert contents(other) == before
    assert contents(Path(tree.root)) == before


@pytest.mark.wheels
def test_a_link_to_a_file_is_replaced_and_comes_back(
    tree: SglangTree, state: Path, tmp_path: Path
) -> None:
    root = Path(tree.root)
    kept = tmp_path / "kept.py"
    (root / FP8).rename(kept)
    (root / FP8).symlink_to(kept)
    before, original = contents(root), kept.read_bytes()
    wanted = job(tree, state)
    work.apply(wanted)
    assert not (root / FP8).is_symlink()
    assert kept.read_bytes() == original
    restore.revert(wanted.store, BOTH, Asked())
    assert contents(root) == before
    assert (root / FP8).is_symlink()


@pytest.mark.wheels
@pytest.mark.parametrize("mode", [0o444, 0o755, 0o600])
def test_the_mode_stays(tree: SglangTree, state: Path, mode: int) -> None:
    path = Path(tree.root) / FP8
    path.chmod(mode)
    before = contents(Path(tree.root))
    wanted = job(tree, state)
    work.apply(wanted)
    assert path.stat().st_mode & 0o7777 == mode
    restore.revert(wanted.store, BOTH, Asked())
    assert contents(Path(tree.root)) == before


@pytest.mark.wheels
def test_the_owner_stays(tree: SglangTree, state: Path) -> None:
    path = Path(tree.root) / FP8
    owner = (65534, 65534) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(path, *owner)  # only root can give files away
    work.apply(job(tree, state))
    assert (path.stat().st_uid, path.stat().st_gid) == owner


@pytest.mark.wheels
def test_compiled_files_go_with_their_source(tree: SglangTree, state: Path) -> None:
    """Compiled without a check of the source, Python would go on to run the old one."""
    root = Path(tree.root)
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compiled = Path(py_compile.compile(str(root / FP8), invalidation_mode=unchecked, doraise=True))
    other = compiled.with_name("fp8.cpython-39.opt-1.pyc")
    neighbour = compiled.with_name("fp8_kernel.cpython-39.pyc")
    for path in (other, neighbour):
        path.write_bytes(b"")
    wanted = job(tree, state)
    work.apply(wanted)
    assert [path.exists() for path in (compiled, other, neighbour)] == [False, False, True]
    py_compile.compile(str(root / FP8), invalidation_mode=unchecked, doraise=True)
    restore.revert(wanted.store, BOTH, Asked())
    assert not compiled.exists()


def _as_nobody(action: Callable[[], object]) -> str:
    """What `action` raises in a process that may not do what root may; "" for nothing."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            action()
            os._exit(0)
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode()[:4000])
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


@pytest.mark.wheels
def test_a_tree_that_cannot_be_written(tree: SglangTree, tmp_path: Path) -> None:
    root = Path(tree.root)
    (tmp_path / "state").mkdir(mode=0o777)
    (tmp_path / "state").chmod(0o777)
    parents = [path for path in tmp_path.parents if path.stat().st_uid == os.getuid()]
    modes = {path: path.stat().st_mode for path in (*parents, tmp_path)}
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    try:
        for path in modes:
            if str(path).count("/") > 1:
                path.chmod(0o755)
        for folder in folders:
            folder.chmod(0o555)
        before = contents(root)
        said = _as_nobody(lambda: work.apply(job(tree, tmp_path / "state")))
    finally:
        for folder in folders:
            folder.chmod(0o755)
        for path, mode in modes.items():
            path.chmod(mode & 0o7777)
    assert said.startswith("PatchRefusedError: ")
    assert "cannot be written" in said
    assert contents(root) == before


@pytest.mark.wheels
def test_a_state_folder_that_cannot_be_written(tree: SglangTree, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(Exception, match="cannot be written") as refused:
        work.apply(job(tree, tmp_path / "state"))
    assert type(refused.value).__name__ == "UsageError"


@pytest.mark.wheels
def test_a_journal_that_another_user_keeps(
    tree: SglangTree, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = job(tree, state)
    work.apply(wanted)
    opened = os.open

    def refusing(path: str | Path, *given: int) -> int:
        if Path(path) == wanted.store.path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *given)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(UsageError, match=r"journal\.json: cannot be read .Permission") as refused:
        restore.status(wanted.store, BOTH)
    assert (refused.value.hint or "").startswith("run it as the user who patched the tree")


# ------------------------------------------------------------------------------ pristine


@pytest.mark.wheels
def test_pristine_by_the_wheels_own_record(sglang_tree: Tree, tree: SglangTree) -> None:
    for release in ("0.5.14", "0.5.23"):
        root = Path(sglang_tree(release).root)
        judge = pristine.judge(root)
        assert judge.of(FP8, (root / FP8).read_bytes()) is True
        assert judge.of(FP8, (root / FP8).read_bytes() + b"\n") is False
        assert judge.of("sglang/no_such.py", b"") is None


@pytest.mark.wheels
def test_pristine_in_a_checkout(tree: SglangTree, state: Path) -> None:
    root = Path(tree.root)
    shutil.rmtree(next(root.glob("*.dist-info")))
    content = (root / FP8).read_bytes()
    assert pristine.judge(root).of(FP8, content) is None
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=root, check=True)
    (root / KV).write_text("# my own\n")
    judge = pristine.judge(root)
    assert judge.of(FP8, content) is True
    planned = work.make_plan(job(tree, state))
    assert planned.pristine == {QUANT: True, FP8: True, KV: False}


# ------------------------------------------------------------------------------ shadow, damage


@pytest.mark.wheels
def test_a_shadow_is_the_tree_with_other_files(tree: SglangTree, tmp_path: Path) -> None:
    before = contents(Path(tree.root))
    other = shadow.build(tree, {FP8: b"NEW = 1\n"}, tmp_path / "shadow")
    root = Path(other.root)
    assert (root / FP8).read_bytes() == b"NEW = 1\n"
    for name, (content, _) in before.items():
        if name != FP8:
            assert (root / name).read_bytes() == content
    code = f"import importlib.util as u; print(u.find_spec({'sglang'!r}).origin)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(root)},
    )
    assert done.stdout.strip() == str(root / "sglang/__init__.py")
    assert contents(Path(tree.root)) == before


@pytest.mark.wheels
@pytest.mark.parametrize("damage", ["no JSON", "no journal", "another format"])
def test_a_damaged_journal_is_named(tree: SglangTree, state: Path, damage: str) -> None:
    wanted = job(tree, state, (ONE,))
    work.apply(wanted)
    path = wanted.store.path
    path.write_text(
        {
            "no JSON": "{",
            "no journal": "[]",
            "another format": path.read_text().replace('"format": 1', '"format": 9'),
        }[damage]
    )
    with pytest.raises(Exception, match=r"journal\.json") as refused:
        restore.revert(wanted.store, BOTH, Asked())
    assert type(refused.value).__name__ == "UsageError"


@pytest.mark.wheels
def test_kept_bytes_that_are_damaged_are_never_written(tree: SglangTree, state: Path) -> None:
    wanted = job(tree, state, (ONE,))
    work.apply(wanted)
    patched = contents(Path(tree.root))
    for kept in (wanted.store.folder / "bytes").iterdir():
        kept.write_bytes(b"damaged")
    with pytest.raises(PatchRefusedError, match="damaged"):
        restore.revert(wanted.store, BOTH, Asked())
    assert contents(Path(tree.root)) == patched


def test_reading_a_file_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert disk.read(tmp_path / "pipe") is None
    assert disk.read(tmp_path) is None
    assert disk.read(tmp_path / "none") is None
    assert disk.read(tmp_path / "pipe" / "none") is None
    assert replace(disk.File(b"a"), mode=0o600).sha256 == disk.sha256(b"a")


def test_a_tree_whose_path_is_no_text(tmp_path: Path) -> None:
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff"))
    (root / "sglang").mkdir(parents=True)
    tree = SglangTree(str(root), "0.5.14", "folder")
    store = Store(tmp_path / "state", tree)
    journal = Journal(str(root), "0.5.14", {KV: Original("0" * 64, 0o644)})
    store.save(journal)
    loaded = store.load()
    assert loaded is not None
    assert loaded.root == str(root)
    made = overlay.write(tmp_path / "overlay", tree, [], {}, {})
    assert overlay.read(tmp_path / "overlay") == made
    assert json.loads((tmp_path / "overlay" / "overlay.json").read_text("utf-8"))["modules"] == []
