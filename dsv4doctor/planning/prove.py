"""A plan held against the SGLang that it is for: every launch is traced and audited.

What the trace says is needed goes into the plan, on both sides alike, and is traced again: flags
that make the experts run, and variables that a finding's remedy names.  One that does not make
its finding go away is taken out again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsv4doctor import fixes
from dsv4doctor.audit import Settings, audit, request_of, run_rules, undetermined
from dsv4doctor.errors import DoctorError
from dsv4doctor.fixes.fix import Change, Choice
from dsv4doctor.models import (
    Alternative,
    Facts,
    Finding,
    GpuFacts,
    Launch,
    Report,
    Severity,
    TreeFeatures,
    Verdict,
)
from dsv4doctor.planning.build import Ground
from dsv4doctor.planning.build import plan as planned
from dsv4doctor.planning.layout import Plan, Server, Setting
from dsv4doctor.planning.release import text_of
from dsv4doctor.planning.settings import grouped, with_flags
from dsv4doctor.rules import PAIR_RULES
from dsv4doctor.rules.common import marlin_scale
from dsv4doctor.rules.rule import NotChecked
from dsv4doctor.rules.torch_indexer import torch_indexer
from dsv4doctor.target import Target
from dsv4doctor.trace.session import trace_launches

_ASSIGNMENT = re.compile(r"\b[Ee]xport (SGLANG_\w+)=(\w+)")
"""As remedies tell to set a variable; one that is only mentioned may be another release's."""
_GRAPHS = "--cuda-graph-max-bs-decode"
_CAP = re.compile(r"--cuda-graph-max-bs(?:-decode)? (\d{1,5})\b")
_MEMORY = "DSV601"
"""The rule that adds up memory, as the plan itself does."""
_SIZED = ("--mem-fraction-static", "--chunked-prefill-size")
_ROUNDS = 6
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Proof:
    """A plan as it came out, and what is known about it."""

    plan: Plan
    reports: tuple[Report, ...]
    """One a server, in the plan's order."""
    pair: tuple[Finding, ...] = ()
    """What the two sides do not agree on."""
    undetermined: str | None = None
    """Why it could not be proved."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Each once, whatever the number of servers that have it."""
        found: dict[tuple[str, str, str], Finding] = {}
        for report in self.reports:
            for finding in report.findings:
                found.setdefault((finding.rule, finding.subject, finding.message), finding)
        for finding in self.pair:
            found.setdefault((finding.rule, finding.subject, finding.message), finding)
        return tuple(found.values())

    @property
    def exit_code(self) -> int:
        if self.undetermined is not None:
            return 3
        return int(bool(self.plan.problems))


@dataclass
class _Try:
    """What has been put into the plan, and what did not help."""

    variables: dict[str, Setting] = field(default_factory=dict)
    rules: dict[str, str] = field(default_factory=dict)
    """Variable -> the rule whose finding it is to cure."""
    rejected: set[str] = field(default_factory=set)
    adopted: bool = False
    """Other flags were taken already."""
    sized: bool = False
    """The memory was added up again already."""


def prove(plan: Plan, on: Ground, timeout: float, progress: Progress | None = None) -> Proof:
    """`plan` with what this SGLang needs, traced.

    Raises UsageError when SGLang's own parser rejects a flag, and UndeterminedError when a trace
    cannot finish.
    """
    tried = _Try()
    current, patches = plan, None
    for _ in range(_ROUNDS):
        reports = _audits(current, on, timeout, progress)
        if patches is None:  # of the launch as asked for, before anything is given up
            patches = helpful_patches(reports[0].facts, Path(on.target.tree.root))
        changed = _changed(current, reports, tried, on)
        if changed is None:
            break
        current = _with_variables(changed, plan, tried)
    else:
        reports = _audits(current, on, timeout, progress)  # of what the last round changed
    return _judged(replace(current, patches=patches or ()), reports)


# ------------------------------------------------------------------------------ traces


