"""Whatever fails or is killed, at whatever step, the tree is put right and nothing is lost."""

import base64
import contextlib
import errno
import hashlib
import importlib.util
import itertools
import multiprocessing
import os
import py_compile
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patching_trees import adds, contents, job

from dsv4doctor.errors import DoctorError, PatchRefusedError
from dsv4doctor.models import SglangTree
from dsv4doctor.patching import disk, restore, work
from dsv4doctor.patching.view import Asked

Tree = Callable[[str], SglangTree]
_STEPS = ("open", "write", "fsync", "replace", "unlink", "symlink", "fchmod", "mkdir", "rmdir")
Fault = Callable[[], object]
_UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH
# Small files, and of RECORD their lines: every step is tried.
_FOLDER = "sglang/srt/layers/quantization/"
FILES = (f"{_FOLDER}base_config.py", f"{_FOLDER}kv_cache.py", "sglang/version.py")
FIXES = (adds("FIX901", *FILES[:2]), adds("FIX902", FILES[0], FILES[2]))


@contextlib.contextmanager
def at_step(number: int, fault: Fault) -> Iterator[list[str]]:
    """`fault` instead of the `number`-th call that changes a file; gives the calls made."""
    real = {name: getattr(os, name) for name in _STEPS}
    made: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & (os.O_CREAT | os.O_DIRECTORY):
                made.append(name)
                if len(made) == number:
                    fault()
            return real[name](*args, **kwargs)

        return call

    for name in _STEPS:
        setattr(os, name, counting(name))
    try:
        yield made
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def _fails() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it has written: only a power cut asks for fsync."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def pristine_part(
    sglang_tree: Tree, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SglangTree, dict[str, Any]]:
    source = Path(sglang_tree("0.5.14").root)
    root = tmp_path_factory.mktemp("part") / "tree"
    record = next(source.glob("sglang-*.dist-info/RECORD"))
    lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.startswith(FILES)]
    (root / record.parent.name).mkdir(parents=True)
    (root / record.parent.name / "RECORD").write_text("".join(kept), encoding="utf-8")
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, root / name)
    tree = SglangTree(str(root), "0.5.14", "folder")
    linked = Path(tree.root) / FILES[1]
    linked.rename(linked.with_name("kept.py"))
    linked.symlink_to("kept.py")
    return tree, contents(Path(tree.root))


class Place:
    """A fresh tree, patched or not, whose actions are watched."""

    def __init__(self, pristine_part: tuple[SglangTree, dict[str, Any]], folder: Path) -> None:
        source, self.original = pristine_part
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source.root, folder / "tree", symlinks=True)
        self.root = folder / "tree"
        self.job = job(SglangTree(str(self.root), "0.5.14", "folder"), folder / "state", FIXES)

    @property
    def now(self) -> dict[str, Any]:
        found = contents(self.root)
        return {name: one for name, one in found.items() if not name.endswith(".pyc")}

    def compile(self) -> None:
        """As by an installer that has Python take what is compiled without a look at the source."""
        for name in FILES:
            py_compile.compile(str(self.root / name), invalidation_mode=_UNCHECKED, doraise=True)

    def check_compiled(self) -> None:
        """Nothing compiled from the original lies beside another source."""
        for name in FILES:
            path = self.root / name
            compiled = Path(importlib.util.cache_from_source(str(path)))
            if contents(self.root)[name] != self.original[name]:
                assert not compiled.exists(), name

    def apply(self) -> None:
        work.apply(self.job)

    def recover(self) -> None:
        restore.recover_tree(self.job.store)

    def revert(self) -> None:
        restore.revert(self.job.store, FIXES, Asked())

    def put_right(self) -> None:
        """As a user would, by what --status says."""
        said = restore.status(self.job.store, FIXES)
        if said.journal is not None and said.journal.pending is not None:
            assert said.exit_code == 1
            assert "--recover" in said.said
            assert said.gone is None  # what is in cannot be said
            with pytest.raises(PatchRefusedError, match="interrupted"):
                work.apply(self.job)
            restore.recover_tree(self.job.store)
        elif said.exit_code:
            raise AssertionError(said.said)

    def check_whole(self, patched: dict[str, Any], both_ways: bool = True) -> None:
        """Either state, with a journal that fits; and from there both ways are open."""
        said = restore.status(self.job.store, FIXES)
        assert said.exit_code == 0, said.said
        expected = self.original if said.journal is None else patched
        assert self.now == expected
        if not both_ways:
            return
        work.apply(self.job)
        assert self.now == patched
        self.revert()
        assert self.now == self.original


