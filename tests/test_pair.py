"""A prefill/decode pair: the scripts of a plan are a good one, and every drift in them is found."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema
import junitparser
import pytest
from planning import SM_120, boxed, standing

from dsv4doctor.audit import run_rules
from dsv4doctor.errors import UsageError
from dsv4doctor.launch import read_script
from dsv4doctor.models import (
    Accepted,
    Facts,
    Finding,
    Gate,
    GpuFacts,
    HostFacts,
    Outcome,
    Package,
    Report,
    Run,
    Severity,
    SglangError,
    SglangTree,
    Stack,
    Trace,
)
from dsv4doctor.pair import is_pair, paired, sort_scripts
from dsv4doctor.planning.build import Ask, Ground, plan
from dsv4doctor.planning.files import write
from dsv4doctor.planning.render import files
from dsv4doctor.report import github, html, junit, markdown, sarif
from dsv4doctor.report import json as report_json
from dsv4doctor.report.console import Style, render_run
from dsv4doctor.router import read_router, reads_as_router
from dsv4doctor.rules import PAIR_RULES, pd_pair
from dsv4doctor.rules.pd_pair import pair

ASK = Ask(True, speculative="auto")
RESOLVED: dict[str, Any] = {
    "kv_cache_dtype": "fp8_e4m3",
    "page_size": 256,
    "dsv4_attn_backend": "auto",
    "tp_size": 4,
    "pp_size": 1,
    "dp_size": 1,
    "enable_dp_attention": False,
    "quantization": "fp8",
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 2,
    "speculative_draft_model_path": "/models/flash",
    "speculative_draft_model_quantization": "fp8",
}
"""What SGLang 0.5.23 resolves for either side."""
PACKAGES = tuple(
    Package(name, "1.0", None, None)
    for name in ("torch", "flashinfer-python", "sgl-kernel", "nixl", "mooncake-transfer-engine")
)


@dataclass(frozen=True)
class Drift:
    """One thing that is changed in a good pair, and the finding that it has to give."""

    subject: str
    decode: tuple[str, str] | None = None
    """Text of decode.sh, and what stands there instead."""
    router: tuple[str, str] | None = None
    resolved: dict[str, Any] = field(default_factory=dict)
    """Of the decode side."""
    release: str | None = None
    package: str | None = None
    checkpoint: str | None = None

    @property
    def name(self) -> str:
        return self.subject + "".join(str(part) for part in (self.decode or self.router or ())[1:])


def _flag(name: str, value: str) -> tuple[str, str]:
    """A flag more at the end of decode.sh's command."""
    return "--enable-metrics", f"--enable-metrics {name} {value}".rstrip()


def _variable(name: str, value: str = "1") -> tuple[str, str]:
    return "export CUDA_VISIBLE_DEVICES", f"export {name}={value}\nexport CUDA_VISIBLE_DEVICES"