def _audits(
    plan: Plan, on: Ground, timeout: float, progress: Progress | None
) -> tuple[Report, ...]:
    targets = [target_of(plan, server, on.target) for server in plan.servers]
    settings = Settings(timeout=timeout)
    requests = [request_of(target, settings) for target in targets]
    # Together they share one import of SGLang; the audits then find the traces in the cache.
    for outcome in trace_launches(requests, timeout=timeout, progress=progress):
        if isinstance(outcome, DoctorError):
            raise outcome
    # What one side's experts run with, the other's do too: only the first asks for another way.
    return tuple(
        audit(target, replace(settings, alternatives=number == 0), progress)
        for number, target in enumerate(targets)
    )


def target_of(plan: Plan, server: Server, base: Target) -> Target:
    """The launch of one server, as if its script had been read."""
    shared = {one.name: one.values[0] for one in plan.shared}
    own = {one.name: one.values[0] for one in server.environment}
    traced = Launch(
        source=f"the plan's {server.part.value} side" if plan.is_pair else "the plan",
        line=None,
        environment=shared,
        model=plan.model,
        flags=server.words,
    )
    # The trace shows SGLang no device by number: without them both sides are traced together.
    written = replace(
        traced,
        environment={**shared, **own},
        wrappers=("exec", "numactl") if server.bind else ("exec",),
    )
    seen = base.snapshot.gpu
    kept = tuple(gpu for gpu in seen.gpus if gpu in server.gpus) or server.gpus
    return replace(
        base,
        launch=traced,
        snapshot=replace(
            base.snapshot, launch=written, gpu=GpuFacts(seen.gpus or kept, seen.driver)
        ),
        gpu=base.gpu if base.gpu is None else server.gpus[0],
        gpu_count=len(server.gpus) if base.gpu is not None else None,
        seconds=0.0,
    )


# ------------------------------------------------------------------------------ what is needed


def _changed(plan: Plan, reports: Sequence[Report], tried: _Try, on: Ground) -> Plan | None:
    """The plan with other flags, or with other variables in `tried`; None: nothing to change."""
    useless = [name for name, rule in tried.rules.items() if rule in _rules(reports)]
    for name in useless:
        del tried.rules[name], tried.variables[name]
        tried.rejected.add(name)
    way = None if tried.adopted else _way(reports[0])
    if way is not None:
        tried.adopted = True
        why = f"traced: with this SGLang the experts run so ({way.change})"
        first = plan.servers[0].words
        servers = tuple(with_flags(server, first, way.flags, why) for server in plan.servers)
        notes = [*plan.notes, f"instead of SGLang's choice, on every side: {way.change}"]
        kernels = [(one.stored_format, one.kernel.symbol) for one in way.layers if one.kernel]
        scales = (marlin_scale(on.features, stored, kernel) for stored, kernel in kernels)
        notes += dict.fromkeys(text for text in scales if text is not None)
        if _speculates(first) and not _speculates(way.flags):
            notes.append(
                "speculative decoding is left out: this SGLang's draft does not run on "
                f"{plan.arch.name}; `dsv4doctor fix` may change that, then plan again"
            )
        return replace(plan, servers=servers, notes=tuple(notes))
    capped = _capped(plan, reports)
    if capped is not None:
        return capped
    added = False
    for finding, name, value in _variables(reports, plan, tried, on.features):
        tried.variables[name] = Setting(name, (value,), f"{finding.rule}: {finding.message}")
        tried.rules[name] = finding.rule
        added = True
    return plan if added or useless else _resized(plan, reports, tried, on)


def _resized(plan: Plan, reports: Sequence[Report], tried: _Try, on: Ground) -> Plan | None:
    """The plan with room for an indexer that runs in torch operations; None: none does."""
    try:
        indexer = torch_indexer(reports[0].facts)
    except NotChecked:
        return None
    if indexer is None or on.features.indexer_replaced or tried.sized:
        return None
    tried.sized = True
    fresh = planned(on.ask, replace(on, indexer=indexer))
    servers = []
    for server, sized in zip(plan.servers, fresh.servers, strict=True):
        found = {flag.name: flag for flag in sized.flags if flag.name in _SIZED}
        flags = tuple(found.get(flag.name, flag) for flag in server.flags)
        servers.append(replace(server, flags=flags))
    return replace(plan, servers=tuple(servers), problems=fresh.problems)


