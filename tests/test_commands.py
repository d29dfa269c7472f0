"""What a finding tells to run or to change can be run, and changes nothing else."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4doctor import cli, commands
from dsv4doctor.audit import _with_command, run_rules
from dsv4doctor.models import (
    ARCHS,
    Alternative,
    Facts,
    Launch,
    Location,
    Package,
    Said,
    SglangError,
    Stack,
)
from dsv4doctor.rules import (
    flag_not_consulted,
    layer_raises,
    moe_draft_sm100_only,
    moe_main_sm100_only,
    package_pins,
)
from dsv4doctor.rules.samples import DRAFT_TRTLLM, MAIN_TRTLLM, facts, gpus, scene

_FLAGS = ("--tp", "4", "--moe-runner-backend", "triton", "--speculative-algorithm", "EAGLE")
_MARLIN = ("--tp", "4", "--moe-runner-backend", "marlin")


def _facts(launch: Launch, *options: Alternative) -> Facts:
    plain = facts("sm_120", [replace(layer, flags_consulted=()) for layer in MAIN_TRTLLM])
    snapshot = replace(plain.snapshot, launch=launch)
    return replace(plain, snapshot=snapshot, alternatives=options)


_SCRIPT = Launch("deploy/serve v4.sh", 7, {"A": "1"}, "/m", _FLAGS, wrappers=("numactl",))
_TYPED = Launch("command line", None, {"A": "x y"}, "/m", _FLAGS, given=("A",))


def test_a_script_is_told_what_to_change() -> None:
    sample = _facts(_SCRIPT, Alternative("marlin", _MARLIN, None))
    (result,) = run_rules([moe_main_sm100_only.RULE], sample)
    remedy = result.findings[0].remedy
    assert remedy is not None
    assert remedy.commands == ()  # numactl and the exports would be lost
    assert (
        "In deploy/serve v4.sh:7: write --moe-runner-backend marlin in place of "
        "--moe-runner-backend triton; take out --speculative-algorithm EAGLE." in remedy.text
    )


def test_a_command_line_is_given_whole() -> None:
    assert commands.server_command(_facts(_TYPED), _MARLIN) == (
        "env 'A=x y' python -m sglang.launch_server --model-path /m --tp 4 "
        "--moe-runner-backend marlin"
    )


def test_what_is_not_known_here_is_in_no_command() -> None:
    for launch in (
        replace(_TYPED, flags=(*_FLAGS, "--api-key", "[redacted]")),
        replace(_TYPED, environment={"HF_TOKEN": "[redacted]"}, given=("HF_TOKEN",)),
    ):
        assert commands.server_command(_facts(launch), launch.flags) is None
        assert commands.doctor_command(_facts(launch), "check") is None


def test_equal_options_in_two_spellings_are_no_change() -> None:
    sample = _facts(replace(_SCRIPT, flags=("--tp=4", "--x")))
    assert commands.launch_change(sample, ("--tp", "4", "--x")) is None
    assert commands.launch_change(sample, ("--tp", "4", "--y", "a b")) == (
        "In deploy/serve v4.sh:7: add --y 'a b'; take out --x."
    )


@pytest.mark.parametrize("launch", [_SCRIPT, _TYPED])
def test_the_doctor_s_own_command_names_launch_tree_and_gpu(launch: Launch) -> None:
    (result,) = run_rules([flag_not_consulted.RULE], _facts(launch))
    remedy = result.findings[0].remedy
    assert remedy is not None
    words = shlex.split(remedy.commands[0])
    assert words[:4] == ["dsv4doctor", "trace-moe", "--main", "--why"]
    assert "--arch" in words
    # An export of the script is there anyway.
    assert ("--env" in words) is (launch is _TYPED)
    if launch is _TYPED:
        assert words[words.index("--env") + 1] == "A=x y"
    assert words[words.index("--sglang") + 1] == "0.5.14"
    is_script = launch is _SCRIPT
    assert ("--launch" in words) is is_script
    assert (tuple(words[-len(_FLAGS) :]) == _FLAGS) is not is_script


def test_the_doctor_s_own_command_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the model, which is not there."""
    (tmp_path / "a b.sh").write_text("sglang serve /not/there --tp 4\n")
    launch = replace(_SCRIPT, source=str(tmp_path / "a b.sh"), line=1)
    line = commands.doctor_command(_facts(launch), "trace-moe", "--main") or ""
    assert cli.run(shlex.split(line)[1:]) == 2
    assert "/not/there" in capsys.readouterr().err


def test_what_was_given_to_a_script_is_given_again() -> None:
    launch = replace(_SCRIPT, environment={"A": "1", "MODE": "plain"}, given=("MODE",))
    words = shlex.split(commands.doctor_command(_facts(launch), "check") or "")
    assert words[words.index("--env") + 1] == "MODE=plain"
    assert words.count("--env") == 1


def test_a_finding_says_where_its_patch_goes_in() -> None:
    plain = facts("sm_120", [DRAFT_TRTLLM])
    snapshot = replace(plain.snapshot, launch=_TYPED)
    said = Said(snapshot="box.json")
    sample = replace(plain, snapshot=snapshot, said=said, arch_source="snapshot")
    (result,) = run_rules([moe_draft_sm100_only.RULE], sample)
    remedy = result.findings[0].remedy
    assert remedy is not None
    assert remedy.fix is not None
    command = f"dsv4doctor fix --only {remedy.fix} --snapshot box.json"
    assert remedy.commands[-1].startswith(command)
    assert (
        "A patch goes in on the machine that box.json is of: `dsv4doctor fix --apply --only "
        f"{remedy.fix}` there, with its launch."
    ) in remedy.text


@pytest.mark.parametrize(("arch", "is_there"), [("sm_120", True), ("sm_100", False)])
def test_remedies_for_another_machine_do_not_name_the_snapshots(arch: str, is_there: bool) -> None:
    stack = Stack("/box/bin/python", "3.12.3", (Package("tilelang", None, "==0.1.12", False),))
    sample = replace(scene(gpus=gpus(1)), arch=ARCHS[arch], said=Said(snapshot="box.json"))
    sample = replace(sample, snapshot=replace(sample.snapshot, stack=stack))
    (result,) = run_rules([package_pins.RULE], sample)
    remedy = result.findings[0].remedy
    assert remedy is not None
    python = "/box/bin/python" if is_there else "python"
    assert remedy.commands == (f"{python} -m pip install 'tilelang==0.1.12'",)
    assert ("on the machine that serves" in remedy.text) is not is_there
    patched = replace(remedy, fix="FIX101")
    [finding] = result.findings
    shown = _with_command(replace(finding, remedy=patched), sample).remedy
    assert shown is not None
    assert ("the machine that box.json is of" in shown.text) is is_there


def test_eagle_without_its_companions() -> None:
    said = "Only EAGLE speculative algorithm with topk == 1 is supported for DeepseekV4ForCausalLM"
    error = SglangError("arguments", "AssertionError", said, Location("a.py", 1))
    sample = _facts(replace(_TYPED, flags=_FLAGS[-2:]))
    assert sample.trace is not None
    sample = replace(sample, trace=replace(sample.trace, layers=(), errors=(error,)))
    (result,) = run_rules([layer_raises.RULE], sample)
    remedy = result.findings[0].remedy
    assert remedy is not None
    assert "--speculative-eagle-topk 1" in remedy.text
    assert remedy.commands[0].endswith(
        "--speculative-algorithm EAGLE --speculative-eagle-topk 1 --speculative-num-steps 3 "
        "--speculative-num-draft-tokens 4"
    )
