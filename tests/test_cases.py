"""Publicly reported faults of DeepSeek-V4 on sm_12x, and launches close to them that are fine.

Dispatch is traced in real SGLang trees with full-depth checkpoints; facts about machines are made
up.  Each case says which rules answer it, and which must not.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tracing import EAGLE, request, traced

from dsv4doctor.audit import judged, run_rules
from dsv4doctor.errors import UsageError
from dsv4doctor.facts.callsite import call_texts
from dsv4doctor.facts.checkpoint import read_checkpoint
from dsv4doctor.facts.features import read_features
from dsv4doctor.facts.snapshot import take
from dsv4doctor.facts.stack import read_stack
from dsv4doctor.models import (
    Facts,
    Finding,
    GpuFacts,
    HostFacts,
    Outcome,
    Severity,
    SglangTree,
    Trace,
)
from dsv4doctor.rules import RULES
from dsv4doctor.rules.samples import flashinfer, gpus, scene
from dsv4doctor.trace.request import TraceRequest
from dsv4doctor.trace.session import trace_launches

HYBRID = "nvidia__DeepSeek-V4-Flash-NVFP4"
HYBRID_DSPARK = "nvidia__DeepSeek-V4-Flash-0731-NVFP4"
STOCK = "deepseek-ai__DeepSeek-V4-Flash"
STOCK_DSPARK = "deepseek-ai__DeepSeek-V4-Flash-0731"
V41 = "deepseek-ai__DeepSeek-V4.1-Flash"
DSPARK = ("--speculative-algorithm", "DSPARK")
CUTLASS = ("--moe-runner-backend", "flashinfer_cutlass")
MLA = "SGLANG_SM120_FLASHMLA_BACKEND"


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    flags: tuple[str, ...]
    expect: tuple[str, ...]
    """Rules that must have a finding."""
    quiet: tuple[str, ...] = ()
    """Rules that must have been checked and have none."""
    environment: tuple[tuple[str, str], ...] = ()


SM120 = {
    "0.5.14": (
        Case(
            "C01 draft",
            HYBRID,
            (*CUTLASS, *EAGLE),
            ("DSV102", "DSV103", "DSV107", "DSV204"),
            ("DSV101",),
        ),
        Case("C02, C24 defaults", HYBRID, (), ("DSV101", "DSV204"), ("DSV102", "DSV107")),
        Case("C24 short context", HYBRID, ("--context-length", "4096"), ("DSV101",), ("DSV204",)),
        Case("C22, C26 defaults", STOCK, (), ("DSV109", "DSV204", "DSV208"), ("DSV101", "DSV202")),
    ),
    "0.5.16": (
        Case("C08, C33 DSpark", STOCK_DSPARK, DSPARK, ("DSV201", "DSV602"), ("DSV202", "DSV403")),
        Case(
            "C15 DSpark experts of the hybrid",
            HYBRID_DSPARK,
            (*CUTLASS, *DSPARK),
            ("DSV108", "DSV107", "DSV201", "DSV602"),
            ("DSV102",),
        ),
        Case(
            "C08 Triton, C33 small graphs",
            STOCK_DSPARK,
            (*DSPARK, "--cuda-graph-max-bs", "8"),
            (),
            ("DSV201", "DSV602", "DSV205"),
            ((MLA, "triton"),),
        ),
        Case(
            "C08 without DSpark",
            STOCK,
            EAGLE,
            (),
            ("DSV201", "DSV202", "DSV204", "DSV208", "DSV403"),
        ),
    ),
    "0.5.20": (
        Case("C21 over 64 tokens", STOCK, EAGLE, ("DSV202",), ("DSV201", "DSV109")),
        Case("C21 Triton", STOCK, EAGLE, (), ("DSV202",), ((MLA, "triton"),)),
        Case("C20 clamp", HYBRID, CUTLASS, ("DSV107", "DSV202"), ("DSV101",)),
        Case(
            "DSpark asked of a NextN draft",
            STOCK,
            DSPARK,
            ("DSV403", "DSV105"),
        ),
    ),
    "0.5.23": (
        Case("C01 draft", HYBRID, (*CUTLASS, *EAGLE), ("DSV102", "DSV103"), ("DSV101", "DSV107")),
        Case("C02 defaults", HYBRID, (), ("DSV101",), ("DSV204", "DSV202")),
        Case("C20 clamp honoured", HYBRID, CUTLASS, (), ("DSV107", "DSV101")),
        Case("C08, C21 fixed", STOCK_DSPARK, DSPARK, (), ("DSV201", "DSV202", "DSV602", "DSV403")),
        Case("C09, C12 V4.1", V41, ("--tp", "2"), ("DSV203", "DSV206"), ("DSV202",)),
        Case(
            "C09, C12 avoided",
            V41,
            ("--tp", "2", "--fp8-gemm-backend", "flashinfer_cutlass"),
            (),
            ("DSV203", "DSV206", "DSV205"),
            ((MLA, "triton"),),
        ),
        Case("C14 attention", STOCK, ("--dsv4-attn-backend", "trtllm"), ("DSV207", "DSV105")),
        Case("C14 its default", STOCK, ("--dsv4-attn-backend", "flashmla"), (), ("DSV207",)),
        Case(
            "--quantization",
            HYBRID,
            (*CUTLASS, "--quantization", "modelopt_fp4"),
            ("DSV301", "DSV108"),
            ("DSV101",),
        ),
        Case("EAGLE asked of a DSpark draft", STOCK_DSPARK, EAGLE, ("DSV403",), ("DSV201",)),
        Case(
            "C10 DeepGEMM forced, and a variable overwritten",
            STOCK,
            (),
            ("DSV404", "DSV401"),
            ("DSV204",),
            (("SGLANG_OPT_DEEPGEMM_HC_PRENORM", "1"), ("SGLANG_OPT_USE_TOPK_V2", "1")),
        ),
        Case("C10 left to SGLang", STOCK, EAGLE, (), ("DSV404", "DSV401", "DSV205", "DSV403")),
    ),
}


def _findings(asked: TraceRequest, trace: Trace) -> dict[str, tuple[Outcome, tuple[Finding, ...]]]:
    root = Path(asked.tree.root)
    texts = call_texts(root, trace.layers)
    stack, _ = read_stack(asked.interpreter, against=asked.tree)
    snapshot = take(
        gpu=GpuFacts(()),
        sglang=asked.tree,
        stack=stack,
        checkpoint=asked.checkpoint,
        launch=asked.launch,
        environment={},
    )
    facts = Facts(
        snapshot,
        asked.arch,
        "--arch",
        judged(trace, texts),
        call_texts=texts,
        features=read_features(root),
    )
    return {result.rule: (result.outcome, result.findings) for result in run_rules(RULES, facts)}


@pytest.mark.wheels
@pytest.mark.parametrize("version", sorted(SM120))
def test_cases_on_sm_120(
    version: str, sglang_tree: Callable[[str], SglangTree], checkpoint: Callable[..., Path]
) -> None:
    """The expected rules find something, and no other rule warns; one import for all cases."""
    cases = SM120[version]
    tree = sglang_tree(version)
    requests = [
        request(tree, checkpoint(case.model), case.flags, environment=dict(case.environment))
        for case in cases
    ]
    wrong = []
    for case, asked, outcome in zip(cases, requests, trace_launches(requests), strict=True):
        results = _findings(asked, traced(outcome))
        assert Outcome.CRASH not in {ended for ended, _ in results.values()}
        missing = [rule for rule in case.expect if results[rule][0] is not Outcome.FINDING]
        loud = [rule for rule in case.quiet if results[rule][0] is not Outcome.PASS]
        others = {
            rule
            for rule, (_, findings) in results.items()
            if any(found.severity is not Severity.INFO for found in findings)
        } - set(case.expect)
        if missing or loud or others:
            wrong.append((case.name, missing, loud, others))
    assert not wrong


@pytest.mark.wheels
def test_options_of_another_engine(
    sglang_tree: Callable[[str], SglangTree], checkpoint: Callable[..., Path]
) -> None:
    """C34: vLLM's option in an SGLang command, and a misspelt one."""
    flags = ("--gpu-memory-utilization", "0.95", "--moe-runer-backend", "marlin")
    (refused,) = trace_launches([request(sglang_tree("0.5.23"), checkpoint(STOCK), flags)])
    assert isinstance(refused, UsageError)
    assert "--gpu-memory-utilization" in refused.message
    assert refused.hint == (
        "--gpu-memory-utilization is vLLM's: SGLang's is --mem-fraction-static; "
        "--moe-runer-backend: did you mean --moe-runner-backend?"
    )


