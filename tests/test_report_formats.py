"""SARIF, JUnit, GitHub commands and Markdown, each read back by something that is not ours."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import junitparser
import markdown_it
import pytest
import referencing
import reporting

from dsv4doctor import gate
from dsv4doctor.cli_options import FORMATS
from dsv4doctor.models import Location, RouterLaunch, Run, Severity
from dsv4doctor.report import console, github, html, junit, markdown, sarif
from dsv4doctor.report import json as report_json
from dsv4doctor.report.formats import RENDERERS
from dsv4doctor.rules import communication_measured
from dsv4doctor.rules.samples import DRAFT_TRTLLM, MAIN_TRTLLM, facts

_TESTS = Path(__file__).parent
_SARIF = json.loads((_TESTS / "data" / "sarif-2.1.0-rtm.5.json").read_text(encoding="utf-8"))
_DOCS = _TESTS.parent / "docs"


def _run(*reports: Any) -> Run:
    return Run(tuple(reports))


def test_every_format_that_can_be_asked_for_is_written() -> None:
    assert set(FORMATS) == set(RENDERERS)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_pure(name: str) -> None:
    assert RENDERERS[name](reporting.several()) == RENDERERS[name](reporting.several())


@pytest.mark.parametrize("name", FORMATS)
def test_a_script_whose_name_is_no_text(name: str) -> None:
    story = reporting.story()
    launch = story.snapshot.launch
    assert launch is not None
    named = replace(launch, source="n\udcff.sh", line=1)
    run = _run(reporting.report(replace(story, snapshot=replace(story.snapshot, launch=named))))
    assert RENDERERS[name](run).encode("utf-8", "backslashreplace")
    assert name != "sarif" or "n%FF.sh" in RENDERERS[name](run)


def test_markdown_keeps_the_spaces_around_code() -> None:
    assert (
        markdown._prose("see `dsv4doctor fix` for `it` now") == "see `dsv4doctor fix` for `it` now"
    )


@pytest.mark.parametrize("color", [False, True])
def test_hostile_text_does_not_steer_the_terminal(color: bool) -> None:
    style = console.Style(width=100, color=color, verbose=True, why=True)
    text = console.render_run(_run(reporting.hostile()), style, with_findings=True)
    assert "<script>alert(1)</script>" in text
    assert set(re.findall(r"\x1b\[[0-9;]*m", text)) >= ({"\x1b[0m"} if color else set())
    text = re.sub(r"\x1b\[(?!31m\x00)[0-9;]*m", "", text) if color else text
    assert not set("\x1b\x00") & set(text)


def test_what_is_about_the_router_is_told_at_its_script() -> None:
    router = RouterLaunch("router.sh", 7, True, (), (), (), "0.0.0.0", "8000", None)
    report = reporting.report(replace(reporting.story(), router=router))
    first, *others = report.findings
    about = replace(first, locations=(Location("router.sh", 7),))
    told = replace(report, results=(replace(report.results[0], findings=(about, *others)),))
    assert "file=router.sh,line=7" in github.render(_run(told))
    [run] = _sarif(_run(told))
    places = [_script_of(result) for result in run["results"]]
    assert places.count("router.sh") == 1
    assert len(places) == len(told.findings)


def _script_of(result: dict[str, Any]) -> str:
    [place] = result["locations"]
    name: str = place["physicalLocation"]["artifactLocation"]["uri"]
    return name


# ------------------------------------------------------------------------------ SARIF


def _sarif(run: Run) -> list[dict[str, Any]]:
    plain = json.loads(sarif.render(run))
    jsonschema.Draft4Validator(_SARIF).validate(plain)
    runs: list[dict[str, Any]] = plain["runs"]
    return runs


@pytest.mark.parametrize("make", [reporting.clean, reporting.accepting, reporting.hostile])
def test_sarif_keeps_to_its_schema(make: Any) -> None:
    _sarif(_run(make()))


def test_sarif_result() -> None:
    (run,) = _sarif(_run(reporting.report(reporting.story())))
    result = next(one for one in run["results"] if one["ruleId"] == "DSV102")
    assert result["level"] == "error"
    assert result["locations"] == [
        {
            "physicalLocation": {
                "artifactLocation": {"uri": "deploy/serve%20it.sh", "uriBaseId": "%SRCROOT%"},
                "region": {"startLine": 12},
            }
        }
    ]
    place = result["relatedLocations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"].endswith("quantization/modelopt_quant.py")
    assert place["artifactLocation"]["uriBaseId"] in run["originalUriBaseIds"]
    assert place["region"]["startLine"] == 1389
    assert "Mxfp4FlashinferTrtllmMoEMethod" in place["region"]["snippet"]["text"]
    rule = next(one for one in run["tool"]["driver"]["rules"] if one["id"] == "DSV102")
    assert rule["defaultConfiguration"] == {"level": "error"}
    assert rule["shortDescription"]["text"]
    assert run["invocations"][0]["executionSuccessful"] is True
    assert run["invocations"][0]["exitCode"] == 1


def test_sarif_without_a_script_points_into_the_tree() -> None:
    (run,) = _sarif(_run(reporting.report(facts("sm_120", [DRAFT_TRTLLM]))))
    where = run["results"][0]["locations"][0]["physicalLocation"]
    assert where["artifactLocation"]["uri"].startswith("sglang/")


def test_sarif_of_several_targets() -> None:
    runs = _sarif(reporting.several())
    ids = [run["automationDetails"]["id"] for run in runs]
    assert ids == ["dsv4doctor/production/", "dsv4doctor/lab/", "dsv4doctor/broken/"]
    suppressed = [one for one in runs[0]["results"] if "suppressions" in one]
    assert [one["ruleId"] for one in suppressed] == ["DSV103"]
    assert "a lab box (until 2026-12-31)" in suppressed[0]["suppressions"][0]["justification"]
    assert runs[2]["invocations"][0]["executionSuccessful"] is False


def test_sarif_says_what_was_not_determined() -> None:
    sample = facts("sm_120", [*MAIN_TRTLLM], unresolved=("draft: KeyError: 'x'",))
    (run,) = _sarif(_run(reporting.report(sample)))
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"] is False
    assert "KeyError" in invocation["toolExecutionNotifications"][0]["message"]["text"]


# ------------------------------------------------------------------------------ JUnit


def _suites(run: Run, path: Path) -> list[Any]:
    path.write_text(junit.render(run), encoding="utf-8")
    return list(junitparser.JUnitXml.fromfile(str(path)))


def test_junit_counts_what_fails(tmp_path: Path) -> None:
    production, lab, broken = _suites(reporting.several(), tmp_path / "junit.xml")
    assert production.name == "production"
    failed = [
        case.name
        for case in production
        if any(isinstance(one, junitparser.Failure) for one in case.result)
    ]
    assert [name.split()[0] for name in failed] == ["DSV101", "DSV102"]
    assert (production.failures, production.errors) == (2, 0)
    assert production.tests == len(list(production))
    skipped = [
        one
        for case in production
        for one in case.result
        if isinstance(one, junitparser.Skipped) and one.type == "suppression"
    ]
    assert [one.message for one in skipped] == ["suppression: a lab box (until 2026-12-31)"]
    assert (lab.name, lab.failures, lab.errors) == ("lab", 0, 0)
    assert (broken.name, broken.errors) == ("broken", 1)


def test_junit_failures_follow_fail_on(tmp_path: Path) -> None:
    def failures(fail_on: Severity | None) -> int:
        report = reporting.report(reporting.story(), gate.Policy(fail_on=fail_on))
        (suite,) = _suites(_run(report), tmp_path / "junit.xml")
        return int(suite.failures)

    found = (failures(None), failures(Severity.ERROR), failures(Severity.WARNING))
    assert found == (0, 2, 3)


def test_junit_of_hostile_text(tmp_path: Path) -> None:
    (suite,) = _suites(_run(reporting.hostile()), tmp_path / "junit.xml")
    assert suite.name.startswith("<script>alert(1)</script> & ")
    assert "\x1b" not in (tmp_path / "junit.xml").read_text(encoding="utf-8")
    kinds = [type(one).__name__ for case in suite for one in case.result]
    assert sorted(kinds) == ["Error", "Error", "Failure", "Skipped", "Skipped"]


# ------------------------------------------------------------------------------ GitHub


def _commands(text: str) -> list[tuple[str, dict[str, str], str]]:
    """As the runner reads them: one a line; a colon or comma ends a property."""
    found = []
    for line in text.splitlines():
        matched = re.fullmatch(r"::(\w+) ([^:]*)::(.*)", line)
        assert matched is not None, line
        pairs = dict(pair.split("=", 1) for pair in matched[2].split(","))
        found.append((matched[1], {key: _plain(value) for key, value in pairs.items()}, matched[3]))
    return [(name, pairs, _plain(message)) for name, pairs, message in found]


def _plain(text: str) -> str:
    for escaped, char in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        text = text.replace(escaped, char)
    return text


def test_github_annotations() -> None:
    commands = _commands(github.render(_run(reporting.report(reporting.story()))))
    assert [name for name, _, _ in commands] == ["error", "error", "warning"]
    _, properties, message = commands[1]
    assert properties["file"] == "deploy/serve it.sh"
    assert properties["line"] == "12"
    assert properties["title"].startswith("DSV102 ")
    assert "modelopt_quant.py:1389" in message
    assert "\n" in message


def test_github_of_hostile_text_is_one_line_a_finding() -> None:
    commands = _commands(github.render(_run(reporting.hostile())))
    assert len(commands) == 3  # the finding, the crashed rule, the unused suppression
    assert reporting.HOSTILE in commands[0][2]
    assert commands[0][1]["file"] == f"{reporting.HOSTILE}.sh"


def test_github_of_several_targets() -> None:
    commands = _commands(github.render(reporting.several()))
    assert commands[0][1]["title"].startswith("production: DSV10")
    assert commands[-1][0] == "error"
    assert commands[-1][2] == "broken: serve.sh: no SGLang command\ngive another script"
    assert github.render(_run(reporting.clean())) == ""


# ------------------------------------------------------------------------------ Markdown

_RENDERER = markdown_it.MarkdownIt("gfm-like", {"html": True, "linkify": False})


def test_markdown_tables_and_details() -> None:
    page = _RENDERER.render(markdown.render(reporting.several()))
    assert page.count("<table>") == 3
    assert "modelopt_quant.py:1389" in page
    assert page.count("<h2>") == 3
    assert "model.decoder.mlp.experts" in page
    assert "a lab box" in page
    assert "<strong>Not determined.</strong> serve.sh: no SGLang command" in page


def test_markdown_commands_in_sentences_are_code() -> None:
    page = _RENDERER.render(markdown.render(_run(reporting.report(reporting.story()))))
    assert "<code>dsv4doctor check</code>" in page
    assert "`" not in page


@pytest.mark.parametrize("render", [markdown.render, html.render, None])
def test_a_very_long_flag_is_cut(render: Callable[[Run], str] | None) -> None:
    sample = reporting.story()
    launch = sample.snapshot.launch
    assert launch is not None
    launch = replace(launch, flags=("--served-model-name", "n" * 90_000))
    sample = replace(sample, snapshot=replace(sample.snapshot, launch=launch))
    run = Run((reporting.report(sample),))
    style = console.Style(100)
    shown = render(run) if render else console.render_run(run, style, with_findings=True)
    assert "nnn..." in "".join(shown.split())
    assert "n" * 400 not in "".join(shown.split())


def test_markdown_of_hostile_text_is_text() -> None:
    page = _RENDERER.render(markdown.render(_run(reporting.hostile())))
    assert "<script" not in page
    assert "<a " not in page
    assert "<em>" not in page
    assert "[x](http://e)|@all" in page
    assert set(re.findall(r"</?([a-z0-9]+)", page)) <= {
        *("h2", "h3", "p", "strong", "ul", "li", "pre", "code", "details", "summary"),
        *("table", "thead", "tbody", "tr", "th", "td", "blockquote"),
    }


# ------------------------------------------------------------------------------ JSON


def test_json_of_several_targets_keeps_to_its_schema() -> None:
    one = json.loads((_DOCS / "report.schema.json").read_text(encoding="utf-8"))
    all_ = json.loads((_DOCS / "reports.schema.json").read_text(encoding="utf-8"))
    registry = referencing.Registry().with_resource(
        one["$id"], referencing.Resource.from_contents(one)
    )
    plain = json.loads(report_json.render_run(reporting.several()))
    jsonschema.Draft202012Validator(all_, registry=registry).validate(plain)
    assert [report["target"] for report in plain["reports"]] == ["production", "lab", "broken"]
    assert plain["reports"][2]["errors"][0]["hint"] == "give another script"
    assert plain["reports"][0]["accepted"][0]["finding"]["rule"] == "DSV103"


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "json"])
def test_every_format_for_people_names_the_fix(name: str) -> None:
    text = RENDERERS[name](_run(reporting.report(reporting.story())))
    assert "dsv4doctor fix --only FIX101" in text


@pytest.mark.parametrize("name", ["console", "html", "markdown"])
def test_what_was_measured_is_told_though_nothing_is_wrong(name: str) -> None:
    sound = next(one for one in communication_measured.EXAMPLES if one.title == "all well")
    text = RENDERERS[name](_run(reporting.report(sound.facts)))
    assert "all-reduce 40.0 GB/s, all-reduce without P2P 20.0 GB/s" in text
    assert "GB/s" not in RENDERERS[name](_run(reporting.report(reporting.story())))


def test_what_was_measured_is_in_the_schema() -> None:
    hanging = next(one for one in communication_measured.EXAMPLES if one.expect)
    written = json.loads(RENDERERS["json"](_run(reporting.report(hanging.facts))))
    jsonschema.validate(written, json.loads((_DOCS / "report.schema.json").read_text("utf-8")))
    assert [one["outcome"] for one in written["gpu"]["measured"]] == ["hang", "ok"]
