"""Several launches in one run: a prefill and a decode server know each other."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from reporting import report

from dsv4doctor import checking
from dsv4doctor.asked import Options
from dsv4doctor.audit import Settings
from dsv4doctor.cli import check
from dsv4doctor.errors import UsageError
from dsv4doctor.launch import read_script
from dsv4doctor.models import Report, Run
from dsv4doctor.rules.samples import scene

_SERVER = "exec numactl --cpunodebind={node} python -m sglang.launch_server --model-path /m --tp 2"
_RESOLVED = {"page_size": 256, "kv_cache_dtype": "fp8_e4m3", "tp_size": 2}


def _script(folder: Path, mode: str, gpus: str, port: int, more: str = "") -> Path:
    path = folder / f"{mode}.sh"
    server = _SERVER.format(node=int(mode == "decode"))
    flags = f"--disaggregation-mode {mode} --port {port} {more}"
    path.write_text(f"export CUDA_VISIBLE_DEVICES={gpus}\n{server} {flags}\n")
    return path


def _checked(
    said: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, resolved: Mapping[str, Any]
) -> dict[str, Report]:
    """The reports by script, where the launches are read as always and traced to `resolved`."""

    def examined(options: Options, source: str | None, settings: Settings) -> Report:
        assert options.launch is not None
        launch = read_script(options.launch, {})
        sample = scene(resolved={**_RESOLVED, **resolved.get(options.launch.stem, {})})
        return report(replace(sample, snapshot=replace(sample.snapshot, launch=launch)))

    monkeypatch.setattr(checking, "_examined", examined)
    planned = checking.plan(said, (), None)
    outcomes = checking.examine(planned, Settings(), {}, lambda message, hint: None)
    return {Path(one.facts.snapshot.launch.source).stem: one for one in Run(outcomes).reports}


def _subjects(shown: Report, rule: str) -> list[str]:
    return [finding.subject for finding in shown.findings if finding.rule == rule]


@pytest.mark.parametrize("order", [("prefill", "decode"), ("decode", "prefill")])
def test_a_pair_that_disagrees(
    order: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = "--disaggregation-transfer-backend"
    _script(tmp_path, "prefill", "0,1", 30000, f"{backend} nixl")
    _script(tmp_path, "decode", "1,2", 30000, f"{backend} mooncake")
    launches = tuple(str(tmp_path / f"{name}.sh") for name in order)
    reports = _checked({"launch": launches}, monkeypatch, {"decode": {"page_size": 64}})
    assert tuple(reports) == order
    prefill, decode = reports["prefill"], reports["decode"]
    assert set(_subjects(prefill, "DSV701")) == {"page_size", backend}
    assert "CUDA_VISIBLE_DEVICES" in _subjects(prefill, "DSV702")
    assert len(_subjects(prefill, "DSV702")) == 2  # and the port
    assert _subjects(decode, "DSV701") == _subjects(decode, "DSV702") == []
    assert prefill.facts.peer is not None
    assert decode.facts.peer is not None


def test_a_pair_that_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = (
        str(_script(tmp_path, "prefill", "0,1", 30000)),
        str(_script(tmp_path, "decode", "2,3", 30001)),
    )
    reports = _checked({"launch": launches}, monkeypatch, {})
    for shown in reports.values():
        assert _subjects(shown, "DSV701") == _subjects(shown, "DSV702") == []


def test_two_launches_that_are_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.sh").write_text("sglang serve /m --tp 4\n")
    launches = tuple(str(tmp_path / f"{name}.sh") for name in ("a", "b"))
    reports = _checked({"launch": launches}, monkeypatch, {})
    assert [shown.facts.peer for shown in reports.values()] == [None, None]


def test_a_router_among_the_scripts_is_no_target(tmp_path: Path) -> None:
    router = tmp_path / "router.sh"
    router.write_text(
        "python -m sglang_router.launch_router --pd-disaggregation "
        "--prefill http://127.0.0.1:30000 8998 --decode http://127.0.0.1:30001\n"
    )
    launches = (
        str(_script(tmp_path, "prefill", "0,1", 30000)),
        str(router),
        str(_script(tmp_path, "decode", "2,3", 30001)),
    )
    planned = checking.plan({"launch": launches}, (), None)
    assert [asked.policy.target for asked in planned.targets] == [launches[0], launches[2]]
    assert planned.router is not None
    assert planned.router.source == str(router)


def test_a_script_twice_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="given twice"):
        checking.plan({"launch": ("a.sh", "a.sh")}, (), None)


def test_a_variable_names_one_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4DOCTOR_LAUNCH", "serve.sh:12")
    assert check.make_context("check", []).params["launch"] == ("serve.sh:12",)
    with pytest.raises(click.ClickException):
        check.make_context("check", ["--launch"])
