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
