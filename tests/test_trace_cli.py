"""`dsv4doctor trace` from its command line to its exit code."""

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from dsv4doctor.cli import run
from dsv4doctor.models import SglangTree

SCHEMA = Path(__file__).parent.parent / "docs" / "report.schema.json"


@pytest.mark.wheels
def test_trace(
    sglang_tree: Callable[[str], SglangTree],
    checkpoint: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = checkpoint("deepseek-ai__DeepSeek-V4-Flash")
    tree = sglang_tree("0.5.15.post1").root
    command = ["trace", str(model), "--arch", "sm_120", "--sglang", tree]
    flags = ["--", "--tp", "4"]
    # FlashMLA's sparse prefill is not there on sm_120, nor decode in the FlashInfer that it pins.
    assert run([*command, "--format", "json", *flags]) == 1
    report = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(report)
    assert len(report["layers"]) == 43
    failing = {path["name"] for path in report["paths"] if path["verdict"] == "fails"}
    assert failing == {"sparse-mla-prefill", "sparse-mla-decode"}

    # Only some, from the cache: nothing of the others is shown or counts.
    assert run([*command, "--path", "kv-cache", "--path", "indexer", *flags]) == 0
    said = capsys.readouterr()
    assert "trace from the cache" in said.err
    assert "dsv4doctor: other paths: 2 fallback, 1 unknown" in said.err
    assert "584 bytes a token" in said.out
    assert "main indexer-decode  torch  fallback" in said.out
    assert "sparse-mla" not in said.out
    assert "Routed experts" not in said.out

    assert run([*command, "--path", "all-reduce", "--strict", *flags]) == 3
    assert "topology" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--path", "nothing"], ["--main", "--draft"]])
def test_wrong_usage(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "model", *wrong]) == 2
    assert wrong[-1].lstrip("-") in capsys.readouterr().err
