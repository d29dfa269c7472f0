"""Who needs a fix, which layers it changes, and what its proof says."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4doctor import fixes
from dsv4doctor.fixes import draft_ways, edit, main_moe_auto
from dsv4doctor.fixes.fix import Absent, Change, Choice
from dsv4doctor.models import (
    ARCHS,
    ArgChange,
    Facts,
    HotPath,
    Kernel,
    Layer,
    Location,
    Role,
    SglangError,
    Trace,
    Verdict,
)
from dsv4doctor.patching import plan, verifying
from dsv4doctor.patching.plan import Plan, Status, Step
from dsv4doctor.rules import layer_unknown, swiglu_limit_dropped
from dsv4doctor.rules.samples import (
    CALL_WITH_CLAMP,
    CALL_WITHOUT_CLAMP,
    DRAFT_CUTLASS,
    DRAFT_TRTLLM,
    MAIN_CUTLASS,
    MAIN_NVFP4_CUTLASS,
    MAIN_TRTLLM,
    facts,
    scene,
)
from dsv4doctor.trace.worker import ourselves
from dsv4doctor.verdicts import judge

BY_ID = {fix.id: fix for fix in fixes.ALL}
AUTO = ArgChange("moe_runner_backend", "auto", "flashinfer_trtllm_routed", Location("hook.py", 1))


def hybrid(arch: str) -> Facts:
    """The hybrid checkpoint with EAGLE and no backend flag."""
    found = facts(arch, [*MAIN_TRTLLM, DRAFT_TRTLLM])
    assert found.trace is not None
    return replace(found, trace=replace(found.trace, arg_changes=(AUTO,)))


def with_paths(found: Facts, *paths: HotPath) -> Facts:
    assert found.trace is not None
    return replace(found, trace=replace(found.trace, paths=paths))


def traced(found: Facts, trace: Trace) -> Facts:
    return replace(found, trace=trace)


def path(name: str, symbol: str, detail: str = "") -> HotPath:
    kernel = Kernel(symbol, None)
    return HotPath(name, Role.MAIN, (), None, kernel, None, (), Verdict.UNKNOWN, "", detail)


def test_ids_and_files_are_as_the_planner_expects() -> None:
    assert sorted(BY_ID) == [f"FIX10{n}" for n in range(1, 8)]
    for fix in fixes.ALL:
        assert fix.examples
        assert {type(fix.plan(e.before, e.choice)) for e in fix.examples} >= {
            e.outcome for e in fix.examples
        }
        for example in fix.examples:
            assert set(example.before) <= set(fix.files)


@pytest.mark.parametrize(
    ("arch", "needed"),
    [("sm_120", True), ("sm_121", True), ("sm_90", True), ("sm_100", False), ("sm_103", False)],
)
def test_the_draft_needs_fix101_where_its_kernel_is_missing(arch: str, needed: bool) -> None:
    assert bool(BY_ID["FIX101"].needed(hybrid(arch))) is needed


def test_a_draft_that_runs_needs_nothing() -> None:
    assert BY_ID["FIX101"].needed(facts("sm_120", [*MAIN_CUTLASS, DRAFT_CUTLASS])) is None


def test_fix101_proves_every_draft_layer() -> None:
    before = hybrid("sm_120")
    fix = BY_ID["FIX101"]
    [draft] = [
        layer for layer in (before.trace.layers if before.trace else ()) if fix.changes(layer)
    ]
    assert draft.role is Role.DRAFT
    after = facts("sm_120", [*MAIN_TRTLLM, DRAFT_CUTLASS]).trace
    assert after is not None
    assert before.trace is not None
    assert fix.verify(before, traced(before, after)) == ()
    assert fix.verify(before, before) == (
        f"{draft.name} still gets Mxfp4FlashinferTrtllmMoEMethod",
    )
    broken = replace(DRAFT_CUTLASS, error=SglangError("draft weights", "ValueError", "no", None))
    assert fix.verify(before, traced(before, replace(after, layers=(broken,)))) == (
        f"{draft.name}: ValueError: no",
    )
    lost = replace(DRAFT_CUTLASS, kernel=None, reason="why")
    assert fix.verify(before, traced(before, replace(after, layers=(lost,)))) == (
        f"{draft.name} reaches no kernel: why",
    )


def test_fix102_is_for_auto_on_sm12x() -> None:
    fix = BY_ID["FIX102"]
    assert fix.needed(hybrid("sm_120")) is not None
    assert fix.needed(hybrid("sm_100")) is None
    asked_for = facts("sm_120", [*MAIN_TRTLLM])  # no change of an argument: the user chose it
    assert fix.needed(asked_for) is None
    before = hybrid("sm_120")
    after = facts("sm_120", [*MAIN_NVFP4_CUTLASS]).trace
    assert after is not None
    assert before.trace is not None
    assert fix.verify(before, traced(before, after)) == ()
    assert len(fix.verify(before, before)) == len(MAIN_TRTLLM)


def test_fix103_where_the_clamp_is_dropped_or_would_be() -> None:
    needed = BY_ID["FIX103"].needed
    dropped = facts("sm_120", [*MAIN_NVFP4_CUTLASS], call=CALL_WITHOUT_CLAMP)
    assert "does not reach FlashInfer's CUTLASS MoE" in str(needed(dropped))
    assert needed(facts("sm_120", [*MAIN_NVFP4_CUTLASS], call=CALL_WITH_CLAMP)) is None
    assert needed(replace(dropped, trace=None)) is None
    assert needed(hybrid("sm_120")) is not None  # FIX102 moves these to the call in question
    assert needed(hybrid("sm_100")) is None
    assert needed(facts("sm_120", [*MAIN_TRTLLM], swiglu_limit=None)) is None
    asked_for = facts("sm_120", [*MAIN_TRTLLM])  # the user's backend: FIX102 leaves it
    assert needed(asked_for) is None


GROUP_MM = Kernel(
    "torch.ops.sglang.cutlass_fp4_group_mm", Location("sglang/jit_kernel/nvfp4.py", 189)
)


def test_fix103_is_not_about_another_kernel() -> None:
    """`--moe-runner-backend triton` of 0.5.14: the clamp is lost where FIX103 changes nothing."""
    fix = BY_ID["FIX103"]
    change = fix.plan(fix.examples[0].before, Choice())
    other = [replace(x, runner_backend="triton", kernel=GROUP_MM) for x in MAIN_NVFP4_CUTLASS]
    lost = facts("sm_120", other, call=CALL_WITHOUT_CLAMP)
    assert fix.needed(lost) is None
    assert fix.leaves(lost, change) == (
        "DSV107 stays open: cutlass_fp4_group_mm is called without swiglu_limit (10); "
        "--moe-runner-backend flashinfer_cutlass with FIX103 passes it"
    )
    assert str(fix.leaves(lost, Absent("no"))).endswith("; no fix is about that")
    assert fix.leaves(facts("sm_120", [*MAIN_NVFP4_CUTLASS], call=CALL_WITHOUT_CLAMP), change) is (
        None
    )
    elsewhere = replace(MAIN_NVFP4_CUTLASS[0], quant_method="CompressedTensorsW4A4Nvfp4MoE")
    assert fix.needed(facts("sm_120", [elsewhere], call=CALL_WITHOUT_CLAMP)) is None
    (finding, *_) = swiglu_limit_dropped.check(lost)
    assert finding.remedy is not None
    assert finding.remedy.fix is None


def test_fix103_is_proved_by_the_call() -> None:
    fix = BY_ID["FIX103"]
    before = facts("sm_120", [*MAIN_NVFP4_CUTLASS], call=CALL_WITHOUT_CLAMP)
    passing = facts("sm_120", [*MAIN_NVFP4_CUTLASS], call=CALL_WITH_CLAMP)
    assert fix.verify(before, passing) == ()
    name = MAIN_NVFP4_CUTLASS[0].name
    assert len(fix.verify(before, before)) == len(MAIN_NVFP4_CUTLASS)
    assert "is not seen to pass swiglu_limit" in fix.verify(before, before)[0]
    unread = replace(passing, call_texts={})
    assert "is not seen to pass swiglu_limit" in fix.verify(before, unread)[0]
    other = [replace(layer, kernel=GROUP_MM) for layer in MAIN_NVFP4_CUTLASS]
    moved = facts("sm_120", other, call=CALL_WITH_CLAMP)
    assert fix.verify(before, moved)[0].startswith(f"{name}: swiglu_limit does not reach")
    assert fix.verify(before, facts("sm_120", []))[0] == f"{name} is not built any more"


class _Backend:
    """As SGLang's MoeRunnerBackend."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Callable[[], bool]:
        return lambda: name == f"is_{self.value}"


