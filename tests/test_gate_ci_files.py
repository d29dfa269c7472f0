"""action.yml, the pre-commit hook and docs/ci.md: parsed, and their commands run."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import junitparser
import pytest
import yaml

from dsv4doctor.models import SglangTree

_ROOT = Path(__file__).parent.parent
_ACTION: dict[str, Any] = yaml.safe_load((_ROOT / "action.yml").read_text(encoding="utf-8"))
_BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```$", (_ROOT / "docs" / "ci.md").read_text(encoding="utf-8"), re.M | re.S
)


@pytest.fixture(scope="module")
def project(
    checkpoint: Callable[..., Path],
    sglang_tree: Callable[[str], SglangTree],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder as docs/ci.md describes it: script, snapshot, configuration, baseline."""
    folder = tmp_path_factory.mktemp("project")
    model = checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4", experts=2)
    (folder / "serve.sh").write_text(
        f"#!/bin/bash\nexec python -m sglang.launch_server --model-path {model} --tp 4\n"
    )
    first = next(body for kind, body in _BLOCKS if kind == "toml")
    text = first.replace('"0.5.23"', f'"{sglang_tree("0.5.14").root}"')
    (folder / "dsv4doctor.toml").write_text(text)
    for command in ("dsv4doctor snapshot -o box.json --launch serve.sh",):
        assert command in (body.strip() for kind, body in _BLOCKS if kind == "sh")
        assert _bash(command, folder).returncode == 0
    return folder


def _environment(folder: Path, **variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DSV4DOCTOR_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cache = str(folder.parent / "cache")
    return {**kept, "PATH": path, "CI": "true", "DSV4DOCTOR_CACHE": cache, **variables}


def _bash(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        capture_output=True,
        text=True,
        cwd=folder,
        env=_environment(folder, **variables),
        timeout=300,
    )


def _strings(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    for child in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        yield from _strings(child)


# ------------------------------------------------------------------------------ the action


def test_action_uses_only_what_it_declares() -> None:
    text = (_ROOT / "action.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(_ACTION["inputs"])
    assert _ACTION["runs"]["using"] == "composite"
    for step in _ACTION["runs"]["steps"]:
        assert "${{" not in step["run"]  # an input inside a script would be code
        assert subprocess.run(["bash", "-n", "-c", step["run"]], check=False).returncode == 0


def _action(
    project: Path, folder: Path, arguments: str
) -> tuple[subprocess.CompletedProcess[str], str, str]:
    """The action's check step as the runner starts it: (process, outputs, summary)."""
    bin_ = folder / "dsv4doctor" / "bin"
    bin_.mkdir(parents=True)
    doctor = bin_ / "dsv4doctor"
    doctor.write_text(f'#!/bin/sh\nexec {sys.executable} -m dsv4doctor "$@"\n')
    doctor.chmod(0o755)
    output, summary = folder / "output", folder / "summary"
    step = next(step for step in _ACTION["runs"]["steps"] if step["id"] == "check")
    done = _bash(
        step["run"],
        project,
        ARGUMENTS=arguments,
        SARIF=_ACTION["inputs"]["sarif"]["default"],
        RUNNER_TEMP=str(folder),
        GITHUB_OUTPUT=str(output),
        GITHUB_STEP_SUMMARY=str(summary),
    )
    return done, output.read_text(), summary.read_text() if summary.exists() else ""


@pytest.mark.wheels
def test_action_annotates_summarises_and_fails(project: Path, tmp_path: Path) -> None:
    baseline = tmp_path / "with space.json"
    baseline.write_text('{"schema": "dsv4doctor-baseline/1", "findings": []}')
    done, outputs, summary = _action(project, tmp_path, f"--baseline\n{baseline}\n\n")
    assert done.returncode == 1
    assert "::error title=DSV101 model.layers.0-42.mlp.experts,file=serve.sh,line=2::" in (
        done.stdout
    )
    assert "\x1b" not in done.stdout
    assert summary.startswith("## ❌ dsv4doctor: production")
    values = dict(line.split("=", 1) for line in outputs.splitlines())
    assert values["exit-code"] == "1"
    sarif = json.loads(Path(values["sarif"]).read_text())
    assert sarif["runs"][0]["results"]


@pytest.mark.wheels
def test_action_with_wrong_usage_says_so(project: Path, tmp_path: Path) -> None:
    done, outputs, summary = _action(project, tmp_path, "--nonsense")
    assert (done.returncode, outputs, summary) == (2, "exit-code=2\n", "")
    assert "--nonsense" in done.stderr


# ------------------------------------------------------------------------------ the examples


@pytest.mark.parametrize("kind", ["yaml"])
def test_every_yaml_example_parses(kind: str) -> None:
    plains = [yaml.safe_load(body) for name, body in _BLOCKS if name == kind]
    assert len(plains) == 4
    github, gitlab, kubernetes, pre_commit = plains
    steps = github["jobs"]["dsv4doctor"]["steps"]
    used = next(step for step in steps if step.get("id") == "dsv4doctor")
    assert set(used["with"]) <= set(_ACTION["inputs"])
    said = " ".join(_strings(github))
    assert set(re.findall(r"steps\.dsv4doctor\.outputs\.([\w-]+)", said)) <= set(_ACTION["outputs"])
    assert gitlab["dsv4doctor"]["artifacts"]["reports"]["junit"] == "dsv4doctor.xml"
    (hook,) = yaml.safe_load((_ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert pre_commit["repos"][0]["hooks"] == [{"id": hook["id"]}]
    spec = kubernetes["spec"]
    mounted = {
        mount["name"]
        for container in (*spec["initContainers"], *spec["containers"])
        for mount in container["volumeMounts"]
    }
    assert mounted == {volume["name"] for volume in spec["volumes"]}


def _commands() -> list[str]:
    """Every `dsv4doctor check` of the examples and the hook."""
    text = "\n".join(body for _, body in _BLOCKS)
    found = re.findall(r"(?:^|[ '/])(dsv4doctor check[^'\n]*)", text, re.M)
    (hook,) = yaml.safe_load((_ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    return [*found, hook["entry"]]


@pytest.mark.wheels
def test_every_command_of_the_examples_runs(project: Path, tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    commands = _commands()
    assert len(commands) == 6
    codes = []
    # The one that writes the baseline goes last: with it nothing is new.
    for command in sorted(commands, key=lambda text: "--update-baseline" in text):
        local = command.replace("/launch/serve.sh", "serve.sh --snapshot box.json --arch sm_120")
        baseline = project / "dsv4doctor-baseline.json"
        if "--update-baseline" not in command:
            baseline.write_text('{"schema": "dsv4doctor-baseline/1", "findings": []}')
        done = _bash(local, project, GITHUB_STEP_SUMMARY=str(summary))
        codes.append(done.returncode)
        assert "Traceback" not in done.stderr
    assert codes == [1, 1, 1, 1, 1, 0]
    assert "DSV101" in summary.read_text()
    assert len(list(junitparser.JUnitXml.fromfile(str(project / "dsv4doctor.xml")))) == 1
    assert (project / "dsv4doctor.html").read_text().startswith("<!DOCTYPE html>")


def test_hook_runs_when_a_launch_changes() -> None:
    (hook,) = yaml.safe_load((_ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert hook["pass_filenames"] is False
    pattern = re.compile(hook["files"])
    for name in ("deploy/serve.sh", "dsv4doctor.toml", "pyproject.toml"):
        assert pattern.search(name)
    assert not pattern.search("README.md")
