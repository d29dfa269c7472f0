"""Every rule against the examples beside it, and the engine that runs them."""

import ast
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4doctor.audit import run_rules
from dsv4doctor.models import (
    Alternative,
    Facts,
    Kernel,
    Location,
    Outcome,
    Severity,
    StoredFormat,
    Verdict,
)
from dsv4doctor.rules import (
    MODULES,
    RULES,
    communication_needs_nvlink,
    custom_all_reduce_pcie,
    deep_gemm_forced,
    dense_fp8_v41,
    gpus_across_nodes,
    gpus_not_visible,
    hot_path_fails,
    layer_raises,
    memory_headroom,
    moe_draft_sm100_only,
    moe_sixteen_bit,
    pd_pair,
    swiglu_limit_dropped,
)
from dsv4doctor.rules.rule import FACTS, Example, Rule
from dsv4doctor.rules.samples import DRAFT_TRTLLM, MAIN_TRTLLM, facts, flashinfer, scene
from dsv4doctor.rules.topology import machine

ROOT = Path(__file__).parent.parent
_CASES = [(module.RULE, example) for module in MODULES for example in module.EXAMPLES]


@pytest.mark.parametrize(
    ("rule", "example"), _CASES, ids=[f"{rule.id}-{example.title}" for rule, example in _CASES]
)
def test_example(rule: Rule, example: Example) -> None:
    (result,) = run_rules([rule], example.facts)
    assert tuple(finding.subject for finding in result.findings) == example.expect
    assert result.outcome is (Outcome.FINDING if example.expect else Outcome.PASS)
    for finding in result.findings:
        assert finding.rule == rule.id
        assert list(Severity).index(finding.severity) >= list(Severity).index(rule.severity)
        assert finding.message.endswith(".")
        assert finding.consequence.endswith(".")
        assert finding.remedy is not None


@pytest.mark.parametrize("module", MODULES, ids=[module.RULE.id for module in MODULES])
def test_rule_is_complete(module: object) -> None:
    rule, examples = module.RULE, module.EXAMPLES  # type: ignore[attr-defined]
    assert any(example.expect for example in examples)
    assert any(not example.expect for example in examples)
    assert set(rule.reads) <= set(FACTS)
    assert f"## {rule.id}: {rule.title}" in (ROOT / "docs" / "rules.md").read_text("utf-8")


def test_ids_are_unique_and_every_rule_file_is_registered() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    helpers = {"__init__", "common", "rule", "samples", "sm100_only", "topology", "torch_indexer"}
    files = {path.stem for path in (ROOT / "rules").glob("*.py")} - helpers
    assert files == {module.__name__.rpartition(".")[2] for module in MODULES}


def test_draft_finding_tells_the_whole_story() -> None:
    both = ("--moe-runner-backend", "triton", "--speculative-moe-runner-backend", "triton")
    tried = (
        Alternative("--moe-runner-backend marlin", ("--moe-runner-backend", "marlin"), None),
        Alternative("--moe-runner-backend flashinfer_cutlass", ("x",), "drops swiglu_limit"),
    )
    sample = replace(facts("sm_120", [DRAFT_TRTLLM], flags=both), alternatives=tried)
    results = {result.rule: result for result in run_rules(RULES, sample)}
    (finding,) = results["DSV102"].findings
    assert finding.severity is Severity.ERROR
    assert "Mxfp4FlashinferTrtllmMoEMethod" in finding.message
    assert "SM100-only" in finding.message
    assert "modelopt_quant.py:1389" in finding.message
    assert "dies in trtllm_fp4_block_scale" in finding.consequence
    assert any(
        "--moe-runner-backend triton and --speculative-moe-runner-backend triton were not "
        "consulted" in line
        for line in finding.evidence
    )
    assert finding.remedy is not None
    assert "runs: --moe-runner-backend marlin." in finding.remedy.text
    assert "flashinfer_cutlass (drops swiglu_limit)" in finding.remedy.text
    assert finding.remedy.commands == (
        "python -m sglang.launch_server --model-path model --moe-runner-backend marlin",
        f"dsv4doctor fix --only FIX101 model --arch sm_120 --sglang 0.5.14 -- {' '.join(both)}",
    )
    (ignored,) = results["DSV103"].findings
    assert ignored.severity is Severity.WARNING