BACKENDS = (
    *("auto", "triton", "marlin", "flashinfer_mxfp4", "flashinfer_cutlass"),
    *("flashinfer_trtllm_routed", "deep_gemm"),
)


@pytest.mark.parametrize("target", ["cutlass", "marlin", "triton"])
@pytest.mark.parametrize("form", ["form = is_sm120_supported()", ""])
def test_what_is_said_of_the_draft_is_what_the_inserted_code_chooses(
    target: str, form: str
) -> None:
    ways = draft_ways.ways_of({draft_ways.CUTLASS: form, draft_ways.MARLIN: ""}, target)
    for name in BACKENDS:
        for ranks in (1, 4):
            names = {
                "backend": _Backend(name),
                "global_ids": name.startswith("flashinfer"),
                "layer": SimpleNamespace(moe_ep_size=ranks),
            }
            for way in ways:
                assert way.holds(name, ranks) is bool(eval(way.condition or "True", names))


@pytest.mark.parametrize(
    ("main", "own", "derived", "auto", "method"),
    [
        ("triton", "triton", True, None, "Dsv4DoctorMxfp4MoEMethod"),
        ("triton", None, False, None, "Dsv4DoctorMxfp4MoEMethod"),
        ("triton", "marlin", False, None, "Mxfp4MarlinMoEMethod"),
        ("marlin", "triton", False, None, "Dsv4DoctorMxfp4MoEMethod"),
        # FIX102 changes what "auto" becomes, and the draft follows where it was not told.
        ("flashinfer_trtllm_routed",) * 2 + (True, "triton", "Dsv4DoctorMxfp4MoEMethod"),
        ("flashinfer_trtllm_routed",) * 2 + (False, "triton", "Mxfp4MarlinMoEMethod"),
        ("flashinfer_trtllm_routed", "auto", True, "triton", "Mxfp4MarlinMoEMethod"),
    ],
)
def test_the_drafts_method_follows_the_launch(
    main: str, own: str | None, derived: bool, auto: str | None, method: str
) -> None:
    fix = BY_ID["FIX101"]
    change = fix.plan(fix.examples[1].before, Choice())
    assert isinstance(change, Change)
    assert change.target == "marlin"
    changes = (ArgChange("speculative_moe_runner_backend", None, own, Location("hook.py", 1)),)
    before = hybrid("sm_120").trace
    assert before is not None
    args = {"moe_runner_backend": main, "speculative_moe_runner_backend": own, "ep_size": 1}
    trace = replace(before, resolved_args=args, arg_changes=changes if derived else ())
    aim = change.aim(trace, auto)
    assert aim is not None
    assert (aim.method, aim.operation) == (
        method,
        "moe_mxfp4" if method.startswith("Dsv4") else None,
    )


