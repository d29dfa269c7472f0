"""Output files that would cost an input, and inputs that are no files."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4doctor.cli import run as command

Said = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said) -> Callable[..., str]:
    """`run(*arguments)`: the one line of a `check` that ends with exit code 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.sh").write_text("python -m sglang.launch_server --model-path m --tp 4\n")

    def said(*arguments: str) -> str:
        assert command(["check", "--launch", "serve.sh", "--arch", "sm_120", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        return error

    return said


@pytest.mark.parametrize("output", [("-o", "serve.sh"), ("--report", "html=serve.sh")])
def test_the_script_is_not_written_over(
    run: Callable[..., str], output: tuple[str, str], tmp_path: Path
) -> None:
    before = (tmp_path / "serve.sh").read_bytes()
    assert "this is the launch script" in run(*output)
    assert (tmp_path / "serve.sh").read_bytes() == before


def test_links_to_an_input_are_seen(run: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("serve.sh")
    os.link(tmp_path / "serve.sh", tmp_path / "hard")
    assert "this is the launch script" in run("-o", "link")
    assert "this is the launch script" in run("-o", "hard")


def test_configuration_and_baseline_are_inputs(run: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "dsv4doctor.toml").write_text("")
    (tmp_path / "known.json").write_text('{"schema": "dsv4doctor-baseline/1", "findings": []}')
    assert "this is the configuration" in run("-o", "dsv4doctor.toml")
    assert "this is the baseline" in run("--baseline", "known.json", "--report", "junit=known.json")


def test_no_file_is_written_twice(run: Callable[..., str]) -> None:
    assert "written twice" in run("-o", "same", "--report", "html=./same")


def test_a_folder_is_no_report(run: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "a folder" in run("--report", "sarif=folder")


@pytest.mark.parametrize("option", ["--baseline", "--config"])
@pytest.mark.parametrize("what", ["pipe", "/dev/zero"])
def test_what_never_ends_is_not_read(
    run: Callable[..., str], option: str, what: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "a pipe, socket or device where a file should be" in run(option, what)


def test_a_configuration_that_is_no_text(run: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_bytes(b'model = "\xff"\n')
    assert "not UTF-8 (byte 9)" in run("--config", "own.toml")


# ------------------------------------------------------------------------------ every command


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with inputs, a checkpoint and an SGLang tree."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSV4DOCTOR_STATE", str(tmp_path / "state"))
    for file in (
        *("serve.sh", "box.json", "server.log", "a.json", "b.json", "python", "ranks/0.json"),
        *("model/config.json", "model/model.safetensors", "half/config.json"),
        *("site/sglang/srt/server_args.py", "site/sglang-0.5.23.dist-info/METADATA"),
        "hub/models--a--b/blobs/0",
        "state/trees/0/journal.json",
    ):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {file}\n")
    (tmp_path / "serve.sh").write_text(
        'source "$(dirname "$0")/env.sh"\npython -m sglang.launch_server --model-path model\n'
    )
    (tmp_path / "env.sh").write_text(". ./more.sh\n")
    (tmp_path / "more.sh").write_text("export A=1\n")
    (tmp_path / "link.json").symlink_to("model/config.json")
    return tmp_path


def _contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


_LAUNCH = ("--launch", "serve.sh", "--arch", "sm_120")
_WRITERS: dict[str, tuple[str, ...]] = {
    "check": ("check", *_LAUNCH),
    "trace": ("trace", *_LAUNCH),
    "trace-moe": ("trace-moe", *_LAUNCH),
    "fix": ("fix", *_LAUNCH),
    "fix --diff": ("fix", "--diff", *_LAUNCH),
    "fix --apply": ("fix", "--apply", *_LAUNCH),
    "fix --check": ("fix", "--check", *_LAUNCH),
    "fix --status": ("fix", "--status", "--launch", "serve.sh"),
    "fix --revert": ("fix", "--revert", "--launch", "serve.sh"),
    "matrix": ("matrix", *_LAUNCH),
    "snapshot": ("snapshot", "--launch", "serve.sh"),
    "diagnose": ("diagnose", "server.log"),
    "diff": ("diff", "a.json", "b.json"),
    "profile": ("profile", "a.json", "ranks", "--expect", "b.json"),
    "kernels list": ("kernels", "list"),
    "kernels bench": ("kernels", "bench"),
}
_PLACES = {
    "model/config.json": "in a checkpoint",
    "model/new.json": "in a checkpoint",
    "link.json": "in a checkpoint",
    "site/sglang/new.json": "in an SGLang tree",
    "site/sglang/srt/server_args.py": "in an SGLang tree",
    "site/sglang-0.5.23.dist-info/METADATA": "in SGLang's metadata",
    "hub/models--a--b/blobs/0": "in a model of the Hugging Face cache",
}


def _refused(capsys: Said, place: Path, *arguments: str) -> str:
    before = _contents(place)
    assert command(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert _contents(place) == before
    return error


@pytest.mark.parametrize("output", _PLACES)
@pytest.mark.parametrize("name", _WRITERS)
def test_nothing_is_written_into_a_checkpoint_or_sglang(
    name: str, output: str, place: Path, capsys: Said
) -> None:
    """Before anything is read: neither the launch's model nor its SGLang can be known here."""
    said = _refused(capsys, place, *_WRITERS[name], "-o", output)
    assert f"--output {output}: this is {_PLACES[output]}" in said


@pytest.mark.parametrize(
    ("name", "output", "what"),
    [
        *(
            (name, *pair)
            for name, arguments in _WRITERS.items()
            if "--launch" in arguments
            for pair in (
                ("serve.sh", "this is the launch script"),
                ("env.sh", "this is a file that the launch script sources"),
                ("more.sh", "this is a file that the launch script sources"),
            )
        ),
        ("diagnose", "server.log", "this is the log"),
        ("diff", "a.json", "this is the prediction"),
        ("diff", "b.json", "this is the recording"),
        ("profile", "a.json", "this is a trace"),
        ("profile", "ranks/0.json", "this is a trace"),
        ("profile", "b.json", "this is the report of --expect"),
        ("fix --status", "state/trees/0/journal.json", "this is in what fixes are taken back with"),
    ],
)
def test_no_command_writes_over_its_inputs(
    name: str, output: str, what: str, place: Path, capsys: Said
) -> None:
    assert f"--output {output}: {what}" in _refused(capsys, place, *_WRITERS[name], "-o", output)


@pytest.mark.parametrize("name", ["check", "trace", "fix", "matrix", "snapshot"])
def test_a_line_of_a_script_the_interpreter_and_a_broken_model(
    name: str, place: Path, capsys: Said
) -> None:
    line = (name, "--launch", "serve.sh:2")
    assert "this is the launch script" in _refused(capsys, place, *line, "-o", "serve.sh")
    python = (name, "model", "--python", "python")
    assert "this is the interpreter" in _refused(capsys, place, *python, "-o", "python")
    model = (name, "half", "-o", "half/new.json")
    assert "new.json: this is in " in _refused(capsys, place, *model)


def test_a_snapshot_is_an_input(place: Path, capsys: Said) -> None:
    for name in ("check", "fix", "matrix", "trace"):
        arguments = (name, "--snapshot", "box.json", "-o", "box.json")
        assert "this is the snapshot" in _refused(capsys, place, *arguments)


def test_an_overlay_is_not_put_where_something_is_read(place: Path, capsys: Said) -> None:
    fix = ("fix", *_LAUNCH, "--overlay")
    assert "in an SGLang tree" in _refused(capsys, place, *fix, "site/sglang/srt/overlay")
    assert "in a checkpoint" in _refused(capsys, place, *fix, "model")
    assert "this holds the launch script" in _refused(capsys, place, *fix, ".")
    said = _refused(capsys, place, *fix, "overlay", "-o", "overlay")
    assert "written twice" in said


def test_a_plan_is_not_put_where_something_is_read(place: Path, capsys: Said) -> None:
    plan = ("plan", "single", "--force", "--out")
    assert "in a checkpoint" in _refused(capsys, place, *plan, "model")
    assert "in an SGLang tree" in _refused(capsys, place, *plan, "site/sglang/deploy")
    (place / "deploy").mkdir()
    (place / "deploy" / "server.sh").write_text("{}")
    said = _refused(capsys, place, *plan, "deploy", "--snapshot", "deploy/server.sh")
    assert "server.sh: this is the snapshot" in said


def test_a_baseline_to_be_written_is_an_output(place: Path, capsys: Said) -> None:
    update = ("check", *_LAUNCH, "--update-baseline", "--baseline")
    assert "in a checkpoint" in _refused(capsys, place, *update, "model/known.json")
    assert "written twice" in _refused(capsys, place, *update, "new.json", "-o", "new.json")


def test_two_outputs_beside_their_inputs_are_fine(place: Path, capsys: Said) -> None:
    """What is refused is refused for a reason: the very same command goes on elsewhere."""
    assert command(["check", *_LAUNCH, "-o", "report.json", "--report", "html=x.html"]) == 2
    assert "model" in capsys.readouterr().err
    assert command(["diff", "a.json", "b.json", "-o", "ranks/diff.json"]) == 2
    assert "not JSON" in capsys.readouterr().err


def test_a_folder_that_takes_no_files_is_found_out_first(place: Path, capsys: Said) -> None:
    """/proc takes none from root either, whatever its rights say."""
    assert "/proc cannot be written" in _refused(capsys, place, "check", *_LAUNCH, "-o", "/proc/x")
    said = _refused(capsys, place, "plan", "single", "m", "--out", "/proc/x")
    assert said.startswith("dsv4doctor: --out /proc/x: /proc cannot be written")
