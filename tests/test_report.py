"""The console reports, compared whole with the files in tests/reports.

After a wanted change: DSV4DOCTOR_WRITE_REPORTS=1 pytest tests/test_report.py, and read the diff.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4doctor.audit import run_rules
from dsv4doctor.models import (
    Alternative,
    ArgChange,
    Branch,
    Facts,
    Kernel,
    Launch,
    Location,
    Package,
    Report,
    Stack,
    Step,
)
from dsv4doctor.report import console
from dsv4doctor.rules import RULES
from dsv4doctor.rules.samples import DRAFT_TRTLLM, MAIN_CUTLASS, MAIN_TRTLLM, facts

GOLDEN = Path(__file__).parent / "reports"
_FLAGS = (
    "--tp",
    "4",
    "--moe-runner-backend",
    "triton",
    "--speculative-moe-runner-backend",
    "triton",
)
_FILE = "sglang/srt/layers/quantization/modelopt_quant.py"
_FUNCTION = "HybridFp8NvFp4Config.get_quant_method"


def _story() -> Facts:
    """The hybrid checkpoint on sm_120 with EAGLE and both flags set."""
    sample = facts("sm_120", [*MAIN_TRTLLM, DRAFT_TRTLLM], flags=_FLAGS)
    assert sample.trace is not None
    values = {"self.is_fp4_experts": "True"}
    branch = Branch(Location(_FILE, 1383, _FUNCTION), "self.is_fp4_experts", values, True)
    step = Step("draft", _FUNCTION, _FILE, (branch,), "Mxfp4FlashinferTrtllmMoEMethod")
    change = ArgChange(
        "page_size",
        None,
        "256",
        Location("sglang/srt/arg_groups/deepseek_v4_hook.py", 17, None, "page_size = 256"),
    )
    stack = Stack("python", "3.11.9", (Package("flashinfer-python", "0.6.11", "==0.6.12", False),))
    launch = Launch("serve.sh", 12, {}, "/models/DeepSeek-V4-Flash-NVFP4", _FLAGS)
    return replace(
        sample,
        trace=replace(
            sample.trace,
            steps=(step,),
            arg_changes=(change,),
            leniencies=("dill is not installed; SGLang imports it, stood in for",),
        ),
        snapshot=replace(sample.snapshot, stack=stack, launch=launch),
        alternatives=(
            Alternative(
                "--moe-runner-backend marlin without speculative decoding",
                ("--tp", "4", "--moe-runner-backend", "marlin"),
                None,
            ),
            Alternative(
                "--moe-runner-backend flashinfer_cutlass without speculative decoding",
                ("--tp", "4", "--moe-runner-backend", "flashinfer_cutlass"),
                "drops swiglu_limit",
            ),
        ),
        notes=("GPUs of several kinds: GPU 0 is used; see --arch",),
    )


def _report(sample: Facts) -> Report:
    return Report("0.1.0", sample, run_rules(RULES, sample), {"trace": 4.5, "total": 5.25})


def _unknown() -> Report:
    layers = [replace(layer, kernel=Kernel("brand.new_moe", None)) for layer in MAIN_CUTLASS]
    return _report(facts("sm_120", layers, unresolved=("draft: KeyError: 'x'",)))


_CASES: dict[str, Callable[[], str]] = {
    "check_80": lambda: console.render_check(
        _report(_story()), 80, False, verbose=False, why=False
    ),
    "check_120_verbose_why": lambda: console.render_check(
        _report(_story()), 120, False, verbose=True, why=True
    ),
    "trace_80": lambda: console.render_trace(
        _report(_story()), 80, False, verbose=False, why=False
    ),
    "trace_200_why": lambda: console.render_trace(
        _report(_story()), 200, False, verbose=False, why=True
    ),
    "check_80_clean": lambda: console.render_check(
        _report(facts("sm_120", [*MAIN_CUTLASS])), 80, False, verbose=False, why=False
    ),
    "check_80_unknown": lambda: console.render_check(
        _unknown(), 80, False, verbose=False, why=False
    ),
}


@pytest.mark.parametrize("name", _CASES)
def test_console(name: str) -> None:
    text = _CASES[name]()
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("DSV4DOCTOR_WRITE_REPORTS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("render", [console.render_trace, console.render_check])
def test_what_our_kernel_waits_for_is_on_every_console(
    render: Callable[..., str], width: int
) -> None:
    symbol = Kernel("triton:dsv4doctor.kernels.grouped_gemm._product_kernel", None)
    ours = replace(DRAFT_TRTLLM, quant_method="Dsv4DoctorMxfp4MoEMethod", kernel=symbol)
    sample = facts("sm_120", [*MAIN_CUTLASS, ours])
    assert sample.trace is not None
    text = render(_report(sample), width, False, verbose=False, why=False)
    layers = text.partition("Findings")[0]
    assert "`dsv4doctor kernels verify --only moe_mxfp4` on the serving machine" in " ".join(
        layers.split()
    )


@pytest.mark.parametrize("width", [40, 80, 120, 160, 200])
def test_no_line_is_wider_than_asked(width: int) -> None:
    text = console.render_check(_report(_story()), width, False, verbose=True, why=True)
    findings = _report(_story()).findings
    commands = {one for found in findings if found.remedy for one in found.remedy.commands}
    assert commands
    others = [line for line in text.splitlines() if line.strip() not in commands]
    assert max(map(len, others)) <= width
    # A command is one line however narrow the terminal: it has to be whole when it is copied.
    assert commands <= {line.strip() for line in text.splitlines()}


def test_colour_changes_nothing_but_escapes() -> None:
    plain = console.render_check(_report(_story()), 100, False, verbose=True, why=True)
    colored = console.render_check(_report(_story()), 100, True, verbose=True, why=True)
    assert "\x1b[" not in plain
    assert "\x1b[1;31merror" in colored


def test_text_that_looks_like_markup_is_printed_as_it_is() -> None:
    sample = _story()
    assert sample.trace is not None
    step = replace(sample.trace.steps[0], function="[red]f[/red] :smile:")
    sample = replace(sample, trace=replace(sample.trace, steps=(step,)))
    text = console.render_trace(_report(sample), 120, True, verbose=False, why=True)
    assert "[red]f[/red] :smile:" in text


def test_summary() -> None:
    assert console.summary(_report(_story())) == "2 errors, 1 warning"
    assert console.summary(_report(facts("sm_120", [*MAIN_CUTLASS]))) == "no findings"


@pytest.mark.parametrize("width", [80, 120, 160, 180, 200, 260])
def test_no_identifier_of_a_layer_is_broken(width: int) -> None:
    text = console.render_trace(_report(_story()), width, False, verbose=False, why=False)
    assert {"Mxfp4FlashinferTrtllmMoEMethod", "flashinfer_trtllm_routed"} <= set(text.split())
    assert "flags read" in text