DRIFTS = (
    # What has to agree.
    Drift("model path", decode=("$MODEL_PATH", "/models/another")),
    Drift("model path", checkpoint="sha256:another"),
    Drift("SGLang version", release="0.5.22"),
    *(
        Drift(name, resolved={name: other})
        for name, other in (
            ("kv_cache_dtype", "bfloat16"),
            ("page_size", 64),
            ("dsv4_attn_backend", "triton"),
            ("pp_size", 2),
            ("quantization", None),
            ("speculative_algorithm", None),
            ("speculative_num_steps", 3),
            ("speculative_eagle_topk", 4),
            ("speculative_num_draft_tokens", 4),
            ("speculative_draft_model_path", "/models/draft"),
            ("speculative_draft_model_quantization", None),
            ("tp_size", 2),
            ("tp_size", 3),
        )
    ),
    Drift("tp_size", resolved={"enable_dp_attention": True, "dp_size": 4}),
    Drift("--disaggregation-mode", decode=("mode decode", "mode prefill")),
    Drift("--disaggregation-transfer-backend", decode=("backend nixl", "backend mooncake")),
    Drift("--disaggregation-bootstrap-port", decode=("port 30998", "port 30997")),
    Drift("--disaggregation-bootstrap-port", decode=("--disaggregation-bootstrap-port 30998 ", "")),
    Drift("--dtype", decode=_flag("--dtype", "float16")),
    Drift(
        "--disaggregation-decode-allocation-policy",
        decode=_flag("--disaggregation-decode-allocation-policy", "prefill_complete"),
    ),
    Drift(
        "--disaggregation-enable-kv-checksum",
        decode=_flag("--disaggregation-enable-kv-checksum", ""),
    ),
    Drift("--chat-template", decode=_flag("--chat-template", "own.jinja")),
    Drift(
        "--default-chat-template-kwargs",
        decode=_flag("--default-chat-template-kwargs", "'{\"thinking\": true}'"),
    ),
    Drift("--reasoning-parser", decode=("parser deepseek-v4", "parser deepseek-r1")),
    Drift("--tool-call-parser", decode=("parser deepseekv4", "parser deepseekv3")),
    Drift("--served-model-name", decode=_flag("--served-model-name", "flash")),
    Drift("--context-length", decode=("length 131072", "length 65536")),
    *(
        Drift(name, decode=_variable(name))
        for name in (
            "SGLANG_SM120_FLASHMLA_BACKEND",
            "SGLANG_DSV4_COMPRESS_STATE_DTYPE",
            "SGLANG_DSV4_FP4_EXPERTS",
            "SGLANG_DSV4_KV_LAYOUT",
            "SGLANG_DSV4_COMPRESSED_KV_LAYOUT",
            "SGLANG_OPT_USE_ONLINE_COMPRESS",
            "SGLANG_OPT_SM120_DIRECT_SWA_KV",
            "SGLANG_OPT_USE_TILELANG_INDEXER",
            "FLASHINFER_DISABLE_JIT",
            "NCCL_P2P_DISABLE",
            "UCX_TLS",
            "MC_FORCE_TCP",
        )
    ),
    *(Drift(package.name, package=package.name) for package in PACKAGES),
    # What has to differ.
    Drift("CUDA_VISIBLE_DEVICES", decode=("DEVICES=4,5,6,7", "DEVICES=3,4,5,6")),
    Drift("port 30000", decode=("--port 30001", "--port 30000")),
    Drift("port 30998", decode=("--port 30001", "--port 30998")),
    Drift("port 8000", decode=("--port 30001", "--port 8000")),
    Drift("port 30900", decode=("--port 30001", "--port 30900")),
    Drift("port 30500", decode=("127.0.0.1:30510", "127.0.0.1:30500")),
    Drift("NUMA node", decode=("--cpunodebind=1 --membind=1", "--cpunodebind=0 --membind=0")),
    # What the router points at.
    Drift("--pd-disaggregation", router=("--pd-disaggregation", "--disable-retries")),
    Drift("--prefill", router=("http://127.0.0.1:30000", "http://127.0.0.1:31000")),
    Drift("--prefill", router=("http://127.0.0.1:30000", "http://box-1:30000")),
    Drift("--decode", router=("http://127.0.0.1:30001", "http://127.0.0.1:30000")),
    Drift("--decode", decode=("--port 30001", "--port 30002")),
    Drift("bootstrap port", router=("30000 30998", "30000 8998")),
)


@pytest.fixture(scope="module")
def ground(checkpoint: Callable[..., Path], sglang_tree: Callable[[str], SglangTree]) -> Ground:
    host = HostFacts(numa_nodes=(0, 1))
    model = checkpoint("deepseek-ai__DeepSeek-V4-Flash")
    return standing(model, sglang_tree("0.5.23"), ASK, host=host)


@pytest.fixture(scope="module")
def written(ground: Ground) -> dict[str, str]:
    return files(plan(ASK, ground), "scripts", Path(ground.target.tree.root), None)


