"""Fingerprints, suppressions, the baseline and exit codes, without a command line."""

from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest
import reporting

from dsv4doctor import baseline as baselines
from dsv4doctor import gate
from dsv4doctor.baseline import Baseline
from dsv4doctor.errors import UsageError
from dsv4doctor.models import Facts, Failure, Kernel, Location, Report, Run, Severity, SglangTree
from dsv4doctor.rules.samples import MAIN_CUTLASS, MAIN_TRTLLM, facts

_TODAY = reporting.TODAY


def _suppression(**changes: object) -> gate.Suppression:
    one = gate.Suppression("DSV103", "a lab box", date(2026, 12, 31), "dsv4doctor.toml: suppress 1")
    return replace(one, **changes)  # type: ignore[arg-type]


def _counted(report: Report) -> list[str]:
    return [finding.rule for finding in report.findings]


def _marks(sample: Facts) -> list[str]:
    return [gate.fingerprint(found, sample) for found in reporting.report(sample).findings]


# ------------------------------------------------------------------------------ fingerprints


def _another_release(sample: Facts) -> Facts:
    """The same decisions at other lines of another tree."""
    assert sample.trace is not None

    def moved(where: Location | None) -> Location | None:
        return where and replace(where, line=where.line + 7, source="changed()")

    layers = tuple(
        replace(
            layer,
            decided_at=moved(layer.decided_at),
            kernel=layer.kernel and Kernel(layer.kernel.symbol, moved(layer.kernel.call_site)),
        )
        for layer in sample.trace.layers
    )
    tree = SglangTree("another/place", "0.5.15", "folder")
    return replace(sample, trace=replace(sample.trace, sglang=tree, layers=layers))


def test_fingerprints_outlive_a_release_bump() -> None:
    before, after = _marks(reporting.story()), _marks(_another_release(reporting.story()))
    assert before == after
    assert len(set(before)) == len(before) == 3


def test_fingerprints_change_with_the_method_or_the_kernel() -> None:
    sample = facts("sm_120", [*MAIN_TRTLLM])
    assert sample.trace is not None

    def with_layers(**changes: object) -> Facts:
        assert sample.trace is not None
        layers = tuple(replace(one, **changes) for one in sample.trace.layers)  # type: ignore[arg-type]
        return replace(sample, trace=replace(sample.trace, layers=layers))

    other_method = with_layers(quant_method="AnotherMethod")
    other_kernel = with_layers(
        kernel=Kernel("flashinfer.fused_moe.trtllm_fp4_block_scale_moe", None)
    )
    marks = {tuple(_marks(one)) for one in (sample, other_method, other_kernel)}
    assert len(marks) == 3


# ------------------------------------------------------------------------------ suppressions


def test_a_suppressed_finding_does_not_count() -> None:
    policy = gate.Policy(fail_on=Severity.WARNING, suppressions=(_suppression(),))
    report = reporting.report(reporting.story(), policy)
    assert _counted(report) == ["DSV101", "DSV102"]
    (accepted,) = report.gate.accepted
    assert (accepted.by, accepted.reason, accepted.expires) == (
        "suppression",
        "a lab box",
        "2026-12-31",
    )


@pytest.mark.parametrize(("days", "counts"), [(0, False), (-1, True)])
def test_the_last_day_of_a_suppression(days: int, counts: bool) -> None:
    one = _suppression(expires=_TODAY + timedelta(days=days))
    report = reporting.report(reporting.story(), gate.Policy(suppressions=(one,)))
    assert ("DSV103" in _counted(report)) is counts
    assert any("ended on 2026-05-31 (a lab box)" in note for note in report.gate.notes) is counts


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"subject": "model.decoder.*"}, False),
        ({"subject": "model.layers.*"}, True),
        ({"target": "production"}, False),
        ({"target": "lab"}, True),
        ({"rule": "DSV104"}, True),
    ],
)
def test_what_a_suppression_covers(changes: dict[str, str], counts: bool) -> None:
    policy = gate.Policy(target="production", suppressions=(_suppression(**changes),))
    assert ("DSV103" in _counted(reporting.report(reporting.story(), policy))) is counts


def test_a_suppression_without_a_finding_is_pointed_out() -> None:
    policy = gate.Policy(suppressions=(_suppression(),))
    (note,) = reporting.report(facts("sm_120", [*MAIN_CUTLASS]), policy).gate.notes
    assert note == "dsv4doctor.toml: suppress 1: the suppression of DSV103 meets no finding"
    assert reporting.report(reporting.story(), policy).gate.notes == ()


# ------------------------------------------------------------------------------ baseline


def _baseline(report: Report) -> Baseline:
    return Baseline("known.json", gate.entries(report))


