"""A patched tree of which somebody wrote files anew: nothing is lost, nothing old comes back."""

import itertools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from patching_trees import BOTH, FILES, FP8, KV, ONE, QUANT, TWO, Recorded, contents, job, part_of

from dsv4doctor.errors import PatchRefusedError
from dsv4doctor.models import SglangTree
from dsv4doctor.patching import restore, work
from dsv4doctor.patching.plan import Status
from dsv4doctor.patching.render import as_json, console
from dsv4doctor.patching.standing import Standing
from dsv4doctor.patching.view import Asked
from dsv4doctor.report.console import Style

Tree = Callable[[str], SglangTree]
SOME = [names for count in (1, 2) for names in itertools.combinations(FILES, count)]
MINE = b"# mine\n"


def _stems(names: Sequence[str]) -> str:
    return "+".join(Path(name).stem for name in names)


class Place:
    """A real tree with fixes in it, and the same one as it was before."""

    def __init__(self, release: SglangTree, folder: Path, own: bool) -> None:
        self.released = Path(release.root)
        self.tree = part_of(release, folder / "tree")
        self.root = Path(self.tree.root)
        self.state = folder / "state"
        if own:
            for name in FILES:
                (self.root / name).write_bytes(MINE + (self.root / name).read_bytes())
        self.original = contents(self.root)
        self.apply()
        self.patched = contents(self.root)

    def job(self, **options: object) -> Recorded:
        return job(self.tree, self.state, **options)

    def apply(self) -> None:
        assert work.apply(self.job()).exit_code == 0
        self.check_journal()

    def check_journal(self) -> None:
        """It is of the release that is there, and has the bytes of every file that it names."""
        store = self.job().store
        journal = store.load()
        if journal is None:
            return
        assert journal.version == self.tree.version
        named = {original.sha256 for original in journal.originals.values()}
        for name in named | set(journal.settled.files.values()):
            store.content(name)

    def put_back(self, names: Sequence[str]) -> dict[str, tuple[bytes | str, int]]:
        """As a reinstall does that gets through `names`; gives what a revert has to give then."""
        for name in names:
            (self.root / name).write_bytes((self.released / name).read_bytes())
        now = contents(self.root)
        return {name: now[name] if name in names else self.original[name] for name in now}

    def revert(self, *only: str) -> None:
        restore.revert(self.job().store, BOTH, Asked(only=only))
        self.check_journal()

    def kept_apart(self) -> set[bytes]:
        folder = self.job().store.folder / "replaced"
        return {path.read_bytes() for path in folder.glob("*")}


