"""JUnit XML: a suite a target, a case for each finding and for each rule that found nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

from dsv4doctor.gate import fails
from dsv4doctor.models import Failure, Finding, Outcome, Report, RuleResult, Run
from dsv4doctor.report.common import ABOUT_PAIRS, between, lines, target_name

_KINDS = ("failure", "error", "skipped")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(run: Run) -> str:
    suites = [
        _failed(outcome) if isinstance(outcome, Failure) else _suite(outcome)
        for outcome in run.outcomes
    ]
    suites += [_between(names, pair) for names, pair in between(run)]
    root = ElementTree.Element("testsuites", name="dsv4doctor")
    root.extend(suites)
    _count(root)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _failed(failure: Failure) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=_clean(failure.target), time="0.000")
    case = _case(failure.target, "the launch is determined")
    hint = f"\n{failure.hint}" if failure.hint else ""
    _outcome(case, "error", "undetermined", failure.message, failure.message + hint)
    suite.append(case)
    _count(suite)
    return suite


def _suite(report: Report) -> ElementTree.Element:
    name = target_name(report)
    seconds = f"{report.timings.get('total', 0.0):.3f}"
    suite = ElementTree.Element("testsuite", name=_clean(name), time=seconds)
    determined = _case(name, "the launch is determined")
    gap = report.gate.undetermined
    if gap is not None:
        _outcome(determined, "error", "undetermined", gap, gap)
    suite.append(determined)
    for result in report.results:
        if report.facts.peer is None or result.rule not in ABOUT_PAIRS:
            suite.extend(_cases(result, report, name))
    if report.gate.notes:
        ElementTree.SubElement(suite, "system-out").text = _clean("\n".join(report.gate.notes))
    _count(suite)
    return suite


def _between(names: str, pair: Report) -> ElementTree.Element:
    """The rules about two servers, under the names of both."""
    suite = ElementTree.Element("testsuite", name=_clean(names), time="0.000")
    for result in pair.results:
        suite.extend(_cases(result, pair, names))
    _count(suite)
    return suite


def _cases(result: RuleResult, report: Report, target: str) -> Iterator[ElementTree.Element]:
    accepted = [one for one in report.gate.accepted if one.finding.rule == result.rule]
    for finding in result.findings:
        yield _finding(finding, report, target)
    for one in accepted:
        case = _case(target, f"{result.rule} {one.finding.subject}")
        until = f" (until {one.expires})" if one.expires else ""
        said = f"{one.by}: {one.reason}{until}"
        _outcome(case, "skipped", one.by, said, lines(one.finding))
        yield case
    if not result.findings and not accepted:
        case = _case(target, f"{result.rule} {result.title}")
        if result.outcome is Outcome.SKIP:
            _outcome(case, "skipped", "skip", f"not checked: {result.reason}", "")
        elif result.outcome is Outcome.CRASH:
            _outcome(case, "error", "crash", f"the rule crashed: {result.reason}", "")
        yield case


def _finding(finding: Finding, report: Report, target: str) -> ElementTree.Element:
    case = _case(target, f"{finding.rule} {finding.subject}")
    if fails(finding, report.gate.fail_on):
        _outcome(case, "failure", finding.severity.value, finding.message, lines(finding))
    else:
        text = f"{finding.severity.value}: {lines(finding)}"
        ElementTree.SubElement(case, "system-out").text = _clean(text)
    return case


def _case(target: str, name: str) -> ElementTree.Element:
    classname = _clean(f"dsv4doctor.{target}")
    return ElementTree.Element("testcase", classname=classname, name=_clean(name), time="0.000")


def _outcome(case: ElementTree.Element, tag: str, kind: str, message: str, text: str) -> None:
    child = ElementTree.SubElement(case, tag, type=kind, message=_clean(" ".join(message.split())))
    child.text = _clean(text) or None


def _count(element: ElementTree.Element) -> None:
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    for tag in _KINDS:
        plural = tag if tag == "skipped" else f"{tag}s"
        element.set(plural, str(sum(case.find(tag) is not None for case in cases)))


def _clean(text: str) -> str:
    """`text` without what XML cannot hold, escaped or not."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
