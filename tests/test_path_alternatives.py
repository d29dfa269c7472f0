"""What is tried where a hot path does not run."""

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from dsv4doctor import gate
from dsv4doctor.asked import Options
from dsv4doctor.audit import Settings, audit, exit_code
from dsv4doctor.errors import UndeterminedError
from dsv4doctor.models import Kernel, Layer, Report, Role, Severity, SglangTree, Trace, Verdict
from dsv4doctor.path_alternatives import path_candidates, path_outcome
from dsv4doctor.rules import hot_path_fails
from dsv4doctor.target import resolve

SWITCH = "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL"
BACKEND = "SGLANG_SM120_FLASHMLA_BACKEND"
FAILS = hot_path_fails.EXAMPLES[0].facts
STOCK = "deepseek-ai__DeepSeek-V4-Flash"


def _trace(chunk: int | None = 8192) -> Trace:
    assert FAILS.trace is not None
    return replace(FAILS.trace, resolved_args={"chunked_prefill_size": chunk})


def _tried(trace: Trace, environment: dict[str, str], default: str) -> list[str]:
    found = path_candidates(trace, ("--tp", "4"), environment, {SWITCH: default})
    return [one.change for one in found]


def test_switches_are_turned_the_other_way() -> None:
    assert _tried(_trace(), {}, "True") == [f"{SWITCH}=0"]
    assert _tried(_trace(), {SWITCH: "0"}, "True") == [f"{SWITCH}=1"]
    assert _tried(_trace(), {}, "flashinfer") == []  # no switch


def test_variables_of_several_paths_are_tried_together() -> None:
    trace = _trace()
    decode = replace(trace.paths[0], name="sparse-mla-decode", flags_consulted=(BACKEND,))
    trace = replace(trace, paths=(decode, *trace.paths))
    defaults = {SWITCH: "True", BACKEND: "flashinfer"}

    def tried(environment: dict[str, str]) -> list[str]:
        return [one.change for one in path_candidates(trace, (), environment, defaults)]

    both = [f"{BACKEND}=triton", f"{SWITCH}=0", f"{BACKEND}=triton and {SWITCH}=0"]
    assert tried({}) == both
    assert path_candidates(trace, (), {}, defaults)[-1].environment == {
        BACKEND: "triton",
        SWITCH: "0",
    }
    assert tried({BACKEND: "triton"}) == [f"{SWITCH}=0"]


def test_long_chunks_are_cut_as_well() -> None:
    chunk = "--chunked-prefill-size 8192"
    wanted = [f"{SWITCH}=0", chunk, f"{SWITCH}=0 and {chunk}"]
    assert _tried(_trace(16384), {}, "True") == wanted
    assert _tried(_trace(-1), {}, "True") == wanted
    found = path_candidates(_trace(16384), ("--chunked-prefill-size=16384",), {}, {})
    assert [one.flags for one in found] == [("--chunked-prefill-size", "8192")]


@pytest.mark.parametrize("paths", [3, 7])
def test_what_holds_all_of_them_is_never_left_out(paths: int) -> None:
    trace = _trace(16384)
    names = [f"SGLANG_OPT_{number}" for number in range(paths)]
    failing = tuple(replace(trace.paths[0], flags_consulted=(name,)) for name in names)
    found = path_candidates(replace(trace, paths=failing), (), {}, {name: "True" for name in names})
    every = " and ".join(f"{name}=0" for name in names)
    tried = [one.change for one in found]
    assert len(tried) == 6
    assert tried[0] == "SGLANG_OPT_0=0"
    assert every in tried
    assert tried[-1] == f"{every} and --chunked-prefill-size 8192"


@pytest.mark.parametrize("role", [Role.MAIN, Role.DRAFT])
def test_experts_that_ran_have_to_run_with_it_too(role: Role) -> None:
    trace = _trace()
    [option] = path_candidates(trace, (), {}, {SWITCH: "True"})
    runs = tuple(replace(path, verdict=Verdict.RUNS) for path in trace.paths)
    layer = Layer(
        *("model.layers.0.mlp.experts", role, None, None, None, None, ()),
        *(Kernel("experts", None), Verdict.RUNS, "as it was"),
    )

    def problem(before: Verdict, *after: Verdict) -> str | None:
        first = replace(trace, layers=(replace(layer, verdict=before),))
        layers = tuple(replace(layer, verdict=one, reason="no kernel") for one in after)
        result = replace(trace, paths=runs, layers=layers)
        return path_outcome(option, result, first).problem

    said = f"{role.value} experts: no kernel"
    assert problem(Verdict.RUNS, Verdict.FAILS) == said
    assert problem(Verdict.FALLBACK, Verdict.UNKNOWN) == said
    assert problem(Verdict.RUNS) == f"{role.value} experts: they were not built"
    assert problem(Verdict.RUNS, Verdict.FALLBACK) is None
    assert problem(Verdict.FAILS, Verdict.FAILS) is None  # other rules say so, with this or not


