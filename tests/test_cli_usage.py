"""What is said to somebody who gives too little, too much or the wrong thing."""

import json
import os
from pathlib import Path

import pytest
from reporting import report

from dsv4doctor import cli
from dsv4doctor.errors import UndeterminedError, UsageError
from dsv4doctor.launch_limits import check_limits
from dsv4doctor.models import Launch
from dsv4doctor.report.console import layer_summary, render_trace
from dsv4doctor.rules.samples import DRAFT_TRTLLM, MAIN_CUTLASS, facts
from dsv4doctor.wheels import fetch_tree


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on standard error."""
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("DSV4DOCTOR_")]:
        monkeypatch.delenv(name)


def test_nothing_given_asks_for_the_launch_first(capsys: pytest.CaptureFixture[str]) -> None:
    said = _refused(capsys, "check")
    assert "no MODEL and no --launch given" in said
    assert "--arch" not in said


def test_main_and_draft_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--main", "--draft"], ["--draft", "--main"]):
        assert "--main and --draft are both given" in _refused(capsys, "trace-moe", *flags)


def test_a_wrong_value_names_what_was_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4DOCTOR_ARCH", "sm_9")
    assert _refused(capsys, "check").startswith("dsv4doctor: DSV4DOCTOR_ARCH: 'sm_9' is not one of")
    said = _refused(capsys, "check", "--arch", "sm_8")
    assert said.startswith("dsv4doctor: --arch: 'sm_8' is not one of")


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["kernels"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Usage: dsv4doctor kernels")
    assert "\n  verify " in shown


def test_a_very_long_name_is_not_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["check", "m" * 50_000, "--arch", "sm_120"], ["check", "--arch", "a" * 9000]):
        said = _refused(capsys, *arguments)
        assert len(said) < 2000
        assert "..." in said


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["profile"], "TRACE"),
        (["diagnose"], "LOG"),
        (["diff"], "PREDICTED"),
        (["diff", "x"], "RECORDED"),
        (["run", "--", "true"], "--overlay"),
    ],
)
def test_what_is_missing_is_named(
    arguments: list[str], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _refused(capsys, *arguments)
    assert said.startswith(f"dsv4doctor: {missing} is missing. See dsv4doctor {arguments[0]} --he")


def test_the_way_out_is_one_that_the_command_has(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("check", "trace", "fix", "trace-moe"):
        said = _refused(capsys, name)
        assert "check MODEL" not in said
        assert "--launch serve.sh" in said
    said = _refused(capsys, "plan", "single")
    assert "--launch" not in said
    assert "no MODEL given" in said


@pytest.mark.parametrize("image", ["", "a b", "a\nprivileged: true", "a\x1b[31m", "\u00e9", "-x"])
def test_an_image_that_is_none(image: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = _refused(capsys, "plan", "single", "m", "--kind", "compose", "--image", image)
    assert "not an image's name" in said


@pytest.mark.parametrize("gpus", ["", "\uff10-\uff13", "\u0660"])
def test_gpus_are_ascii_numbers(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is no GPU" in _refused(capsys, "plan", "single", "m", "--gpus", gpus)


def test_an_empty_value_is_no_default(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--sglang", "--arch"):
        rest = ["--arch", "sm_120"] if flag == "--sglang" else []
        said = _refused(capsys, "matrix", "m", flag, "", *rest)
        assert f"{flag}: nothing in the list" in said
    for arguments in (["fix"], ["run", "--", "true"]):
        said = _refused(capsys, arguments[0], "--overlay", "", *arguments[1:])
        assert "--overlay: no folder" in said


@pytest.mark.parametrize(
    "wrong", [["--status", "--revert"], ["--check", "--overlay", "x"], ["--overlay", ""]]
)
def test_fix_says_wrong_usage_in_json_too(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["fix", "--format", "json", *wrong]) == 2
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert error["message"] in err


# ------------------------------------------------------------------------------ limits


def _launch(*flags: str) -> Launch:
    return Launch("command line", None, {}, "model", flags)


def test_more_flags_than_a_launch_has() -> None:
    check_limits(_launch(*["--tp", "4"] * 1000))
    with pytest.raises(UsageError, match="60000 arguments"):
        check_limits(_launch(*["--tp"] * 60_000))
    with pytest.raises(UsageError, match="1 arguments with 300000 characters"):
        check_limits(_launch("x" * 300_000))


def test_a_config_file_of_aliases(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a: &a [x, x]\nb: [*a, *a]\ntp: 4\nname: 2*3 a*b\n")
    check_limits(_launch("--config", str(path)))
    path.write_text("a: &a [x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(9)))
    with pytest.raises(UsageError, match="more than 16 YAML aliases"):
        check_limits(_launch(f"--config={path}"))
    path.write_text("a: b\n" * 300_000)
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        check_limits(_launch("--config", str(path)))
    check_limits(_launch("--config", str(tmp_path / "absent.yaml")))


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    pip = tmp_path / "python"
    pip.write_text("#!/bin/sh\necho 'ERROR: [Errno 28] No space left on device' >&2\nexit 1\n")
    pip.chmod(0o755)
    with pytest.raises(UndeterminedError, match="no space left in") as caught:
        fetch_tree("0.5.99", tmp_path / "cache", python=str(pip))
    assert "DSV4DOCTOR_CACHE" in (caught.value.hint or "")


# ------------------------------------------------------------------------------ trace-moe


def test_the_summary_of_a_trace_counts_layers() -> None:
    shown = report(facts("sm_120", [*MAIN_CUTLASS, DRAFT_TRTLLM]))
    assert layer_summary(shown) == "layers: 3 main runs, 1 draft fails"
    assert "DSV" not in render_trace(shown, 100, False, verbose=False, why=False)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *(("check", option) for option in ("--launch", "--sglang", "--python", "--snapshot")),
        *(("fix --status", option) for option in ("--sglang", "--python", "--config")),
        *(("plan single x", option) for option in ("--sglang", "--python", "--host")),
        *(("matrix x", option) for option in ("--launch", "--python")),
        *((command, "--output") for command in ("check", "snapshot", "diff a b", "profile a")),
        ("trace", "MODEL"),
    ],
)
def test_an_empty_value_is_not_the_default(
    capsys: pytest.CaptureFixture[str], command: str, option: str
) -> None:
    """As of `--sglang "$TREE"` without such a variable: another tree would be patched."""
    given = [""] if option == "MODEL" else [option, ""]
    said = _refused(capsys, *command.split(), *given)
    assert said.startswith(f"dsv4doctor: {option}: empty. Leave it out, or give a ")


def test_an_empty_variable_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4DOCTOR_SGLANG", "")
    assert "no MODEL and no --launch given" in _refused(capsys, "check")