def test_a_plan_says_where_its_layers_go_and_what_the_server_asks_for() -> None:
    """FIX101 with FIX102 on our kernels: the draft follows what "auto" becomes."""
    found = hybrid("sm_120")
    assert found.trace is not None
    routed = "flashinfer_trtllm_routed"
    args = {"moe_runner_backend": routed, "speculative_moe_runner_backend": None}
    found = traced(found, replace(found.trace, resolved_args=args))
    first, second = (BY_ID[name] for name in ("FIX101", "FIX102"))
    one = first.plan(first.examples[1].before, Choice())
    two = replace(one, target="triton", auto="triton", aim=main_moe_auto.aim_of("triton"))
    steps = tuple(
        Step(fix, Status.PLANNED, outcome, fix.needed(found))
        for fix, outcome in ((first, one), (second, two))
    )
    aims = plan.aims(Plan(steps, (), {}), found)
    assert {name: aim.method for name, (aim, _) in aims.items()} == {
        "FIX101": "Dsv4DoctorMxfp4MoEMethod",
        "FIX102": "Dsv4DoctorModelOptNvFp4MoEMethod",
    }
    assert aims["FIX101"][1] == (DRAFT_TRTLLM.name,)
    aimed = [replace(step, aim=aims[step.fix.id][0], aimed=aims[step.fix.id][1]) for step in steps]
    notes = verifying.of_plan(Plan(tuple(aimed), (), {}), found, {})
    assert notes[0] == (
        f"{DRAFT_TRTLLM.name} on dsv4doctor's own kernel: the server stops while it builds the "
        "model until `dsv4doctor kernels verify --only moe_mxfp4` was run on the serving machine"
    )
    assert "kernels verify --only moe_nvfp4" in notes[1]