def test_an_ignored_flag_on_a_layer_that_runs_is_only_information() -> None:
    flags = ("--moe-runner-backend", "triton")
    sample = facts("sm_100", [DRAFT_TRTLLM], flags=flags)
    assert sample.trace is not None
    assert sample.trace.layers[0].verdict is Verdict.RUNS
    findings = [found for result in run_rules(RULES, sample) for found in result.findings]
    assert [(found.rule, found.severity) for found in findings] == [("DSV103", Severity.INFO)]


def test_a_missing_fact_skips_with_its_reason_and_is_no_pass() -> None:
    sample = facts("sm_120", [*MAIN_TRTLLM])
    sample = replace(sample, trace=None, trace_failure="the worker was killed")
    results = {result.rule: result for result in run_rules(RULES, sample)}
    assert results["DSV101"].outcome is Outcome.SKIP
    assert results["DSV101"].reason == "the worker was killed"
    assert results["DSV104"].outcome is Outcome.PASS  # reads the checkpoint only


def test_a_rule_that_crashes_leaves_the_others_alone() -> None:
    def check(facts: Facts) -> itertools.chain[object]:
        raise KeyError("absent")

    broken = replace(RULES[0], id="DSV999", check=check)
    results = run_rules([broken, *RULES], facts("sm_120", [*MAIN_TRTLLM]))
    assert results[0].outcome is Outcome.CRASH
    assert results[0].reason == "KeyError: 'absent'"
    assert [result.outcome for result in results[1:3]] == [Outcome.FINDING, Outcome.PASS]


def test_deep_gemm_is_kept_out_by_what_the_release_takes() -> None:
    """A default that nobody set cannot be left unset."""
    (own,) = deep_gemm_forced.RULE.check(deep_gemm_forced.EXAMPLES[2].facts)
    assert own.remedy is not None
    assert own.remedy.text.startswith("Export SGLANG_OPT_FP8_WO_A_GEMM=0, unless ")
    (asked,) = deep_gemm_forced.RULE.check(deep_gemm_forced.EXAMPLES[0].facts)
    assert asked.remedy is not None
    assert asked.remedy.text.startswith("Leave SGLANG_OPT_DEEPGEMM_HC_PRENORM unset on sm_12x")


def test_a_hot_path_that_fails_is_told_with_its_way_out() -> None:
    (finding,) = hot_path_fails.RULE.check(hot_path_fails.EXAMPLES[0].facts)
    assert finding.message == (
        "The main model's sparse MLA prefill reaches flash_mla_sparse_fwd, which does not run on "
        "sm_120, called at sglang/srt/layers/attention/deepseek_v4_backend.py:1560."
    )
    assert "2 layers: compress ratio 0; 256 tokens" in finding.evidence
    assert "2 layers: compress ratio 4; 256 tokens" in finding.evidence
    assert finding.remedy is not None
    assert "Export SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=0." in finding.remedy.text
    assert finding.remedy.commands == (
        "env SGLANG_OPT_FLASHMLA_SPARSE_PREFILL=0 python -m sglang.launch_server "
        "--model-path model",
    )


def test_which_gpus_a_uuid_means_is_not_guessed() -> None:
    """The first GPUs share a node; the launch's may be any."""
    uuids = {"CUDA_VISIBLE_DEVICES": "GPU-5fd4f087,GPU-4ea1aa9b"}
    nodes, two = (0, 0, 1, 1), {"tp_size": 2}
    some = machine(4, nodes=nodes, resolved=two, environment=uuids)
    (result,) = run_rules([gpus_across_nodes.RULE], some)
    assert result.outcome is Outcome.SKIP
    whole = machine(4, nodes=nodes, environment=uuids)
    (result,) = run_rules([gpus_across_nodes.RULE], whole)
    assert result.outcome is Outcome.FINDING


