"""Reports for the tests of the formats; imported by test files."""

from dataclasses import replace
from datetime import date

from dsv4doctor import gate
from dsv4doctor.audit import run_rules
from dsv4doctor.models import (
    Branch,
    Facts,
    Failure,
    Finding,
    Launch,
    Location,
    Outcome,
    Remedy,
    Report,
    RuleResult,
    Run,
    Severity,
    Step,
)
from dsv4doctor.pair import paired
from dsv4doctor.rules import RULES, pd_pair
from dsv4doctor.rules.samples import DRAFT_CUTLASS, DRAFT_TRTLLM, MAIN_CUTLASS, MAIN_TRTLLM, facts

TODAY = date(2026, 6, 1)
HOSTILE = (
    "<script>alert(1)</script> & \"'`*_[x](http://e)|@all %0A::error::\r\n]]>\x1b[31m\x00\ufffe"
)
FLAGS = ("--tp", "4", "--moe-runner-backend", "triton", "--speculative-moe-runner-backend=triton")
_FILE = "sglang/srt/layers/quantization/modelopt_quant.py"


def report(sample: Facts, policy: gate.Policy | None = None) -> Report:
    """The rules' results on `sample`, held against `policy`."""
    raw = Report("0.1.0", sample, run_rules(RULES, sample), {"trace": 4.5, "total": 5.25})
    return gate.decide(raw, policy or gate.Policy(), TODAY)


def story() -> Facts:
    """The hybrid checkpoint on sm_120 with a draft, from a script, with its decision path."""
    sample = facts("sm_120", [*MAIN_TRTLLM, DRAFT_TRTLLM], flags=FLAGS)
    assert sample.trace is not None
    at = Location(_FILE, 1383, "HybridFp8NvFp4Config.get_quant_method", "if self.is_fp4_experts:")
    branches = (
        Branch(at, "self.is_fp4_experts", {"self.is_fp4_experts": "True"}, True),
        Branch(at, "prefix in self.ignored", {"prefix": "'model.decoder'"}, False),
    )
    steps = (
        Step("main", "get_quant_method", _FILE, branches[1:], "ModelOptNvFp4FusedMoEMethod", 43),
        Step("draft", "get_quant_method", _FILE, branches, "Mxfp4FlashinferTrtllmMoEMethod"),
    )
    launch = Launch("deploy/serve it.sh", 12, {}, "/models/DeepSeek-V4-Flash-NVFP4", FLAGS)
    snapshot = replace(sample.snapshot, launch=launch)
    return replace(sample, trace=replace(sample.trace, steps=steps), snapshot=snapshot)


def hostile() -> Report:
    """Every text that comes from outside is made to break out of the format."""
    sample = story()
    trace = sample.trace
    assert trace is not None
    assert sample.snapshot.launch is not None
    assert sample.snapshot.checkpoint is not None
    where = Location(f"sglang/{HOSTILE}.py", 3, HOSTILE, HOSTILE)
    layers = tuple(
        replace(layer, name=f"{layer.name}.{HOSTILE}", quant_method=HOSTILE, decided_at=where)
        for layer in trace.layers
    )
    branch = Branch(where, HOSTILE, {HOSTILE: HOSTILE}, None)
    trace = replace(
        trace, layers=layers, steps=(Step("draft", HOSTILE, where.file, (branch,), HOSTILE),)
    )
    launch = replace(sample.snapshot.launch, source=f"{HOSTILE}.sh", flags=(HOSTILE,))
    checkpoint = replace(sample.snapshot.checkpoint, name=HOSTILE, path=f"/m/{HOSTILE}")
    snapshot = replace(sample.snapshot, launch=launch, checkpoint=checkpoint)
    sample = replace(sample, trace=trace, snapshot=snapshot, notes=(HOSTILE,))
    finding = Finding(
        rule="DSV102",
        severity=Severity.ERROR,
        subject=HOSTILE,
        message=HOSTILE,
        consequence=HOSTILE,
        evidence=(HOSTILE,),
        locations=(where,),
        remedy=Remedy(HOSTILE, (HOSTILE,)),
    )
    results = (
        RuleResult("DSV102", HOSTILE, Outcome.FINDING, (finding,)),
        RuleResult("DSV103", HOSTILE, Outcome.FINDING, (replace(finding, rule="DSV103"),)),
        RuleResult("DSV104", HOSTILE, Outcome.SKIP, reason=HOSTILE),
        RuleResult("DSV105", HOSTILE, Outcome.CRASH, reason=HOSTILE),
    )
    accepting = gate.Suppression("DSV103", HOSTILE, date(2027, 1, 1), HOSTILE)
    unused = replace(accepting, rule="DSV102", subject="nothing")
    policy = gate.Policy(target=HOSTILE, suppressions=(accepting, unused))
    return gate.decide(Report("0.1.0", sample, results, {"total": 1.0}), policy, TODAY)


def clean() -> Report:
    return report(facts("sm_120", [*MAIN_CUTLASS, DRAFT_CUTLASS]))


def accepting() -> Report:
    """The story with its flag finding suppressed, on a target called production."""
    one = gate.Suppression("DSV103", "a lab box", date(2026, 12, 31), "dsv4doctor.toml: suppress 1")
    return report(story(), gate.Policy(target="production", suppressions=(one,)))


def several() -> Run:
    """Three targets: one with findings, one clean, one that gave no report."""
    lab = replace(clean(), gate=replace(clean().gate, target="lab"))
    failure = Failure("broken", "serve.sh: no SGLang command", "give another script", 2)
    return Run((accepting(), lab, failure))


def pair() -> Run:
    """A prefill and a decode server that disagree about their page size."""
    sample = pd_pair.pair(changed={"page_size": 64})
    assert sample.peer is not None
    sides = (replace(sample, peer=None), sample.peer)
    reports = paired([Report("0.1.0", side, run_rules(RULES, side)) for side in sides])
    names = ("prefill.sh", "decode.sh")
    return Run(
        tuple(
            gate.decide(report, gate.Policy(target=name), TODAY)
            for report, name in zip(reports, names, strict=True)
        )
    )