@pytest.fixture
def folder(written: dict[str, str], tmp_path: Path) -> Path:
    """The scripts of a plan."""
    write(tmp_path, written, force=False)
    return tmp_path


def _side(ground: Ground, script: Path, drift: Drift | None = None) -> Facts:
    launch = read_script(script, {})
    tree = replace(ground.target.tree, version=drift.release or "0.5.23") if drift else None
    resolved = {**RESOLVED, **(drift.resolved if drift else {})}
    trace = Trace(tree or ground.target.tree, SM_120, resolved, (), {}, (), (), (), (), {})
    base = ground.target.snapshot
    stored = base.checkpoint
    assert stored is not None
    if drift is not None and drift.checkpoint is not None:
        stored = replace(stored, content_key=drift.checkpoint)
    stack = Stack(
        "python",
        "3.12",
        tuple(
            replace(package, version="2.0") if drift and package.name == drift.package else package
            for package in PACKAGES
        ),
    )
    snapshot = replace(base, launch=launch, checkpoint=stored, stack=stack, gpu=boxed())
    return Facts(snapshot, SM_120, "--arch", trace)


def _findings(ground: Ground, folder: Path, drift: Drift | None = None) -> tuple[Finding, ...]:
    for name, change in (
        ("decode.sh", drift and drift.decode),
        ("router.sh", drift and drift.router),
    ):
        if change:
            text = (folder / name).read_text()
            code = text.index("set -euo")
            assert change[0] in text[code:]
            (folder / name).write_text(text[:code] + text[code:].replace(*change))
    prefill = _side(ground, folder / "prefill.sh")
    decode = _side(ground, folder / "decode.sh", drift)
    facts = replace(prefill, peer=decode, router=read_router(folder / "router.sh", {}))
    results = run_rules(PAIR_RULES, facts)
    assert all(result.outcome in (Outcome.PASS, Outcome.FINDING) for result in results)
    mirrored = run_rules(PAIR_RULES, replace(decode, peer=prefill, router=facts.router))
    found = tuple(finding for result in results for finding in result.findings)
    again = {finding.subject for result in mirrored for finding in result.findings}
    assert again == {finding.subject for finding in found}
    return found


def test_a_plans_pair_agrees(ground: Ground, folder: Path) -> None:
    assert _findings(ground, folder) == ()


@pytest.mark.parametrize("drift", DRIFTS, ids=[drift.name for drift in DRIFTS])
def test_every_drift_is_found(drift: Drift, ground: Ground, folder: Path) -> None:
    found = _findings(ground, folder, drift)
    assert drift.subject in [finding.subject for finding in found]
    about = next(finding for finding in found if finding.subject == drift.subject)
    assert about.remedy is not None
    assert about.evidence


@pytest.mark.parametrize(
    ("name", "severity"),
    [
        ("SGLANG_DSV4_KV_LAYOUT", Severity.ERROR),
        ("SGLANG_DSV4_COMPRESSED_KV_LAYOUT", Severity.ERROR),
        ("SGLANG_OPT_USE_ONLINE_COMPRESS", Severity.ERROR),
        ("SGLANG_OPT_SM120_DIRECT_SWA_KV", Severity.ERROR),
        ("SGLANG_OPT_USE_TILELANG_INDEXER", Severity.WARNING),
    ],
)
def test_what_decides_the_caches_layout_is_an_error(
    ground: Ground, folder: Path, name: str, severity: Severity
) -> None:
    [found] = _findings(ground, folder, Drift(name, decode=_variable(name)))
    assert found.severity is severity


def test_two_spellings_of_a_switch_are_no_drift(ground: Ground, folder: Path) -> None:
    name = "SGLANG_OPT_USE_TILELANG_INDEXER"
    shared = folder / "dsv4.env"
    shared.write_text(f"{shared.read_text()}\n{name}=true\n")
    assert _findings(ground, folder, Drift("", decode=_variable(name))) == ()