def test_dense_layers_of_v41_say_where_they_go() -> None:
    sample = dense_fp8_v41.EXAMPLES[0].facts
    assert sample.trace is not None
    assert hot_path_fails.EXAMPLES[0].facts.trace is not None
    [path, *_] = hot_path_fails.EXAMPLES[0].facts.trace.paths
    dense = replace(path, name="dense-fp8", kernel=Kernel("triton:some_matmul", None))
    traced = replace(sample, trace=replace(sample.trace, paths=(path, dense)))
    (finding,) = dense_fp8_v41.RULE.check(traced)
    assert [text for text in finding.evidence if "reach" in text] == [
        "they reach triton:some_matmul"
    ]


def test_a_way_out_of_the_experts_does_not_hide_another_path_that_fails() -> None:
    sample = facts("sm_120", [*MAIN_TRTLLM])
    assert sample.trace is not None
    assert hot_path_fails.EXAMPLES[0].facts.trace is not None
    paths = hot_path_fails.EXAMPLES[0].facts.trace.paths
    way = Alternative("--moe-runner-backend marlin", (), None)
    both = replace(sample, trace=replace(sample.trace, paths=paths), alternatives=(way,))
    alone = replace(sample, alternatives=(way,))
    for found, is_said in ((both, True), (alone, False)):
        results = {result.rule: result for result in run_rules(RULES, found)}
        (finding,) = results["DSV101"].findings
        assert finding.remedy is not None
        assert ("DSV209 has to be mended as well" in finding.remedy.text) is is_said


def test_hot_paths_that_were_not_traced_are_no_pass() -> None:
    (result,) = run_rules([hot_path_fails.RULE], facts("sm_120", [*MAIN_TRTLLM]))
    assert (result.outcome, result.required) == (Outcome.SKIP, False)


def test_the_one_gpu_of_a_machine_tells_nothing_of_the_links_of_four() -> None:
    (result,) = run_rules(
        [custom_all_reduce_pcie.RULE], machine(1, "sm_90", resolved={"tp_size": 4})
    )
    assert result.outcome is Outcome.SKIP
    assert result.reason == "the launch takes more GPUs than this machine has"


def test_weights_of_layers_that_are_not_loaded_are_not_counted() -> None:
    """Four layers of a checkpoint that is too large as a whole: a server on an H200 started."""
    example = memory_headroom.EXAMPLES[0].facts
    launch = example.snapshot.launch
    assert launch is not None
    flags = (*launch.flags, "--json-model-override-args", '{"num_hidden_layers": 4}')
    snapshot = replace(example.snapshot, launch=replace(launch, flags=flags))
    (result,) = run_rules([memory_headroom.RULE], replace(example, snapshot=snapshot))
    assert result.outcome is Outcome.SKIP
    assert "--json-model-override-args" in str(result.reason)


@pytest.mark.parametrize("visible", ["\u00b2", "all", "0,gpu1"])
def test_gpus_that_nobody_can_count_are_not_counted(visible: str) -> None:
    example = gpus_not_visible.EXAMPLES[0].facts
    launch = example.snapshot.launch
    assert launch is not None
    said = replace(launch, environment={"CUDA_VISIBLE_DEVICES": visible})
    snapshot = replace(example.snapshot, launch=said)
    (result,) = run_rules([gpus_not_visible.RULE], replace(example, snapshot=snapshot))
    assert result.outcome is Outcome.SKIP


def test_gpus_of_a_launch_that_was_not_resolved_are_not_counted() -> None:
    example = gpus_not_visible.EXAMPLES[0].facts
    assert example.trace is not None
    (result,) = run_rules(
        [gpus_not_visible.RULE], replace(example, trace=replace(example.trace, resolved_args={}))
    )
    assert result.outcome is Outcome.SKIP


def test_rules_ask_for_arguments_that_a_trace_reports() -> None:
    """What no trace resolves is only there in an example, and the rule never holds."""
    read = {
        name
        for path in (ROOT / "rules").glob("*.py")
        for name in re.findall(
            r"(?:resolved_args|\bargs|arguments)\.get\(\s*\"(\w+)\"", path.read_text("utf-8")
        )
    }
    read |= {*communication_needs_nvlink._OPTIONS, *pd_pair._RESOLVED}
    assert len(read) > 20
    assert read <= set(serving_fields())