def test_only_what_is_known_to_run_helps() -> None:
    trace = _trace()
    [option] = path_candidates(trace, (), {}, {SWITCH: "True"})
    runs = tuple(replace(path, verdict=Verdict.FALLBACK) for path in trace.paths)

    def problem(result: Trace | UndeterminedError) -> str | None:
        return path_outcome(option, result, trace).problem

    assert problem(replace(trace, paths=runs)) is None
    assert "sparse-mla-prefill" in (problem(trace) or "")
    unknown = (*runs, replace(runs[0], verdict=Verdict.UNKNOWN, reason="who knows"))
    assert "who knows" in (problem(replace(trace, paths=unknown)) or "")
    other = (*runs, replace(runs[0], name="mhc-pre", verdict=Verdict.FAILS))
    assert "mhc-pre" in (problem(replace(trace, paths=other)) or "")
    assert "not reached" in (problem(replace(trace, paths=())) or "")
    short = replace(trace, paths=runs, unresolved=("draft: KeyError: 'x'",))
    assert problem(short) == "the trace stopped short"
    assert problem(UndeterminedError("killed")) == "the trace failed"


def test_fingerprint_tells_kernels_apart() -> None:
    [finding] = hot_path_fails.RULE.check(FAILS)
    trace = _trace()
    other = tuple(replace(path, kernel=Kernel("another", None)) for path in trace.paths)
    changed = replace(FAILS, trace=replace(trace, paths=other))
    assert gate.fingerprint(finding, FAILS) != gate.fingerprint(finding, changed)


def test_strict_asks_about_hot_paths_only_where_they_were_asked_for() -> None:
    """The KV cache and the all-reduce are never known: `check --strict` would never pass."""
    trace = _trace()
    paths = tuple(replace(path, verdict=Verdict.UNKNOWN) for path in trace.paths)
    report = Report("0", replace(FAILS, trace=replace(trace, paths=paths)), ())
    assert exit_code(report, Severity.ERROR, strict=True) == 0
    assert exit_code(report, Severity.ERROR, strict=True, strict_paths=True) == 3
    policy = gate.Policy(strict=True, strict_paths=True)
    assert gate.decide(report, policy, date(2026, 6, 1)).gate.exit_code == 3


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("version", "arch", "flags", "environment"),
    [
        # Its FlashInfer has no sparse MLA for sm_12x either: decode takes the other variable.
        ("0.5.15.post1", "sm_120", (), {BACKEND: "triton", SWITCH: "0"}),
        ("0.5.14", "sm_120", ("--chunked-prefill-size", "16384"), {}),
        ("0.5.14", "sm_120", (), None),
        ("0.5.15.post1", "sm_100", (), None),
    ],
)
def test_a_prefill_without_a_kernel(
    sglang_tree: Callable[[str], SglangTree],
    checkpoint: Callable[..., Path],
    version: str,
    arch: str,
    flags: tuple[str, ...],
    environment: dict[str, str] | None,
) -> None:
    """FlashMLA's sparse prefill on sm_12x: always, with long chunks, or not at all."""
    options = Options(
        model=str(checkpoint(STOCK)),
        flags=("--tp", "4", *flags),
        sglang=sglang_tree(version).root,
        arch=arch,
    )
    report = audit(resolve(options), Settings())
    found = [finding for finding in report.findings if finding.rule == "DSV209"]
    if environment is None:
        assert found == []
        return
    finding = found[-1]
    assert finding.severity is Severity.ERROR
    assert finding.subject == "main sparse-mla-prefill"
    decode = ["main sparse-mla-decode"] if BACKEND in environment else []
    assert [one.subject for one in found[:-1]] == decode
    assert finding.locations[0].file.endswith("deepseek_v4_backend.py")
    works = report.facts.path_alternatives[-1]
    assert works.problem is None
    assert works.environment == environment
    assert finding.remedy is not None
    assert all(works.change in one.remedy.text for one in found if one.remedy)
