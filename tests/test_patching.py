"""Plan, apply, apply again, revert: on real releases, with recorded facts."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from patching_trees import (
    BOTH,
    FACTS,
    FILES,
    FP8,
    KV,
    ONE,
    QUANT,
    RELEASES,
    TWO,
    Recorded,
    adds,
    contents,
    insisting,
    job,
    part_of,
)

from dsv4doctor.errors import PatchRefusedError, UndeterminedError, UsageError
from dsv4doctor.fixes import ALL
from dsv4doctor.fixes.fix import Absent, Fix, Refused
from dsv4doctor.models import Facts, Kernel, SglangTree
from dsv4doctor.patching import pristine, restore, work
from dsv4doctor.patching.plan import Status
from dsv4doctor.patching.render import as_diff, as_json, console
from dsv4doctor.patching.view import Asked, Outcome
from dsv4doctor.report.console import Style

Tree = Callable[[str], SglangTree]
SCHEMA = json.loads(
    (Path(__file__).parent.parent / "docs" / "fix.schema.json").read_text(encoding="utf-8")
)


@pytest.fixture
def tree(sglang_tree: Tree, tmp_path: Path) -> SglangTree:
    return part_of(sglang_tree("0.5.14"), tmp_path / "tree")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def _status(outcome: object, fix: Fix) -> Status:
    planned = getattr(outcome, "plan", None)
    assert planned is not None
    return next(step.status for step in planned.steps if step.fix.id == fix.id)


# ------------------------------------------------------------------------------ there and back


@pytest.mark.wheels
@pytest.mark.parametrize("release", RELEASES)
def test_real_fixes_go_in_once_and_come_out_without_a_trace(
    sglang_tree: Tree, tmp_path: Path, release: str
) -> None:
    files = dict.fromkeys(file for fix in ALL for file in fix.files)
    tree = part_of(sglang_tree(release), tmp_path / "tree", files)
    root, fixes = Path(tree.root), insisting()
    before = contents(root)
    wanted = job(tree, tmp_path / "state", fixes)
    planned = work.make_plan(wanted)
    assert contents(root) == before
    done = work.apply(wanted)
    patched = contents(root)
    assert set(done.changes) == {name for name in before if patched[name] != before[name]}
    assert bool(done.changes) == bool(planned.plan and planned.plan.of(Status.PLANNED))
    assert all(done.pristine[name] is True for name in done.changes)
    for name, (old, new) in planned.changes.items():
        assert (before[name][0], patched[name][0]) == (old, new)
    again = work.apply(wanted)
    assert again.said.startswith("nothing to do")
    assert again.exit_code == done.exit_code
    assert contents(root) == patched
    back = restore.revert(wanted.store, fixes, Asked())
    assert back.exit_code == 0
    assert contents(root) == before
    assert not wanted.store.path.exists()


@pytest.mark.wheels
def test_a_diff_does_with_git_what_apply_does(
    tree: SglangTree, state: Path, tmp_path: Path
) -> None:
    by_git = tmp_path / "by-git"
    shutil.copytree(tree.root, by_git)
    # An environment in a project's folder: git must not look for the files at the project's top.
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    wanted = job(tree, state)
    patch = tmp_path / "change.patch"
    patch.write_text(as_diff(work.make_plan(wanted)), encoding="utf-8", newline="")
    subprocess.run(["git", "apply", str(patch)], cwd=by_git, check=True)
    work.apply(wanted)
    assert contents(by_git) == contents(Path(tree.root))


@pytest.mark.wheels
def test_one_of_two_comes_out(tree: SglangTree, state: Path, tmp_path: Path) -> None:
    only_two = part_of(tree, tmp_path / "two")
    work.apply(job(only_two, state, (TWO,)))
    before = contents(Path(tree.root))
    wanted = job(tree, state)
    work.apply(wanted)
    outcome = restore.revert(wanted.store, BOTH, Asked(only=("FIX901",)))
    assert "FIX901 taken back" in outcome.said
    assert "still in: FIX902" in outcome.said
    assert contents(Path(tree.root)) == contents(Path(only_two.root))
    assert "not proved" in restore.status(wanted.store, BOTH).said
    restore.revert(wanted.store, BOTH, Asked(only=("FIX902",)))
    assert contents(Path(tree.root)) == before


@pytest.mark.wheels
def test_what_is_not_in_does_not_come_out(tree: SglangTree, state: Path) -> None:
    wanted = job(tree, state, only=("FIX902",))
    work.apply(wanted)
    with pytest.raises(UsageError, match="FIX901: not in this tree") as refused:
        restore.revert(wanted.store, BOTH, Asked(only=("FIX901",)))
    assert refused.value.hint == "in it: FIX902"


@pytest.mark.wheels
def test_only_and_then_the_rest(tree: SglangTree, state: Path, tmp_path: Path) -> None:
    both = part_of(tree, tmp_path / "both")
    work.apply(job(both, state))
    first = work.apply(job(tree, state, only=("FIX902",)))
    assert _status(first, ONE) is Status.LEFT_OUT
    assert set(first.changes) == {QUANT, KV}
    check = work.make_plan(job(tree, state), "check")
    assert (check.exit_code, _status(check, TWO)) == (1, Status.APPLIED)
    assert work.make_plan(job(tree, state, only=("FIX902",)), "check").exit_code == 0
    assert work.make_plan(job(tree, state, only=("FIX901",)), "check").exit_code == 1
    second = work.apply(job(tree, state))
    assert (_status(second, ONE), _status(second, TWO)) == (Status.APPLIED, Status.APPLIED)
    assert work.make_plan(job(tree, state), "check").exit_code == 0
    # Composed in the fixes' order, not in that of the two runs.
    assert contents(Path(tree.root)) == contents(Path(both.root))


@pytest.mark.wheels
def test_another_kernel_is_written_over_and_kept(tree: SglangTree, state: Path) -> None:
    before = contents(Path(tree.root))
    work.apply(job(tree, state))
    assert _status(work.make_plan(job(tree, state, kernel="marlin")), ONE) is Status.RENEWED
    outcome = work.apply(job(tree, state, kernel="marlin", only=("FIX901",)))
    text = (Path(tree.root) / QUANT).read_text()
    assert text.startswith("# FIX902: auto\n# FIX901: marlin\n")
    assert outcome.journal is not None
    assert [one.kernel for one in outcome.journal.settled.applied] == ["marlin", "auto"]
    assert work.apply(job(tree, state)).changes == {}
    restore.revert(job(tree, state).store, BOTH, Asked())
    assert contents(Path(tree.root)) == before


@pytest.mark.wheels
def test_a_fix_that_is_written_otherwise_now_is_renewed(tree: SglangTree, state: Path) -> None:
    work.apply(job(tree, state, (ONE,)))
    newer = replace(adds("FIX901", QUANT), files=ONE.files)
    planned = work.make_plan(job(tree, state, (newer,)))
    assert _status(planned, ONE) is Status.RENEWED
    work.apply(job(tree, state, (newer,)))
    root = Path(tree.root)
    assert "FIX901" in (root / QUANT).read_text()
    assert "FIX901" not in (root / FP8).read_text()


@pytest.mark.wheels
def test_a_fix_that_this_version_does_not_know_is_not_lost(tree: SglangTree, state: Path) -> None:
    work.apply(job(tree, state))
    patched = contents(Path(tree.root))
    with pytest.raises(PatchRefusedError, match="FIX901 is in, and would be lost"):
        work.apply(job(tree, state, (TWO,)))
    assert contents(Path(tree.root)) == patched


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.wheels
def test_a_release_in_our_own_cache_is_left_alone(sglang_tree: Tree, state: Path) -> None:
    with pytest.raises(PatchRefusedError, match="dsv4doctor's own copy"):
        work.apply(job(sglang_tree("0.5.14"), state))


@pytest.mark.wheels
def test_a_file_changed_while_the_launch_was_traced(tree: SglangTree, state: Path) -> None:
    class Slow(Recorded):
        def facts(self, tree: SglangTree, files: Iterable[str] = ()) -> Facts:
            (Path(tree.root) / FP8).write_text("# somebody else\n")
            return FACTS

    slow = Slow(**vars(job(tree, state)))
    quant = (Path(tree.root) / QUANT).read_bytes()
    with pytest.raises(PatchRefusedError, match=r"fp8\.py: changed since the plan"):
        work.apply(slow)
    assert (Path(tree.root) / QUANT).read_bytes() == quant
    assert restore.status(slow.store, BOTH).journal is None


@pytest.mark.wheels
def test_someone_elses_change_is_not_overwritten(tree: SglangTree, state: Path) -> None:
    wanted = job(tree, state)
    before = contents(Path(tree.root))
    work.apply(wanted)
    file = Path(tree.root) / FP8
    file.write_text(file.read_text() + "# mine\n")
    theirs = contents(Path(tree.root))
    for attempt in (
        lambda: restore.revert(wanted.store, BOTH, Asked()),
        lambda: work.apply(wanted),
        lambda: work.make_plan(wanted),
    ):
        with pytest.raises(PatchRefusedError, match="changed after dsv4doctor wrote it") as refused:
            attempt()
        assert contents(Path(tree.root)) == theirs
    said = restore.status(wanted.store, BOTH)
    assert (said.exit_code, said.said) == (1, "1 of the patched files changed since")
    # The way out that it names:
    assert refused.value.hint is not None
    original = refused.value.hint.split(":")[0].removeprefix("its original is ")
    shutil.copyfile(original, file)
    restore.revert(wanted.store, BOTH, Asked())
    assert contents(Path(tree.root)) == before


@pytest.mark.wheels
def test_a_missing_file_is_said(tree: SglangTree, state: Path) -> None:
    wanted = job(tree, state)
    work.apply(wanted)
    (Path(tree.root) / KV).unlink()
    with pytest.raises(PatchRefusedError, match=r"kv_cache\.py is missing"):
        restore.revert(wanted.store, BOTH, Asked())


@pytest.mark.wheels
def test_a_tree_that_was_installed_anew(
    sglang_tree: Tree, tree: SglangTree, state: Path, tmp_path: Path
) -> None:
    work.apply(job(tree, state))
    shutil.rmtree(tree.root)
    newer = part_of(sglang_tree("0.5.16"), Path(tree.root))
    fresh = contents(Path(tree.root))
    wanted = job(newer, state)
    assert "installed anew" in restore.status(wanted.store, BOTH).said
    work.apply(wanted)
    restore.revert(wanted.store, BOTH, Asked())
    assert contents(Path(tree.root)) == fresh
    work.apply(job(newer, state))
    shutil.rmtree(tree.root)
    part_of(sglang_tree("0.5.17"), Path(tree.root))
    assert "nothing of ours" in restore.revert(wanted.store, BOTH, Asked()).said
    assert restore.status(wanted.store, BOTH).journal is None


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("up and out", "names 'sglang/../../x.py', outside the tree"),
        ("absolute", "outside the tree"),
        ("an original less", "has no original of"),
        ("nothing in it", "names no file"),
        ("bytes up and out", "names '../../x', no sha256"),
        ("bytes of no name", r"names '\ud800', no sha256"),
        ("a name that is none", r"names 'sglang/\ud800', outside the tree"),
        ("a link to nowhere", "names a link to no path"),
    ],
)
def test_a_damaged_journal_costs_no_original(
    tree: SglangTree, state: Path, damage: str, said: str
) -> None:
    wanted = job(tree, state)
    work.apply(wanted)
    plain = json.loads(wanted.store.path.read_text())
    original = plain["originals"][KV]
    match damage:
        case "up and out":
            plain["originals"] = {"sglang/../../x.py": original}
            plain["settled"]["files"] = {"sglang/../../x.py": original["sha256"]}
        case "absolute":
            plain["originals"]["/x.py"] = original
        case "an original less":
            del plain["originals"][KV]
        case "nothing in it":
            plain["originals"], plain["settled"]["files"] = {}, {}
        case "bytes up and out":
            plain["settled"]["files"][KV] = "../../x"
        case "bytes of no name":
            original["sha256"] = "\ud800"
        case "a name that is none":
            plain["originals"]["sglang/\ud800"] = original
        case "a link to nowhere":
            original["link"] = "\ud800"
    wanted.store.path.write_text(json.dumps(plain))
    patched, kept = contents(Path(tree.root)), contents(wanted.store.folder / "bytes")
    for call in (
        lambda: restore.revert(wanted.store, BOTH, Asked()),
        lambda: restore.status(wanted.store, BOTH),
        lambda: restore.recover_tree(wanted.store),
        lambda: work.apply(wanted),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert said in str(caught.value)
    assert contents(Path(tree.root)) == patched
    assert contents(wanted.store.folder / "bytes") == kept


@pytest.mark.wheels
def test_what_is_missing_from_a_newer_release_may_be_the_last_copy(
    sglang_tree: Tree, tree: SglangTree, state: Path
) -> None:
    """Only a file that the release is known not to have is no loss."""
    wanted = job(tree, state, (TWO,))
    work.apply(wanted)
    shutil.rmtree(tree.root)
    newer = part_of(sglang_tree("0.5.16"), Path(tree.root))
    (Path(tree.root) / KV).unlink()
    wanted = job(newer, state, (TWO,))
    with pytest.raises(PatchRefusedError, match=r"kv_cache\.py is missing"):
        restore.revert(wanted.store, (TWO,), Asked())
    assert (wanted.store.folder / "bytes").is_dir()
    (record,) = Path(tree.root).glob("sglang-*.dist-info/RECORD")
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(line for line in lines if not line.startswith(KV)))
    assert "nothing of ours" in restore.revert(wanted.store, (TWO,), Asked()).said
    assert not wanted.store.path.exists()


@pytest.mark.wheels
def test_a_file_that_goes_during_the_proof_keeps_its_original(
    tree: SglangTree, state: Path
) -> None:
    def goes() -> None:
        (Path(tree.root) / KV).unlink()
        raise UndeterminedError("the trace")

    wanted = job(tree, state, (TWO,), traced=goes)
    original = (Path(tree.root) / KV).read_bytes()
    with pytest.raises(PatchRefusedError, match=r"kv_cache\.py is missing"):
        work.apply(wanted)
    journal = wanted.store.load()
    assert journal is not None
    assert wanted.store.content(journal.originals[KV].sha256) == original


@pytest.mark.wheels
@pytest.mark.parametrize("earlier", ["nothing", "a fix", "an unproved fix"])
@pytest.mark.parametrize("ends", [UndeterminedError("no import"), KeyboardInterrupt()])
def test_what_someone_changed_during_the_proof_is_not_overwritten(
    tree: SglangTree, state: Path, earlier: str, ends: BaseException
) -> None:
    if earlier != "nothing":
        work.apply(job(tree, state, (ONE,) if earlier == "a fix" else BOTH))
    if earlier == "an unproved fix":
        restore.revert(job(tree, state).store, BOTH, Asked(only=("FIX902",)))
    path = Path(tree.root) / QUANT

    def changes() -> None:
        path.write_text("# mine\n")
        raise ends

    wanted = job(tree, state, traced=changes)
    said = r"the proof failed \(.*no import\), and " * isinstance(ends, UndeterminedError)
    with pytest.raises(PatchRefusedError, match=rf"^{said}/.*quant\.py was changed") as refused:
        work.apply(wanted)
    assert path.read_text() == "# mine\n"
    assert restore.status(wanted.store, BOTH).exit_code == 1
    kept = Path((refused.value.hint or "").partition("its original is ")[2].partition(":")[0])
    shutil.copyfile(kept, path)  # as the hint says
    restore.revert(wanted.store, BOTH, Asked())
    assert b"FIX90" not in path.read_bytes()
    assert not wanted.store.path.exists()


@pytest.mark.wheels
def test_what_is_not_ours_stays_as_someone_made_it_during_the_proof(
    tree: SglangTree, state: Path
) -> None:
    """A fix reads it, and has nothing to change there."""
    reads = replace(ONE, files=(*ONE.files, KV))

    def changes() -> None:
        (Path(tree.root) / KV).write_text("# mine\n")
        raise UndeterminedError("no import")

    before = contents(Path(tree.root))
    assert work.apply(job(tree, state, (reads,), traced=changes)).exit_code == 4
    assert (Path(tree.root) / KV).read_text() == "# mine\n"
    assert contents(Path(tree.root)) == {
        **before,
        KV: (b"# mine\n", before[KV][1]),
    }


@pytest.mark.wheels
def test_a_file_that_a_checkout_does_not_have(tree: SglangTree, tmp_path: Path) -> None:
    root = Path(tree.root)
    shutil.rmtree(next(root.glob("sglang-*.dist-info")))
    git = ("git", "-C", str(root))
    subprocess.run([*git, "init", "-q"], check=True)
    judge = pristine.judge(root)
    assert not judge.lacks(KV)  # a repository that does not know the tree knows nothing
    subprocess.run([*git, "add", "."], check=True)
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run([*git, *author, "commit", "-q", "-m", "all"], check=True)
    assert not judge.lacks(KV)
    assert judge.lacks("sglang/srt/gone.py")


@pytest.mark.wheels
def test_every_command_says_that_a_release_was_unpacked_over_another(
    tree: SglangTree, state: Path
) -> None:
    root = Path(tree.root)
    (root / "sglang/_version.py").write_text(f"__version__ = {tree.version!r}\n")
    older = root / "sglang-0.5.12.dist-info"
    older.mkdir()
    (older / "METADATA").write_text("Name: sglang\nVersion: 0.5.12\n")
    wanted = job(tree, state)

    def said(outcome: Outcome) -> list[str]:
        return [note for note in outcome.notes if f"its code is of {tree.version}" in note]

    for _ in range(2):  # with fixes in it too
        assert len(said(restore.status(wanted.store, BOTH))) == 1
        assert len(said(work.make_plan(wanted))) == 1
        assert len(said(work.apply(wanted))) == 1
    assert len(said(restore.revert(wanted.store, BOTH, Asked()))) == 1


@pytest.mark.wheels
def test_status_says_what_a_server_stops_for(sglang_tree: Tree, tmp_path: Path) -> None:
    files = dict.fromkeys(file for fix in ALL for file in fix.files)
    tree = part_of(sglang_tree("0.5.14"), tmp_path / "tree", files)
    wanted = job(tree, tmp_path / "state", insisting())
    assert restore.status(wanted.store, ALL).notes == ()
    work.apply(wanted)
    # The branch is in the tree, and no launch that was traced comes by it.
    assert restore.status(wanted.store, ALL).notes == ()
    assert FACTS.trace is not None
    symbol = Kernel("triton:dsv4doctor.kernels.grouped_gemm._product_kernel", None)
    first = replace(FACTS.trace.layers[0], quant_method="Dsv4DoctorMxfp4MoEMethod", kernel=symbol)
    other = replace(FACTS, trace=replace(FACTS.trace, layers=(first,)))
    assert "nothing to do" in work.apply(replace(wanted, before=other, after=other)).said
    (note,) = restore.status(wanted.store, ALL).notes
    assert note == (
        "routed experts that go to dsv4doctor's own kernel: the server stops while it builds the "
        "model until `dsv4doctor kernels verify --only moe_mxfp4` was run on the serving machine"
    )
    assert note in console(restore.status(wanted.store, ALL), Style(300))
    work.apply(wanted)  # what another launch stops for is not forgotten
    assert restore.status(wanted.store, ALL).notes == (note,)
    journal = wanted.store.load()
    assert journal is not None
    unknown = replace(journal.settled, stops_for=None)  # as of an earlier dsv4doctor
    for settled in (unknown, replace(unknown, stops_for=(), proved=False)):
        wanted.store.save(replace(journal, settled=settled))
        assert restore.status(wanted.store, ALL).notes == (note,)
    wanted.store.path.unlink()  # as after `git apply`
    assert restore.status(wanted.store, ALL).notes == (note,)


@pytest.mark.wheels
def test_what_stays_says_when_it_now_leads_to_our_kernel(sglang_tree: Tree, tmp_path: Path) -> None:
    """FIX102 without FIX103 makes "auto" the Triton method, which stops without its stamp."""
    files = dict.fromkeys(file for fix in ALL for file in fix.files)
    tree = part_of(sglang_tree("0.5.18"), tmp_path / "tree", files)
    wanted = job(tree, tmp_path / "state", insisting(), only=("FIX102", "FIX103"))
    work.apply(wanted)
    outcome = restore.revert(wanted.store, wanted.fixes, Asked(only=("FIX103",)))
    assert "still in: FIX102" in outcome.said
    (note,) = outcome.notes
    assert "kernels verify --only moe_nvfp4` was run on the serving machine" in note
    assert restore.revert(wanted.store, wanted.fixes, Asked()).notes == ()


@pytest.mark.wheels
def test_through_a_link_out_of_the_tree(tree: SglangTree, state: Path, tmp_path: Path) -> None:
    layers = Path(tree.root) / "sglang/srt/layers"
    layers.rename(tmp_path / "elsewhere")
    layers.symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path / "elsewhere")
    with pytest.raises(PatchRefusedError, match="outside the tree, through a link"):
        work.apply(job(tree, state))
    assert contents(tmp_path / "elsewhere") == before


@pytest.mark.wheels
@pytest.mark.parametrize("kind", ["refused", "raises", "needed raises", "no Python", "not its own"])
def test_a_fix_that_cannot_is_refused_and_the_others_go_in(
    tree: SglangTree, state: Path, kind: str
) -> None:
    def fails(*_: object) -> str:
        raise KeyError("a bug")

    odd = Refused(FP8, "def expected(): ...\n", "def found(): ...\n", "another shape")
    change = ONE.plan({name: (Path(tree.root) / name).read_text() for name in FILES[:2]}, _choice())
    bad = {
        "refused": replace(ONE, plan=lambda sources, choice: odd),
        "raises": replace(ONE, plan=fails),
        "needed raises": replace(ONE, needed=fails),
        "no Python": replace(
            ONE, plan=lambda sources, choice: replace(change, sources={QUANT: "def ("})
        ),
        "not its own": replace(
            ONE, plan=lambda sources, choice: replace(change, sources={"sglang/other.py": ""})
        ),
    }[kind]
    outcome = work.apply(job(tree, state, (bad, TWO)))
    assert _status(outcome, ONE) is Status.REFUSED
    assert set(outcome.changes) == {QUANT, KV}
    document = json.loads(as_json(outcome))
    jsonschema.validate(document, SCHEMA)
    assert document["fixes"][0]["status"] == "refused"
    shown = console(outcome, Style(100, verbose=True))
    assert "FIX901 refused" in shown
    if kind == "refused":
        assert document["fixes"][0]["refused"]["expected"] == "def expected(): ...\n"
        assert "-def expected(): ...\n    +def found(): ...\n" in shown
    # One that cannot say whether it is needed is not missed.
    assert outcome.exit_code == (0 if kind == "needed raises" else 4)


def _choice() -> object:
    from dsv4doctor.fixes.fix import Choice

    return Choice()


@pytest.mark.wheels
def test_what_the_tree_has_or_lacks_is_not_missing(tree: SglangTree, state: Path) -> None:
    absent = replace(ONE, plan=lambda sources, choice: Absent("no such path"))
    (Path(tree.root) / QUANT).write_text("# FIX902: by hand\n")
    (Path(tree.root) / KV).write_text("# FIX902: by hand\n")
    check = work.make_plan(job(tree, state, (absent, TWO)), "check")
    assert check.exit_code == 0
    assert (_status(check, ONE), _status(check, TWO)) == (Status.ABSENT, Status.PRESENT)
    assert "FIX902 is in this tree" in restore.status(job(tree, state).store, BOTH).said


@pytest.mark.wheels
def test_source_that_is_not_utf8_is_refused(tree: SglangTree, state: Path) -> None:
    (Path(tree.root) / FP8).write_bytes(b"# \xff\n")
    outcome = work.make_plan(job(tree, state))
    assert _status(outcome, ONE) is Status.REFUSED
    assert _status(outcome, TWO) is Status.PLANNED


# ------------------------------------------------------------------------------ proof


@pytest.mark.wheels
def test_what_does_not_hold_is_taken_back(tree: SglangTree, state: Path) -> None:
    before = contents(Path(tree.root))
    doubting = replace(TWO, verify=lambda facts, trace: ("the layer kept its kernel",))
    wanted = job(tree, state, (ONE, doubting))
    outcome = work.apply(wanted)
    assert outcome.exit_code == 4
    assert outcome.proof is not None
    assert outcome.proof.problems == ("FIX902: the layer kept its kernel",)
    assert contents(Path(tree.root)) == before
    assert restore.status(wanted.store, BOTH).said == "nothing of ours is in this tree"


@pytest.mark.wheels
def test_a_failed_proof_gives_the_earlier_fix_back(tree: SglangTree, state: Path) -> None:
    work.apply(job(tree, state, (ONE,)))
    earlier = contents(Path(tree.root))
    doubting = replace(TWO, verify=lambda facts, trace: ("no",))
    assert work.apply(job(tree, state, (ONE, doubting))).exit_code == 4
    assert contents(Path(tree.root)) == earlier
    assert restore.status(job(tree, state).store, BOTH).said == "FIX901 in, proved by trace"


@pytest.mark.wheels
@pytest.mark.parametrize("error", [UndeterminedError("no import"), KeyboardInterrupt()])
def test_a_trace_that_ends_early_takes_it_back(
    tree: SglangTree, state: Path, error: BaseException
) -> None:
    before = contents(Path(tree.root))

    def ends() -> None:
        assert contents(Path(tree.root)) != before
        raise error

    wanted = job(tree, state, traced=ends)
    if isinstance(error, UndeterminedError):
        outcome = work.apply(wanted)
        assert outcome.proof is not None
        assert "could not be traced: no import" in outcome.proof.problems[0]
    else:
        with pytest.raises(KeyboardInterrupt):
            work.apply(wanted)
    assert contents(Path(tree.root)) == before
    assert not wanted.store.path.exists()


@pytest.mark.wheels
def test_what_was_left_unproved_is_proved_or_taken_out(tree: SglangTree, state: Path) -> None:
    before = contents(Path(tree.root))
    wanted = job(tree, state)
    work.apply(wanted)
    restore.revert(wanted.store, BOTH, Asked(only=("FIX901",)))
    one_left = contents(Path(tree.root))
    proved = work.apply(job(tree, state, only=("FIX902",)))
    assert proved.proof is not None
    assert contents(Path(tree.root)) == one_left
    assert restore.status(wanted.store, BOTH).said == "FIX902 in, proved by trace"
    work.apply(wanted)
    restore.revert(wanted.store, BOTH, Asked(only=("FIX901",)))
    doubting = replace(TWO, verify=lambda facts, trace: ("no",))
    outcome = work.apply(job(tree, state, (ONE, doubting), only=("FIX902",)))
    assert outcome.said == "taken back, the tree is without any fix: the proof failed"
    assert contents(Path(tree.root)) == before


@pytest.mark.wheels
def test_a_renewed_fix_is_held_against_the_tree_without_it(tree: SglangTree, state: Path) -> None:
    original = (Path(tree.root) / QUANT).read_bytes()
    traced: list[tuple[bool, bytes]] = []

    class Watched(Recorded):
        def facts(self, tree: SglangTree, files: Iterable[str] = ()) -> Facts:
            content = (Path(tree.root) / QUANT).read_bytes()
            traced.append((tree.root == self.tree.root, content))
            return FACTS

    work.apply(job(tree, state, (ONE,)))
    work.apply(Watched(**vars(job(tree, state, (ONE,), kernel="marlin"))))
    plan, before, after = traced
    assert plan == (True, b"# FIX901: auto\n" + original)
    assert before == (False, original)
    assert after == (True, b"# FIX901: marlin\n" + original)


@pytest.mark.wheels
def test_the_journal_goes_by_where_the_tree_is(
    tree: SglangTree, state: Path, tmp_path: Path
) -> None:
    work.apply(job(tree, state))
    link = tmp_path / "link"
    link.symlink_to(tree.root)
    by_link = job(replace(tree, root=str(link)), state)
    assert restore.status(by_link.store, BOTH).said == "FIX901, FIX902 in, proved by trace"
    relative = job(replace(tree, root=os.path.relpath(tree.root)), state)
    assert relative.store.folder == by_link.store.folder