# ------------------------------------------------------------------------------ machines

TWO = gpus(2)
PHB = {gpu.pci_bus_id or "": f"pci0000:{gpu.index}0" for gpu in TWO}
TP2 = {"tp_size": 2}


def _rules(facts: Facts) -> set[str]:
    return {found.rule for result in run_rules(RULES, facts) for found in result.findings}


@pytest.mark.parametrize(
    ("rule", "faulty", "fine"),
    [
        (
            "DSV406",
            scene(host=HostFacts(nvcc="/usr/bin/nvcc", nvcc_version="12.4"), gpus=gpus(1)),
            scene(host=HostFacts(nvcc="/usr/bin/nvcc", nvcc_version="12.9"), gpus=gpus(1)),
        ),
        (
            "DSV502",
            scene(host=HostFacts(pci_roots=PHB), gpus=TWO, resolved=TP2),
            scene(
                host=HostFacts(pci_roots=PHB),
                gpus=TWO,
                resolved=TP2,
                environment={"NCCL_P2P_DISABLE": "1"},
            ),
        ),
        (
            "DSV503",
            scene(
                "sm_121",
                host=HostFacts(
                    "7.0.0-1019-nvidia", cma_total_bytes=1 << 27, cma_free_bytes=1 << 32
                ),
                gpus=gpus(1, "sm_121"),
            ),
            scene(
                "sm_121",
                host=HostFacts("6.17.0-1014", cma_total_bytes=1 << 27, cma_free_bytes=1 << 26),
                gpus=gpus(1, "sm_121"),
            ),
        ),
    ],
    ids=["C23 nvcc", "C28 PHB", "C32 GB10"],
)
def test_machines(rule: str, faulty: Facts, fine: Facts) -> None:
    assert rule in _rules(faulty)
    assert rule not in _rules(fine)