@pytest.mark.parametrize(
    ("fix", "name", "before", "after"),
    [
        (
            "FIX104",
            "indexer-decode",
            "sglang.srt.layers.attention.dsv4.indexer.fp8_paged_mqa_logits_torch_sm120",
            "triton:dsv4doctor.kernels.indexer_logits._logits_kernel",
        ),
        (
            "FIX105",
            "sparse-mla-decode",
            "triton:sglang.kernels.ops.attention.flash_mla_sm120_triton._tiled_kernel",
            "triton:dsv4doctor.kernels.mla_kernels.decode_kernel",
        ),
    ],
)
def test_hot_paths_decide_and_prove(fix: str, name: str, before: str, after: str) -> None:
    slow, fast = path(name, before), path(name, after)
    needed, verify = BY_ID[fix].needed, BY_ID[fix].verify
    assert needed(with_paths(scene(), slow)) is not None
    assert needed(with_paths(scene(), fast)) is None
    assert needed(with_paths(scene("sm_100"), slow)) is None
    found = with_paths(scene(), slow)
    assert found.trace is not None
    assert verify(found, found) == (f"{name} still reaches {before}",)
    assert verify(found, traced(found, replace(found.trace, paths=(fast,)))) == ()


def test_without_hot_paths_the_environment_decides() -> None:
    torch = "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"
    indexer, sparse = BY_ID["FIX104"].needed, BY_ID["FIX105"].needed
    assert indexer(scene(overwritten={torch: (None, "True")})) is not None
    tilelang = {"SGLANG_OPT_USE_TILELANG_INDEXER": (None, "True")}
    assert indexer(scene(overwritten={torch: (None, "True"), **tilelang})) is None
    assert sparse(scene()) is None  # FlashInfer by default
    assert sparse(scene(environment={"SGLANG_SM120_FLASHMLA_BACKEND": "triton"})) is not None


def test_fix106_by_the_torch_part_of_the_mixing() -> None:
    fix = BY_ID["FIX106"]
    detail = "in part plain torch: hc_pre_torch_impl"
    slow = with_paths(scene(), path("mhc-pre", "tilelang:hc_split_sinkhorn_kernel", detail))
    assert fix.needed(slow) is not None
    assert slow.trace is not None
    assert fix.verify(slow, slow) == ("mhc-pre still goes through torch operations",)
    fast = path("mhc-pre", "triton:dsv4doctor.kernels.dense_glue._mix_kernel")
    assert fix.verify(slow, traced(slow, replace(slow.trace, paths=(fast,)))) == ()
    assert fix.needed(with_paths(scene(), fast)) is None


def test_fix107_for_what_the_launch_sets() -> None:
    fix, name = BY_ID["FIX107"], "SGLANG_OPT_USE_TOPK_V2"
    overruled = scene(environment={name: "1"}, overwritten={name: ("1", "False")})
    assert name in str(fix.needed(overruled))
    assert overruled.trace is not None
    assert fix.verify(overruled, overruled) == (f"{name} is still overruled",)
    kept = replace(overruled.trace, environment_overwritten={})
    assert fix.verify(overruled, traced(overruled, kept)) == ()
    assert fix.needed(scene(overwritten={name: (None, "False")})) is None


