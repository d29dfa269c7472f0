"""The gate from the command line: several targets, reports, baseline, suppressions, completion."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import junitparser
import pytest

from dsv4doctor.models import SglangTree

_FLAGS = (
    *("--tp", "4", "--moe-runner-backend", "triton"),
    *("--speculative-moe-runner-backend", "triton", "--speculative-algorithm", "EAGLE"),
    *("--speculative-num-steps", "1", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "2"),
)
Doctor = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def doctor(tmp_path: Path, cache: str) -> Doctor:
    """`doctor(*arguments, **variables)` in a folder of its own."""
    ours = ("DSV4DOCTOR_", "_DSV4DOCTOR", "NO_COLOR", "CI")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}

    def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dsv4doctor", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**kept, "DSV4DOCTOR_CACHE": cache, "COLUMNS": "100", **variables},
            timeout=300,
        )

    return run


@pytest.fixture
def project(
    checkpoint: Callable[..., Path], sglang_tree: Callable[[str], SglangTree], tmp_path: Path
) -> Path:
    """A folder with serve.sh and a configuration of three targets, one of them broken."""
    model = checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4", experts=2)
    serve = f"exec python -m sglang.launch_server --model-path {model} {' '.join(_FLAGS)}\n"
    (tmp_path / "serve.sh").write_text(f"#!/bin/bash\n{serve}")
    (tmp_path / "empty.sh").write_text("#!/bin/bash\necho nothing\n")
    (tmp_path / "dsv4doctor.toml").write_text(
        f'sglang = "{sglang_tree("0.5.14").root}"\n'
        '[[target]]\nname = "production"\nlaunch = "serve.sh"\narch = "sm_120"\n'
        '[[target]]\nname = "b200"\nlaunch = "serve.sh"\narch = "sm_100"\n'
        '[[target]]\nname = "broken"\nlaunch = "empty.sh"\narch = "sm_120"\n'
    )
    return tmp_path


def _suppress(project: Path, rule: str, expires: str) -> None:
    with (project / "dsv4doctor.toml").open("a") as file:
        file.write(f'[[suppress]]\nrule = "{rule}"\nreason = "seen"\nexpires = {expires}\n')


@pytest.mark.wheels
def test_several_targets_and_reports(project: Path, doctor: Doctor) -> None:
    reports = {
        name: project / f"out.{name}" for name in ("sarif", "junit", "github", "markdown", "html")
    }
    asked = [word for name, file in reports.items() for word in ("--report", f"{name}={file}")]
    done = doctor("check", *asked)
    assert done.returncode == 2  # the broken one; without it see below
    assert [line.split(" ")[1] for line in done.stdout.splitlines() if "Target " in line] == [
        *("production", "b200", "broken"),
    ]
    assert "\x1b" not in done.stdout + done.stderr
    said = done.stderr.splitlines()
    assert said[0].startswith("dsv4doctor: broken: empty.sh")
    assert said[1].startswith("dsv4doctor: production: 2 errors")
    sarif = json.loads(reports["sarif"].read_text())
    assert [len(run["results"]) > 0 for run in sarif["runs"]] == [True, True, False]
    suites = list(junitparser.JUnitXml.fromfile(str(reports["junit"])))
    assert [suite.errors for suite in suites] == [0, 0, 1]
    assert "::error title=production%3A DSV102 " in reports["github"].read_text()
    assert reports["markdown"].read_text().count("\n## ") == 2
    page = reports["html"].read_text()
    assert "Draft model: how its routed experts are decided" in page

    done = doctor("check", "--target", "production", "--target", "b200", "--format", "json")
    assert done.returncode == 1
    plain = json.loads(done.stdout)
    assert [report["target"] for report in plain["reports"]] == ["production", "b200"]


@pytest.mark.wheels
def test_baseline_from_first_run_to_the_last_fix(
    project: Path, doctor: Doctor, sglang_tree: Callable[[str], SglangTree]
) -> None:
    one = ("check", "--target", "production", "--format", "json", "--fail-on", "warning")
    known = project / "known.json"
    done = doctor(*one, "--baseline", known)
    assert (done.returncode, "there is no such file" in done.stderr) == (2, True)
    done = doctor(*one, "--baseline", known, "--update-baseline")
    assert (done.returncode, json.loads(done.stdout)["findings"]) == (0, [])
    written = known.read_text()

    # Another release, the same faults at other lines.
    newer = sglang_tree("0.5.15").root
    done = doctor(*one, "--baseline", known, "--sglang", newer)
    plain = json.loads(done.stdout)
    same = {entry["fingerprint"] for entry in json.loads(written)["findings"]}
    assert {found["finding"]["fingerprint"] for found in plain["accepted"]} & same
    accepted = [one["finding"]["rule"] for one in plain["accepted"]]
    assert {"DSV102", "DSV103"} <= set(accepted)
    assert "modelopt_quant.py:1389" not in json.dumps(plain["accepted"])

    # Without a draft its findings are gone, and stay in the file until it is written again.
    text = (project / "serve.sh").read_text()
    cut = text.index("--speculative-algorithm")
    (project / "serve.sh").write_text(text[:cut] + "\n")
    done = doctor(*one, "--baseline", known)
    notes = json.loads(done.stdout)["gate_notes"]
    assert any(note.startswith("DSV102 model.decoder.mlp.experts is gone") for note in notes)
    assert known.read_text() == written
    assert doctor(*one, "--baseline", known, "--update-baseline").returncode == 0
    assert "DSV102" not in known.read_text()


@pytest.mark.wheels
def test_suppressions_and_their_end(project: Path, doctor: Doctor) -> None:
    one = ("check", "--target", "production")
    _suppress(project, "DSV107", "2998-12-31")
    _suppress(project, "DSV102", "2999-12-31")
    done = doctor(*one)
    assert done.returncode == 0
    assert "DSV102  model.decoder.mlp.experts  suppression: seen, until 2999-12-31" in done.stdout
    assert "accepted" in done.stderr
    text = (project / "dsv4doctor.toml").read_text()
    (project / "dsv4doctor.toml").write_text(text.replace("2999-12-31", "2020-01-31"))
    done = doctor(*one)
    assert done.returncode == 1
    assert "the suppression of DSV102 ended on 2020-01-31 (seen)" in " ".join(done.stdout.split())


@pytest.mark.wheels
def test_a_partial_answer_does_not_touch_the_baseline(project: Path, doctor: Doctor) -> None:
    known = project / "known.json"
    known.write_text(
        '{"schema": "dsv4doctor-baseline/1", "findings": [{"target": "broken", "rule": "DSV101", '
        '"subject": "x", "severity": "error", "fingerprint": "00"}, {"target": "nobody", '
        '"rule": "DSV101", "subject": "x", "severity": "error", "fingerprint": "00"}]}'
    )
    done = doctor("check", "--baseline", known, "--update-baseline")
    assert done.returncode == 2
    targets = {entry["target"] for entry in json.loads(known.read_text())["findings"]}
    assert "broken" in targets
    assert "production" in targets
    assert "nobody" not in targets


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--report", "sarif"), "--report sarif: not FORMAT=FILE"),
        (("--report", "xml=a.xml"), "--report xml=a.xml: not FORMAT=FILE"),
        (("--report", "sarif=no/a.sarif"), "--report no/a.sarif: no folder"),
        (("--report", "sarif=a", "--report", "junit=a"), "a is written twice"),
        (("--update-baseline",), "--update-baseline: no --baseline"),
        (("--baseline", "none.json"), "--baseline none.json: there is no such file"),
        (("--config", "none.toml"), "none.toml: cannot be read"),
        (("--target", "x"), "--target x: no such target"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], said: str, doctor: Doctor) -> None:
    done = doctor("check", "--arch", "sm_120", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_mistake_in_the_configuration_is_one_line(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "dsv4doctor.toml").write_text('[[suppress]]\nrule = "DSV102"\n')
    done = doctor("check", "model")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"dsv4doctor: {tmp_path}/dsv4doctor.toml: suppress 1: reason: is missing. "
        "Say why the finding is accepted\n"
    )


def test_one_target_that_fails_is_in_the_reports(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "empty.sh").write_text("echo nothing\n")
    reports = (
        "--report",
        "junit=out.xml",
        "--report",
        "sarif=out.sarif",
        "--report",
        "json=o.json",
    )
    done = doctor("check", "--arch", "sm_120", "--launch", "empty.sh", *reports)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    (suite,) = junitparser.JUnitXml.fromfile(str(tmp_path / "out.xml"))
    assert (suite.tests, suite.errors) == (1, 1)
    (run,) = json.loads((tmp_path / "out.sarif").read_text())["runs"]
    assert run["invocations"][0]["exitCode"] == 2
    (error,) = json.loads((tmp_path / "o.json").read_text())["errors"]
    assert error["message"].startswith("empty.sh")


def test_a_folder_that_is_gone(doctor: Doctor, tmp_path: Path) -> None:
    code = (
        "import os, sys; os.makedirs('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
        "from dsv4doctor.cli import run; sys.exit(run(['check', '/nothing', '--arch', 'sm_120']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 2
    assert "/nothing" in done.stderr
    assert done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------ completion


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("dsv4doctor ch", ["check"]),
        ("dsv4doctor check --form", ["--format"]),
        ("dsv4doctor check --format s", ["sarif"]),
        ("dsv4doctor check --arch sm_12", ["sm_120", "sm_121"]),
    ],
)
def test_bash_completion(words: str, expected: list[str], doctor: Doctor) -> None:
    """What bash's own COMPREPLY holds after our script's function has run."""
    source = doctor(_DSV4DOCTOR_COMPLETE="bash_source")
    assert source.returncode == 0
    line = words.split()
    script = (
        f"{source.stdout}\nCOMP_WORDS=({words}); COMP_CWORD={len(line) - 1}\n"
        '_dsv4doctor_completion dsv4doctor\nprintf "%s\\n" "${COMPREPLY[@]}"'
    )
    folder = str(Path(sys.executable).parent)
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        check=True,
    )
    assert done.stdout.split() == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_of_other_shells(shell: str, doctor: Doctor) -> None:
    source = doctor(_DSV4DOCTOR_COMPLETE=f"{shell}_source")
    assert source.returncode == 0
    assert f"{shell}_complete" in source.stdout
