"""The fixes on real SGLang trees: what each makes of a release, and what the result traces to."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tracing import EAGLE, request

from dsv4doctor import fixes
from dsv4doctor.fixes.fix import Absent, Change, Choice, Fix, Outcome, Present, Refused
from dsv4doctor.models import ARCHS, Role, SglangTree, Trace
from dsv4doctor.trace.session import trace_launch

pytestmark = pytest.mark.wheels

Tree = Callable[[str], SglangTree]
Checkpoint = Callable[..., Path]
HYBRID = "nvidia__DeepSeek-V4-Flash-NVFP4"
BY_ID = {fix.id: fix for fix in fixes.ALL}

C, P, A = Change, Present, Absent
RELEASES = {
    # Before the hybrid checkpoints: what is there is found by its structure all the same.
    "0.5.12.post1": {"101": A, "102": A, "103": C, "104": A, "105": A, "106": C, "107": A},
    "0.5.13.post1": {"101": A, "102": A, "103": C, "104": C, "105": C, "106": C, "107": C},
    **{
        version: {"101": C, "102": C, "103": C, "104": C, "105": C, "106": C, "107": C}
        for version in ("0.5.14", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.19")
    },
    "0.5.20": {"101": C, "102": C, "103": C, "104": C, "105": C, "106": C, "107": P},
    **{
        version: {"101": C, "102": C, "103": P, "104": C, "105": C, "106": C, "107": P}
        for version in ("0.5.21", "0.5.22", "0.5.23")
    },
}


def read(root: Path, fix: Fix) -> dict[str, str]:
    files = {file: root / file for file in fix.files}
    return {file: path.read_text("utf-8") for file, path in files.items() if path.is_file()}


@dataclass
class Planned:
    """Each fix on what the ones before it left."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    read: dict[str, dict[str, str]] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)


def planned(root: Path, order: Iterable[Fix], kernel: str = "auto") -> Planned:
    plan = Planned()
    for fix in order:
        sources = {**read(root, fix), **{f: t for f, t in plan.changed.items() if f in fix.files}}
        plan.read[fix.id] = sources
        plan.outcomes[fix.id] = outcome = fix.plan(sources, Choice(kernel))
        plan.changed.update(getattr(outcome, "sources", {}))
    return plan


def types(plan: Planned) -> dict[str, type]:
    return {name.removeprefix("FIX"): type(outcome) for name, outcome in plan.outcomes.items()}


@pytest.mark.parametrize("version", RELEASES)
def test_every_fix_on_every_release(version: str, sglang_tree: Tree) -> None:
    root = Path(sglang_tree(version).root)
    plan = planned(root, fixes.ALL)
    assert types(plan) == RELEASES[version]
    for file, text in plan.changed.items():
        compile(text, file, "exec")
        gone = Counter((root / file).read_text("utf-8").splitlines()) - Counter(text.splitlines())
        assert gone.total() <= 12, gone
    for name, outcome in plan.outcomes.items():
        if isinstance(outcome, Change):
            for place in outcome.at:
                # Also where another fix was planned before: the release's own line numbers.
                line = (root / place.file).read_text("utf-8").splitlines()[place.line - 1]
                assert line.strip() == place.source
            again = BY_ID[name].plan({**plan.read[name], **plan.changed}, Choice())
            assert isinstance(again, Present)
            assert again.how == "applied by dsv4doctor"


@pytest.mark.parametrize("version", ["0.5.14", "0.5.20"])
def test_the_fixes_compose_in_any_order(version: str, sglang_tree: Tree) -> None:
    root = Path(sglang_tree(version).root)
    plan = planned(root, reversed(fixes.ALL))
    assert types(plan) == RELEASES[version]
    for file, text in plan.changed.items():
        compile(text, file, "exec")


@pytest.mark.parametrize("kernel", ["triton", "marlin", "cutlass"])
@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
def test_a_kernel_that_was_asked_for(version: str, kernel: str, sglang_tree: Tree) -> None:
    root = Path(sglang_tree(version).root)
    plan = planned(root, (BY_ID["FIX101"], BY_ID["FIX102"]), kernel)
    refused = version == "0.5.14" and kernel == "cutlass"
    for outcome in plan.outcomes.values():
        if refused:
            assert isinstance(outcome, Refused)
        else:
            assert isinstance(outcome, Change)
            assert outcome.target == kernel
    for file, text in plan.changed.items():
        compile(text, file, "exec")