@pytest.fixture(params=[False, True], ids=["as released", "with changes of one's own"])
def place(sglang_tree: Tree, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    return Place(sglang_tree("0.5.14"), tmp_path, request.param)


@pytest.mark.wheels
@pytest.mark.parametrize("names", SOME, ids=_stems)
def test_status_apply_revert(place: Place, names: tuple[str, ...]) -> None:
    expected = place.put_back(names)
    own = place.original[KV][0].startswith(MINE)
    said = restore.status(place.job().store, BOTH)
    assert said.exit_code == 1
    assert said.said.startswith(f"{len(names)} of 3 patched files written anew since")
    anew = Standing.RELEASED if own else Standing.ORIGINAL
    assert {name: stand.standing for name, stand in said.stands.items()} == {
        name: anew if name in names else Standing.OURS for name in FILES
    }
    assert said.gone == {fix.id: [name for name in fix.files if name in names] for fix in BOTH}
    text = console(said, Style(200))
    for fix in BOTH:
        assert (f"{fix.id} in, kernel" in text) != any(name in names for name in fix.files)
    checked = work.make_plan(place.job(), "check")
    assert checked.exit_code == 1
    assert checked.plan is not None
    assert {step.fix.id for step in checked.plan.of(Status.PLANNED)} == {
        fix.id for fix in BOTH if set(fix.files) & set(names)
    }
    place.apply()
    assert restore.status(place.job().store, BOTH).exit_code == 0
    patched = contents(place.root)
    assert all(patched[name] == place.patched[name] for name in set(FILES) - set(names))
    assert all(b"FIX90" in patched[name][0] for name in FILES)
    place.revert()
    assert contents(place.root) == expected
    assert not place.job().store.path.exists()
    assert place.kept_apart() == {place.original[name][0] for name in names if own}


@pytest.mark.wheels
@pytest.mark.parametrize("names", [*SOME, FILES], ids=_stems)
def test_revert_at_once(place: Place, names: tuple[str, ...]) -> None:
    expected = place.put_back(names)
    own = place.original[KV][0].startswith(MINE)
    place.revert()
    assert contents(place.root) == expected
    assert restore.status(place.job().store, BOTH).said == "nothing of ours is in this tree"
    assert place.kept_apart() == {place.original[name][0] for name in names if own}


@pytest.mark.wheels
@pytest.mark.parametrize("names", SOME, ids=_stems)
@pytest.mark.parametrize("only", ["FIX901", "FIX902"])
def test_one_fix_out_then_all(place: Place, names: tuple[str, ...], only: str) -> None:
    expected = place.put_back(names)
    place.revert(only)
    stays = next(fix for fix in BOTH if fix.id != only)
    marked = {name for name in FILES if stays.id.encode() in (place.root / name).read_bytes()}
    assert marked == set(stays.files)
    place.revert()
    assert contents(place.root) == expected


@pytest.mark.wheels
@pytest.mark.parametrize("names", SOME, ids=_stems)
def test_a_failed_proof_gives_back_what_was_there(place: Place, names: tuple[str, ...]) -> None:
    expected = place.put_back(names)
    before = contents(place.root)
    doubting = replace(TWO, verify=lambda facts, trace: ("no",))
    assert work.apply(job(place.tree, place.state, (ONE, doubting))).exit_code == 4
    place.check_journal()
    assert contents(place.root) == before
    said = restore.status(place.job().store, BOTH)
    assert said.exit_code == 1
    assert said.said.startswith(f"{len(names)} of 3 patched files written anew")
    place.apply()
    place.revert()
    assert contents(place.root) == expected


@pytest.mark.wheels
def test_all_put_back_is_nothing_of_ours(place: Place) -> None:
    """And the fixes go in again, as at first."""
    expected = place.put_back(FILES)
    said = restore.status(place.job().store, BOTH)
    assert said.exit_code == 0
    assert said.said.endswith("nothing of that is left") or "its original again" in said.said
    assert "FIX90" not in console(said, Style(200))
    assert '"journal": null' in as_json(said)
    place.apply()
    place.revert()
    assert contents(place.root) == expected


@pytest.mark.wheels
@pytest.mark.parametrize("names", [*SOME, FILES], ids=_stems)
@pytest.mark.parametrize("unpacked", ["installed", "unpacked over the other"])
def test_another_release_over_a_patched_one(
    sglang_tree: Tree, tmp_path: Path, names: tuple[str, ...], unpacked: str
) -> None:
    """All of its files, or those that an installer came to before it was killed."""
    place = Place(sglang_tree("0.5.16"), tmp_path, own=False)
    other = part_of(sglang_tree("0.5.14"), tmp_path / "other")
    if unpacked == "installed":
        shutil.rmtree(next(place.root.glob("sglang-*.dist-info")))
    for name in ("sglang-0.5.14.dist-info/RECORD", *names):
        target = place.root / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((Path(other.root) / name).read_bytes())
    place.tree = replace(place.tree, version="0.5.14")
    seen = contents(place.root)
    said = restore.status(place.job().store, BOTH)
    assert contents(place.root) == seen
    assert {said.stands[name].standing for name in names} <= {
        Standing.RELEASED,
        Standing.ORIGINAL,  # the releases have the same
    }
    assert (said.exit_code, said.journal is None) == ((0, True) if names == FILES else (1, False))
    place.apply()
    place.revert()
    now = contents(place.root)
    assert {name: now[name] for name in names} == {name: seen[name] for name in names}
    rest = set(FILES) - set(names)
    assert {name: now[name] for name in rest} == {name: place.original[name] for name in rest}
    assert place.kept_apart() == set()  # releases are no one's last copy


@pytest.mark.wheels
def test_no_one_is_told_to_put_old_bytes_into_another_release(
    sglang_tree: Tree, tmp_path: Path
) -> None:
    """Nothing says here which release the files are of."""
    place = Place(sglang_tree("0.5.14"), tmp_path, own=False)
    shutil.rmtree(next(place.root.glob("sglang-*.dist-info")))
    place.tree = replace(place.tree, version="0.5.16")
    for name in FILES:
        shutil.copyfile(Path(sglang_tree("0.5.16").root) / name, place.root / name)
    newer = contents(place.root)
    store = place.job().store
    with pytest.raises(PatchRefusedError, match="left alone") as refused:
        place.revert()
    assert contents(place.root) == newer
    hint = refused.value.hint or ""
    assert "SGLang 0.5.14 was patched, and 0.5.16 is there now" in hint
    assert "copy" not in hint
    assert f"remove {store.path};" in hint
    kept = Path(hint.rpartition("was before is ")[2])
    store.path.unlink()  # as the hint says
    assert kept.read_bytes() in {content for content, _ in place.original.values()}
    place.apply()
    place.revert()
    assert contents(place.root) == newer


@pytest.mark.wheels
def test_what_was_put_back_by_git(sglang_tree: Tree, tmp_path: Path) -> None:
    """And another commit checked out, in which one of the files is another."""
    place = Place(sglang_tree("0.5.14"), tmp_path, own=False)
    place.revert()
    shutil.rmtree(next(place.root.glob("sglang-*.dist-info")))

    def git(*words: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", "-C", str(place.root), *author, *words], check=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "old")
    place.apply()
    git("checkout", "-q", "--", FP8)
    (place.root / FP8).write_bytes(MINE + (place.root / FP8).read_bytes())
    git("commit", "-q", "-m", "new", "--", FP8)
    newer = (place.root / FP8).read_bytes()
    said = restore.status(place.job().store, BOTH)
    assert said.stands[FP8].standing is Standing.RELEASED
    place.apply()
    place.revert()
    assert (place.root / FP8).read_bytes() == newer
    assert (place.root / KV).read_bytes() == place.original[KV][0]
    assert place.kept_apart() == set()  # git has the older one


@pytest.mark.wheels
def test_a_kept_file_that_is_damaged_keeps_nobody_from_going_on(
    sglang_tree: Tree, tmp_path: Path
) -> None:
    place = Place(sglang_tree("0.5.14"), tmp_path, own=True)
    store = place.job().store
    journal = store.load()
    assert journal is not None
    store.where(journal.originals[QUANT].sha256).write_bytes(b"damaged")
    with pytest.raises(PatchRefusedError, match="damaged"):
        place.revert()
    expected = place.put_back((QUANT,))
    outcome = restore.revert(store, BOTH, Asked())
    assert contents(place.root) == expected
    assert any("is lost" in note for note in outcome.notes)
