"""The hot paths beside the routed experts, on real trees."""

import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tracing import EAGLE, request, traced

from dsv4doctor.audit import judged
from dsv4doctor.evidence.grounds import grounds
from dsv4doctor.models import ARCHS, Arch, HotPath, Kernel, Role, SglangTree, Trace, Verdict
from dsv4doctor.report.console import Style, printed
from dsv4doctor.report.hot_paths import only_paths, path_parts
from dsv4doctor.trace import cache
from dsv4doctor.trace.session import trace_launches
from dsv4doctor.trace.worker import forward
from dsv4doctor.verdicts import judge_path

Tree = Callable[[str], SglangTree]
Checkpoint = Callable[..., Path]

HYBRID = "nvidia__DeepSeek-V4-Flash-NVFP4"
STOCK = "deepseek-ai__DeepSeek-V4-Flash"


def of(trace: Trace, name: str, role: Role = Role.MAIN) -> list[HotPath]:
    return [path for path in trace.paths if (path.name, path.role) == (name, role)]


def choices(trace: Trace, name: str, role: Role = Role.MAIN) -> set[str | None]:
    return {path.choice for path in of(trace, name, role)}


@pytest.mark.wheels
def test_paths_of_0_5_14(sglang_tree: Tree, checkpoint: Checkpoint) -> None:
    """Fallbacks everywhere, and variables that only take effect once arguments are resolved."""
    [outcome] = trace_launches(
        [request(sglang_tree("0.5.14"), checkpoint(HYBRID), with_paths=True)], use_cache=False
    )
    trace = traced(outcome)
    trace = judged(trace, {})
    assert len(trace.of(Role.MAIN)) == 43
    decode = of(trace, "sparse-mla-decode")
    assert [len(path.layers) for path in decode] == [2, 21, 20]
    assert {path.kernel.symbol for path in decode if path.kernel} == {
        "triton:sglang.srt.layers.attention.flash_mla_sm120_triton._tiled_sparse_decode_kernel"
    }
    assert {path.verdict for path in decode} == {Verdict.FALLBACK}
    assert {path.flags_consulted for path in decode} == {("SGLANG_SM120_TRITON_FLASHMLA",)}
    assert decode[0].decided_at is not None
    assert decode[0].decided_at.function == "flash_mla_with_kvcache_sm120"
    assert choices(trace, "sparse-mla-prefill", Role.DRAFT) == {"triton"}
    [indexer] = of(trace, "indexer-decode")
    assert indexer.choice == "torch"
    assert "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH" in indexer.flags_consulted
    assert indexer.detail.startswith("max_seq_len 262208 in this batch, context limit 1048576 tok")
    assert "in prefill every new token is a row" in indexer.reason
    [short, *_] = of(trace, "indexer-prefill")
    assert short.detail.startswith("max_seq_len 64 in this batch, context limit 1048576 tokens")
    [dense] = of(trace, "dense-fp8")
    assert dense.choice == "triton"
    # SGLang turns SGLANG_OPT_FP8_WO_A_GEMM off on sm_12x: the output projection is no FP8 layer.
    assert not any(name.endswith("wo_a") for name in dense.layers)
    assert choices(trace, "mhc-post") == {"tilelang"}
    [cache_path] = of(trace, "kv-cache")
    assert cache_path.choice == "float8_e4m3fn"
    assert "window: 584 bytes a token, pages of 256" in cache_path.detail
    # How the pool lies in memory was read off; what writes it was not run.
    assert cache_path.verdict is Verdict.UNKNOWN
    [reduce] = of(trace, "all-reduce")
    assert (reduce.verdict, reduce.choice) == (Verdict.UNKNOWN, None)
    assert "topology" in reduce.reason


@pytest.mark.wheels
def test_paths_by_arch_and_variable(sglang_tree: Tree, checkpoint: Checkpoint) -> None:
    tree, model = sglang_tree("0.5.23"), checkpoint(STOCK)
    triton = {"SGLANG_SM120_FLASHMLA_BACKEND": "triton"}
    outcomes = trace_launches(
        [
            request(tree, model, with_paths=True),
            request(tree, model, with_paths=True, environment=triton),
            request(tree, model, arch=ARCHS["sm_100"], with_paths=True),
        ],
        use_cache=False,
    )
    sm_120, forced, sm_100 = (traced(outcome) for outcome in outcomes)
    for trace, decode, prefill, indexer, dense in (
        (sm_120, "flashinfer", "flashinfer", "tilelang", "cutlass"),
        (forced, "triton", "triton", "tilelang", "cutlass"),
        (sm_100, "flashmla", "flashmla", "deep_gemm", "deep_gemm"),
    ):
        for role in Role:
            assert choices(trace, "sparse-mla-decode", role) == {decode}
            assert choices(trace, "sparse-mla-prefill", role) == {prefill}
            assert choices(trace, "dense-fp8", role) == {dense}
        assert choices(trace, "indexer-decode") == {indexer}
    # A server there mixes with the fused kernel, which these steps do not reach.
    assert all("fused into one" in found.reason for found in of(sm_120, "mhc-post"))
    flags = of(sm_120, "sparse-mla-decode")[0].flags_consulted
    assert flags == ("SGLANG_SM120_FLASHMLA_BACKEND",)