@pytest.fixture(scope="module")
def patched(
    pristine_part: tuple[SglangTree, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    place = Place(pristine_part, tmp_path_factory.mktemp("patched"))
    work.apply(place.job)
    return place.now


def _place(part: tuple[SglangTree, dict[str, Any]], folder: Path, action: str) -> Place:
    """A fresh place, patched where `action` takes the fixes back."""
    place = Place(part, folder / "place")
    if action == "revert":
        work.apply(place.job)
    return place


@pytest.mark.wheels
@pytest.mark.parametrize("action", ["apply", "revert"])
def test_an_error_at_any_step(
    pristine_part: tuple[SglangTree, dict[str, Any]],
    patched: dict[str, Any],
    tmp_path: Path,
    action: str,
) -> None:
    for number in itertools.count(1):
        place = _place(pristine_part, tmp_path, action)
        with at_step(number, _fails) as made, contextlib.suppress(DoctorError):
            getattr(place, action)()
        if len(made) < number:
            break
        place.put_right()
        place.check_whole(patched, number % 4 == 0)
    assert number > 30


@pytest.mark.wheels
@pytest.mark.parametrize("action", ["apply", "revert", "recover"])
def test_killed_at_any_step(
    pristine_part: tuple[SglangTree, dict[str, Any]],
    patched: dict[str, Any],
    tmp_path: Path,
    action: str,
) -> None:
    for number in itertools.count(1):
        place = _place(pristine_part, tmp_path, action)
        if action == "recover":
            _interrupt(place)
        if action == "apply":
            place.compile()
        status = _in_child(getattr(place, action), number)
        if status == 0:
            break
        assert os.WIFSIGNALED(status), status
        place.check_compiled()
        place.put_right()
        place.check_whole(patched, number % 4 == 0)
    assert number > 20


@pytest.mark.wheels
@pytest.mark.parametrize("fault", [_fails, _is_killed], ids=["an error", "killed"])
@pytest.mark.parametrize("action", ["apply", "revert"])
def test_a_file_was_written_anew_before(
    pristine_part: tuple[SglangTree, dict[str, Any]], tmp_path: Path, action: str, fault: Fault
) -> None:
    """Another release's file stays as it is, and what it replaced is never dropped."""
    mine, newer = b"# mine\n", b"# of another release\n"
    digest = base64.urlsafe_b64encode(hashlib.sha256(newer).digest()).decode().rstrip("=")
    for number in itertools.count(1):
        place = Place(pristine_part, tmp_path / "place")
        anew, record = place.root / FILES[0], next(place.root.glob("sglang-*.dist-info/RECORD"))
        anew.write_bytes(mine)
        place.apply()
        record.write_text(f"{FILES[0]},sha256={digest},1\nsglang/srt/x.py,sha256=x,1\n")
        anew.write_bytes(newer)
        if fault is _fails:
            with at_step(number, fault) as made, contextlib.suppress(DoctorError, OSError):
                getattr(place, action)()
            done = len(made) < number
        else:
            done = _in_child(getattr(place, action), number) == 0
        said = restore.status(place.job.store, FIXES)
        if said.journal is not None and said.journal.pending is not None:
            place.recover()
            said = restore.status(place.job.store, FIXES)
        if said.exit_code:  # as before
            assert anew.read_bytes() == newer
            assert "1 of 3 patched files written anew" in said.said
        else:
            assert (b"FIX90" in anew.read_bytes()) == (said.journal is not None)
        folder = place.job.store.folder
        assert mine in {path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        place.revert()
        assert anew.read_bytes() == newer
        assert all(place.now[name] == place.original[name] for name in FILES[1:])
        if done:
            break
    assert number > 20


def _interrupt(place: Place) -> None:
    """Apply is killed when two of the three files are in."""
    for _ in range(2):  # the first time makes folders
        with at_step(0, _fails) as made:
            place.apply()
        place.revert()
    replacing = [number for number, name in enumerate(made, 1) if name == "replace"]
    # The last are the three files, the journal, and the journal with the proof.
    assert os.WIFSIGNALED(_in_child(place.apply, replacing[-3]))
    assert 0 < sum(place.now.get(name) != place.original[name] for name in FILES) < 3


def _in_child(action: Callable[[], object], number: int) -> int:
    """The wait status of a process that is killed at its `number`-th step; 0: it was done first."""
    pid = os.fork()
    if pid == 0:
        try:
            with at_step(number, _is_killed):
                action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


# ------------------------------------------------------------------------------ others


@pytest.mark.wheels
@pytest.mark.parametrize("room", [0, 5_000, 30_000, 40_000])
def test_a_full_disk_changes_nothing(
    pristine_part: tuple[SglangTree, dict[str, Any]],
    patched: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
) -> None:
    place = Place(pristine_part, tmp_path)
    write = os.write

    def limited(handle: int, content: Any) -> int:
        nonlocal room
        size = min(len(content), room)
        room -= size
        if len(content) and not size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, content[:size])

    monkeypatch.setattr(os, "write", limited)
    with pytest.raises(PatchRefusedError, match="No space left on device") as refused:
        work.apply(place.job)
    assert refused.value.hint == "make room there and run it again"
    monkeypatch.undo()
    assert place.now == place.original
    place.check_whole(patched)


@pytest.mark.wheels
def test_a_second_run_waits_for_nobody(
    pristine_part: tuple[SglangTree, dict[str, Any]], tmp_path: Path
) -> None:
    place = Place(pristine_part, tmp_path)
    other_user = job(place.job.tree, tmp_path / "another-state", FIXES)
    with other_user.store.locked():
        for attempt in (
            lambda: work.apply(place.job),
            place.revert,
            lambda: restore.recover_tree(place.job.store),
        ):
            with pytest.raises(PatchRefusedError, match="another dsv4doctor is changing"):
                attempt()
    assert place.now == place.original
    work.apply(place.job)


@pytest.mark.wheels
def test_sixteen_at_once(
    pristine_part: tuple[SglangTree, dict[str, Any]], patched: dict[str, Any], tmp_path: Path
) -> None:
    place = Place(pristine_part, tmp_path)
    context = multiprocessing.get_context("fork")
    start = context.Barrier(16)
    said = context.SimpleQueue()

    def one() -> None:
        start.wait(60)
        try:
            said.put(work.apply(place.job).said.partition(":")[0])
        except PatchRefusedError as error:
            said.put(error.message.partition(": ")[2])

    processes = [context.Process(target=one) for _ in range(16)]
    for process in processes:
        process.start()
    answers = [said.get() for _ in processes]
    for process in processes:
        process.join()
    assert set(answers) <= {
        "FIX901, FIX902 in, 3 files changed, proved by trace",
        "nothing to do",
        "another dsv4doctor is changing this tree",
    }
    assert answers.count("FIX901, FIX902 in, 3 files changed, proved by trace") == 1
    assert place.now == patched
    place.check_whole(patched)


@pytest.mark.wheels
def test_a_killed_runs_tree_that_someone_changed_meanwhile(
    pristine_part: tuple[SglangTree, dict[str, Any]], tmp_path: Path
) -> None:
    place = Place(pristine_part, tmp_path)
    _interrupt(place)
    (place.root / FILES[0]).write_text("# mine\n")
    with pytest.raises(PatchRefusedError, match="changed after dsv4doctor wrote it"):
        restore.recover_tree(place.job.store)
    assert (place.root / FILES[0]).read_text() == "# mine\n"


@pytest.mark.wheels
@pytest.mark.parametrize("how", ["one file", "all files", "a file less"])
def test_a_killed_runs_tree_that_was_installed_anew_meanwhile(
    pristine_part: tuple[SglangTree, dict[str, Any]], tmp_path: Path, how: str
) -> None:
    place = Place(pristine_part, tmp_path)
    _interrupt(place)
    store, record = place.job.store, next(place.root.glob("sglang-*.dist-info/RECORD"))
    listed = []
    for name in FILES if how == "all files" else FILES[:1]:
        path = place.root / name
        path.unlink()
        if how != "a file less":
            path.write_text("# of another release\n")
            digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest())
            listed.append(f"{name},sha256={digest.decode().rstrip('=')},1\n")
    others = [line for line in record.read_text().splitlines(keepends=True) if FILES[0] not in line]
    record.write_text("".join([*others, *listed] if how != "all files" else listed))
    before = (place.now, contents(store.folder / "bytes"))
    with pytest.raises(PatchRefusedError, match="another SGLang was installed since") as refused:
        place.recover()
    assert (place.now, contents(store.folder / "bytes")) == before
    hint = refused.value.hint or ""
    assert ("reinstall" in hint) == (how != "all files")
    assert f"remove {store.folder}" in hint
    kept = Path(hint.partition("copy the original, ")[2].partition(", there")[0])
    assert kept.read_bytes() == place.original[FILES[0]][0]
    (place.root / FILES[0]).write_bytes(kept.read_bytes())
    if how != "all files":  # as the hint says
        place.recover()
        assert place.now[FILES[1]] == place.original[FILES[1]]


@pytest.mark.wheels
def test_what_someone_changed_while_an_error_is_taken_back(
    pristine_part: tuple[SglangTree, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place(pristine_part, tmp_path)
    publish = disk.publish

    def failing(scratch: Path, path: Path) -> None:
        if path == place.root / FILES[2]:
            (place.root / FILES[0]).write_text("# mine\n")
            _fails()
        publish(scratch, path)

    monkeypatch.setattr(disk, "publish", failing)
    with pytest.raises(PatchRefusedError, match=r"base_config\.py was changed by someone else"):
        place.apply()
    assert (place.root / FILES[0]).read_text() == "# mine\n"
    monkeypatch.undo()
    with pytest.raises(PatchRefusedError, match=r"base_config\.py was changed") as refused:
        place.recover()
    kept = Path((refused.value.hint or "").partition("its original is ")[2].partition(":")[0])
    shutil.copyfile(kept, place.root / FILES[0])  # as the hint says
    place.recover()
    assert place.now == place.original


@pytest.mark.wheels
def test_nothing_to_recover(
    pristine_part: tuple[SglangTree, dict[str, Any]], tmp_path: Path
) -> None:
    place = Place(pristine_part, tmp_path)
    assert restore.recover_tree(place.job.store).said == "no run was interrupted"
    work.apply(place.job)
    patched = place.now
    assert restore.recover_tree(place.job.store).said == "no run was interrupted"
    assert place.now == patched