# ------------------------------------------------------------------------ traced


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def patched(tree: SglangTree, target: Path, ids: tuple[str, ...], kernel: str) -> SglangTree:
    """A copy of a tree, its files linked where that can be, with the fixes applied."""
    root = Path(tree.root)
    shutil.copytree(root, target, copy_function=link_or_copy)
    order = tuple(fix for fix in fixes.ALL if fix.id in ids)
    for file, text in planned(root, order, kernel).changed.items():
        path = target / file
        path.parent.chmod(0o755)
        path.unlink()
        path.write_text(text, "utf-8")
    return SglangTree(str(target), tree.version, "folder")


Traced = Callable[..., Trace]


@pytest.fixture
def traced(sglang_tree: Tree, checkpoint: Checkpoint, tmp_path: Path) -> Traced:
    def run(
        version: str,
        ids: tuple[str, ...],
        kernel: str = "auto",
        arch: str = "sm_120",
        flags: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        **options: bool,
    ) -> Trace:
        tree = patched(sglang_tree(version), tmp_path / "tree", ids, kernel)
        asked = request(
            tree,
            checkpoint(HYBRID),
            (*EAGLE, *flags),
            ARCHS[arch],
            dict(environment or {}),
            **options,
        )
        return trace_launch(asked, use_cache=False)

    return run


def reached(trace: Trace, role: Role) -> set[tuple[str | None, str | None]]:
    for layer in trace.of(role):
        assert layer.error is None, layer.error
    return {(x.quant_method, x.kernel.symbol if x.kernel else None) for x in trace.of(role)}


CUTLASS = "flashinfer.fused_moe.cutlass_fused_moe"
OURS = "triton:dsv4doctor.kernels.grouped_gemm._product_kernel"


def test_0_5_14_with_every_fix(traced: Traced) -> None:
    trace = traced(
        "0.5.14",
        tuple(BY_ID),
        environment={"SGLANG_OPT_USE_TOPK_V2": "1"},
        with_paths=True,
    )
    assert (trace.errors, trace.unresolved) == ((), ())
    assert reached(trace, Role.MAIN) == {("ModelOptNvFp4FusedMoEMethod", CUTLASS)}
    [(method, kernel)] = reached(trace, Role.DRAFT)
    assert method == "Mxfp4MarlinMoEMethod"
    assert kernel is not None
    assert kernel.startswith("jit:moe_wna16_marlin")
    [draft] = trace.of(Role.DRAFT)
    assert "speculative_moe_runner_backend" in draft.flags_consulted
    kernels = {path.name: path.kernel.symbol for path in trace.paths if path.kernel}
    assert kernels["indexer-decode"].startswith("triton:dsv4doctor.kernels.indexer_logits.")
    assert kernels["indexer-prefill"].startswith("triton:dsv4doctor.kernels.indexer_logits.")
    assert kernels["sparse-mla-decode"].startswith("triton:dsv4doctor.kernels.mla_kernels.")
    assert kernels["mhc-pre"].startswith("triton:dsv4doctor.kernels.dense_glue.")
    assert "SGLANG_OPT_USE_TOPK_V2" not in trace.environment_overwritten
    assert trace.environment_overwritten["SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"][1] == "True"


def test_0_5_18_loads_its_draft(traced: Traced) -> None:
    """With default flags and EAGLE this release raises while it loads the draft."""
    trace = traced("0.5.18", ("FIX101",))
    assert reached(trace, Role.DRAFT) == {("Mxfp4FlashinferCutlassMoEMethod", CUTLASS)}
    assert {layer.runner_backend for layer in trace.of(Role.MAIN)} == {"flashinfer_trtllm_routed"}


def test_0_5_23_on_our_kernels(traced: Traced) -> None:
    trace = traced("0.5.23", ("FIX101", "FIX102"), kernel="triton")
    assert (trace.errors, trace.unresolved) == ((), ())
    assert reached(trace, Role.MAIN) == {("Dsv4DoctorModelOptNvFp4MoEMethod", OURS)}
    assert reached(trace, Role.DRAFT) == {("Dsv4DoctorMxfp4MoEMethod", OURS)}


def test_sm_100_is_left_as_it_was(traced: Traced) -> None:
    trace = traced("0.5.23", tuple(BY_ID), kernel="triton", arch="sm_100")
    routed = "flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe"
    assert reached(trace, Role.MAIN) == {("ModelOptNvFp4FusedMoEMethod", routed)}
    assert reached(trace, Role.DRAFT) == {("Mxfp4FlashinferTrtllmMoEMethod", routed)}
    assert {layer.runner_backend for layer in trace.of(Role.MAIN)} == {"flashinfer_trtllm_routed"}
