"""SGLang's own dispatch, release by release, on real wheels and full-depth checkpoints."""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tracing import BOTH_TRITON, EAGLE, SM_120, request, traced

from dsv4doctor.models import ARCHS, Arch, Layer, Role, SglangTree, StoredFormat, Trace
from dsv4doctor.trace import cache
from dsv4doctor.trace.session import trace_launch, trace_launches

pytestmark = pytest.mark.wheels

RELEASES = (
    *("0.5.12.post1", "0.5.13.post1", "0.5.14", "0.5.15.post1", "0.5.16", "0.5.17"),
    *("0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
)
HYBRID = "nvidia__DeepSeek-V4-Flash-NVFP4"
STOCK = "deepseek-ai__DeepSeek-V4-Flash"
DSPARK = ("--speculative-algorithm", "DSPARK")

Tree = Callable[[str], SglangTree]
Checkpoint = Callable[..., Path]


def dispatch_rows() -> list[dict]:  # type: ignore[type-arg]
    path = Path(__file__).parent / "data" / "dispatch.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("version", sorted({row["version"] for row in dispatch_rows()}))
def test_known_dispatch(version: str, sglang_tree: Tree, checkpoint: Checkpoint) -> None:
    """Method, runner, kernel and failure of known launches; see tests/data/README.md."""
    models = {
        "nvfp4": checkpoint(HYBRID),
        "mxfp4": checkpoint(STOCK),
        "fp8": checkpoint("sgl-project__DeepSeek-V4-Flash-FP8", variant="model-type-deepseek-v4"),
    }
    rows = [row for row in dispatch_rows() if row["version"] == version]
    outcomes = trace_launches(
        [
            request(
                sglang_tree(version),
                models[row["ckpt"]],
                tuple(row["flags"]),
                Arch(*map(int, row["cc"].split("."))),
            )
            for row in rows
        ],
        use_cache=False,
    )
    for row, outcome in zip(rows, outcomes, strict=True):
        trace = traced(outcome)
        known = {name: trace.resolved_args.get(name) for name in row["args"]}
        assert known == row["args"]
        for role in Role:
            assert_layers(trace, role, row)


def assert_layers(trace: Trace, role: Role, row: dict) -> None:  # type: ignore[type-arg]
    verdict, expected = row[f"{role.value}_verdict"], row[role.value]
    if expected is None:
        assert not trace.of(role)
        assert trace.errors, row
        return
    count = 43 if role is Role.MAIN else 1
    assert len(trace.of(role)) == count
    for layer in trace.of(role):
        found = (layer.quant_method, layer.runner_backend, kernel(layer))
        assert found == (expected["method"], expected["runner"], expected["kernel"]), row
        if verdict.endswith("-raises"):
            assert layer.error is not None
            phase = {"load-raises": "weights", "forward-raises": "forward"}[verdict]
            assert layer.error.phase == f"{role.value} {phase}"
        else:
            assert layer.error is None


def kernel(layer: Layer) -> str | None:
    return layer.kernel.symbol if layer.kernel else None


def test_the_acceptance_story(sglang_tree: Tree, checkpoint: Checkpoint) -> None:
    """0.5.14, both runner flags set to triton: neither is read for the draft."""
    trace = trace_launch(
        request(sglang_tree("0.5.14"), checkpoint(HYBRID), EAGLE + BOTH_TRITON), use_cache=False
    )
    [draft] = trace.of(Role.DRAFT)
    assert draft.name == "model.decoder.mlp.experts"
    assert draft.quant_method == "Mxfp4FlashinferTrtllmMoEMethod"
    assert draft.stored_format is StoredFormat.MXFP4
    assert draft.flags_consulted == ()
    assert draft.decided_at is not None
    assert draft.decided_at.file == "sglang/srt/layers/quantization/modelopt_quant.py"
    assert draft.decided_at.line == 1389
    assert draft.decided_at.source is not None
    assert draft.decided_at.source.startswith("return Mxfp4FlashinferTrtllmMoEMethod(")
    assert kernel(draft) == "flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe"
    main = trace.of(Role.MAIN)
    assert [layer.name for layer in main] == [f"model.layers.{n}.mlp.experts" for n in range(43)]
    assert {layer.stored_format for layer in main} == {StoredFormat.NVFP4}
    assert {layer.flags_consulted for layer in main} == {("moe_runner_backend",)}


@pytest.mark.parametrize("version", RELEASES)
def test_every_release_traces_to_the_end(
    version: str, sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    trace = trace_launch(
        request(sglang_tree(version), checkpoint(HYBRID), with_path=True), use_cache=False
    )
    assert trace.errors == ()
    assert trace.unresolved == ()
    assert len(trace.of(Role.MAIN)) == 43
    assert len(trace.of(Role.DRAFT)) == 1
    for layer in trace.layers:
        assert layer.quant_method
        assert layer.kernel is not None or layer.error is not None, layer
        assert layer.decided_at is not None
        assert layer.decided_at.source is not None
        assert "return" in layer.decided_at.source
    changed = {change.name: change for change in trace.arg_changes}
    assert changed["attention_backend"].after == "dsv4"
    assert changed["attention_backend"].at.line > 0
    phases = [step.phase for step in trace.steps]
    assert set(phases) == {"arguments", "main", "draft"}
    assert phases == sorted(phases, key=["arguments", "main", "draft"].index)


# 0.5.14 to 0.5.23 as in the version table of the public reports: the line that returns the draft's
# method, whatever the GPU, and the line that turns `auto` into the routed TRT-LLM runner.
DRAFT_LINES = {
    "0.5.14": 1389,
    "0.5.15.post1": 1391,
    "0.5.16": 1375,
    "0.5.17": 1423,
    "0.5.18": 1605,
    "0.5.19": 1669,
    "0.5.20": 1698,
    "0.5.21": 1734,
    "0.5.22": 1738,
    "0.5.23": 1762,
}


@pytest.mark.parametrize(("version", "line"), DRAFT_LINES.items())
def test_the_draft_is_decided_on_the_reported_line(
    version: str, line: int, sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    trace = trace_launch(request(sglang_tree(version), checkpoint(HYBRID)), use_cache=False)
    [draft] = trace.of(Role.DRAFT)
    assert draft.decided_at is not None
    assert draft.decided_at.line == line
    assert draft.flags_consulted == ()
    runner = next(change for change in trace.arg_changes if change.name == "moe_runner_backend")
    assert runner.after == "flashinfer_trtllm_routed"
    assert "flashinfer_trtllm_routed" in (runner.at.source or "")


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_the_stock_checkpoint_on_every_gpu(
    arch: Arch, sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    """Fp8Config looks at the GPU: CUTLASS on sm_90 and sm_12x, TRT-LLM on sm_10x."""
    trace = trace_launch(
        request(sglang_tree("0.5.23"), checkpoint(STOCK), EAGLE, arch), use_cache=False
    )
    cutlass = arch.major in (9, 12)
    expected = f"Mxfp4Flashinfer{'Cutlass' if cutlass else 'Trtllm'}MoEMethod"
    assert {layer.quant_method for layer in trace.layers} == {expected}
    [draft] = trace.of(Role.DRAFT)
    assert draft.flags_consulted == ("speculative_moe_runner_backend", "moe_runner_backend")


@pytest.mark.parametrize(
    ("version", "method"),
    [
        ("0.5.16", "ModelOptNvFp4FusedMoEMethod"),
        ("0.5.17", "Mxfp4FlashinferTrtllmMoEMethod"),
        ("0.5.23", "Mxfp4FlashinferTrtllmMoEMethod"),
    ],
)
def test_dspark_stages_of_a_hybrid_checkpoint(
    version: str, method: str, sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    """0.5.16 takes DSpark but does not yet exclude its stages from NVFP4."""
    model = checkpoint("nvidia__DeepSeek-V4-Flash-0731-NVFP4")
    flags = (*DSPARK, "--speculative-moe-runner-backend", "marlin")
    trace = trace_launch(request(sglang_tree(version), model, flags), use_cache=False)
    draft = trace.of(Role.DRAFT)
    assert [layer.name for layer in draft] == [f"stages.{n}.mlp.experts" for n in range(3)]
    assert {layer.quant_method for layer in draft} == {method}
    assert {layer.stored_format for layer in draft} == {StoredFormat.MXFP4}


def test_dspark_drafts_follow_the_main_runner(sglang_tree: Tree, checkpoint: Checkpoint) -> None:
    """DSpark's worker does not switch to --speculative-moe-runner-backend."""
    model = checkpoint("deepseek-ai__DeepSeek-V4-Flash-0731")
    flags = (*DSPARK, "--speculative-moe-runner-backend", "marlin")
    trace = trace_launch(request(sglang_tree("0.5.23"), model, flags), use_cache=False)
    assert len(trace.of(Role.DRAFT)) == 3
    for layer in trace.of(Role.DRAFT):
        assert layer.quant_method == "Mxfp4FlashinferCutlassMoEMethod"
        assert layer.flags_consulted == ("moe_runner_backend",)


def test_a_refusal_by_sglang_is_a_result(sglang_tree: Tree, checkpoint: Checkpoint) -> None:
    trace = trace_launch(
        request(sglang_tree("0.5.15.post1"), checkpoint(STOCK), DSPARK), use_cache=False
    )
    [error] = trace.errors
    assert (error.phase, error.type) == ("arguments", "AssertionError")
    assert "Only EAGLE" in error.message
    assert error.at is not None
    assert error.at.file == "sglang/srt/arg_groups/deepseek_v4_hook.py"
    assert trace.layers == ()


def test_a_layout_that_v41_cannot_have(sglang_tree: Tree, checkpoint: Checkpoint) -> None:
    """2304 intermediate over four GPUs is no multiple of 128: the model class refuses."""
    model = checkpoint("deepseek-ai__DeepSeek-V4.1-Flash")
    trace = trace_launch(request(sglang_tree("0.5.23"), model, ()), use_cache=False)
    [error] = trace.errors
    assert error.phase == "main"
    assert "multiples of 128" in error.message


def test_the_environment_of_the_launch_counts(sglang_tree: Tree, checkpoint: Checkpoint) -> None:
    """SGLANG_DSV4_FP4_EXPERTS=0 sends the hybrid's draft to the FP8 method."""
    trace = trace_launch(
        request(
            sglang_tree("0.5.14"),
            checkpoint(HYBRID),
            environment={"SGLANG_DSV4_FP4_EXPERTS": "0"},
        ),
        use_cache=False,
    )
    [draft] = trace.of(Role.DRAFT)
    assert draft.quant_method == "Fp8MoEMethod"


def test_environment_that_sglang_overwrites(sglang_tree: Tree, checkpoint: Checkpoint) -> None:
    trace = trace_launch(
        request(
            sglang_tree("0.5.14"),
            checkpoint(HYBRID),
            environment={"SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "0"},
        ),
        use_cache=False,
    )
    assert trace.environment_overwritten["SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"] == ("0", "True")


@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
def test_leaving_modules_out_changes_nothing(
    version: str, sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    """The same launches with SGLang's whole runtime and torch's compiler imported."""
    tree = sglang_tree(version)
    models = [checkpoint(HYBRID), checkpoint(STOCK)]
    lean = trace_launches([request(tree, model) for model in models], use_cache=False)
    whole = trace_launches([request(tree, model, whole=True) for model in models], use_cache=False)
    for one, other in zip(map(traced, lean), map(traced, whole), strict=True):
        assert one.layers == other.layers
        assert one.resolved_args == other.resolved_args
        assert one.arg_changes == other.arg_changes


def test_the_decision_path_names_conditions_and_values(
    sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    trace = trace_launch(
        request(sglang_tree("0.5.23"), checkpoint(HYBRID), with_path=True), use_cache=False
    )
    decision = next(
        step
        for step in trace.steps
        if step.phase == "draft" and step.function == "HybridFp8NvFp4Config.get_quant_method"
    )
    assert decision.returned == "Mxfp4FlashinferTrtllmMoEMethod"
    conditions = {branch.condition: branch for branch in decision.branches}
    fp4 = conditions["self.is_fp4_experts"]
    assert (fp4.values, fp4.taken) == ({"self.is_fp4_experts": "True"}, True)
    excluded = conditions["not self.nvfp4_config.is_layer_excluded(prefix)"]
    assert excluded.taken is False
    assert excluded.values == {"prefix": "'model.decoder.mlp.experts'"}
    runner = next(
        branch
        for step in trace.steps
        for branch in step.branches
        if branch.condition == "cfg.moe_runner_backend == 'auto'"
    )
    assert runner.values == {"cfg.moe_runner_backend": "'auto'"}
    assert runner.location.file == "sglang/srt/arg_groups/model_overrides/deepseek_v4.py"


def test_recording_the_path_does_not_change_the_answer(
    sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    tree, model = sglang_tree("0.5.17"), checkpoint(HYBRID)
    plain, recorded = (
        trace_launch(request(tree, model, with_path=flag), use_cache=False)
        for flag in (False, True)
    )
    assert plain.layers == recorded.layers
    assert plain.steps == ()


def test_one_import_serves_several_launches(sglang_tree: Tree, checkpoint: Checkpoint) -> None:
    """Same tree, GPU and environment: the import's time is the same measurement in each."""
    tree, model = sglang_tree("0.5.14"), checkpoint(HYBRID)
    outcomes = trace_launches(
        [request(tree, model, flags, SM_120) for flags in (EAGLE, (), EAGLE + BOTH_TRITON)],
        use_cache=False,
    )
    imports = {traced(outcome).timings["imports"] for outcome in outcomes}
    assert len(imports) == 1
    assert [len(traced(outcome).of(Role.DRAFT)) for outcome in outcomes] == [1, 0, 1]


def test_a_config_file_counts_as_flags(
    sglang_tree: Tree, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """SGLang merges --config into its flags, and the trace key follows the file's content.

    The parsers' choices are those of modules that a trace leaves out where nothing names them.
    """
    config = tmp_path / "serve.yaml"
    config.write_text("moe-runner-backend: flashinfer_cutlass\ntool-call-parser: deepseekv4\n")
    flags = ("--config", str(config), "--reasoning", "deepseek-v4")  # as argparse takes it
    asked = request(sglang_tree("0.5.23"), checkpoint(HYBRID), flags)
    trace = trace_launch(asked, use_cache=False)
    assert {layer.runner_backend for layer in trace.layers} == {"flashinfer_cutlass"}
    before = cache.key(asked)
    config.write_text("moe-runner-backend: triton\n")
    assert cache.key(asked) != before


def test_a_config_file_names_the_drafts_runner(
    sglang_tree: Tree, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Only where nothing says it does the draft's runner follow --moe-runner-backend."""
    config = tmp_path / "serve.yaml"
    runners = {"moe-runner-backend": "marlin", "speculative-moe-runner-backend": "triton"}
    config.write_text("".join(f"{name}: {value}\n" for name, value in runners.items()))
    flags = tuple(word for name, value in runners.items() for word in (f"--{name}", value))
    said, filed = (
        traced(outcome).of(Role.DRAFT)
        for outcome in trace_launches(
            [
                request(sglang_tree("0.5.23"), checkpoint(STOCK), (*EAGLE, *more))
                for more in (flags, ("--config", str(config)))
            ],
            use_cache=False,
        )
    )
    assert said == filed
    assert said[0].flags_consulted == ("speculative_moe_runner_backend",)


def test_data_parallel_attention_reaches_its_kernel(
    sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    """0.5.14 reads buffer sizes that every forward of a server sets for its batch."""
    flags = ("--tp", "8", "--dp", "8", "--enable-dp-attention")
    trace = trace_launch(request(sglang_tree("0.5.14"), checkpoint(HYBRID), flags), use_cache=False)
    assert len(trace.layers) == 43
    for layer in trace.layers:
        assert layer.error is None
        assert layer.kernel is not None
        assert layer.kernel.symbol == "flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe"


def test_a_machine_without_triton_says_the_same(
    sglang_tree: Tree, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """There is no Triton for macOS: what SGLang's host code asks of it is stood in for."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    [site] = (tmp_path / "venv").glob("lib/python3*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("triton", "__")) and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    here = request(sglang_tree("0.5.14"), checkpoint(HYBRID))
    there = replace(here, interpreter=tmp_path / "venv" / "bin" / "python")
    assert trace_launch(here, use_cache=False).layers == trace_launch(there, use_cache=False).layers
    # From 0.5.21 on modules use Triton's language while they are imported.
    newer = trace_launch(replace(there, tree=sglang_tree("0.5.22")), use_cache=False)
    assert newer.errors == newer.unresolved == ()
    assert all(layer.kernel for layer in newer.layers)
    assert len(newer.of(Role.MAIN)) == 43


def test_a_draft_of_its_own_checkpoint(sglang_tree: Tree, checkpoint: Checkpoint) -> None:
    """--speculative-draft-model-path: the draft's stored format is that checkpoint's."""
    other = checkpoint("deepseek-ai__DeepSeek-V4-Flash-Base")
    flags = (*EAGLE, "--speculative-draft-model-path", str(other))
    trace = trace_launch(request(sglang_tree("0.5.23"), checkpoint(STOCK), flags), use_cache=False)
    assert {layer.stored_format for layer in trace.of(Role.MAIN)} == {StoredFormat.MXFP4}
    [draft] = trace.of(Role.DRAFT)
    assert (draft.stored_format, draft.quant_method) == (StoredFormat.FP8_BLOCK, "Fp8MoEMethod")


def test_a_runner_that_is_none_is_sglangs_own_fault(
    sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    model = checkpoint("sgl-project__DeepSeek-V4-Flash-FP8", variant="model-type-deepseek-v4")
    flags = ("--moe-runner-backend", "flashinfer_cutlass")
    trace = trace_launch(request(sglang_tree("0.5.19"), model, flags), use_cache=False)
    assert len(trace.of(Role.MAIN)) == 43
    for layer in trace.of(Role.MAIN):
        assert layer.error is not None
        assert "runner_backend" in layer.error.message


def test_a_name_that_a_module_has_for_other_gpus_only(
    sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    flags = (*EAGLE, "--moe-runner-backend", "marlin")
    asked = request(sglang_tree("0.5.20"), checkpoint(HYBRID), flags, Arch(9, 0))
    [draft] = trace_launch(asked, use_cache=False).of(Role.DRAFT)
    assert draft.error is not None
    assert draft.error.type == "ImportError"
    assert "flashinfer_mxfp8_quantize" in draft.error.message


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23"])
def test_v41_with_its_engram_layers(
    version: str, sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    """Its hash of the vocabulary needs a tokenizer, which decides no kernel."""
    model = checkpoint("deepseek-ai__DeepSeek-V4.1-Flash")
    flags = ("--tp", "8", "--ep-size", "8", *DSPARK)
    trace = trace_launch(request(sglang_tree(version), model, flags), use_cache=False)
    assert (trace.errors, trace.unresolved) == ((), ())
    assert [len(trace.of(role)) for role in Role] == [40, 3]
    assert {layer.quant_method for layer in trace.layers} == {"Mxfp4FlashinferCutlassMoEMethod"}
    assert {layer.stored_format for layer in trace.layers} == {StoredFormat.MXFP4}


@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
def test_another_machines_devices_and_files_are_not_this_ones(
    version: str, sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    """SGLang looks for the named devices on its own machine, which is not this one."""
    flags = ("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake")
    flags += ("--disaggregation-ib-device", "mlx5_doctor")
    flags += ("--ssl-keyfile", "/etc/doctor.key", "--ssl-certfile=/etc/doctor.pem")
    asked = request(sglang_tree(version), checkpoint(STOCK), flags)
    here = traced(trace_launch(asked, use_cache=False))
    assert [error.phase for error in here.errors] == ["arguments"]
    there = traced(trace_launch(replace(asked, elsewhere=True), use_cache=False))
    assert there.errors == ()
    assert there.resolved_args["tp_size"] == 4
    for path in ("/sys/class/infiniband", "/etc/doctor.key", "/etc/doctor.pem"):
        assert any(text.startswith(f"{path} ") for text in there.leniencies)
    assert cache.key(asked) != cache.key(replace(asked, elsewhere=True))
