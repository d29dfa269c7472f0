"""SARIF 2.1.0: one SARIF run a target, for code scanning and other viewers.

A result's location is the launch script, the user's own file; the lines of the SGLang tree that
prove it are its related locations, and of what is about a pair the other side's script.  Without a
script those lines are the locations.
"""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from dsv4doctor import __version__, jsonio
from dsv4doctor.gate import fingerprint
from dsv4doctor.models import (
    Accepted,
    Failure,
    Finding,
    Location,
    Outcome,
    Report,
    Run,
    Severity,
)
from dsv4doctor.report.common import is_about_pair, is_absolute, names_of, scripts, sentences
from dsv4doctor.rules import RULES

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_TREE = "SGLANG"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def render(run: Run) -> str:
    runs = [
        _failure(outcome) if isinstance(outcome, Failure) else _report(outcome, names_of(run))
        for outcome in run.outcomes
    ]
    return jsonio.dump({"$schema": _SCHEMA, "version": "2.1.0", "runs": runs})


def _failure(failure: Failure) -> dict[str, Any]:
    hint = f" ({failure.hint})" if failure.hint else ""
    return {
        **_head(failure.target, []),
        "invocations": [
            {
                "executionSuccessful": False,
                "exitCode": failure.exit_code,
                "toolExecutionNotifications": [_notification("error", failure.message + hint)],
            }
        ],
        "results": [],
    }


def _report(report: Report, pair: tuple[str, ...]) -> dict[str, Any]:
    results = [_result(finding, report, pair) for finding in report.findings]
    accepted = [_accepted(one, report, pair) for one in report.gate.accepted]
    tree = report.facts.trace.sglang if report.facts.trace else report.facts.snapshot.sglang
    bases = {"originalUriBaseIds": {_TREE: {"uri": _folder(tree.root)}}} if tree else {}
    return {
        **_head(
            report.gate.target, [_rule(result.rule, result.title) for result in report.results]
        ),
        **bases,
        "invocations": [_invocation(report)],
        "results": [*results, *accepted],
    }


def _head(target: str | None, rules: list[dict[str, Any]]) -> dict[str, Any]:
    driver = {"name": "dsv4doctor", "version": __version__, "rules": rules}
    return {
        "tool": {"driver": driver},
        "automationDetails": {"id": f"dsv4doctor/{target}/" if target else "dsv4doctor/"},
        "columnKind": "unicodeCodePoints",
    }


def _rule(name: str, title: str) -> dict[str, Any]:
    severity = next((rule.severity for rule in RULES if rule.id == name), Severity.WARNING)
    return {
        "id": name,
        "shortDescription": {"text": title},
        "help": {"text": f"{title}. See `dsv4doctor explain {name}`."},
        "defaultConfiguration": {"level": _LEVELS[severity]},
    }


# ------------------------------------------------------------------------------ results


def _result(finding: Finding, report: Report, pair: tuple[str, ...]) -> dict[str, Any]:
    mark = fingerprint(finding, report.facts)
    places = scripts(report.facts, finding)
    own = {file for file, _ in places}
    proof = [_location(one) for one in finding.locations if one.file not in own]
    where: dict[str, Any] = {"locations": proof}
    if places:
        first, *others = (_script(*place) for place in places)
        numbered = [{**one, "id": number} for number, one in enumerate([*others, *proof], 1)]
        where = {"locations": [first], "relatedLocations": numbered}
    targets = list(pair) if is_about_pair(finding) else []
    about = f"{' and '.join(targets)}: " if targets else ""
    return {
        "ruleId": finding.rule,
        "level": _LEVELS[finding.severity],
        # "](" would make a viewer see a link
        "message": {"text": f"{about}{finding.subject}: {sentences(finding)}".replace("](", "] (")},
        **where,
        "partialFingerprints": {
            "dsv4doctor/v1": mark,
            "primaryLocationLineHash": f"{mark}:1",  # the one that GitHub goes by
        },
        "properties": {"subject": finding.subject, "evidence": list(finding.evidence)}
        | ({"targets": targets} if targets else {}),
    }


def _accepted(one: Accepted, report: Report, pair: tuple[str, ...]) -> dict[str, Any]:
    until = f" (until {one.expires})" if one.expires else ""
    suppression = {
        "kind": "external",
        "status": "accepted",
        "justification": f"{one.by}: {one.reason}{until}",
    }
    return {**_result(one.finding, report, pair), "suppressions": [suppression]}


def _location(location: Location) -> dict[str, Any]:
    region: dict[str, Any] = {"startLine": max(1, location.line)}
    if location.source:
        region["snippet"] = {"text": location.source}
    found: dict[str, Any] = {
        "physicalLocation": {"artifactLocation": _artifact(location.file, _TREE), "region": region}
    }
    if location.function:
        found["logicalLocations"] = [{"fullyQualifiedName": location.function}]
    return found


def _script(file: str, line: int) -> dict[str, Any]:
    return {
        "physicalLocation": {
            "artifactLocation": _artifact(file, "%SRCROOT%"),
            "region": {"startLine": line},
        }
    }


def _artifact(file: str, base: str) -> dict[str, str]:
    if is_absolute(file):
        return {"uri": PurePath(file).as_uri()}
    return {"uri": quote(os.fsencode(PurePath(file).as_posix())), "uriBaseId": base}


def _folder(root: str) -> str:
    return PurePath(root).as_uri() + "/" if is_absolute(root) else quote(os.fsencode(root)) + "/"


# ------------------------------------------------------------------------------ how it went


def _invocation(report: Report) -> dict[str, Any]:
    crashed = [result for result in report.results if result.outcome is Outcome.CRASH]
    errors = [f"rule {result.rule} crashed: {result.reason}" for result in crashed]
    gap = report.gate.undetermined
    if gap is not None and not crashed:
        errors.append(f"not determined: {gap}")
    skipped = [
        _notification("note", f"not checked ({result.reason})", result.rule)
        for result in report.results
        if result.outcome is Outcome.SKIP
    ]
    return {
        "executionSuccessful": gap is None,
        "exitCode": report.gate.exit_code,
        "toolExecutionNotifications": [
            *(_notification("error", text) for text in errors),
            *(_notification("warning", note) for note in report.gate.notes),
        ],
        "toolConfigurationNotifications": skipped,
    }


def _notification(level: str, text: str, rule: str | None = None) -> dict[str, Any]:
    about = {"associatedRule": {"id": rule}} if rule else {}
    return {"level": level, "message": {"text": text}, **about}