def serving_fields() -> tuple[str, ...]:
    """FIELDS of the trace's worker, whose modules import torch."""
    text = (ROOT / "dsv4doctor" / "trace" / "worker" / "serving.py").read_text("utf-8")
    (value,) = (
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FIELDS"
    )
    fields: tuple[str, ...] = ast.literal_eval(value)
    return fields


def test_the_line_that_activates_without_the_clamp_is_the_evidence() -> None:
    """The grouped GEMM has no activation: its call site proves nothing."""
    [example] = [
        one for one in swiglu_limit_dropped.EXAMPLES if one.title.startswith("the grouped")
    ]
    [finding] = swiglu_limit_dropped.check(example.facts)
    assert finding.severity is Severity.ERROR
    assert [place.line for place in finding.locations] == [475]
    said = " ".join(finding.evidence)
    assert "cutlass_moe.py:475: silu_and_mul(c1, intermediate)" in said
    assert "nvfp4.py" not in said
    unread = replace(example.facts, features=None)
    assert "nvfp4.py:189, none is applied" in " ".join(
        next(iter(swiglu_limit_dropped.check(unread))).evidence
    )


def test_marlin_on_nvfp4_says_what_no_header_shows() -> None:
    where = Location("sglang/srt/layers/quantization/modelopt_quant.py", 2022)
    [example] = [
        one for one in swiglu_limit_dropped.EXAMPLES if one.title.startswith("the grouped")
    ]
    assert example.facts.features is not None
    known = replace(example.facts, features=replace(example.facts.features, marlin_one_scale=where))
    [finding] = swiglu_limit_dropped.check(known)
    assert finding.remedy is not None
    assert "modelopt_quant.py:2022" in finding.remedy.text
    [stock] = [one for one in moe_sixteen_bit.EXAMPLES if one.title == "Marlin on sm_120"]
    assert stock.facts.trace is not None

    def said(stored: StoredFormat) -> str:
        layers = [replace(one, stored_format=stored) for one in stock.facts.trace.layers]
        trace = replace(stock.facts.trace, layers=tuple(layers))
        changed = replace(stock.facts, trace=trace, features=known.features)
        return next(iter(moe_sixteen_bit.check(changed))).consequence

    assert "w1_weight_scale_2 must match w3_weight_scale_2" in said(StoredFormat.NVFP4)
    assert "w1_weight_scale_2" not in said(StoredFormat.MXFP4)


def test_an_algorithm_that_the_release_lacks_is_told_with_those_it_has() -> None:
    [example] = [one for one in layer_raises.EXAMPLES if "algorithm" in one.title]
    [finding] = layer_raises.check(example.facts)
    assert finding.remedy is not None
    assert "has no DSPARK: its algorithms are EAGLE and NGRAM" in finding.remedy.text
    assert "Another release" in finding.remedy.text


@pytest.mark.parametrize(
    ("arch", "version", "line"),
    [
        ("sm_120", "0.6.12", "Error occurred when running GEMM!"),
        ("sm_121", "0.6.17", "cubin manifest contains no kernels runnable on sm121"),
        ("sm_90", "0.6.12", "No supported CUDA architectures found for major versions [10, 12]"),
    ],
)
def test_a_draft_on_an_sm100_kernel_is_told_with_what_its_log_will_say(
    arch: str, version: str, line: str
) -> None:
    """The table's line, for the FlashInfer that serves."""
    draft = scene(arch, layers=[DRAFT_TRTLLM], packages=flashinfer(version))
    [finding] = moe_draft_sm100_only.RULE.check(draft)
    assert f"(FlashInfer {version}: " in finding.consequence
    assert line in finding.consequence
    [unknown] = moe_draft_sm100_only.RULE.check(scene(arch, layers=[DRAFT_TRTLLM]))
    assert "FlashInfer" not in unknown.consequence