def test_known_findings_do_not_fail() -> None:
    policy = gate.Policy(baseline=_baseline(reporting.report(reporting.story())))
    report = reporting.report(_another_release(reporting.story()), policy)
    assert _counted(report) == []
    assert report.gate.exit_code == 0
    assert {one.by for one in report.gate.accepted} == {"baseline"}
    assert report.gate.notes == ()


def test_new_findings_fail_and_gone_ones_are_pointed_out() -> None:
    known = _baseline(reporting.report(facts("sm_120", [*MAIN_TRTLLM])))
    report = reporting.report(reporting.story(), gate.Policy(baseline=known))
    assert _counted(report) == ["DSV102", "DSV103"]
    assert report.gate.exit_code == 1
    everything = _baseline(reporting.report(reporting.story()))
    report = reporting.report(facts("sm_120", [*MAIN_TRTLLM]), gate.Policy(baseline=everything))
    assert report.gate.exit_code == 0
    gone = [note.split(" is gone")[0] for note in report.gate.notes]
    assert gone == ["DSV102 model.decoder.mlp.experts", "DSV103 model.decoder.mlp.experts"]


def test_a_finding_that_got_worse_is_new() -> None:
    known = _baseline(reporting.report(reporting.story()))
    milder = tuple(replace(entry, severity=Severity.WARNING) for entry in known.entries)
    policy = gate.Policy(baseline=replace(known, entries=milder))
    report = reporting.report(reporting.story(), policy)
    assert _counted(report) == ["DSV101", "DSV102"]


def test_entries_of_another_target_are_not_known_here() -> None:
    known = _baseline(reporting.report(reporting.story(), gate.Policy(target="lab")))
    policy = gate.Policy(target="production", baseline=known)
    report = reporting.report(reporting.story(), policy)
    assert len(_counted(report)) == 3
    assert report.gate.notes == ()


def test_entries_without_a_target_hold_for_every_target() -> None:
    """Written while the launch had no name; it has one now."""
    unnamed = _baseline(reporting.report(reporting.story()))
    assert {entry.target for entry in unnamed.entries} == {None}
    policy = gate.Policy(target="production", baseline=unnamed)
    assert _counted(reporting.report(reporting.story(), policy)) == []
    # What is not found here may be another target's: nothing is said to be gone.
    clean = reporting.report(facts("sm_120", [*MAIN_CUTLASS]), policy)
    assert clean.gate.notes == ()
    # The other way round an entry is of its own target only.
    named = _baseline(reporting.report(reporting.story(), gate.Policy(target="production")))
    assert len(_counted(reporting.report(reporting.story(), gate.Policy(baseline=named)))) == 3


def test_nothing_is_gone_where_the_rule_could_not_look() -> None:
    everything = _baseline(reporting.report(reporting.story()))
    sample = replace(reporting.story(), trace=None, trace_failure="it timed out")
    report = reporting.report(sample, gate.Policy(baseline=everything))
    assert not [note for note in report.gate.notes if "is gone" in note]
    assert report.gate.exit_code == 3


def test_baseline_file_holds_no_lines_and_no_paths(tmp_path: Path) -> None:
    text = baselines.render(gate.entries(reporting.report(reporting.story())))
    assert "1389" not in text
    assert "/" not in text.replace("dsv4doctor-baseline/1", "")
    path = tmp_path / "known.json"
    path.write_text(text, encoding="utf-8")
    again = baselines.read(path)
    assert set(again.entries) == set(gate.entries(reporting.report(reporting.story())))
    assert baselines.render(again.entries) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a baseline"),
        ('{"schema": "dsv4doctor-baseline/1"}', "findings"),
        ('{"schema": "dsv4doctor-baseline/1", "findings": [{"rule": 3}]}', "findings"),
        ('{"schema": "dsv4doctor-report/1", "findings": []}', "not a baseline"),
    ],
)
def test_damaged_baseline(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "known.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        baselines.read(path)
    assert str(path) in caught.value.message
    assert said in caught.value.message or said == "findings"


# ------------------------------------------------------------------------------ exit codes


@pytest.mark.parametrize(
    ("codes", "expected"), [((0, 0), 0), ((0, 1), 1), ((3, 1), 3), ((1, 2, 3), 2), ((), 0)]
)
def test_the_worst_target_decides(codes: tuple[int, ...], expected: int) -> None:
    clean = reporting.clean()
    outcomes = tuple(
        Failure("x", "y", None, code)
        if code == 2
        else replace(clean, gate=replace(clean.gate, exit_code=code))
        for code in codes
    )
    assert gate.worst(Run(outcomes)) == expected