def test_one_sided_speculation_is_one_finding(ground: Ground, folder: Path) -> None:
    without = dict.fromkeys((name for name in RESOLVED if name.startswith("speculative_")), None)
    found = _findings(ground, folder, Drift("", resolved=without))
    assert [finding.subject for finding in found] == ["speculative_algorithm"]


def test_arguments_that_were_not_resolved_are_compared_as_written() -> None:
    """Where SGLang stops before it has resolved them, nothing is known that is not written."""
    stopped = SglangError("arguments", "RuntimeError", "no such device", None)

    def results(prefill: tuple[str, ...], decode: tuple[str, ...]) -> list[str]:
        one = pair(prefill, decode, gpus=("0", "1"))
        assert one.trace is not None
        halted = replace(one.trace, resolved_args={}, errors=(stopped,))
        [result] = run_rules([pd_pair.RULE], replace(one, trace=halted))
        if result.outcome is Outcome.SKIP:
            return [str(result.reason)]
        return [finding.subject for finding in result.findings]

    not_known = ["SGLang stops before it has resolved one side's arguments"]
    assert results((), ()) == not_known
    assert results(("--tp", "4", "--page-size", "64"), ("--tp-size=4",)) == not_known
    eagle = ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1")
    assert results(("--tp", "4", *eagle), ("--tp", "2")) == ["tp_size", "speculative_algorithm"]
    pages = ("--page-size", "64"), ("--page-size", "256")
    assert results(*pages) == ["page_size"]
    assert results(("--tp", "4", "--config", "a.yaml"), ()) == not_known


def test_paths_that_say_where_may_differ(ground: Ground, folder: Path) -> None:
    own = Drift("", decode=_variable("SGLANG_CACHE_DIR", "/var/decode"))
    assert _findings(ground, folder, own) == ()
    same = Drift("", decode=_flag("--nccl-port", "40001"))
    assert _findings(ground, folder, same) == ()


def test_two_machines_may_have_the_same_ports_and_gpus(ground: Ground, folder: Path) -> None:
    text = (folder / "decode.sh").read_text()
    text = text.replace("=4,5,6,7", "=0,1,2,3").replace("--port 30001", "--port 30000")
    text = text.replace("bind=1", "bind=0").replace("127.0.0.1 ", "0.0.0.0 ")
    (folder / "decode.sh").write_text(text)
    prefill = (folder / "prefill.sh").read_text()
    (folder / "prefill.sh").write_text(prefill.replace("--host 127.0.0.1", "--host 0.0.0.0"))
    router = (folder / "router.sh").read_text()
    router = router.replace("127.0.0.1:30000", "box-1:30000").replace(
        "127.0.0.1:30001", "box-2:30000"
    )
    (folder / "router.sh").write_text(router)
    assert _findings(ground, folder) == ()


def test_the_nodes_of_a_machine_that_is_not_the_server(ground: Ground, folder: Path) -> None:
    """Its one node says nothing about the serving machine's."""
    drift = ("--cpunodebind=1 --membind=1", "--cpunodebind=0 --membind=0")
    script = folder / "decode.sh"
    script.write_text(script.read_text().replace(*drift))
    sides = []
    for name in ("prefill.sh", "decode.sh"):
        side = _side(ground, folder / name)
        here = replace(side.snapshot, gpu=GpuFacts(()), host=HostFacts(numa_nodes=(0,)))
        sides.append(replace(side, snapshot=here))
    results = run_rules(PAIR_RULES, replace(sides[0], peer=sides[1]))
    subjects = [finding.subject for result in results for finding in result.findings]
    assert subjects == ["NUMA node"]