def test_a_machine_that_is_not_the_server_is_not_judged() -> None:
    elsewhere = scene(host=HostFacts(nvcc="/usr/bin/nvcc", nvcc_version="11.8"))
    results = {result.rule: result for result in run_rules(RULES, elsewhere)}
    assert results["DSV406"].outcome is Outcome.SKIP
    assert results["DSV406"].reason == "this machine has no GPU: it is not the server"
    assert not results["DSV406"].required


def test_layouts_of_v41_that_fit_eight_gpus_of_96_gb(checkpoint: Callable[..., Path]) -> None:
    """C34: over eight GPUs it starts, over four the weights and engram tables do not fit."""
    stored = read_checkpoint(checkpoint(V41))
    for ranks, expected in ((8, set()), (4, {"DSV601"})):
        resolved = {"tp_size": ranks, "mem_fraction_static": 0.9}
        facts = scene(model="deepseek_v41", checkpoint=stored, resolved=resolved, gpus=gpus(ranks))
        assert _rules(facts) & {"DSV601"} == expected


def test_fp8_experts_on_a_cold_cache(checkpoint: Callable[..., Path]) -> None:
    """C16: a conversion to FP8, by its Hugging Face id, before and after it was downloaded."""
    stored = read_checkpoint(checkpoint("sgl-project__DeepSeek-V4-Flash-FP8"))
    name = "sgl-project/DeepSeek-V4-Flash-FP8"
    for cached, expected in ((False, {"DSV302"}), (True, set())):
        host = HostFacts(hub_model=name, hub_model_cached=cached)
        facts = scene("sm_100", checkpoint=stored, path=name, host=host, overwritten={})
        assert _rules(facts) == expected


def test_prefill_and_decode() -> None:
    """C30: speculation on one side only, and a pair that agrees."""
    args = {"speculative_algorithm": "DSPARK", "page_size": 256}
    half, other = {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}
    mode = ("--enable-metrics", "--disaggregation-mode", "prefill")
    prefill = scene("sm_100", flags=mode, resolved=args, environment=half)
    for resolved, expected in (
        (args, set()),
        ({**args, "speculative_algorithm": None}, {"DSV701"}),
    ):
        mode = ("--port", "30001", "--enable-metrics", "--disaggregation-mode", "decode")
        decode = scene("sm_100", flags=mode, resolved=resolved, environment=other)
        assert _rules(replace(prefill, peer=decode)) == expected


def test_a_version_of_flashinfer_between_the_known_ones_is_not_judged() -> None:
    facts = scene(packages=flashinfer("0.7.0"))
    results = {result.rule: result for result in run_rules(RULES, facts)}
    assert results["DSV202"].outcome is Outcome.SKIP
