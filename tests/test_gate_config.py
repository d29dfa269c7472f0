"""dsv4doctor.toml and [tool.dsv4doctor]: what is read, and what is said about mistakes."""

import re
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4doctor import checking, config
from dsv4doctor.errors import UsageError
from dsv4doctor.models import Severity

_FULL = """
arch = "sm_120"
sglang = "0.5.14"
env = { NCCL_DEBUG = "INFO" }
fail_on = "warning"
baseline = "known.json"

[[target]]
name = "production"
launch = "serve.sh"

[[target]]
name = "lab"
launch = ["a.sh", "b.sh:12"]
arch = "sm_121"
env = { SGLANG_X = "1" }

[[target]]
name = "flags"
model = "nvidia/DeepSeek-V4-Flash-NVFP4"
flags = ["--tp", "4"]
strict = true
fail_on = "never"

[[suppress]]
rule = "DSV103"
subject = "model.decoder.*"
target = "production"
reason = "the flag is set for another model"
expires = 2026-12-31

[[suppress]]
rule = "DSV107"
reason = "measured, answers are the same"
expires = "2027-01-31"
"""


def _read(text: str, folder: Path, name: str = config.NAME) -> config.Config:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return config.read(path)


def test_everything_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    read = _read(_FULL, tmp_path)
    names = [target.name for target in read.targets]
    assert names == ["production", "lab: a.sh", "lab: b.sh:12", "flags"]
    production, lab, _, flags = read.targets
    assert (production.launch, production.arch, production.sglang) == (
        "serve.sh",
        "sm_120",
        "0.5.14",
    )
    assert (lab.launch, lab.arch) == ("a.sh", "sm_121")
    assert lab.env == ("NCCL_DEBUG=INFO", "SGLANG_X=1")
    assert (flags.flags, flags.launch, flags.model) == (
        ("--tp", "4"),
        None,
        "nvidia/DeepSeek-V4-Flash-NVFP4",
    )
    assert read.baseline == "known.json"
    assert [one.expires for one in read.suppressions] == [date(2026, 12, 31), date(2027, 1, 31)]
    assert read.suppressions[0].source == "dsv4doctor.toml: suppress 1"


def test_paths_are_seen_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "below").mkdir()
    (tmp_path / "tree").mkdir()
    monkeypatch.chdir(tmp_path)
    text = 'launch = "serve.sh"\nsglang = "../tree"\npython = "/venv/bin/python"\n'
    (target,) = _read(text, tmp_path / "deploy").targets
    assert target.launch == "deploy/serve.sh"
    assert target.python == "/venv/bin/python"
    assert Path(target.sglang or "").resolve() == tmp_path / "tree"


def test_the_nearest_file_is_found(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert config.find(inner) is None or tmp_path not in (config.find(inner) or tmp_path).parents
    project = tmp_path / "pyproject.toml"
    project.write_text('[tool.dsv4doctor]\narch = "sm_120"\n')
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.ruff]\n")
    assert config.find(inner) == project
    assert config.read(project).defaults.arch == "sm_120"
    own = tmp_path / "a" / config.NAME
    own.write_text("")
    assert config.find(inner) == own


_MISTAKES = {
    "key": ("archh = 1", "archh: is not a key"),
    "key of a target": ('[[target]]\nname = "x"\nlunch = "y"', "target 1: lunch: is not a key"),
    "key of a suppression": ("[[suppress]]\nuntil = 2026-01-01", "suppress 1: until: is not a key"),
    "no name": ('[[target]]\nlaunch = "y"', "target 1: name: is missing"),
    "twice": ('[[target]]\nname = "x"\n[[target]]\nname = "x"', "target: two are called 'x'"),
    "type": ("arch = 120", "arch: should be a string, is 120"),
    "value": ('arch = "sm_75"', "arch: should be one of auto, sm_90"),
    "fail_on": ('fail_on = "info"', "fail_on: should be one of error, warning, never"),
    "env": ("env = { A = 1 }", "env.A: should be a variable with a string"),
    "flags": ("flags = [1]", "flags: should be a list of strings"),
    "both": ('launch = "x.sh"\nflags = ["--tp", "4"]', "launch: given together with flags"),
    "both in a target": (
        '[[target]]\nname = "x"\nlaunch = ["x.sh"]\nflags = ["--tp", "4"]',
        "target 1: launch: given together with flags",
    ),
    "no script": ("launch = []", "launch: is an empty list"),
    "table": ('target = "x"', "target: should be a list of tables"),
    "two launches": (
        'launch = "a.sh"\n[[target]]\nname = "x"\nlaunch = "b.sh"',
        "launch: is also in [[target]]",
    ),
    "no rule": ('[[suppress]]\nreason = "x"\nexpires = 2026-01-01', "suppress 1: rule: is missing"),
    "no reason": (
        '[[suppress]]\nrule = "DSV103"\nexpires = 2026-01-01',
        "suppress 1: reason: is missing",
    ),
    "empty reason": (
        '[[suppress]]\nrule = "DSV103"\nreason = " "\nexpires = 2026-01-01',
        "suppress 1: reason: is missing",
    ),
    "no date": ('[[suppress]]\nrule = "DSV103"\nreason = "x"', "suppress 1: expires: is missing"),
    "bad date": (
        '[[suppress]]\nrule = "DSV103"\nreason = "x"\nexpires = "2026-02-30"',
        "suppress 1: expires: '2026-02-30' is not a date",
    ),
    "time": (
        '[[suppress]]\nrule = "DSV103"\nreason = "x"\nexpires = 2026-02-28T10:00:00',
        "suppress 1: expires: '2026-02-28 10:00:00' is not a date",
    ),
    "target": (
        '[[suppress]]\nrule = "DSV103"\nreason = "x"\nexpires = 2026-02-28\ntarget = "y"',
        "suppress 1: target: there is no target 'y'",
    ),
    "toml": ("[[[", "not TOML"),
    "nul": (r'launch = ["a\u0000.sh"]', "launch: holds a NUL character"),
}