@pytest.mark.wheels
def test_prefill_of_0_5_15_on_sm_120(sglang_tree: Tree, checkpoint: Checkpoint) -> None:
    """It takes FlashMLA's sparse prefill, which is not there; 0.5.16 keeps sm_120 out of it.
    Its decode imports a part of FlashInfer that came after the version it pins."""
    tree = sglang_tree("0.5.15.post1")
    [outcome] = trace_launches([request(tree, checkpoint(STOCK), with_paths=True)])
    trace = judged(traced(outcome), {}, grounds(None, tree))
    for role in Role:
        for found in of(trace, "sparse-mla-prefill", role):
            assert found.kernel is not None
            assert found.kernel.symbol == "sgl_kernel.flash_mla.flash_mla_sparse_fwd"
            assert found.flags_consulted == ("SGLANG_OPT_FLASHMLA_SPARSE_PREFILL",)
            assert found.verdict is Verdict.FAILS
        assert {found.verdict for found in of(trace, "sparse-mla-decode", role)} == {Verdict.FAILS}


@pytest.mark.wheels
@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
def test_attention_of_another_backend_is_unknown(
    sglang_tree: Tree, checkpoint: Checkpoint, version: str
) -> None:
    """SGLang joins two backends into one, or gives the draft its own; neither is run."""
    tree, model = sglang_tree(version), checkpoint(STOCK)
    same = ("--prefill-attention-backend", "dsv4")
    outcomes = trace_launches(
        [
            request(tree, model, (*EAGLE, *flags), ARCHS["sm_100"], with_paths=True)
            for flags in (
                ("--prefill-attention-backend", "fa3"),
                ("--decode-attention-backend", "triton"),
                ("--speculative-draft-attention-backend", "triton"),
                same,
            )
        ]
    )
    prefill, decode, draft, own = (judged(traced(outcome), {}) for outcome in outcomes)
    named = ("sparse-mla-decode", "sparse-mla-prefill")
    for trace, roles, name in (
        (prefill, (Role.MAIN, Role.DRAFT), "fa3"),
        (decode, (Role.MAIN, Role.DRAFT), "triton"),
        (draft, (Role.DRAFT,), "triton"),
    ):
        for role in roles:
            paths = [found for path in named for found in of(trace, path, role)]
            assert {found.verdict for found in paths} == {Verdict.UNKNOWN}
            assert all(f"SGLang takes {name} here" in found.reason for found in paths)
            assert of(trace, "kv-cache", role)
    assert [len(found.layers) for found in of(prefill, "indexer-decode")] == [43]
    for trace in (draft, own):
        assert {found.verdict for found in of(trace, named[0])} == {Verdict.RUNS}


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("version", "arch", "environment"),
    [
        ("0.5.12.post1", "sm_120", {}),
        ("0.5.23", "sm_120", {"SGLANG_OPT_FP8_WO_A_GEMM": "1"}),
        ("0.5.18", "sm_100", {}),
    ],
)
def test_the_output_projection_in_fp8_is_the_attentions_own(
    sglang_tree: Tree,
    checkpoint: Checkpoint,
    version: str,
    arch: str,
    environment: dict[str, str],
) -> None:
    """Its layer has a method for FP8 that nobody calls: DeepGEMM's einsum multiplies it."""
    asked = request(
        sglang_tree(version),
        checkpoint(STOCK),
        arch=ARCHS[arch],
        with_paths=True,
        environment=environment,
    )
    [outcome] = trace_launches([asked])
    trace = judged(traced(outcome), {})
    for role, layers in ((Role.MAIN, 43), (Role.DRAFT, 1)):
        paths = of(trace, "dense-fp8", role)
        own = [found for found in paths if any(name.endswith(".wo_a") for name in found.layers)]
        assert sum(len(found.layers) for found in own) == layers
        assert {found.kernel.symbol for found in own if found.kernel} == {"deep_gemm.fp8_einsum"}
        assert {found.verdict for found in own} == {Verdict.UNKNOWN}
        assert not any(name.endswith(".wo_a") for found in paths[:1] for name in found.layers)