def test_router_scripts(tmp_path: Path) -> None:
    script = tmp_path / "router.sh"
    script.write_text(
        "P=30000\n"
        "exec sglang-router launch --router-pd-disaggregation --prefill http://a:$P none \\\n"
        "  --prefill=http://b:1 --decode http://c:2 --decode http://d:3 --port=8080\n"
    )
    router = read_router(script, {})
    assert router.prefill == (("http://a:30000", None), ("http://b:1", None))
    assert router.decode == ("http://c:2", "http://d:3")
    assert (router.line, router.port, router.pd) == (2, "8080", True)
    script.write_text("pip install sglang-router\npython -m sglang.launch_server --model m\n")
    assert not reads_as_router(script, {})
    with pytest.raises(UsageError, match="no SGLang router"):
        read_router(script, {})
    script.write_text("smg launch\nsmg launch\n")
    with pytest.raises(UsageError, match="2 routers"):
        read_router(script, {})


# ------------------------------------------------------------------------------ several scripts


def test_scripts_are_told_apart(folder: Path) -> None:
    names = ("router.sh", "prefill.sh", "decode.sh")
    found = sort_scripts([folder / name for name in names], {})
    assert found.servers == (folder / "prefill.sh", folder / "decode.sh")
    assert found.router is not None
    assert found.router.source == str(folder / "router.sh")
    line = folder / "prefill.sh:12"
    assert sort_scripts([line], {}).servers == (line,)
    with pytest.raises(UsageError, match="a router and no server"):
        sort_scripts([folder / "router.sh"], {})
    (folder / "second.sh").write_text((folder / "router.sh").read_text())
    with pytest.raises(UsageError, match="2 routers"):
        sort_scripts([folder / "router.sh", folder / "second.sh"], {})


@pytest.fixture
def differing(ground: Ground, folder: Path) -> Run:
    """A pair that disagrees about its page size, checked by two scripts."""
    drift = Drift("page_size", resolved={"page_size": 64})
    sides = [_side(ground, folder / "prefill.sh"), _side(ground, folder / "decode.sh", drift)]
    reports = paired([Report("0", side, run_rules(PAIR_RULES, side)) for side in sides])
    return Run(
        tuple(
            replace(report, gate=Gate(target=name, exit_code=code))
            for report, name, code in zip(reports, ("prefill.sh", "decode.sh"), (1, 0), strict=True)
        )
    )


def test_what_is_about_both_stands_under_both_names(differing: Run) -> None:
    shown = render_run(differing, Style(width=100), with_findings=True)
    apart, heading, both = shown.partition("Between prefill.sh and decode.sh\n")
    assert heading
    assert "DSV701" in both
    assert "DSV701" not in apart
    assert apart.count("No findings of its own.") == 2
    apart, heading, both = markdown.render(differing).partition("## ❌ Between")
    assert both.startswith(" prefill.sh and decode.sh\n")
    assert ("DSV701" in apart, "DSV701" in both) == (False, True)


def test_html_has_a_part_between_the_two(differing: Run) -> None:
    page = html.render(differing)
    title = "Between prefill.sh and decode.sh"
    apart, heading, both = page.partition(
        f'<section id="between"><h1>{title} <span class="verdict '
    )
    assert heading
    assert ("DSV701 <code>" in apart, "DSV701 <code>" in both) == (False, True)
    assert apart.count("None of its own.") == 2
    assert apart.count("passes</span> <a") == 2
    assert f'fails</span> <a href="#between">{title}</a>' in apart
    assert both.startswith('fails">fails</span>')


def test_html_of_a_pair_that_agrees_has_none(differing: Run) -> None:
    agreeing = Run(tuple(replace(one, results=()) for one in differing.reports))
    assert "between" not in html.render(agreeing)