def test_without_dsv4doctor_the_patched_line_says_what_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dsv4doctor.kernels.adapters.gone", None)
    with pytest.raises(RuntimeError, match="pip install dsv4doctor") as caught:
        exec(edit.from_ours("FIX101", "gone", "name"), {})
    assert "\n" not in str(caught.value)
    assert "dsv4doctor fix --revert" in str(caught.value)


@pytest.mark.parametrize(
    ("layer", "method", "kernel"),
    [
        (DRAFT_CUTLASS, "Dsv4DoctorMxfp4MoEMethod", "moe_mxfp4"),
        (MAIN_TRTLLM[0], "Dsv4DoctorModelOptNvFp4MoEMethod", "moe_nvfp4"),
    ],
)
def test_our_experts_are_no_promise_without_a_stamp(layer: Layer, method: str, kernel: str) -> None:
    """A trace asks for no stamp; without one the serving machine's server stops."""
    symbol = Kernel("triton:dsv4doctor.kernels.grouped_gemm._product_kernel", None)
    ours = replace(layer, quant_method=method, kernel=symbol, error=None)
    judged = judge(ours, ARCHS["sm_120"])
    assert judged.verdict is Verdict.UNKNOWN
    assert f"kernels verify --only {kernel}" in judged.reason
    assert judge(ours, ARCHS["sm_100"]).verdict is Verdict.FAILS


def test_a_borrowed_environment_is_lent_dsv4doctor_and_nothing_else(tmp_path: Path) -> None:
    finder = ourselves.Finder(str(tmp_path))
    spec = finder.find_spec("dsv4doctor")
    assert spec.origin == str(tmp_path / "__init__.py")
    assert spec.submodule_search_locations == [str(tmp_path)]
    assert finder.find_spec("dsv4doctor.kernels") is None
    assert finder.find_spec("torch") is None


def test_line_endings_and_odd_indentation_are_kept() -> None:
    """A method under an `if`, indented by eight, in a file with CRLF."""
    lines = ("if x:", "        class A:", "                def f(self):", " " * 24 + "a = 1", "")
    text = "\r\n".join(lines)
    sources = {"a.py": text}
    piece = edit.find_piece(sources, "a.py", "A.f")
    assert piece is not None
    [line] = piece.find(edit.m.SimpleStatementLine())
    new = edit.with_piece(
        sources, piece, piece.replaced([(line, edit.put_after("b = 2\n", piece.newline))])
    )
    assert new == text + "                        b = 2\r\n"


def test_a_line_is_what_python_takes_for_one() -> None:
    """A form feed ends no line, nor does a separator in a string, before or in the function."""
    example = BY_ID["FIX107"].examples[0]
    assert example.after is not None
    [(file, before)], [(_, after)] = example.before.items(), example.after.items()
    odd = "# one\n\x0c\nNAME = 'a\u2028b'\n"
    inside = ("SM120 lacks", "SM120\x85 lacks")
    outcome = BY_ID["FIX107"].plan({file: odd + before.replace(*inside)}, Choice())
    assert isinstance(outcome, Change)
    assert outcome.sources[file] == odd + after.replace(*inside)
    assert [at.line for at in outcome.at] == [9, 12, 14]
    assert outcome.at[0].source == "envs.SGLANG_OPT_USE_TOPK_V2.set(False)"


def test_the_verifying_command_is_the_remedy_of_our_own_kernel() -> None:
    said = "it serves after `dsv4doctor kernels verify --only moe_mxfp4` on the serving machine"
    ours = replace(DRAFT_CUTLASS, verdict=Verdict.UNKNOWN, reason=said)
    base = facts("sm_120", [ours])
    assert base.trace is not None
    known = replace(base, trace=replace(base.trace, layers=(ours,)))
    [found] = layer_unknown.check(known)
    assert found.remedy is not None
    assert found.remedy.commands == ("dsv4doctor kernels verify --only moe_mxfp4",)
