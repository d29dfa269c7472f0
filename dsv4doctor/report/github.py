"""GitHub workflow commands: each finding an annotation, on the launch script where there is one."""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Failure, Report, Run, Severity
from dsv4doctor.report.common import by_severity, is_about_pair, lines, names_of, scripts

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def render(run: Run) -> str:
    """Empty when there is nothing to say."""
    said: list[str] = []
    several = len(run.outcomes) > 1
    for outcome in run.outcomes:
        if isinstance(outcome, Failure):
            hint = f"\n{outcome.hint}" if outcome.hint else ""
            said.append(_command("error", f"{outcome.target}: {outcome.message}{hint}", {}))
        else:
            said += _report(outcome, several, " and ".join(names_of(run)))
    return "".join(f"{line}\n" for line in said)


def _report(report: Report, several: bool, pair: str) -> Iterator[str]:
    name = f"{report.gate.target}: " if several else ""
    for finding in by_severity(report):
        places = scripts(report.facts, finding)
        at = {"file": places[0][0], "line": str(places[0][1])} if places else {}
        about = f"{pair}: " if pair and is_about_pair(finding) else name
        title = f"{about}{finding.rule} {finding.subject}"
        yield _command(_COMMANDS[finding.severity], lines(finding), {**at, "title": title})
    if report.gate.undetermined is not None:
        yield _command("error", f"{name}not determined: {report.gate.undetermined}", {})
    for note in report.gate.notes:
        yield _command("warning", f"{name}{note}", {})


def _command(name: str, message: str, properties: dict[str, str]) -> str:
    given = {"title": "dsv4doctor", **properties}
    listed = ",".join(f"{key}={_property(value)}" for key, value in given.items())
    return f"::{name} {listed}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
