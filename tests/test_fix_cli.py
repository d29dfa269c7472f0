"""`dsv4doctor fix` as a user meets it: exit codes, streams, files, a real trace."""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from patching_trees import QUANT, adds, part_of

from dsv4doctor import fixes
from dsv4doctor.cli import run
from dsv4doctor.models import SglangTree

ROOT = Path(__file__).parent.parent
SCHEMA = json.loads((ROOT / "docs" / "fix.schema.json").read_text(encoding="utf-8"))
_LAUNCH = (
    *("--", "--tp", "4", "--moe-runner-backend", "flashinfer_cutlass"),
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"),
)
Tree = Callable[[str], SglangTree]
Fix = Callable[..., int]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    kept = tmp_path_factory.mktemp("fix-cli")
    return {"DSV4DOCTOR_CACHE": str(kept / "cache"), "DSV4DOCTOR_STATE": str(kept / "state")}


@pytest.fixture
def fix(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fix:
    """`fix(*arguments)`: the exit code; with a state and cache of this file's own."""
    for name in list(os.environ):
        if name.startswith("DSV4DOCTOR_"):
            monkeypatch.delenv(name)
    for name, value in {**folders, "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run(["fix", *map(str, arguments)])


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4", experts=2)


def linked(tree: SglangTree, target: Path) -> Path:
    """The whole tree, its files hard-linked as uv links them from its cache."""

    def link(source: str, copy: str) -> None:
        try:
            os.link(source, copy)
        except OSError:  # another file system
            shutil.copy2(source, copy)

    shutil.copytree(tree.root, target, copy_function=link)
    for folder, _, _ in os.walk(target):
        os.chmod(folder, 0o755)
    return target


def _json(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, SCHEMA)
    return dict(document)


# ------------------------------------------------------------------------------ with a trace


@pytest.mark.wheels
def test_from_a_missing_fix_to_one_that_is_proved_and_back(
    fix: Fix,
    sglang_tree: Tree,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = sglang_tree("0.5.14")
    tree = linked(release, tmp_path / "tree")
    original = (tree / QUANT).read_bytes()
    launch = (model, "--arch", "sm_120", "--sglang", tree, *_LAUNCH)

    assert fix("--check", *launch) == 1
    captured = capsys.readouterr()
    assert "FIX101 planned" in captured.out
    assert captured.err.startswith("dsv4doctor: fixes: ")
    assert captured.err.endswith(" missing\n")
    assert fix("--diff", *launch) == 0
    patch = capsys.readouterr().out
    subprocess.run(["git", "apply", "--check", "-"], input=patch, text=True, cwd=tree, check=True)

    assert fix("--apply", "--format", "json", *launch) == 0
    applied = _json(capsys)
    assert applied["diff"] == patch
    expected = {"file": QUANT, "changes": True, "from_release": True, "standing": None}
    assert expected in applied["files"]  # type: ignore[operator]
    proof = applied["proof"]
    assert isinstance(proof, dict)
    assert proof["holds"]
    (draft,) = (one for one in proof["layers"] if "FIX101" in one["fixes"])
    assert draft["name"] == "model.decoder.mlp.experts"
    assert draft["before"].endswith("trtllm_fp4_block_scale_routed_moe: fails")
    assert not draft["after"].endswith("fails")
    assert all(one["fixes"] for one in proof["layers"])
    # The cache that the tree was linked from has its own bytes.
    assert (Path(release.root) / QUANT).read_bytes() == original

    assert fix("--check", *launch) == 0
    assert "missing" not in capsys.readouterr().err
    assert fix("--status", "--sglang", tree, "--format", "json") == 0
    status = _json(capsys)
    assert status["journal"]["proved"]  # type: ignore[index]
    assert "FIX101" in [one["id"] for one in status["journal"]["applied"]]  # type: ignore[index]
    assert fix("--revert", "--sglang", tree, "--format", "json") == 0
    assert _json(capsys)["journal"] is None
    assert (tree / QUANT).read_bytes() == original

    folder = tmp_path / "overlay"
    assert fix("--overlay", folder, *launch) == 0
    assert "proved by trace; start with: dsv4doctor run --overlay" in capsys.readouterr().err
    assert (tree / QUANT).read_bytes() == original
    _a_fix_that_breaks_the_import_is_taken_back(fix, launch, tree, capsys, monkeypatch)


def _a_fix_that_breaks_the_import_is_taken_back(
    fix: Fix,
    launch: tuple[object, ...],
    tree: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = (tree / QUANT).read_bytes()
    good = adds("FIX901", QUANT)

    def breaks(sources: fixes.fix.Sources, choice: fixes.fix.Choice) -> fixes.fix.Outcome:
        change = good.plan(sources, choice)
        assert isinstance(change, fixes.fix.Change)
        broken = change.sources[QUANT] + "\nfrom sglang.srt import no_such\n"
        return replace(change, sources={QUANT: broken})

    monkeypatch.setattr(fixes, "ALL", (replace(good, plan=breaks),))
    assert fix("--apply", *launch) == 4
    captured = capsys.readouterr()
    assert "no_such" in captured.out
    assert captured.err.endswith("taken back, the tree is as it was: the proof failed\n")
    assert (tree / QUANT).read_bytes() == original
    assert fix("--status", "--sglang", tree) == 0
    assert "nothing of ours" in capsys.readouterr().err


# ------------------------------------------------------------------------------ without


@pytest.mark.wheels
def test_pip_still_checks_and_uninstalls_a_patched_wheel(
    fix: Fix, sglang_tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RECORD is left alone: it is what says what was pristine."""
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python3*/site-packages"))
    source = linked(sglang_tree("0.5.14"), tmp_path / "tree")
    for entry in source.iterdir():
        entry.rename(site / entry.name)
    (next(site.glob("sglang-*.dist-info")) / "INSTALLER").write_text("pip\n")

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pip", "--python", str(python), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    before = pip("check")
    record = next(site.glob("sglang-*.dist-info/RECORD")).read_bytes()
    _put_in(site, fix)
    assert b"FIX901" in (site / QUANT).read_bytes()
    assert next(site.glob("sglang-*.dist-info/RECORD")).read_bytes() == record
    after = pip("check")
    assert (after.returncode, after.stdout) == (before.returncode, before.stdout)
    assert fix("--status", "--python", python) == 0
    done = pip("uninstall", "-y", "sglang")
    assert done.returncode == 0, done.stderr
    assert not (site / "sglang").exists()
    monkeypatch.setattr(sys, "executable", str(python))
    assert fix("--status", "--sglang", site) == 2


def _put_in(root: Path, fix: Fix) -> None:
    """A fix without a trace, in the journal that `fix` reads."""
    from patching_trees import ONE, job

    from dsv4doctor.patching import work
    from dsv4doctor.state import state_folder

    work.apply(job(SglangTree(str(root), "0.5.14", "installed"), state_folder(), (ONE,)))


@pytest.fixture
def part(sglang_tree: Tree, tmp_path: Path) -> Path:
    return Path(part_of(sglang_tree("0.5.14"), tmp_path / "part").root)


@pytest.mark.wheels
def test_what_needs_no_launch(fix: Fix, part: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (part / QUANT).read_bytes()
    for mode, said in (
        ("--status", "nothing of ours is in this tree"),
        ("--revert", "nothing of ours is in this tree"),
        ("--recover", "no run was interrupted"),
    ):
        assert fix(mode, "--sglang", part) == 0
        assert capsys.readouterr().err == f"dsv4doctor: {said}\n"
    _put_in(part, fix)
    assert fix("--status", "--sglang", part, "--format", "json") == 0
    status = _json(capsys)
    assert [file["standing"] for file in status["files"]] == ["ours", "ours"]  # type: ignore[attr-defined, index]
    assert fix("--status", "--sglang", part) == 0
    assert f"{QUANT}: as dsv4doctor wrote it" in capsys.readouterr().out
    (part / QUANT).write_text("# mine\n")
    assert fix("--status", "--sglang", part) == 1
    assert fix("--revert", "--sglang", part) == 4
    line = capsys.readouterr().err.splitlines()[-1]
    assert "changed after dsv4doctor wrote it: left alone" in line
    assert fix("--revert", "--sglang", part, "--format", "json") == 4
    assert "its original is" in _json(capsys)["error"]["hint"]  # type: ignore[index]
    (part / QUANT).write_bytes(before)
    assert fix("--revert", "--sglang", part) == 0


_BAD = {
    "two modes": (("--apply", "--revert"), "--apply and --revert are both given"),
    "apply and an overlay": (("--apply", "--overlay", "x"), "--apply and --overlay are both given"),
    "a mode and an overlay": (("--status", "--overlay", "x"), "--status and --overlay"),
    "no such fix": (("--only", "FIX999", "--status"), "--only FIX999: no such fix"),
    "no such kernel": (("--kernel", "cuda"), "cuda"),
    "no tree": (("--status", "--sglang", "/dev/null"), "/dev/null"),
    "no folder": (("--revert", "--sglang", "./none"), "none: no such folder"),
    "no version": (("--status", "--sglang", "x.y"), "neither a folder nor a version"),
    "no interpreter": (("--recover", "--python", "./none"), "no such interpreter"),
    "no launch": (("--apply",), ""),
    "output": (("--status", "-o", "none/out.txt"), "--output none/out.txt"),
}


@pytest.mark.parametrize("name", _BAD)
def test_bad_input_is_one_line(fix: Fix, capsys: pytest.CaptureFixture[str], name: str) -> None:
    arguments, said = _BAD[name]
    assert fix(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("dsv4doctor: ")
    assert said in captured.err


def test_a_bad_input_in_json(fix: Fix, capsys: pytest.CaptureFixture[str]) -> None:
    assert fix("--revert", "--format", "json", "--sglang", "./none") == 2
    document = _json(capsys)
    assert (document["command"], document["exit_code"]) == ("revert", 2)


def test_a_configuration_with_several_targets(
    fix: Fix, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '[[target]]\nname = "a"\nmodel = "m"\n[[target]]\nname = "b"\nmodel = "m"\n'
    (tmp_path / "dsv4doctor.toml").write_text(text)
    assert fix("--apply") == 2
    assert "several targets (a, b). Say which one: --target NAME" in capsys.readouterr().err


def test_help_has_examples(fix: Fix, capsys: pytest.CaptureFixture[str]) -> None:
    assert fix("--help") == 0
    assert "dsv4doctor fix --check --launch serve.sh" in capsys.readouterr().out


@pytest.mark.wheels
def test_a_state_folder_of_nobody(
    fix: Fix, part: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSV4DOCTOR_STATE", "~no-such-user/state")
    assert fix("--status", "--sglang", part) == 2
    assert "DSV4DOCTOR_STATE ~no-such-user/state: no such user" in capsys.readouterr().err
