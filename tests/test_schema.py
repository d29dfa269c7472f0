"""docs/report.schema.json against what is really written."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsv4doctor.audit import run_rules
from dsv4doctor.errors import UndeterminedError, UsageError
from dsv4doctor.models import (
    ARCHS,
    Accepted,
    Alternative,
    ArgChange,
    Branch,
    Gate,
    Gpu,
    GpuFacts,
    HotPath,
    Kernel,
    Location,
    Package,
    Report,
    Role,
    SglangError,
    Stack,
    Step,
    Verdict,
)
from dsv4doctor.report import json as report_json
from dsv4doctor.rules import MODULES, RULES
from dsv4doctor.rules.samples import DRAFT_TRTLLM, MAIN_TRTLLM, facts

_PATH = Path(__file__).parent.parent / "docs" / "report.schema.json"
_SCHEMA: dict[str, Any] = json.loads(_PATH.read_text(encoding="utf-8"))
_VALIDATOR = jsonschema.Draft202012Validator(_SCHEMA)


def _written(report: Report) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(report_json.render(report))
    return plain


def _full() -> Report:
    """A report in which every list and every optional part is there."""
    at = Location("sglang/srt/server_args.py", 12, "resolve", "raise ValueError(x)")
    error = SglangError("arguments", "ValueError", "no", at)
    sample = facts(
        "sm_120",
        [*MAIN_TRTLLM, replace(DRAFT_TRTLLM, error=replace(error, phase="draft forward"))],
        flags=("--moe-runner-backend", "triton"),
        errors=(error,),
        unresolved=("draft: KeyError: 'x'",),
    )
    assert sample.trace is not None
    trace = replace(
        sample.trace,
        resolved_args={"moe_runner_backend": "triton", "tp_size": 4, "quantization": None},
        arg_changes=(ArgChange("page_size", None, "256", at),),
        environment_overwritten={"SGLANG_X": (None, "1")},
        steps=(Step("draft", "f", at.file, (Branch(at, "a", {"a": "1"}),), None, 43),),
        leniencies=("dill",),
        paths=(
            HotPath(
                *("dense-fp8", Role.MAIN, ("model.layers.0.self_attn.wq_b",), "triton"),
                *(Kernel("triton:f", at), at, ("SGLANG_X",), Verdict.FAILS, "no"),
                detail="weights 1x1",
                error=error,
            ),
        ),
    )
    gpu = Gpu(0, "RTX PRO 6000", ARCHS["sm_120"], 96 << 30, "0000:01:00.0", 5, 16, 0)
    stack = Stack("python", "3.11", (Package("torch", None, "==2.11", False),))
    snapshot = replace(sample.snapshot, gpu=GpuFacts((gpu,), "580.1"), stack=stack)
    sample = replace(
        sample,
        trace=trace,
        snapshot=snapshot,
        alternatives=(Alternative("x", ("--y",), "z"),),
        notes=("note",),
    )
    results = run_rules(RULES, sample)
    known = next(finding for result in results for finding in result.findings)
    accepted = Accepted(known, "suppression", "only in the lab", "2027-01-31")
    gate = Gate("production", accepted=(accepted,), notes=("a note",))
    return Report("0.1.0", sample, results, {"total": 1.0}, gate)


def test_schema_is_valid_and_strict() -> None:
    jsonschema.Draft202012Validator.check_schema(_SCHEMA)

    def objects(node: Any) -> Iterator[dict[str, Any]]:
        if isinstance(node, dict):
            if node.get("type") == "object":
                yield node
            for value in node.values():
                yield from objects(value)
        elif isinstance(node, list):
            for value in node:
                yield from objects(value)

    for node in objects(_SCHEMA):
        assert "additionalProperties" in node
        assert set(node.get("required", ())) == set(node.get("properties", ()))


def test_full_report() -> None:
    plain = _written(_full())
    _VALIDATOR.validate(plain)
    empty = [key for key, value in plain.items() if value in ([], {}, None, "")]
    assert empty == []
    assert plain["schema"] == _SCHEMA["$id"]
    assert plain["arch"] == "sm_120"
    assert plain["sglang"]["version"] == "0.5.14"
    last = plain["layers"][-1]
    assert last["decided_at"]["file"].endswith("modelopt_quant.py")
    assert (last["decided_at"]["line"], last["verdict"]) == (1389, "fails")
    assert [error["kind"] for error in plain["errors"]] == ["sglang", "undetermined"]


@pytest.mark.parametrize("module", MODULES, ids=[module.RULE.id for module in MODULES])
def test_every_example_of_a_rule(module: Any) -> None:
    for example in module.EXAMPLES:
        results = run_rules(RULES, example.facts)
        _VALIDATOR.validate(_written(Report("0.1.0", example.facts, results)))


def test_report_without_a_trace() -> None:
    sample = replace(facts("sm_120", []), trace=None, trace_failure="killed")
    _VALIDATOR.validate(_written(Report("0.1.0", sample, run_rules(RULES, sample))))


@pytest.mark.parametrize("kind", [UsageError, UndeterminedError])
def test_errors_are_reports_too(kind: type[UsageError]) -> None:
    plain = json.loads(report_json.render_error(kind("config.json: empty", "fetch it again")))
    _VALIDATOR.validate(plain)
    (error,) = plain["errors"]
    assert (error["message"], error["hint"]) == ("config.json: empty", "fetch it again")
    assert error["kind"] == ("usage" if kind is UsageError else "undetermined")


@pytest.mark.parametrize(
    "damage",
    [
        lambda plain: plain.update(extra=1),
        lambda plain: plain.pop("layers"),
        lambda plain: plain["layers"][0].update(verdict="works"),
        lambda plain: plain["findings"][0].update(rule="X1"),
        lambda plain: plain["sglang"].pop("version"),
    ],
    ids=["extra", "missing", "verdict", "rule", "sglang"],
)
def test_the_schema_rejects(damage: Any) -> None:
    plain = _written(_full())
    damage(plain)
    with pytest.raises(jsonschema.ValidationError):
        _VALIDATOR.validate(plain)