@pytest.mark.parametrize("name", _MISTAKES)
@pytest.mark.parametrize("file", [config.NAME, "pyproject.toml"])
def test_mistakes_name_the_file_and_the_key(name: str, file: str, tmp_path: Path) -> None:
    text, said = _MISTAKES[name]
    if file == "pyproject.toml" and name != "toml":
        text = text.replace("[[", "[[tool.dsv4doctor.")
        text = f"[tool.dsv4doctor]\n{text}"
    with pytest.raises(UsageError) as caught:
        _read(text, tmp_path, file)
    assert caught.value.message.startswith(f"{tmp_path / file}: ")
    assert said in caught.value.message


_VALUES = st.recursive(
    st.one_of(st.integers(), st.booleans(), st.text("ab\\/\x00\n", max_size=5), st.dates()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from([*config._TOP, *config._SUPPRESS, "x"]), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from([*config._TOP, "name"]), _VALUES, max_size=5))
def test_any_table_is_read_or_refused(plain: dict[str, object]) -> None:
    refused = ""
    try:
        read = config._Reader(Path("dsv4doctor.toml")).config(plain)
    except UsageError as error:
        refused = error.message
    assert refused.startswith("dsv4doctor.toml: ") or read.targets


def test_the_documented_examples_are_read(tmp_path: Path) -> None:
    docs = Path(__file__).parent.parent / "docs"
    for name, targets in (("commands.md", ["production", "lab"]), ("ci.md", ["production"])):
        text = (docs / name).read_text(encoding="utf-8")
        (example,) = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        assert [target.name for target in _read(example, tmp_path).targets] == targets


# ------------------------------------------------------------------------------ who wins


def _plan(said: dict[str, object], tmp_path: Path, *only: str) -> checking.Plan:
    return checking.plan(said, only, _read(_FULL, tmp_path))


def test_the_command_line_wins(tmp_path: Path) -> None:
    planned = _plan({"arch": "sm_100", "fail_on": "error", "env": ("A=1",)}, tmp_path)
    assert {asked.options.arch for asked in planned.targets} == {"sm_100"}
    assert {asked.policy.fail_on for asked in planned.targets} == {Severity.ERROR}
    assert planned.targets[0].options.env == ("NCCL_DEBUG=INFO", "A=1")
    assert planned.targets[3].policy.strict is True
    assert _plan({"baseline": "other.json"}, tmp_path).baseline == "other.json"


@pytest.mark.parametrize("said", [{"launch": "x.sh"}, {"flags": ("--tp", "8")}, {"model": "m"}])
def test_a_launch_on_the_command_line_is_the_only_target(
    said: dict[str, object], tmp_path: Path
) -> None:
    (asked,) = _plan(said, tmp_path).targets
    assert asked.options.arch == "sm_120"
    assert asked.policy.target is None
    assert (str(asked.options.launch), asked.options.flags) == (
        str(said.get("launch")),
        said.get("flags", ()),
    )


def test_targets_by_name(tmp_path: Path) -> None:
    planned = _plan({}, tmp_path, "flags")
    assert [asked.policy.target for asked in planned.targets] == ["flags"]
    assert len(planned.configured) == 4
    with pytest.raises(UsageError, match="--target nobody"):
        _plan({}, tmp_path, "nobody")


def test_without_a_file_there_is_one_target() -> None:
    (asked,) = checking.plan({"model": "m", "strict": True}, (), None).targets
    assert (asked.options.model, asked.options.arch, asked.policy.strict) == ("m", "auto", True)
    assert asked.policy.fail_on is Severity.ERROR
