"""`dsv4doctor diagnose` as a user meets it, and its documented JSON."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from log_writer import ARGUMENTS_0514, healthy

from dsv4doctor.asked import Options
from dsv4doctor.cli import run
from dsv4doctor.diagnose.signature import signatures
from dsv4doctor.errors import UsageError
from dsv4doctor.models import SglangTree
from dsv4doctor.target import Target

_ROOT = Path(__file__).parent.parent
_CRASH = """[2026-11-29 14:10:00 TP0 EP0] Shuffling FP4 expert weights for TRT-LLM MxFP4 kernel (layer: model.decoder.mlp.experts)...
[2026-11-29 14:10:09 TP3 EP3] Scheduler hit an exception: Traceback (most recent call last):
  File "/opt/sglang/srt/models/deepseek_v4_nextn.py", line 90, in forward
    hidden = self.decoder(hidden)
RuntimeError: Error occurred when running GEMM! (numBatches: 64, GemmMNK: 8 2048 4096, Kernel: bmm_E4m3_E2m1E4m3_tma_dynBatch_sm100f)
"""  # noqa: E501


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text(healthy("0.5.14") + _CRASH)
    return path


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((_ROOT / "docs" / "diagnose.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(loaded)
    return loaded


def test_console(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", str(log)]) == 1
    out, err = capsys.readouterr()
    text = " ".join(out.split())
    for part in (
        "SGLang 0.5.14; sm_120 (from the log)",
        "First sign of trouble: line",
        "Most likely root: Draft routed experts prepared for the SM100-only TRT-LLM kernel [LOG1",
        "draft model, layer model.decoder.mlp.experts",
        "cause 1 (high)",
        "--moe-runner-backend triton",
        "--sglang 0.5.14",
    ):
        assert part in text
    assert "\x1b" not in out
    assert err.startswith("dsv4doctor: LOG101")


def test_nothing_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fine.log"
    path.write_text(healthy("0.5.23"))
    assert run(["diagnose", str(path)]) == 0
    assert "Nothing wrong found" in capsys.readouterr().out


def test_unexplained_error_shows_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.log"
    path.write_text("hello\nKeyError: 'zebra'\n")
    assert run(["diagnose", str(path)]) == 3
    assert "line 2: KeyError: 'zebra'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["/nowhere/server.log"],
        ["."],
        [],
        ["--sglang", "not a version", "LOG"],
        ["--output", "/nowhere/x", "LOG"],
        ["--format", "xml", "LOG"],
    ],
    ids=["missing", "folder", "none", "sglang", "output", "format"],
)
def test_bad_usage(arguments: list[str], log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", *(str(log) if word == "LOG" else word for word in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("dsv4doctor: ")


@pytest.mark.parametrize("style", ["console", "json"])
@pytest.mark.parametrize("kind", ["no launch", "no model"])
def test_trace_that_is_not_possible_keeps_the_diagnosis(
    style: str, kind: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "no launch":
        log.write_text("KeyError: 'zebra'\n")
    code = run(["diagnose", str(log), "--trace", "--arch", "sm_120", "--format", style])
    out, err = capsys.readouterr()
    assert code == 2
    assert "zebra" in out or "LOG101" in out
    assert style == "console" or json.loads(out)["check"] is None
    assert err.splitlines()[-1].startswith("dsv4doctor: ")
    assert "dsv4doctor check" in err or "/models/DeepSeek-V4-Flash-NVFP4" in err


def test_standard_input_in_a_process(log: Path) -> None:
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "dsv4doctor", "diagnose", "-"],
        input=log.read_bytes(),
        capture_output=True,
        env=environment,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.startswith(b"standard input: ")
    assert max(map(len, done.stdout.decode().splitlines())) <= 100


def test_json_of_every_example(
    schema: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all.log"
    examples = [example.text for entry in signatures() for example in entry.examples]
    path.write_text(ARGUMENTS_0514 + "\n" + "".join(examples))
    assert run(["diagnose", str(path), "--format", "json"]) == 1
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)
    assert document["outcome"] == "cause"
    assert len(document["matches"]) > 25
    assert document["launch"]["model"] == "/models/DeepSeek-V4-Flash-NVFP4"
    assert document["check"] is None


@pytest.mark.parametrize("text", ["hello\n", "KeyError: 'zebra'\n"])
def test_json_without_a_cause(
    text: str, schema: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Piped:
        buffer = io.BytesIO(text.encode())

    monkeypatch.setattr(sys, "stdin", Piped())
    output = tmp_path / "out.json"
    code = run(["diagnose", "-", "--format", "json", "-o", str(output)])
    document = json.loads(output.read_text())
    jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)
    assert (code, document["outcome"]) in [(0, "clean"), (3, "unexplained")]
    assert (document["first"] is None) is (code == 0)


@pytest.mark.wheels
def test_trace_goes_on_to_the_very_launch(
    tmp_path: Path,
    checkpoint: Callable[..., Path],
    sglang_tree: Callable[[str], SglangTree],
    schema: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4", experts=2)
    path = tmp_path / "server.log"
    path.write_text(healthy("0.5.14") + _CRASH)
    tree = sglang_tree("0.5.14").root
    code = run(
        [
            "diagnose",
            str(path),
            "--sglang",
            tree,
            "--trace",
            "--model",
            str(model),
            "--format",
            "json",
        ]
    )
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)
    assert code == 1
    draft = [layer for layer in document["check"]["layers"] if layer["role"] == "draft"]
    assert draft[0]["quant_method"] == "Mxfp4FlashinferTrtllmMoEMethod"
    assert "DSV102" in [finding["rule"] for finding in document["check"]["findings"]]
    evidence = document["matches"][0]["evidence"]
    assert evidence[0]["file"].endswith("mxfp4_flashinfer_trtllm_moe.py")
    assert "Shuffling FP4 expert weights" in evidence[0]["source"]


@pytest.mark.parametrize(("draft", "is_kept"), [("/m/V4", False), ("/m/draft", True)])
def test_a_draft_in_the_model_s_own_folder_moves_with_model(
    draft: str, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang fills --speculative-draft-model-path in itself, with the server's path."""
    asked: list[Options] = []

    def resolve(options: Options, *_: object) -> Target:
        asked.append(options)
        raise UsageError("enough", "")

    monkeypatch.setattr("dsv4doctor.target.resolve", resolve)
    log = tmp_path / "server.log"
    log.write_text(
        "server_args=ServerArgs(model_path='/m/V4', speculative_algorithm='EAGLE', "
        f"speculative_draft_model_path='{draft}')\n"
    )
    assert run(["diagnose", str(log), "--trace", "--model", str(tmp_path)]) == 2
    [options] = asked
    kept = ("--speculative-draft-model-path", draft) if is_kept else ()
    assert options.flags == ("--speculative-algorithm", "EAGLE", *kept)


def test_a_command_is_one_line_on_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    log = tmp_path / "server.log"
    log.write_text("RuntimeError: No supported CUDA architectures found for major versions [12].\n")
    assert run(["diagnose", str(log)]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "export CUDA_HOME=/usr/local/cuda-13.0 PATH=/usr/local/cuda-13.0/bin:$PATH" in lines
