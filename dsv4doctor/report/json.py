"""The report as JSON: docs/report.schema.json describes it."""

from __future__ import annotations

from typing import Any

from dsv4doctor import __version__, jsonio
from dsv4doctor.errors import DoctorError
from dsv4doctor.gate import fingerprint
from dsv4doctor.models import (
    Accepted,
    Checkpoint,
    Facts,
    Failure,
    Finding,
    Layer,
    Location,
    Report,
    Run,
    SglangError,
    Stack,
    Step,
    Trace,
)
from dsv4doctor.report.common import is_about_pair, names_of

SCHEMA = "dsv4doctor-report/1"


RUN_SCHEMA = "dsv4doctor-reports/1"


def render(report: Report) -> str:
    return jsonio.dump(document(report))


def render_run(run: Run) -> str:
    """The report; of several targets, all of them in one object."""
    reports = [
        document(outcome, names_of(run)) if isinstance(outcome, Report) else _failure(outcome)
        for outcome in run.outcomes
    ]
    if len(reports) == 1:
        return jsonio.dump(reports[0])
    return jsonio.dump({**_head(__version__), "schema": RUN_SCHEMA, "reports": reports})


def _failure(failure: Failure) -> dict[str, Any]:
    kind = "usage" if failure.exit_code == 2 else "undetermined"
    return {**failed(kind, failure.message, failure.hint), "target": failure.target}


def render_error(error: DoctorError) -> str:
    """The report of a run that ended before there was anything to report."""
    kind = "usage" if error.exit_code == 2 else "undetermined"
    return render_failure(kind, error.message, error.hint)


def render_failure(kind: str, message: str, hint: str | None) -> str:
    return jsonio.dump(failed(kind, message, hint))


def failed(kind: str, message: str, hint: str | None) -> dict[str, Any]:
    empty: dict[str, Any] = {
        "target": None,
        "sglang": None,
        "arch": None,
        "arch_source": None,
        "gpu": None,
        "checkpoint": None,
        "launch": None,
        "stack": None,
        "resolved_args": {},
        "arg_changes": [],
        "environment_overwritten": {},
        "layers": [],
        "paths": [],
        "findings": [],
        "accepted": [],
        "gate_notes": [],
        "rules": [],
        "alternatives": [],
        "leniencies": [],
        "notes": [],
        "decision_path": [],
        "timings": {},
        "cached": False,
    }
    errors = [
        {"kind": kind, "phase": None, "type": None, "message": message, "hint": hint, "at": None}
    ]
    return {**_head(__version__), **empty, "errors": errors}


def document(report: Report, pair: tuple[str, ...] = ()) -> dict[str, Any]:
    """`report` as plain values, in the schema's order; `pair`: its targets' names, of two."""
    facts = report.facts
    snapshot, trace = facts.snapshot, facts.trace
    return {
        **_head(report.tool_version),
        "target": report.gate.target,
        "sglang": _sglang(facts),
        "arch": facts.arch.name,
        "arch_source": facts.arch_source,
        "gpu": _gpu(facts),
        "checkpoint": _checkpoint(snapshot.checkpoint) if snapshot.checkpoint else None,
        "launch": jsonio.to_plain(snapshot.launch) if snapshot.launch else None,
        "stack": _stack(snapshot.stack) if snapshot.stack else None,
        "resolved_args": trace.resolved_args if trace else {},
        "arg_changes": [jsonio.to_plain(change) for change in trace.arg_changes] if trace else [],
        "environment_overwritten": _environment(trace),
        "layers": [_layer(layer) for layer in trace.layers] if trace else [],
        "paths": [jsonio.to_plain(path) for path in trace.paths] if trace else [],
        "findings": [_finding(finding, facts, pair) for finding in report.findings],
        "accepted": [_accepted(one, facts, pair) for one in report.gate.accepted],
        "gate_notes": list(report.gate.notes),
        "errors": _errors(trace),
        "rules": [
            {
                "rule": result.rule,
                "title": result.title,
                "outcome": result.outcome.value,
                "reason": result.reason,
            }
            for result in report.results
        ],
        "alternatives": [
            {"change": option.change, "flags": list(option.flags), "problem": option.problem}
            for option in facts.alternatives
        ],
        "leniencies": list(trace.leniencies) if trace else [],
        "notes": list(facts.notes),
        "decision_path": [_step(step) for step in trace.steps] if trace else [],
        "timings": report.timings,
        "cached": trace.cached if trace else False,
    }


