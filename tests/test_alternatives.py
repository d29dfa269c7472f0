"""Which other flags are tried for a launch that does not run."""

from dataclasses import replace

import pytest

from dsv4doctor.alternatives import Candidate, candidates, outcome, without, without_speculation
from dsv4doctor.audit import _left, judged, run_rules
from dsv4doctor.errors import UndeterminedError
from dsv4doctor.models import ARCHS, Alternative, Layer, SglangError, StoredFormat, Trace, Verdict
from dsv4doctor.rules import hot_path_fails, moe_draft_sm100_only
from dsv4doctor.rules.common import way_out
from dsv4doctor.rules.samples import (
    CALL_WITHOUT_CLAMP,
    DRAFT_CUTLASS,
    DRAFT_TRTLLM,
    MAIN_CUTLASS,
    MAIN_NVFP4_CUTLASS,
    MAIN_TRTLLM,
    facts,
)

_EAGLE = ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1")
_PLAIN = ("--tp", "4")
_NVFP4 = StoredFormat.NVFP4


def _trace(*layers: Layer) -> Trace:
    trace = facts("sm_120", list(layers)).trace
    assert trace is not None
    return trace


def _flags(trace: Trace, flags: tuple[str, ...], **settings: bool) -> list[tuple[str, ...]]:
    settings.setdefault("clamp_lost", False)
    return [found.flags for found in candidates(trace, flags, _NVFP4, **settings)]


def test_a_way_with_a_hot_path_that_fails_is_none() -> None:
    """The launch itself stopped before its hot paths: those of the way out are looked at."""
    paths = hot_path_fails.EXAMPLES[0].facts.trace
    assert paths is not None
    trace = _trace(*MAIN_CUTLASS)
    runs, fails = (
        outcome(Candidate("x", ()), one, {}, has_clamp=False).problem
        for one in (trace, replace(trace, paths=paths.paths))
    )
    assert runs is None
    assert (fails or "").startswith("main sparse-mla-prefill: flash_mla_sparse_fwd")


def test_main_alone_gets_other_backends() -> None:
    assert _flags(_trace(*MAIN_TRTLLM), _PLAIN) == [
        (*_PLAIN, "--moe-runner-backend", "flashinfer_cutlass"),
        (*_PLAIN, "--moe-runner-backend", "marlin"),
    ]


def test_sglangs_own_choice_is_tried_where_it_is_made_for_the_gpu() -> None:
    chosen = (*_PLAIN, "--moe-runner-backend", "triton")
    trace = _trace(*MAIN_TRTLLM)
    assert _PLAIN not in _flags(trace, chosen)
    on_sm_100 = replace(trace, arch=ARCHS["sm_100"])
    assert _flags(on_sm_100, chosen)[0] == _PLAIN
    assert _PLAIN not in _flags(on_sm_100, _PLAIN)


def test_a_draft_that_no_flag_changes_has_to_go() -> None:
    trace = _trace(*MAIN_NVFP4_CUTLASS, DRAFT_TRTLLM)
    assert _flags(trace, (*_PLAIN, *_EAGLE)) == [_PLAIN]
    both = _flags(_trace(*MAIN_TRTLLM, DRAFT_TRTLLM), (*_PLAIN, *_EAGLE))
    assert len(both) == 2
    assert not any("EAGLE" in flags for flags in both)


def test_a_draft_that_reads_the_flags_gets_other_backends_first() -> None:
    draft = replace(DRAFT_TRTLLM, flags_consulted=("moe_runner_backend",))
    tried = _flags(_trace(*MAIN_NVFP4_CUTLASS, draft), (*_PLAIN, *_EAGLE))
    assert ["EAGLE" in flags for flags in tried] == [True, True, False]


def test_the_launch_itself_is_not_tried_again() -> None:
    flags = ("--moe-runner-backend", "marlin", *_PLAIN)
    assert _flags(_trace(*MAIN_TRTLLM), flags) == [
        (*_PLAIN, "--moe-runner-backend", "flashinfer_cutlass")
    ]


