"""`fix --overlay` and `run --overlay`: other modules in front of a tree that stays as it is."""

import json
import os
import shlex
import subprocess
import sys
import textwrap
import venv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from patching_trees import BOTH, KV, QUANT, TWO, contents, job, part_of

from dsv4doctor.cli import run
from dsv4doctor.errors import PatchRefusedError, UsageError
from dsv4doctor.models import SglangTree
from dsv4doctor.patching import overlay, work

Tree = Callable[[str], SglangTree]
_MOE = "sglang/srt/layers/moe.py"
_PACKAGE = "sglang/srt/layers/__init__.py"
# The shape of SGLang, and a server that starts processes in every way that it does.
_SOURCES = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    _PACKAGE: "WHICH = 'the tree'\n",
    _MOE: "def which():\n    return 'the tree'\n",
    "sglang/srt/layers/other.py": "WHICH = 'the tree'\n",
    "sglang/launch_server.py": """
        import inspect, multiprocessing, subprocess, sys, traceback
        from sglang.srt.layers import WHICH, moe, other

        CODE = "from sglang.srt.layers import moe; print('a Python of its own:', moe.which())"

        def child(name):
            from sglang.srt.layers import moe
            print(name + ":", moe.which(), flush=True)

        def main():
            print("package:", WHICH, "| other:", other.WHICH)
            print("main:", moe.which(), flush=True)
            for method in ("spawn", "forkserver", "fork"):
                process = multiprocessing.get_context(method).Process(target=child, args=(method,))
                process.start()
                process.join()
            subprocess.run([sys.executable, "-c", CODE], check=True)
            print("file:", moe.__file__)
            print("source:", inspect.getsource(moe.which).splitlines()[-1].strip())
            try:
                moe.which(0)
            except TypeError:
                pass
            print("code:", moe.which.__code__.co_filename)

        if __name__ == "__main__":
            main()
    """,
}
_NEW = {
    _MOE: b"# a line more\ndef which():\n    return 'the overlay'\n",
    _PACKAGE: b"WHICH = 'the overlay'\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name, source in _SOURCES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(source))
    return root


@pytest.fixture
def folder(root: Path, tmp_path: Path) -> Path:
    before = {name: (root / name).read_bytes() for name in _NEW}
    tree = SglangTree(str(root), "0.5.14", "folder")
    overlay.write(tmp_path / "overlay", tree, ["FIX901"], before, _NEW)
    return tmp_path / "overlay"


def _run(
    folder: Path, *command: str, path: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    unset = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    if path is not None:
        kept["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-m", "dsv4doctor", "run", "--overlay", str(folder), "--", *command],
        capture_output=True,
        text=True,
        env={**kept, **variables},
        cwd=folder.parent,
        check=False,
    )


# ------------------------------------------------------------------------------ run


def test_every_process_gets_the_overlays_modules(folder: Path, root: Path) -> None:
    done = _run(folder, sys.executable, "-m", "sglang.launch_server", path=root)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said == {
        "package": "the overlay | other: the tree",
        "main": "the overlay",
        "spawn": "the overlay",
        "forkserver": "the overlay",
        "fork": "the overlay",
        "a Python of its own": "the overlay",
        # Data beside the module is found, and tracebacks and Triton read the right source.
        "file": str(root / _MOE),
        "source": "return 'the overlay'",
        "code": str(folder / "modules" / _MOE),
    }


def test_the_tree_is_not_written(folder: Path, root: Path) -> None:
    before = {name: (root / name).read_bytes() for name in _SOURCES}
    _run(folder, sys.executable, "-m", "sglang.launch_server", path=root)
    assert {name: (root / name).read_bytes() for name in _SOURCES} == before
    compiled = [path.name.split(".")[0] for path in root.rglob("*.pyc")]
    assert "other" in compiled
    assert "moe" not in compiled
    done = subprocess.run(
        [sys.executable, "-c", "from sglang.srt.layers import moe; print(moe.which())"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=True,
    )
    assert done.stdout == "the tree\n"


def test_an_installed_command(folder: Path, root: Path, tmp_path: Path) -> None:
    """`sglang serve` is a script that starts with a Python of its own."""
    script = tmp_path / "bin" / "sglang"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nfrom sglang.launch_server import moe\n")
    with script.open("a") as more:
        more.write("import sys; print(sys.argv[1:], moe.which())\n")
    script.chmod(0o755)
    search = f"{script.parent}{os.pathsep}{os.environ['PATH']}"
    done = _run(folder, "sglang", "serve", "M", "--tp", "4", path=root, PATH=search)
    assert done.stdout == "['serve', 'M', '--tp', '4'] the overlay\n", done.stderr


def test_the_sitecustomize_that_was_there_runs_too(folder: Path, root: Path) -> None:
    (root / "sitecustomize.py").write_text("import os; os.environ['THEIRS'] = 'yes'\n")
    code = (
        "import os, sitecustomize; from sglang.srt.layers import moe; "
        "print(os.environ['THEIRS'], sitecustomize.__file__, moe.which())"
    )
    done = _run(folder, sys.executable, "-c", code, path=root)
    assert done.stdout == f"yes {root / 'sitecustomize.py'} the overlay\n", done.stderr


def test_dsv4doctor_comes_along_where_it_is_not_installed(
    folder: Path, root: Path, tmp_path: Path
) -> None:
    """The kernels that patched code imports, for an image that nothing can be installed into."""
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    python = str(tmp_path / "venv" / "bin" / "python")
    code = "import dsv4doctor.errors as found, platformdirs, pynvml; print(found.__name__)"
    bare = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert "No module named 'dsv4doctor'" in bare.stderr
    done = _run(folder, python, "-c", code, path=root)
    assert done.stdout == "dsv4doctor.errors\n", done.stderr


def test_the_exit_code_is_the_commands(folder: Path) -> None:
    assert _run(folder, sys.executable, "-c", "raise SystemExit(7)").returncode == 7


# ------------------------------------------------------------------------------ refusals


Refused = Callable[..., tuple[int, str]]


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Exit code and the one line of a `run` that starts nothing."""

    def call(*command: str) -> tuple[int, str]:
        code = run(["run", "--overlay", str(folder), "--", *command])
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("dsv4doctor: ")
        assert captured.err.count("\n") == 1
        return code, captured.err

    return call


def test_a_tree_that_has_changed_since(refused: Refused, root: Path) -> None:
    (root / _MOE).write_text("# newer\n")
    code, line = refused(sys.executable, "-m", "sglang.launch_server")
    assert code == 4
    assert f"{root / _MOE}: no longer what the overlay" in line


def test_another_tree_than_it_was_made_from(folder: Path, root: Path, tmp_path: Path) -> None:
    """SGLang goes on without a model whose import failed: a refusal must end the process."""
    other = tmp_path / "other"
    for name, source in _SOURCES.items():
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text(textwrap.dedent(source))
    (other / _MOE).write_text("# another release\n")
    code = "try:\n    import sglang.srt.layers.moe\nexcept BaseException:\n    print('went on')"
    done = _run(folder, sys.executable, "-c", code, path=other)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.count("\n") == 1
    assert str(other / _MOE) in done.stderr


def test_an_overlay_made_on_another_machine(folder: Path, root: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    root.rename(moved)
    done = _run(folder, sys.executable, "-m", "sglang.launch_server", path=moved)
    assert "main: the overlay" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ((), "run: no command"),
        (("no-such-command",), "no-such-command: cannot be started"),
        ((sys.executable, "-I", "-m", "sglang.launch_server"), "-I ignores PYTHONPATH"),
        ((sys.executable, "-u", "-E", "-c", ""), "-E ignores PYTHONPATH"),
        ((sys.executable, "-uBI", "-c", ""), "-uBI ignores PYTHONPATH"),
        ((sys.executable, "-W", "ignore", "-S", "-c", ""), "-S ignores PYTHONPATH"),
        ((sys.executable, "-Xdev", "-sE", "-c", ""), "-sE ignores PYTHONPATH"),
    ],
)
def test_what_cannot_be_run(refused: Refused, command: tuple[str, ...], said: str) -> None:
    code, line = refused(*command)
    assert code == 2
    assert said in line


@pytest.mark.parametrize(
    "command",
    [
        ("sudo", "-E", "python", "-m", "sglang.launch_server"),
        ("bash", "-E", "serve.sh"),
        ("python3", "-WIgnore", "-m", "sglang.launch_server", "-E"),
        ("python3", "-c", "import sys", "-I"),
        ("python3", "serve.py", "-S"),
    ],
)
def test_other_programs_options_are_not_pythons(command: tuple[str, ...]) -> None:
    overlay.refuse_blind(command)


def test_a_script_whose_python_does_not_look(refused: Refused, tmp_path: Path) -> None:
    script = tmp_path / "sglang"
    script.write_text("#!/usr/bin/python3 -sE\nraise SystemExit(9)\n")
    script.chmod(0o755)
    code, line = refused(str(script), "serve")
    assert code == 2
    assert "-sE ignores PYTHONPATH" in line


@pytest.mark.parametrize(
    "damage",
    [
        *("missing", "no JSON", "other fields", "a module"),
        *("no sitecustomize", "another sitecustomize", "one that comes before it"),
    ],
)
def test_what_is_no_overlay(refused: Refused, folder: Path, damage: str) -> None:
    manifest = folder / "overlay.json"
    match damage:
        case "missing":
            manifest.unlink()
        case "no JSON":
            manifest.write_bytes(b"\xff{")
        case "other fields":
            manifest.write_text('{"root": 1}')
        case "a module":
            (folder / "modules" / _MOE).write_text("import os\n")
        case "no sitecustomize":
            (folder / "python" / "sitecustomize.py").unlink()
        case "another sitecustomize":
            (folder / "python" / "sitecustomize.py").write_text("\n")
        case "one that comes before it":
            (folder / "python" / "sitecustomize").mkdir()
            (folder / "python" / "sitecustomize" / "__init__.py").write_text("")
    code, line = refused(sys.executable, "-c", "raise SystemExit(5)")
    assert code == 2
    assert str(folder) in line


def test_an_overlay_whose_path_python_splits(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PYTHONPATH has no way to say a colon: the command would start unpatched."""
    split = folder.rename(tmp_path / f"a{os.pathsep}b")
    assert run(["run", "--overlay", str(split), "--", sys.executable, "-c", ""]) == 2
    assert "where PYTHONPATH is split" in capsys.readouterr().err
    with pytest.raises(UsageError, match="where PYTHONPATH is split"):
        overlay.refuse_target(tmp_path / f"c{os.pathsep}d" / "overlay")


def test_an_overlay_of_before_the_hash_of_its_start(folder: Path) -> None:
    manifest = folder / "overlay.json"
    plain = json.loads(manifest.read_text())
    del plain["bootstrap"]
    manifest.write_text(json.dumps(plain))
    assert overlay.read(folder).bootstrap == ""
    (folder / "python" / "sitecustomize.py").write_text("\n")
    with pytest.raises(UsageError, match=r"sitecustomize\.py is not as it was written"):
        overlay.read(folder)


def test_an_overlay_that_is_taken_away_stops_its_pythons(folder: Path, root: Path) -> None:
    code = (
        "import os, subprocess, sys; os.remove(sys.argv[1]); "
        "print(subprocess.run([sys.executable, '-c', 'print(1)']).returncode)"
    )
    done = _run(folder, sys.executable, "-c", code, str(folder / "overlay.json"), path=root)
    assert done.stdout == "4\n"
    assert "not a whole overlay" in done.stderr


# ------------------------------------------------------------------------------ making one


@pytest.mark.wheels
def test_the_plans_modules_and_nothing_else(sglang_tree: Tree, tmp_path: Path) -> None:
    tree = part_of(sglang_tree("0.5.14"), tmp_path / "tree")
    before = contents(Path(tree.root))
    folder = tmp_path / "overlay"
    outcome = work.write_overlay(job(tree, tmp_path / "state", (TWO,)), folder)
    assert outcome.exit_code == 0
    assert contents(Path(tree.root)) == before
    made = overlay.read(folder)
    assert [module.file for module in made.modules] == [KV, QUANT]
    assert (made.fixes, made.root) == (("FIX902",), tree.root)
    assert (folder / "modules" / KV).read_bytes() == outcome.changes[KV][1]
    # Made again, it is replaced whole.
    work.write_overlay(job(tree, tmp_path / "state", BOTH), folder)
    assert len(overlay.read(folder).modules) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["overlay", "tree"]


@pytest.mark.wheels
def test_a_folder_in_the_tree_and_one_that_a_shell_splits(
    sglang_tree: Tree, tmp_path: Path
) -> None:
    tree = part_of(sglang_tree("0.5.14"), tmp_path / "tree")
    before = contents(Path(tree.root))
    wanted = job(tree, tmp_path / "state", (TWO,))
    (tmp_path / "link").symlink_to(tree.root)
    for folder in (Path(tree.root) / "overlay", tmp_path / "link" / "sglang" / "overlay"):
        with pytest.raises(UsageError, match="lies in the tree"):
            work.write_overlay(wanted, folder)
    assert contents(Path(tree.root)) == before
    folder = tmp_path / "my overlay; ls"
    said = work.write_overlay(wanted, folder).said
    words = shlex.split(said.partition("start with: ")[2])
    assert words == ["dsv4doctor", "run", "--overlay", str(folder), "--", "COMMAND"]


@pytest.mark.wheels
def test_what_does_not_hold_is_not_written(sglang_tree: Tree, tmp_path: Path) -> None:
    tree = part_of(sglang_tree("0.5.14"), tmp_path / "tree")
    doubting = replace(TWO, verify=lambda facts, trace: ("no",))
    outcome = work.write_overlay(job(tree, tmp_path / "s", (doubting,)), tmp_path / "overlay")
    assert outcome.exit_code == 4
    assert not (tmp_path / "overlay").exists()


@pytest.mark.parametrize("there", ["a file", "a folder with something", "a dangling link"])
def test_a_folder_that_is_taken(tmp_path: Path, there: str) -> None:
    folder = tmp_path / "overlay"
    match there:
        case "a file":
            folder.write_text("mine")
        case "a folder with something":
            folder.mkdir()
            (folder / "mine").write_text("mine")
        case "a dangling link":
            folder.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="something else already"):
        overlay.refuse_target(folder)
    with pytest.raises(UsageError, match="no folder"):
        overlay.refuse_target(tmp_path / "no" / "such" / "overlay")


def test_outdated_is_seen_before_anything_starts(folder: Path, root: Path) -> None:
    made = overlay.read(folder)
    overlay.refuse_outdated(folder, made)
    (root / _PACKAGE).unlink()
    with pytest.raises(PatchRefusedError, match="no longer what the overlay"):
        overlay.refuse_outdated(folder, made)


def test_the_manifest_says_what_it_was_made_from(folder: Path, root: Path) -> None:
    plain = json.loads((folder / "overlay.json").read_text())
    assert plain["root"] == str(root)
    assert [module["name"] for module in plain["modules"]] == [
        "sglang.srt.layers",
        "sglang.srt.layers.moe",
    ]