def _head(version: str) -> dict[str, Any]:
    return {"schema": SCHEMA, "tool": {"name": "dsv4doctor", "version": version}}


def _stack(stack: Stack) -> dict[str, Any]:
    """The packages; what they hold for which GPU is in the layers' reasons."""
    plain: dict[str, Any] = jsonio.to_plain(stack)
    del plain["evidence"]
    return plain


def _sglang(facts: Facts) -> dict[str, Any] | None:
    tree = facts.trace.sglang if facts.trace else facts.snapshot.sglang
    if tree is None:
        return None
    return {"version": tree.version, "path": tree.root, "origin": tree.origin}


def _gpu(facts: Facts) -> dict[str, Any]:
    host = facts.snapshot.host
    return {
        "driver": facts.snapshot.gpu.driver,
        "unavailable": facts.snapshot.gpu.unavailable,
        "gpus": [
            {**jsonio.to_plain(gpu), "arch": gpu.arch.name} for gpu in facts.snapshot.gpu.gpus
        ],
        "measured": [jsonio.to_plain(one) for one in host.measured] if host else [],
    }


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "name": checkpoint.name,
        "path": checkpoint.path,
        "architectures": list(checkpoint.architectures),
        "declared_main": _value(checkpoint.declared_main),
        "declared_draft": _value(checkpoint.declared_draft),
        "main_layers": len(checkpoint.main_layers),
        "draft_stages": checkpoint.draft_stages,
        "tensor_count": checkpoint.tensor_count,
        "payload_bytes": checkpoint.payload_bytes,
        "shard_count": checkpoint.shard_count,
        "content_key": checkpoint.content_key,
        "notes": list(checkpoint.notes),
    }


def _value(member: Any) -> Any:
    return None if member is None else member.value


def _environment(trace: Trace | None) -> dict[str, Any]:
    overwritten = trace.environment_overwritten if trace else {}
    return {name: {"before": old, "after": new} for name, (old, new) in overwritten.items()}


def _layer(layer: Layer) -> dict[str, Any]:
    kernel = layer.kernel
    return {
        "name": layer.name,
        "role": layer.role.value,
        "stored_format": _value(layer.stored_format),
        "quant_method": layer.quant_method,
        "runner_backend": layer.runner_backend,
        "decided_at": _location(layer.decided_at),
        "flags_consulted": list(layer.flags_consulted),
        "kernel": {"symbol": kernel.symbol, "call_site": _location(kernel.call_site)}
        if kernel
        else None,
        "verdict": layer.verdict.value,
        "reason": layer.reason,
        "error": _sglang_error(layer.error) if layer.error else None,
    }


def _location(location: Location | None) -> dict[str, Any] | None:
    return None if location is None else dict(jsonio.to_plain(location))


def _sglang_error(error: SglangError) -> dict[str, Any]:
    return {
        "kind": "sglang",
        "phase": error.phase,
        "type": error.type,
        "message": error.message,
        "hint": None,
        "at": _location(error.at),
    }


def _errors(trace: Trace | None) -> list[dict[str, Any]]:
    """What SGLang raised, and what stopped the trace."""
    if trace is None:
        return []
    found = [_sglang_error(error) for error in trace.errors]
    for text in trace.unresolved:
        phase, _, message = text.partition(": ")
        found.append(
            {
                "kind": "undetermined",
                "phase": phase,
                "type": None,
                "message": message,
                "hint": None,
                "at": None,
            }
        )
    return found


def _accepted(one: Accepted, facts: Facts, pair: tuple[str, ...]) -> dict[str, Any]:
    return {
        "by": one.by,
        "reason": one.reason,
        "expires": one.expires,
        "finding": _finding(one.finding, facts, pair),
    }


def _finding(finding: Finding, facts: Facts, pair: tuple[str, ...]) -> dict[str, Any]:
    remedy = finding.remedy
    return {
        "rule": finding.rule,
        "severity": finding.severity.value,
        "subject": finding.subject,
        "message": finding.message,
        "consequence": finding.consequence,
        "evidence": list(finding.evidence),
        "locations": [_location(location) for location in finding.locations],
        "remedy": {"text": remedy.text, "commands": list(remedy.commands), "fix": remedy.fix}
        if remedy
        else None,
        "fingerprint": fingerprint(finding, facts),
        "targets": list(pair) if is_about_pair(finding) else [],
    }


def _step(step: Step) -> dict[str, Any]:
    plain: dict[str, Any] = jsonio.to_plain(step)
    return plain