def test_a_lost_clamp_is_a_reason_to_look_for_another_backend() -> None:
    trace = _trace(*MAIN_NVFP4_CUTLASS, DRAFT_TRTLLM)
    assert len(_flags(trace, (*_PLAIN, *_EAGLE), clamp_lost=True)) == 3


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (("--tp", "4", "--x", "1", "2", "--y"), ("--tp", "4", "--y")),
        (("--x=1", "--tp", "4"), ("--tp", "4")),
        (("--x",), ()),
        (("--xy", "1"), ("--xy", "1")),
    ],
)
def test_without(flags: tuple[str, ...], kept: tuple[str, ...]) -> None:
    assert without(flags, ("--x",)) == kept


def test_without_speculation() -> None:
    assert without_speculation((*_EAGLE, *_PLAIN, "--speculative-adaptive")) == _PLAIN


_CANDIDATE = Candidate("x", ("--api-key", "sk-1"))
_ERROR = SglangError("main forward", "NotImplementedError", "no", None)


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([*MAIN_CUTLASS, DRAFT_CUTLASS], None),
        (
            [*MAIN_CUTLASS, DRAFT_TRTLLM],
            "draft experts still reach trtllm_fp4_block_scale_routed_moe",
        ),
        ([replace(MAIN_CUTLASS[0], error=_ERROR)], "SGLang raises NotImplementedError"),
        ([replace(MAIN_CUTLASS[0], kernel=None, reason="why")], "unknown: why"),
        ([], "the trace stopped short"),
    ],
)
def test_only_what_runs_everywhere_has_no_problem(layers: list[Layer], problem: str | None) -> None:
    sample = facts("sm_120", layers)
    assert sample.trace is not None
    trace = judged(sample.trace, sample.call_texts)
    found = outcome(_CANDIDATE, trace, sample.call_texts, has_clamp=True)
    assert found.problem == problem
    assert found.flags == ("--api-key", "[redacted]")


def test_a_draft_that_is_not_there_does_not_run() -> None:
    sample = facts("sm_120", [*MAIN_CUTLASS])
    assert sample.trace is not None
    trace = judged(sample.trace, sample.call_texts)
    assert outcome(_CANDIDATE, trace, sample.call_texts, has_clamp=True).problem is None
    trace = replace(trace, resolved_args={"speculative_algorithm": "EAGLE"})
    found = outcome(_CANDIDATE, trace, sample.call_texts, has_clamp=True)
    assert found.problem == "the trace stopped short"


def test_a_dropped_clamp_is_a_problem_of_models_that_have_one() -> None:
    sample = facts("sm_120", [*MAIN_NVFP4_CUTLASS], call=CALL_WITHOUT_CLAMP)
    assert sample.trace is not None
    texts = sample.call_texts
    assert outcome(_CANDIDATE, sample.trace, texts, has_clamp=True).problem == (
        "drops swiglu_limit"
    )
    assert outcome(_CANDIDATE, sample.trace, texts, has_clamp=False).problem is None


def test_a_failed_trace_is_a_problem() -> None:
    assert outcome(_CANDIDATE, UndeterminedError("killed"), {}, True).problem == "the trace failed"


_QUANTISED = (*_PLAIN, "--quantization", "modelopt_fp4")


def test_a_quantization_that_spoils_the_experts_is_taken_out_of_every_candidate() -> None:
    spoilt = replace(MAIN_TRTLLM[0], quant_method="ModelOptNvFp4OnlineFusedMoEMethod")
    tried = candidates(_trace(spoilt), _QUANTISED, _NVFP4, clamp_lost=False)
    assert [one.flags for one in tried] == [
        _PLAIN,
        (*_PLAIN, "--moe-runner-backend", "flashinfer_cutlass"),
        (*_PLAIN, "--moe-runner-backend", "marlin"),
    ]
    assert all(one.change.endswith(" without --quantization") for one in tried)
    right = candidates(_trace(*MAIN_TRTLLM), _QUANTISED, _NVFP4, clamp_lost=False)
    assert all("--quantization" in one.flags for one in right)


