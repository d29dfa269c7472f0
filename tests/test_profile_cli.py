"""`dsv4doctor profile` as a user meets it, its documented JSON, its page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from trace_writer import cpu_event, document, kernel, mark, write

from dsv4doctor.cli import run

_ROOT = Path(__file__).parent.parent
_MOE = "void sglang::device::marlin_moe::Marlin<1125899906909960l, 256>(int4 const*)"
_MUL = "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float> >"
_SGEMM = "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1::Params>"
_NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_US = 1000


def _decode(moe: int, glue: int, steps: int = 3, device: int = 0, extra: str = "") -> list[str]:
    """Decode steps of MoE, glue and an all-reduce half hidden behind a copy; times in us."""
    events: list[str] = []
    for number in range(steps):
        start = number * 1000 * _US
        events += [
            cpu_event(f"step[DECODE bs={8}]", start, 900 * _US, "user_annotation"),
            cpu_event("aten::mm", start, 5 * _US),
            mark("step[DECODE bs=8]", start, (moe + glue + 150) * _US, number + 1, device),
            kernel(_MOE, start, moe * _US, device),
            kernel(_MUL, start + moe * _US, glue * _US, device),
            kernel(_NCCL, start + (moe + glue) * _US, 100 * _US, device, stream=20),
            kernel("Memcpy DtoD (Device -> Device)", start + (moe + glue) * _US, 50 * _US, device),
            kernel("my_own_kernel", start + (moe + glue + 100) * _US, 50 * _US, device),
        ]
        if extra:
            events.append(kernel(extra, start + 800 * _US, 40 * _US, device))
    return events


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write(tmp_path / "id-TP-0.trace.json.gz", _decode(300, 100))


def _json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    run(["profile", "--format", "json", *arguments])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    schema = json.loads((_ROOT / "docs" / "profile.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    return document


def test_console(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["profile", trace]) == 0
    out, err = capsys.readouterr()
    for line in (
        r"MoE +35\.3% +0\.900 ms  █+",
        r"glue +17\.6% +0\.450 ms  █+",
        r"communication +5\.9% +0\.150 ms  █+",
        r"unknown +5\.9% +0\.150 ms  █+",
        r"idle +35\.3% +0\.900 ms  █+",
        r"DECODE bs=8 +3 +0\.550  MoE 54\.5%, glue 27\.3%",
        r" +0\.900 +3  moe +moe-marlin +sglang::device::marlin_moe",
    ):
        assert re.search(line, out), line
    assert "\x1b" not in out
    assert err.startswith("dsv4doctor: 1 GPU, 15 GPU events, 2.550 ms, busy 64.7%; ")


def test_a_terminal_without_block_characters(
    trace: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4doctor.profile_cli._can_draw", lambda: False)
    assert run(["profile", trace]) == 0
    assert capsys.readouterr().out.isascii()


def test_json_says_what_the_console_says(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    profile = _json([trace], capsys)["profile"]
    assert profile["span_ns"] == 2_550_000
    assert {name: one["ns"] for name, one in profile["categories"].items() if one["ns"]} == {
        "moe": 900_000,
        "glue": 450_000,
        "unknown": 150_000,
        "communication": 150_000,
        "idle": 900_000,
    }
    assert [(step["name"], step["count"]) for step in profile["steps"]] == [("DECODE bs=8", 3)]
    assert profile["gpus"][0]["outside_steps_ns"] == 900_000
    assert profile["kernels"][0]["rule"] == "moe-marlin"


def test_glue_and_fp32_are_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.json", _decode(100, 300, extra=_SGEMM))
    found = _json([path], capsys)["findings"]
    assert [(one["rule"], one["severity"]) for one in found] == [
        ("PRF101", "warning"),
        ("PRF102", "warning"),
    ]
    assert found[0]["message"].startswith("59% of the busy GPU time is glue")
    assert "MulFunctor" in found[0]["evidence"][0]
    assert "simt_sgemm" in found[1]["evidence"][0]
    assert run(["profile", path]) == 0
    assert run(["profile", path, "--fail-on", "warning"]) == 1
    assert run(["profile", path, "--fail-on", "never"]) == 0


def test_little_fp32_is_said_and_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [*_decode(300, 100), kernel(_SGEMM, 900 * _US, 5 * _US)]
    found = _json([write(tmp_path / "a.json", events)], capsys)["findings"]
    assert [(one["rule"], one["severity"]) for one in found] == [("PRF102", "info")]


def _report(folder: Path, *symbols: str, paths: dict[str, str] | None = None) -> str:
    layers = [{"name": "x", "kernel": {"symbol": symbol}} for symbol in symbols]
    others = [
        {"name": name, "kernel": {"symbol": symbol}} for name, symbol in (paths or {}).items()
    ]
    path = folder / "report.json"
    report = {"schema": "dsv4doctor-report/1", "layers": [*layers, {}], "paths": [*others, {}]}
    path.write_text(json.dumps(report))
    return str(path)


def test_another_kernel_than_predicted(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = _report(tmp_path, "flashinfer.fused_moe.cutlass_fused_moe")
    (finding,) = _json([trace, "--expect", expected], capsys)["findings"]
    assert finding["rule"] == "PRF103"
    assert "ran on marlin" in finding["message"]
    assert "predicts cutlass (cutlass did not run)" in finding["message"]


def test_the_kernel_that_was_predicted(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = _report(tmp_path, "jit:moe_wna16_marlin.moe_wna16_marlin_gemm")
    document = _json([trace, "--expect", expected], capsys)
    assert (document["findings"], document["profile"]["notes"]) == ([], [])


def test_a_prediction_that_cannot_be_compared(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = _json([trace, "--expect", _report(tmp_path, "new.moe")], capsys)
    assert document["findings"] == []
    assert "not compared" in document["profile"]["notes"][0]
    assert "new.moe" in document["profile"]["notes"][0]


def test_another_path_than_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Triton kernels go by their function's name; a phase that was not profiled is not missed."""
    events = [*_decode(300, 20), kernel("_tiled_sparse_decode_kernel", 700 * _US, 10 * _US)]
    expected = _report(
        tmp_path,
        paths={
            "dense-fp8": "triton:sglang.srt.layers.fp8_kernel._w8a8_block_fp8_matmul",
            "sparse-mla-decode": "triton:sglang.x.flash_mla_sm120._tiled_sparse_decode_kernel",
            "sparse-mla-prefill": "triton:sglang.x.flash_mla_sm120._tiled_prefill_kernel",
            "mhc-post": "tilelang:sglang.kernels.ops.layernorm.mhc.mhc_post_tilelang",
        },
    )
    trace = write(tmp_path / "a.json", events)
    (finding,) = _json([trace, "--expect", expected], capsys)["findings"]
    assert (finding["rule"], finding["subject"]) == ("PRF103", "dense-fp8")
    assert "_w8a8_block_fp8_matmul" in finding["message"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not JSON"),
        ("[]", "not a report"),
        ('{"schema": "dsv4doctor-reports/1", "reports": []}', "not a report of one launch"),
        ('{"schema": "dsv4doctor-report/1", "layers": []}', "names no kernel"),
    ],
)
def test_no_prediction(
    trace: str, tmp_path: Path, content: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)
    assert run(["profile", trace, "--expect", str(path)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_what_moved(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = write(tmp_path / "after.json", _decode(300, 20, steps=5, extra=_SGEMM))
    assert run(["profile", trace, after]) == 0
    out = capsys.readouterr().out
    assert re.search(r"ms per step +before +after +change", out)
    assert re.search(r"glue +0\.150 +0\.070 +-0\.080 +-53%", out)
    assert re.search(r"MoE +0\.300 +0\.300 +\+0\.000 +\+0%", out)
    assert re.search(r"gemm +0\.000 +0\.040 +\+0\.040 +new  cutlass::Kernel2", out)
    moved = _json([trace, after], capsys)["comparison"]
    assert moved["unit"] == "step"
    assert moved["kernels"][0]["name"] == _MUL
    assert moved["kernels"][0]["before_ns"] == 100_000


def test_ranks_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        write(tmp_path / f"17-TP-{rank}.trace.json.gz", _decode(300 + 100 * rank, 100), rank=rank)
    (tmp_path / "notes.txt").write_text("x")
    profile = _json([str(tmp_path)], capsys)["profile"]
    assert [gpu["name"] for gpu in profile["gpus"]] == ["TP-0, GPU 0", "TP-1, GPU 0"]
    assert [gpu["model"] for gpu in profile["gpus"]] == ["NVIDIA H200"] * 2
    assert profile["categories"]["moe"]["ns"] == 3 * 700_000
    assert profile["span_ns"] == sum(gpu["span_ns"] for gpu in profile["gpus"])


def test_ranks_that_sglang_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its merger puts a label in front of every process, and every rank's GPU may be number 0."""
    events = [
        kernel(_MOE, 1000 * rank, 500, pid=f"[TP{rank:02d}] 0", stream=7) for rank in (0, 1, 10)
    ]
    profile = _json([write(tmp_path / "merged.json", events)], capsys)["profile"]
    assert [gpu["name"] for gpu in profile["gpus"]] == [f"TP{n}, GPU 0" for n in ("00", "01", "10")]
    assert [gpu["span_ns"] for gpu in profile["gpus"]] == [500] * 3


def test_what_sglang_leaves_in_a_folder_beside_the_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its arguments are no trace, a merged file has every rank again, a stage is no GPU."""
    for name in ("1-TP-0.trace.json", "1-TP-1.trace.json", "merged-1.trace.json"):
        write(tmp_path / name, _decode(300, 100))
    (tmp_path / "server_args.json").write_text('{"tp_size": 2}')
    profile = _json([str(tmp_path)], capsys)["profile"]
    assert [gpu["name"].partition(",")[0] for gpu in profile["gpus"]] == ["TP-0", "TP-1"]
    assert profile["notes"] == []
    write(tmp_path / "1-TP-1-DECODE.trace.json", _decode(300, 100))
    (note,) = _json([str(tmp_path)], capsys)["profile"]["notes"]
    assert note.startswith("TP-1 has 2 traces")


def test_several_gpus_of_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = _decode(300, 100) + _decode(200, 100, device=1)
    path = write(tmp_path / "a.json", events)
    profile = _json([path], capsys)["profile"]
    assert [gpu["name"] for gpu in profile["gpus"]] == ["GPU 0", "GPU 1"]
    assert profile["steps"][0]["count"] == 6
    assert run(["profile", path]) == 0
    assert re.search(r"GPU 1 +2\.450 ms █", capsys.readouterr().out)


@pytest.mark.parametrize("arguments", [[], ["before"]])
def test_the_page_asks_for_nothing(
    trace: str, tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    nasty = kernel("<script>alert(1)</script>", 2000, 10)
    other = write(tmp_path / "o.json", [*_decode(100, 300, extra=_SGEMM), nasty])
    page = tmp_path / "page.html"
    traces = [trace, other] if arguments else [other]
    assert run(["profile", *traces, "--format", "html", "-o", str(page)]) == 0
    html = page.read_text()
    assert "<script" not in html
    assert not re.search(r"(\bsrc=|href=|url\(|@import)", html)
    assert "PRF101" in html
    assert ("What moved" in html) == bool(arguments)


def test_a_real_trace_of_the_profiler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What torch itself writes: without a GPU there is nothing to add up, and that is said; with
    GPU events put into that very file there is."""
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    path = tmp_path / "cpu.trace.json"
    import torch

    once = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU],
        with_stack=True,
        schedule=once,
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(2):
            with record_function("step[DECODE bs=1]"):
                torch.ones(8) + 1
            profiler.step()
    assert run(["profile", str(path)]) == 2
    err = capsys.readouterr().err
    assert "no GPU events" in err
    assert err.count("\n") == 1
    text = path.read_text()
    end = text.rindex("]")
    path.write_text(text[:end] + ",\n" + ",\n".join(_decode(300, 100)) + text[end:])
    assert _json([str(path)], capsys)["profile"]["span_ns"] == 2_550_000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"hello", "not a torch-profiler trace"),
        (document([cpu_event("aten::mm", 0, 5)]).encode(), "no GPU events"),
        (b"\x1f\x8b\x08\x00", "cut off or damaged"),
    ],
)
def test_no_profile(
    tmp_path: Path, content: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert run(["profile", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert str(path) in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["gone.json", "empty"])
def test_no_file(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert run(["profile", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_events_without_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = '{"ph": "X", "cat": "kernel", "name": "x", "pid": 0, "tid": 7, "ts": "soon", "dur": 1}'
    profile = _json([write(tmp_path / "a.json", [bad, *_decode(300, 100)])], capsys)["profile"]
    assert profile["notes"] == ["1 GPU events without a time were left out"]


@pytest.mark.parametrize("dur", ["-5", "NaN", "1e999", "null"])
def test_a_length_that_is_none(
    tmp_path: Path, dur: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = f'{{"ph": "X", "cat": "kernel", "name": "x", "pid": 0, "ts": 1, "dur": {dur}}}'
    profile = _json([write(tmp_path / "a.json", [bad, *_decode(300, 100)])], capsys)["profile"]
    assert profile["notes"] == ["1 GPU events without a time were left out"]


@pytest.mark.parametrize("device", ['"²"', '"' + "9" * 5000 + '"', "[1]"])
def test_a_device_that_is_no_number(
    tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = kernel("fused_moe_kernel", 100, 5).replace('"device": 0', f'"device": {device}')
    path = write(tmp_path / "a.json", [odd, *_decode(300, 100)])
    assert run(["profile", path, "--fail-on", "never"]) == 0
    assert "internal" not in capsys.readouterr().err


def test_kernels_of_no_length_against_a_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / "a.json", [kernel("fused_moe_kernel", 100, 0)] * 2)
    report = tmp_path / "report.json"
    symbol = "flashinfer.fused_moe.trtllm_fp4_block_scale_moe"
    layers = [{"kernel": {"symbol": symbol}}]
    report.write_text(json.dumps({"schema": "dsv4doctor-report/1", "layers": layers}))
    assert run(["profile", trace, "--expect", str(report), "--fail-on", "never"]) == 0
    assert "PRF103" in capsys.readouterr().out