def _capped(plan: Plan, reports: Sequence[Report]) -> Plan | None:
    """The plan with smaller CUDA graphs, where a finding asks for them; None: none does."""
    servers = []
    for server, report in zip(plan.servers, reports, strict=True):
        has = grouped(server.words).get(_GRAPHS, ("",))[0]
        for finding in report.findings:
            asked = _CAP.search(finding.remedy.text) if finding.remedy else None
            if asked and has.isdigit() and int(asked[1]) < int(has):
                words = (_GRAPHS, asked[1])
                why = f"{finding.rule}: {finding.message}"
                server = with_flags(server, (_GRAPHS, has), words, why)
                break
        servers.append(server)
    return replace(plan, servers=tuple(servers)) if tuple(servers) != plan.servers else None


def _rules(reports: Sequence[Report]) -> set[str]:
    return {finding.rule for report in reports for finding in report.findings}


def _speculates(words: Sequence[str]) -> bool:
    return "--speculative-algorithm" in words


def _way(report: Report) -> Alternative | None:
    """Other flags with which the launch runs; None where there are none, or no need."""
    return next((way for way in report.facts.alternatives if way.problem is None), None)


def _variables(
    reports: Sequence[Report], plan: Plan, tried: _Try, known: TreeFeatures
) -> Iterator[tuple[Finding, str, str]]:
    """What remedies tell to set, where this SGLang knows the variable and nobody has set it."""
    taken = {one.name for one in plan.shared} | tried.rejected
    for report in reports:
        for finding in report.findings:
            text = finding.remedy.text if finding.remedy else ""
            for name, value in _ASSIGNMENT.findall(text):
                if name not in known.environment_defaults or name in taken:
                    continue
                if finding.severity is not Severity.INFO:
                    taken.add(name)
                    yield finding, name, value


def _with_variables(changed: Plan, first: Plan, tried: _Try) -> Plan:
    return replace(changed, shared=(*first.shared, *tried.variables.values()))


def helpful_patches(facts: Facts, root: Path) -> tuple[str, ...]:
    """The fixes that this launch needs and that the tree has not; each with its reason."""
    found = []
    for fix in fixes.ALL:
        try:
            why = fix.needed(facts)
            if why is None:
                continue
            texts = {name: text_of(root / name) for name in fix.files}
            outcome = fix.plan({name: text for name, text in texts.items() if text}, Choice())
        except Exception:  # a fix that fails on a tree is no help for it
            continue
        if isinstance(outcome, Change):
            found.append(f"{fix.id}, {fix.title} ({why})")
    return tuple(found)


# ------------------------------------------------------------------------------ judgement


def _judged(plan: Plan, reports: tuple[Report, ...]) -> Proof:
    pair = tuple(pair_findings([report.facts for report in reports])) if plan.is_pair else ()
    gaps = [gap for report in reports if (gap := undetermined(report, strict=False))]
    gaps += [gap for report in reports if (gap := _unknown_layer(report))]
    errors: dict[str, None] = {}
    for server, report in zip(plan.servers, reports, strict=True):
        for finding in report.findings:
            said = finding.rule == _MEMORY and plan.problems
            if finding.severity is Severity.ERROR and not said:
                errors[f"{server.part.value}: {finding.rule} {finding.message}"] = None
    for finding in pair:
        if finding.severity is Severity.ERROR:
            errors[f"{finding.rule} {finding.message}"] = None
    judged = replace(plan, problems=(*plan.problems, *errors))
    return Proof(judged, reports, pair, gaps[0] if gaps else None)


def _unknown_layer(report: Report) -> str | None:
    """A plan is only sound where every layer is known to run."""
    trace = report.facts.trace
    layers = trace.layers if trace is not None else ()
    unknown = (layer for layer in layers if layer.verdict is Verdict.UNKNOWN)
    return next((f"{layer.name}: {layer.reason}" for layer in unknown), None)


def pair_findings(sides: Sequence[Facts]) -> Iterator[Finding]:
    """What the rules about a pair find in two launches of one."""
    one, other = sides
    for result in run_rules(PAIR_RULES, replace(one, peer=other)):
        yield from result.findings