def test_nothing_runs_that_leaves_an_error_about_the_experts() -> None:
    another = [replace(layer, quant_method="AnotherFusedMoEMethod") for layer in MAIN_NVFP4_CUTLASS]
    spoilt = facts("sm_120", another, flags=_QUANTISED)
    option = Alternative("x", _QUANTISED, None)
    problem = _left(spoilt, option)
    assert problem is not None
    assert problem.startswith("leaves DSV301")
    assert _left(spoilt, replace(option, flags=_PLAIN)) is None


def test_what_runs_as_a_fallback_is_called_that() -> None:
    slow = replace(MAIN_NVFP4_CUTLASS[0], verdict=Verdict.FALLBACK)
    options = (
        Alternative("--moe-runner-backend marlin", _PLAIN, None, (slow,)),
        Alternative("--moe-runner-backend other", _PLAIN, None, (MAIN_NVFP4_CUTLASS[0],)),
    )
    known = replace(facts("sm_120", MAIN_TRTLLM), alternatives=options)
    text = way_out(known, MAIN_TRTLLM[0]).text
    assert "runs: --moe-runner-backend marlin (a fallback); --moe-runner-backend other." in text


def test_a_patch_that_keeps_speculation_and_the_clamp_is_named() -> None:
    """Where only the clamp speaks against CUTLASS for the main experts, FIX103 and FIX101 help."""
    flags = ("--tp", "4", *_EAGLE, "--moe-runner-backend", "triton")
    base = facts("sm_120", [*MAIN_TRTLLM, DRAFT_TRTLLM], flags=flags)
    candidate = Candidate("x", (*_PLAIN, "--moe-runner-backend", "flashinfer_cutlass"))
    cutlass = outcome(candidate, _trace(*MAIN_NVFP4_CUTLASS), {}, has_clamp=False)

    def commands(option: Alternative) -> list[str]:
        remedy = way_out(replace(base, alternatives=(option,)), DRAFT_TRTLLM)
        named = [one for one in remedy.commands if "--only FIX103" in one]
        assert bool(named) == ("with the fixes FIX101 and FIX103" in remedy.text)
        return named

    [command] = commands(replace(cutlass, problem="drops swiglu_limit"))
    assert command.startswith("dsv4doctor fix --only FIX101 --only FIX103 ")
    assert command.endswith(
        "--speculative-algorithm EAGLE --speculative-num-steps 1 "
        "--moe-runner-backend flashinfer_cutlass"
    )
    assert commands(replace(cutlass, problem="SGLang raises ValueError")) == []
    assert commands(replace(cutlass, problem="drops swiglu_limit", layers=())) == []


def test_a_fix_is_named_with_its_whole_command() -> None:
    flags = ("--tp", "4", *_EAGLE)
    launch = facts("sm_120", [*MAIN_CUTLASS, DRAFT_TRTLLM], flags=flags)
    [result] = run_rules([moe_draft_sm100_only.RULE], launch)
    [finding] = result.findings
    assert finding.remedy is not None
    [command] = [one for one in finding.remedy.commands if one.startswith("dsv4doctor fix")]
    assert command.startswith("dsv4doctor fix --only FIX101 ")
    assert command.endswith(" -- " + " ".join(flags))


def test_experts_whose_cut_is_too_small_are_spread_whole() -> None:
    said = "hidden_size and intermediate_size_per_partition have to be multiples of 128"
    stopped = replace(
        _trace(),
        errors=(SglangError("main", "ValueError", said, None),),
        resolved_args={"tp_size": 8, "ep_size": 1},
    )
    spread = (*_PLAIN, "--ep-size", "8")
    assert _flags(stopped, _PLAIN)[0] == spread
    already = replace(stopped, resolved_args={"tp_size": 8, "ep_size": 8})
    other = replace(stopped, errors=(SglangError("main", "ValueError", "no", None),))
    assert spread not in _flags(already, _PLAIN) + _flags(other, _PLAIN)
