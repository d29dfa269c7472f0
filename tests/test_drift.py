"""A prediction against a recording."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsv4doctor.cli import run
from dsv4doctor.drift import Standing, compare, read_report, same_kernel
from dsv4doctor.models import (
    ARCHS,
    Facts,
    GpuFacts,
    HotPath,
    Kernel,
    Report,
    Role,
    SglangTree,
    Snapshot,
    Trace,
    Verdict,
)
from dsv4doctor.report import json as report_json
from dsv4doctor.rules.samples import DRAFT_TRTLLM, MAIN_TRTLLM


@pytest.fixture
def report() -> dict[str, Any]:
    tree = SglangTree("/t", "0.5.23", "folder")
    paths = tuple(
        HotPath(
            *(name, Role.MAIN, layers, "triton", Kernel(f"triton:sglang.{name}", None), None),
            *((), Verdict.RUNS, ""),
        )
        for name, layers in (("sparse-mla-decode", ("a", "b")), ("dense-fp8", ("c", "d")))
    )
    layers = tuple(replace(one, verdict=Verdict.RUNS) for one in (*MAIN_TRTLLM, DRAFT_TRTLLM))
    trace = Trace(
        *(tree, ARCHS["sm_120"], {"tp_size": 4}, (), {}, layers, (), (), (), {}), paths=paths
    )
    facts = Facts(
        Snapshot("0", "", GpuFacts(()), tree, None, None, None, {}), trace.arch, "", trace
    )
    plain: dict[str, Any] = json.loads(report_json.render(Report("0", facts, ())))
    return plain


def test_the_same(report: dict[str, Any]) -> None:
    comparison = compare(report, report)
    assert comparison.exit_code == 0
    assert {one.standing for one in comparison.differences} == {Standing.SAME}


def test_a_path_of_no_layer_is_found_in_both(report: dict[str, Any]) -> None:
    """The all-reduce: read off the arguments, and often not known."""
    reduce = {**report["paths"][0], "name": "all-reduce", "layers": [], "kernel": None}
    unknown = {"choice": None, "verdict": "unknown", "reason": "no topology"}
    report["paths"].append({**reduce, **unknown})
    [found] = compare(report, report).of(Standing.UNKNOWN)
    assert (found.subject, found.what, found.reason) == ("main all-reduce", "choice", "no topology")
    assert compare(report, report).exit_code == 3
    other = copy.deepcopy(report)
    other["paths"][-1]["choice"] = "nccl"
    [found] = compare(report, other).of(Standing.UNKNOWN)
    assert (found.subject, found.what) == ("main all-reduce", "choice")
    report["paths"][-1]["choice"] = "custom"
    assert compare(report, other).exit_code == 1


def test_a_cache_that_neither_side_knows_is_not_the_same(report: dict[str, Any]) -> None:
    cache = {**report["paths"][0], "name": "kv-cache", "kernel": None, "choice": "fp8_e4m3"}
    report["paths"] = [{**cache, "detail": "584 bytes"}]
    assert compare(report, report).exit_code == 0
    for part, what in (("choice", "dtype"), ("detail", "layout")):
        nothing = {"choice": None, "detail": ""}[part]
        short = {**report, "paths": [{**report["paths"][0], part: nothing}]}
        [found] = compare(short, short).of(Standing.UNKNOWN)
        assert found.what == what


def test_what_ran_and_was_to_fail_is_drift_and_a_failure_never_the_same(
    report: dict[str, Any],
) -> None:
    predicted = copy.deepcopy(report)
    predicted["layers"][0]["verdict"] = "fails"
    assert compare(predicted, report).exit_code == 1
    assert compare(report, report).exit_code == 0
    predicted["layers"][0]["verdict"] = "unknown"
    assert compare(predicted, report).exit_code == 0  # the kernel is the one predicted
    failed = copy.deepcopy(report)
    failed["layers"][0]["verdict"] = "fails"
    assert compare(predicted, failed).exit_code == 3


@pytest.mark.parametrize(
    ("change", "what", "code"),
    [
        (lambda r: r["layers"][-1].update(quant_method="X"), "quant method", 1),
        (lambda r: r["layers"][-1].update(runner_backend="X"), "runner", 1),
        (lambda r: r["layers"][-1].update(flags_consulted=["x"]), "flags read", 1),
        (lambda r: r["layers"][-1]["kernel"].update(symbol="triton:x"), "kernel", 1),
        (lambda r: r["layers"][-1].update(kernel=None), "kernel", 3),
        (lambda r: r["layers"].pop(), "layer", 3),
        (lambda r: r["layers"][0].update(verdict="fails", reason="CUDA error"), "outcome", 1),
        (lambda r: r["paths"][0].update(verdict="fails", reason="CUDA error"), "outcome", 1),
        (lambda r: r["layers"].append({**r["layers"][0], "name": "new"}), "layer", 1),
        (lambda r: r["paths"][0]["kernel"].update(symbol="triton:x"), "kernel", 1),
        (lambda r: r["paths"][0].update(layers=["z"]), "path", 3),
        (lambda r: r["resolved_args"].update(tp_size=8), "tp_size", 1),
        (lambda r: r.update(arch="sm_100"), "architecture", 1),
    ],
)
def test_differences(report: dict[str, Any], change: Any, what: str, code: int) -> None:
    recorded = copy.deepcopy(report)
    change(recorded)
    comparison = compare(report, recorded)
    assert comparison.exit_code == code
    different = [one for one in comparison.differences if one.standing is not Standing.SAME]
    assert [one.what for one in different] == [what]


def test_a_path_may_have_one_of_several_kernels(report: dict[str, Any]) -> None:
    """By the number of tokens; and a recording that saw only one class of layers is enough."""
    predicted = copy.deepcopy(report)
    other = copy.deepcopy(report["paths"][0])
    other["kernel"]["symbol"] = "triton:sglang.long"
    predicted["paths"].append(other)
    recorded = copy.deepcopy(report)
    recorded["paths"] = [{**other, "layers": ["b"]}]
    comparison = compare(predicted, recorded)
    assert comparison.exit_code == 0
    assert comparison.not_recorded == ("main dense-fp8",)


@pytest.mark.parametrize(
    ("predicted", "recorded", "same"),
    [
        (
            "flashinfer.fused_moe.cutlass_fused_moe",
            "flashinfer.fused_moe.core.cutlass_fused_moe",
            True,
        ),
        ("flashinfer.fused_moe.cutlass_fused_moe", "flashinfer.fused_moe.core.other", False),
        ("deep_gemm.fp8_gemm_nt", "deep_gemm_cpp.fp8_gemm_nt", True),
        ("jit:moe_wna16_marlin.bf16_t.gemm", "jit:moe_wna16_marlin.bf16_t", True),
        ("jit:moe_wna16_marlin.bf16_t.gemm", "jit:moe_wna16", False),
        ("triton:sglang.a.kernel", "triton:sglang.b.kernel", False),
        ("torch.ops.sglang.a", "sglang.a", False),
    ],
)
def test_names_of_a_kernel(predicted: str, recorded: str, same: bool) -> None:
    assert same_kernel(predicted, recorded) is same


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"schema": "dsv4doctor-report/1"}', '{"schema": "other/1"}', "\x00"]
)
def test_what_is_no_report(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert run(["diff", str(path), str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_trace_that_stopped_short_is_a_prediction_of_what_it_has(
    report: dict[str, Any], tmp_path: Path
) -> None:
    """Of the model that it did not get to build nothing is known, and nothing has drifted."""
    short = copy.deepcopy(report)
    short["layers"] = [layer for layer in short["layers"] if layer["role"] == "main"]
    short["errors"] = [{"kind": "undetermined", "phase": "draft", "message": "KeyError: 'x'"}]
    path = tmp_path / "predicted.json"
    path.write_text(json.dumps(short))
    comparison = compare(read_report(path), report)
    assert comparison.exit_code == 3
    [unknown] = comparison.of(Standing.UNKNOWN)
    assert unknown.subject.startswith("draft ")
    assert unknown.reason == "the trace stopped short: KeyError: 'x'"
    del short["errors"]
    assert compare(short, report).exit_code == 1


def test_an_error_report_is_no_prediction(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(report_json.render_failure("undetermined", "killed", None))
    with pytest.raises(Exception, match="killed"):
        read_report(path)


@pytest.mark.parametrize("format_", ["console", "json", "markdown"])
def test_formats(
    tmp_path: Path, report: dict[str, Any], format_: str, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted, recorded = tmp_path / "p.json", tmp_path / "r.json"
    predicted.write_text(json.dumps(report))
    report["layers"][-1]["quant_method"] = "Other|Method"
    report["layers"][0]["kernel"] = None
    recorded.write_text(json.dumps(report))
    assert run(["diff", str(predicted), str(recorded), "--format", format_]) == 1
    said = capsys.readouterr()
    assert DRAFT_TRTLLM.name in said.out
    assert "1 drift, 1 unknown" in said.err
    if format_ == "json":
        plain = json.loads(said.out)
        assert (plain["schema"], plain["exit_code"]) == ("dsv4doctor-diff/1", 1)
        schema = json.loads((Path(__file__).parent.parent / "docs/diff.schema.json").read_text())
        jsonschema.Draft202012Validator(schema).validate(plain)
    if format_ == "markdown":
        assert "Other\\|Method" in said.out


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert run(["diff", str(tmp_path / "no.json"), str(tmp_path / "no.json")]) == 2


def test_a_recording_in_the_place_of_the_prediction(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted, recorded = tmp_path / "p.json", tmp_path / "a recording.json"
    predicted.write_text(json.dumps(report))
    recorded.write_text(json.dumps({**report, "notes": ["recorded in the server"]}))
    assert run(["diff", str(predicted), str(recorded)]) == 0
    capsys.readouterr()
    assert run(["diff", str(recorded), str(predicted)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{recorded}: a recording, where the prediction should be" in err
    assert f"dsv4doctor diff '{recorded}' {predicted}" not in err
    assert f"dsv4doctor diff {predicted} '{recorded}'" in err
    assert run(["diff", str(recorded), str(recorded)]) == 0  # two servers
