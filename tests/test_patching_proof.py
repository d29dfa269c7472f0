"""What counts as proved: recorded traces held against one another."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from patching_trees import ONE

from dsv4doctor.errors import UndeterminedError
from dsv4doctor.fixes.fix import Aim, Fix
from dsv4doctor.models import (
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
from dsv4doctor.patching.proof import Aims, Proof, modules_of, prove
from dsv4doctor.patching.proof import compare as compare_facts
from dsv4doctor.rules.samples import DRAFT_CUTLASS, DRAFT_TRTLLM, MAIN_CUTLASS, facts

BEFORE = facts("sm_120", [*MAIN_CUTLASS, DRAFT_TRTLLM])
assert BEFORE.trace is not None
TRACE: Trace = BEFORE.trace
PATH = HotPath(
    name="sparse-mla-decode",
    role=Role.MAIN,
    layers=("model.layers.0.self_attn",),
    choice="triton",
    kernel=Kernel("triton:sglang.decode", None),
    decided_at=None,
    flags_consulted=(),
    verdict=Verdict.FALLBACK,
    reason="",
)
_FIXED = facts("sm_120", [*MAIN_CUTLASS, DRAFT_CUTLASS]).trace
assert _FIXED is not None
*MAIN, DRAFT_FIXED = _FIXED.layers
DRAFT = replace(
    ONE, changes=lambda layer: layer.role is Role.DRAFT, changes_path=lambda path: False
)
MLA = replace(ONE, id="FIX902", changes_path=lambda path: path.name == "sparse-mla-decode")


def _with(*layers: Layer, trace: Trace = TRACE, **changes: object) -> Trace:
    return replace(trace, layers=tuple(layers) or trace.layers, **changes)  # type: ignore[arg-type]


def compare(before: Facts, after: Trace, fixes: Sequence[Fix], aims: Aims | None = None) -> Proof:
    return compare_facts(before, replace(before, trace=after), fixes, aims or {})


def _error(phase: str, message: str = "no") -> SglangError:
    return SglangError(phase, "ValueError", message, None)


def test_what_was_meant_and_nothing_else() -> None:
    proof = compare(BEFORE, _FIXED, [DRAFT])
    assert proof.problems == ()
    (change,) = proof.changes
    assert (change.name, change.fixes) == (DRAFT_TRTLLM.name, ("FIX901",))
    assert change.before != change.after
    assert proof.unchanged == len(MAIN)


def test_lines_that_moved_are_no_change() -> None:
    moved = [
        replace(layer, decided_at=Location("other.py", 9), reason="another sentence")
        for layer in TRACE.layers
    ]
    assert compare(BEFORE, _with(*moved), []).changes == ()


@pytest.mark.parametrize(
    "change",
    [
        {"quant_method": "Other"},
        {"runner_backend": "marlin"},
        {"kernel": Kernel("flashinfer.other", None)},
        {"verdict": Verdict.UNKNOWN},
        {"error": _error("main forward")},
    ],
)
def test_any_other_layer_that_changed(change: dict[str, object]) -> None:
    first = replace(TRACE.layers[0], **change)  # type: ignore[arg-type]
    proof = compare(BEFORE, _with(first, *TRACE.layers[1:]), [DRAFT])
    assert proof.problems == (f"main {first.name} changed, and no fix means to change it",)


def test_a_layer_that_is_gone() -> None:
    proof = compare(BEFORE, _with(*MAIN), [DRAFT])
    assert proof.problems == (f"draft {DRAFT_TRTLLM.name} is no longer built",)


def test_many_layers_are_one_sentence() -> None:
    other = [replace(layer, quant_method="Other") for layer in (*MAIN, *MAIN)]
    other = [replace(layer, name=f"layers.{index}") for index, layer in enumerate(other)]
    first = replace(BEFORE, trace=_with(*other))
    changed = _with(*(replace(layer, quant_method="Second") for layer in other))
    assert compare(first, changed, []).problems == (
        "main layers.0 ... layers.5 (6) changed, and no fix means to change it",
    )
    assert compare(first, _with(other[0]), []).problems == (
        "main layers.1 ... layers.5 (5) is no longer built",
    )


def test_a_fix_that_the_launch_does_not_need_has_nothing_to_show() -> None:
    idle = replace(DRAFT, needed=lambda facts: None, verify=lambda facts, trace: ("no",))
    assert compare(BEFORE, TRACE, [idle]).problems == ()


def test_a_layer_that_only_now_is_built() -> None:
    """Where the draft raised while it was built, its layers are new."""
    stopped = replace(BEFORE, trace=_with(*MAIN, errors=(_error("draft"),)))
    assert compare(stopped, _FIXED, [DRAFT]).problems == ()
    silent = replace(BEFORE, trace=_with(*MAIN))
    assert compare(silent, _FIXED, [DRAFT]).problems == (
        f"draft {DRAFT_FIXED.name} changed, and no fix means to change it",
    )


def test_a_new_error_and_an_old_one() -> None:
    old, new = _error("draft"), _error("main", "broken\nby us")
    stopped = replace(BEFORE, trace=_with(errors=(old,)))
    assert compare(stopped, _with(errors=(old,)), []).problems == ()
    assert compare(stopped, _with(errors=(old, new)), []).problems == (
        "main now stops with ValueError: broken",
    )
    assert compare(BEFORE, _with(unresolved=("draft: KeyError: x",)), []).problems == (
        "draft now stops with KeyError: x",
    )


def test_hot_paths_count_like_layers() -> None:
    before = replace(BEFORE, trace=_with(paths=(PATH,)))
    ours = replace(PATH, kernel=Kernel("triton:dsv4doctor.kernels.x", None), verdict=Verdict.RUNS)
    after = _with(paths=(ours,))
    assert compare(before, after, [MLA]).problems == ()
    assert compare(before, after, [DRAFT]).problems == (
        "main sparse-mla-decode of model.layers.0.self_attn changed, and no fix means to change it",
    )
    assert compare(before, _with(paths=(PATH,)), []).changes == ()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kernel": None, "verdict": Verdict.UNKNOWN}, "reaches no kernel any more"),
        ({"kernel": Kernel("b.x", None), "verdict": Verdict.FAILS}, "fails: triton, x: fails"),
    ],
)
def test_what_is_meant_to_change_may_not_become_worse(
    change: dict[str, object], problem: str
) -> None:
    before = replace(BEFORE, trace=_with(paths=(PATH,)))
    after = _with(paths=(replace(PATH, **change),))  # type: ignore[arg-type]
    (said,) = compare(before, after, [MLA]).problems
    assert said.startswith("main sparse-mla-decode of model.layers.0.self_attn ")
    assert said.endswith(problem)


def test_what_the_fix_itself_finds_wrong() -> None:
    def fails(facts: Facts, after: Facts) -> tuple[str, ...]:
        raise KeyError("a bug")

    doubting = replace(DRAFT, verify=lambda facts, trace: ("still on TRT-LLM",))
    assert compare(BEFORE, TRACE, [doubting]).problems == ("FIX901: still on TRT-LLM",)
    assert compare(BEFORE, TRACE, [replace(DRAFT, verify=fails)]).problems == (
        "FIX901: its check failed: KeyError: 'a bug'",
    )


def test_a_layer_that_gets_another_method_than_the_plan_said() -> None:
    method = DRAFT_FIXED.quant_method
    assert method is not None
    said = Aim(Role.DRAFT, "triton", method)
    names = (DRAFT_FIXED.name,)
    assert compare(BEFORE, _FIXED, [DRAFT], {"FIX901": (said, names)}).problems == ()
    other = replace(said, method="Dsv4DoctorMxfp4MoEMethod")
    assert compare(BEFORE, _FIXED, [DRAFT], {"FIX901": (other, names)}).problems == (
        f"FIX901: draft {DRAFT_FIXED.name} gets {method}, planned was Dsv4DoctorMxfp4MoEMethod",
    )
    runner = replace(said, runner="marlin")
    assert compare(BEFORE, _FIXED, [DRAFT], {"FIX901": (runner, names)}).problems == (
        f"FIX901: draft {DRAFT_FIXED.name} gets {method}/{DRAFT_FIXED.runner_backend}, "
        f"planned was {method}/marlin",
    )


def test_a_method_that_calls_its_kernel_without_a_runner() -> None:
    """So does SGLang's NVFP4 method on CUTLASS."""
    assert DRAFT_FIXED.quant_method is not None
    aim = Aim(Role.DRAFT, "cutlass", DRAFT_FIXED.quant_method, runner="flashinfer_cutlass")
    bare = _with(*MAIN, replace(DRAFT_FIXED, runner_backend=None))
    assert compare(BEFORE, bare, [DRAFT], {"FIX901": (aim, (DRAFT_FIXED.name,))}).problems == ()
    other = replace(aim, method="Other")
    (said,) = compare(BEFORE, bare, [DRAFT], {"FIX901": (other, (DRAFT_FIXED.name,))}).problems
    assert said.endswith("planned was Other/flashinfer_cutlass")


def test_nothing_built_is_nothing_proved() -> None:
    """SGLang stops with the same error before and after."""
    stopped = replace(TRACE, layers=(), errors=(_error("arguments", "no such flag"),))
    proof = compare(replace(BEFORE, trace=stopped), stopped, [DRAFT])
    assert proof.problems == (
        "nothing was built: not proved (arguments: ValueError: no such flag)",
    )


def test_no_trace_is_no_proof() -> None:
    def stops() -> Facts:
        raise UndeterminedError("too slow")

    proof, after = prove(BEFORE, [DRAFT], stops)
    assert (proof.problems, after) == (("the changed tree could not be traced: too slow",), None)
    nothing = replace(BEFORE, trace=None, trace_failure="no torch")
    proof, _ = prove(BEFORE, [DRAFT], lambda: nothing)
    assert proof.problems == ("the changed tree gave no trace: no torch",)


def test_the_modules_of_files() -> None:
    files = ("sglang/srt/layers/moe/__init__.py", "sglang/srt/server_args.py")
    assert modules_of(files) == ("sglang.srt.layers.moe", "sglang.srt.server_args")