@pytest.mark.wheels
def test_a_kernel_of_a_package_that_nobody_asks_for_is_unknown(
    sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    """SGLang 0.5.12.post1 imports flash_mla and does not require it; 0.5.14 has it in its own."""
    trees = [sglang_tree(version) for version in ("0.5.12.post1", "0.5.14")]
    outcomes = trace_launches(
        [request(tree, checkpoint(STOCK), arch=ARCHS["sm_90"], with_paths=True) for tree in trees]
    )
    for outcome, verdict in zip(outcomes, (Verdict.UNKNOWN, Verdict.RUNS), strict=True):
        found_in = replace(traced(outcome), leniencies=())  # words for people, and no more
        paths = of(judged(found_in, {}), "sparse-mla-decode")
        assert {found.verdict for found in paths} == {verdict}
        said = {"flash_mla is not installed here" in found.reason for found in paths}
        assert said == {verdict is Verdict.UNKNOWN}


def test_paths_have_a_cache_key_of_their_own(tmp_path: Path, checkpoint: Checkpoint) -> None:
    (tmp_path / "sglang").mkdir()
    tree = SglangTree(str(tmp_path), "0.5.23", "folder")
    with_paths = request(tree, checkpoint(STOCK), with_paths=True)
    assert cache.key(with_paths) != cache.key(request(tree, checkpoint(STOCK)))


def path(kernel: str | None = None, choice: str | None = None, reason: str = "") -> HotPath:
    return HotPath(
        name="sparse-mla-decode",
        role=Role.MAIN,
        layers=("model.layers.0.self_attn",),
        choice=choice,
        kernel=Kernel(kernel, None) if kernel else None,
        decided_at=None,
        flags_consulted=(),
        verdict=Verdict.UNKNOWN,
        reason=reason,
    )


@pytest.mark.parametrize(
    ("given", "arch", "verdict"),
    [
        (path("sgl_kernel.flash_mla.flash_mla_with_kvcache"), "sm_120", Verdict.FAILS),
        (path("flash_mla.flash_mla_sparse_fwd"), "sm_120", Verdict.FAILS),
        (path("flash_mla.flash_mla_sparse_fwd"), "sm_90", Verdict.RUNS),
        (path("triton:sglang.a._w8a8_block_fp8_matmul"), "sm_120", Verdict.RUNS),
        (
            path("triton:a._w8a8_block_fp8_matmul", reason="another shape"),
            "sm_120",
            Verdict.UNKNOWN,
        ),
        (path("flash_mla.flash_mla_x", reason="another shape"), "sm_120", Verdict.FAILS),
        (path("nobody.knows.this"), "sm_120", Verdict.UNKNOWN),
        (path(None), "sm_120", Verdict.UNKNOWN),
        (path(None, "nccl"), "sm_120", Verdict.UNKNOWN),
        (path(None, "nccl", "the trace stopped"), "sm_120", Verdict.UNKNOWN),
    ],
)
def test_verdicts(given: HotPath, arch: str, verdict: Verdict) -> None:
    judgement = judge_path(given, ARCHS[arch])
    assert judgement.verdict is verdict
    assert judgement.reason


@pytest.mark.parametrize(
    ("statement", "fails"), [("raise ValueError('no')", True), ("{}[1]", False)]
)
def test_what_sglang_raises_after_the_first_kernel_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, fails: bool
) -> None:
    """Anything else that breaks there may have broken on a stand-in."""
    file = tmp_path / "sglang" / "layer.py"
    file.parent.mkdir()
    file.write_text(f"def apply(launch):\n    launch()\n    {statement}\n")
    scope: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)

    def launch() -> None:
        forward.RECORDER.note("flashinfer.fused_moe.cutlass_fused_moe", None)

    monkeypatch.setattr(forward, "_apply", lambda layer, unrouted: scope["apply"](launch))
    monkeypatch.setattr(forward, "_other_dispatcher", lambda: None)
    outcome = forward.run_layer(types.SimpleNamespace(quant_method=None))
    assert outcome["kernel"]["symbol"] == "flashinfer.fused_moe.cutlass_fused_moe"
    assert (outcome["error"] is not None) is fails


def test_nothing_is_shown_where_nothing_was_traced() -> None:
    tree = SglangTree("/t", "0.5.23", "folder")
    empty = Trace(tree, Arch(12, 0), {}, (), {}, (), (), (), (), {})
    assert list(path_parts(empty)) == list(path_parts(None)) == []
    assert not only_paths(empty)
    assert only_paths(replace(empty, paths=(path("k"),)))
    assert not only_paths(replace(empty, paths=(path("k"),), unresolved=("main: stopped",)))


def test_what_sglang_sets_is_said_beside_the_variable() -> None:
    tree = SglangTree("/t", "0.5.14", "folder")
    given = replace(path("k"), flags_consulted=("SGLANG_A", "SGLANG_B"))
    overwritten: dict[str, tuple[str | None, str]] = {"SGLANG_B": ("1", "0")}
    trace = Trace(*(tree, Arch(12, 0), {}, (), overwritten, (), (), (), (), {}), paths=(given,))
    text = printed(list(path_parts(trace)), Style(100))
    assert "reads   SGLANG_A, SGLANG_B (SGLang sets it to 0)" in text