def test_sarif_points_into_both_scripts(differing: Run, folder: Path) -> None:
    plain = json.loads(sarif.render(differing))
    schema = Path(__file__).parent / "data" / "sarif-2.1.0-rtm.5.json"
    jsonschema.Draft4Validator(json.loads(schema.read_text(encoding="utf-8"))).validate(plain)
    [result] = [one for run in plain["runs"] for one in run["results"]]
    assert result["ruleId"] == "DSV701"
    assert result["message"]["text"].startswith("prefill.sh and decode.sh: page_size: ")
    assert result["properties"]["targets"] == ["prefill.sh", "decode.sh"]
    places = [
        [one["physicalLocation"]["artifactLocation"]["uri"] for one in result[key]]
        for key in ("locations", "relatedLocations")
    ]
    assert places == [[(folder / f"{side}.sh").as_uri()] for side in ("prefill", "decode")]


def test_junit_has_a_suite_of_the_two(differing: Run, tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(junit.render(differing), encoding="utf-8")
    prefill, decode, both = junitparser.JUnitXml.fromfile(str(tmp_path / "junit.xml"))
    assert (prefill.failures, decode.failures, both.failures) == (0, 0, 1)
    assert both.name == "prefill.sh and decode.sh"
    cases = {suite.name: {case.name[:6] for case in suite} for suite in (prefill, decode, both)}
    about = {rule.id for rule in PAIR_RULES}
    assert cases[both.name] == about
    assert not about & (cases[prefill.name] | cases[decode.name])
    assert {case.classname for case in both} == {"dsv4doctor.prefill.sh and decode.sh"}


def test_annotations_name_both(differing: Run) -> None:
    assert "title=prefill.sh and decode.sh%3A DSV701 page_size" in github.render(differing)


def test_json_names_both(differing: Run) -> None:
    plain = json.loads(report_json.render_run(differing))
    docs = Path(__file__).parent.parent / "docs"
    schema = json.loads((docs / "report.schema.json").read_text(encoding="utf-8"))
    for report in plain["reports"]:
        jsonschema.Draft202012Validator(schema).validate(report)
    [[found], none] = [report["findings"] for report in plain["reports"]]
    assert (found["rule"], found["targets"]) == ("DSV701", ["prefill.sh", "decode.sh"])
    assert none == []


def test_accepted_of_a_pair_is_accepted_of_both(differing: Run, tmp_path: Path) -> None:
    prefill, decode = differing.reports
    [finding] = prefill.findings
    gate = replace(prefill.gate, accepted=(Accepted(finding, "suppression", "a lab"),))
    results = tuple(replace(one, findings=()) for one in prefill.results)
    run = Run((replace(prefill, gate=gate, results=results), decode))
    (tmp_path / "junit.xml").write_text(junit.render(run), encoding="utf-8")
    skipped = {
        suite.name: [
            case.name for case in suite if any(one.type == "suppression" for one in case.result)
        ]
        for suite in junitparser.JUnitXml.fromfile(str(tmp_path / "junit.xml"))
    }
    assert skipped == {
        "prefill.sh": [],
        "decode.sh": [],
        "prefill.sh and decode.sh": ["DSV701 page_size"],
    }
    plain = json.loads(report_json.render_run(run))
    [accepted] = plain["reports"][0]["accepted"]
    assert accepted["finding"]["targets"] == ["prefill.sh", "decode.sh"]


def test_reports_of_a_pair(ground: Ground, folder: Path) -> None:
    """Findings about both stand in the prefill side's report, once."""
    drift = Drift("page_size", resolved={"page_size": 64})
    sides = [_side(ground, folder / "decode.sh", drift), _side(ground, folder / "prefill.sh")]
    reports = [Report("0", side, run_rules(PAIR_RULES, side)) for side in sides]
    assert is_pair(reports)
    assert not is_pair(reports[:1])
    prefill, decode = paired(reports, read_router(folder / "router.sh", {}))
    assert [finding.subject for finding in prefill.findings] == ["page_size"]
    assert decode.findings == ()
    assert decode.facts.peer == sides[1]
    skipped = {result.rule: result.reason for result in decode.results}
    assert skipped["DSV701"] == f"in the report on {folder / 'prefill.sh'}"
