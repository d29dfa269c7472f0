"""Facts and trace -> rules -> findings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4doctor import __version__
from dsv4doctor.alternatives import Candidate, candidates, outcome
from dsv4doctor.commands import doctor_command, is_for_another_machine
from dsv4doctor.errors import DoctorError
from dsv4doctor.evidence.grounds import Grounds, grounds
from dsv4doctor.evidence.stamped import verified_here
from dsv4doctor.facts.callsite import call_texts, text_at
from dsv4doctor.facts.features import read_features
from dsv4doctor.flags import written_out
from dsv4doctor.models import (
    Alternative,
    Facts,
    Finding,
    Layer,
    Outcome,
    Report,
    Role,
    RuleResult,
    Severity,
    Trace,
    Verdict,
)
from dsv4doctor.path_alternatives import path_candidates, path_outcome
from dsv4doctor.rules import RULES
from dsv4doctor.rules.rule import FACTS, NotChecked, Rule
from dsv4doctor.target import Target
from dsv4doctor.trace.request import TraceRequest
from dsv4doctor.trace.session import trace_launch, trace_launches
from dsv4doctor.verdicts import after_imports, drops_clamp, judge, judge_path, said_of_clamp

Progress = Callable[[str], None]
_EXPERTS = ("DSV1", "DSV3")
"""The rules about routed experts and their formats."""
_SEVERITIES = (Severity.INFO, Severity.WARNING, Severity.ERROR)


@dataclass(frozen=True)
class Settings:
    roles: tuple[Role, ...] = (Role.MAIN, Role.DRAFT)
    with_path: bool = False
    """Record the decision path."""
    use_cache: bool = True
    timeout: float = 300.0
    """Seconds for each trace."""
    alternatives: bool = True
    """Try other flags when the launch does not run."""
    modules: tuple[str, ...] = ()
    """Modules of SGLang that have to import."""
    with_paths: bool = True
    """Trace the hot paths beside the routed experts too."""
    paths: tuple[str, ...] = ()
    """Only these, by the start of their name; "moe" is the routed experts.  Empty: all."""


def audit(target: Target, settings: Settings, progress: Progress | None = None) -> Report:
    """Trace the launch and run every rule.

    Raises UsageError when SGLang rejects a flag, UndeterminedError when the trace cannot finish.
    """
    started = time.monotonic()
    request = request_of(target, settings)
    trace = trace_launch(
        request, use_cache=settings.use_cache, timeout=settings.timeout, progress=progress
    )
    traced = time.monotonic()
    trace = _of_roles(trace, settings.roles)
    if not settings.paths or "moe" in settings.paths:
        trace = _with_gaps(trace, settings.roles)
    trace = _of_paths(trace, settings.paths)
    texts = call_texts(Path(target.tree.root), trace.layers)
    verified = verified_here(target.snapshot, target.arch_source)
    stand_on = replace(grounds(target.snapshot.stack, target.tree), verified=verified)
    trace = judged(trace, texts, stand_on)
    if target.checkpoint.text_config.get("swiglu_limit"):
        layers = tuple(said_of_clamp(layer, text_at(texts, layer)) for layer in trace.layers)
        trace = replace(trace, layers=layers)
    facts = Facts(
        snapshot=target.snapshot,
        arch=target.arch,
        arch_source=target.arch_source,
        trace=trace,
        call_texts=texts,
        notes=(*target.notes, *_no_draft(trace, settings.roles)),
        features=read_features(Path(target.tree.root)),
        said=target.said,
    )
    with_others = settings.alternatives and not trace.missing  # no flag brings a package
    if with_others and _needs_another(trace):
        tried = _alternatives(request, facts, stand_on, settings, progress)
        facts = replace(facts, alternatives=tried)
    if with_others and trace.failing_paths:
        tried = _path_alternatives(request, facts, stand_on, settings, progress)
        facts = replace(facts, path_alternatives=tried)
    results = run_rules(RULES, facts)
    ended = time.monotonic()
    timings = {
        "facts": target.seconds,
        **trace.timings,
        "trace": traced - started,
        "rules": ended - traced,
        "total": target.seconds + ended - started,
    }
    rounded = {name: round(seconds, 3) for name, seconds in timings.items()}
    return Report(__version__, facts, results, rounded)


def request_of(target: Target, settings: Settings) -> TraceRequest:
    """What `audit` traces for `target`."""
    return TraceRequest(
        tree=target.tree,
        interpreter=target.interpreter,
        arch=target.arch,
        checkpoint=target.checkpoint,
        model_path=target.model_path,
        launch=target.launch,
        with_path=settings.with_path,
        with_paths=settings.with_paths,
        environment=target.environment,
        gpu=target.gpu,
        gpu_count=target.gpu_count,
        elsewhere=target.elsewhere,
        modules=settings.modules,
    )


def judged(trace: Trace, texts: Mapping[str, str], stand_on: Grounds | None = None) -> Trace:
    """`trace` with every layer's verdict; `texts` as from `call_texts`."""
    layers = tuple(
        after_imports(judge(layer, trace.arch, text_at(texts, layer), stand_on), trace.missing)
        for layer in trace.layers
    )
    paths = tuple(
        after_imports(judge_path(path, trace.arch, stand_on), trace.missing) for path in trace.paths
    )
    return replace(trace, layers=layers, paths=paths)


def _of_roles(trace: Trace, roles: Sequence[Role]) -> Trace:
    """`trace` without the layers, errors and steps of models that were not asked for.

    What stopped the main model stays where it left no draft to be built.
    """
    left_out = tuple(role.value for role in Role if role not in roles)
    if not left_out:
        return trace
    stopping = left_out if any(trace.of(role) for role in roles) else ()
    return replace(
        trace,
        layers=tuple(layer for layer in trace.layers if layer.role in roles),
        paths=tuple(path for path in trace.paths if path.role in roles),
        errors=tuple(error for error in trace.errors if not error.phase.startswith(stopping)),
        unresolved=tuple(text for text in trace.unresolved if not text.startswith(stopping)),
        steps=tuple(step for step in trace.steps if not step.phase.startswith(left_out)),
    )


def _with_gaps(trace: Trace, roles: Sequence[Role]) -> Trace:
    """`trace`, unresolved where nothing stopped a model and it still has no routed experts."""
    if trace.errors or trace.unresolved:
        return trace
    speculates = trace.resolved_args.get("speculative_algorithm") is not None
    empty = [role for role in roles if not trace.of(role) and (role is Role.MAIN or speculates)]
    said = tuple(f"{role.value}: it has no routed experts that a trace knows" for role in empty)
    return replace(trace, unresolved=said)


def _no_draft(trace: Trace, roles: Sequence[Role]) -> tuple[str, ...]:
    """Why there is nothing to see where only the draft was asked for."""
    if tuple(roles) != (Role.DRAFT,) or trace.layers or trace.errors or trace.unresolved:
        return ()
    if trace.resolved_args.get("speculative_algorithm") is not None:
        return ()
    return (
        "this launch has no draft model: it does not speculate (--speculative-algorithm is not "
        "set)",
    )


def _of_paths(trace: Trace, names: Sequence[str]) -> Trace:
    """`trace` without the hot paths that were not asked for."""
    if not names:
        return trace
    layers = trace.layers if "moe" in names else ()
    paths = tuple(path for path in trace.paths if path.name.startswith(tuple(names)))
    return replace(trace, layers=layers, paths=paths)


# ------------------------------------------------------------------------------ alternatives


def _needs_another(trace: Trace) -> bool:
    in_a_model = any(error.phase != "arguments" for error in trace.errors)
    return in_a_model or any(layer.verdict is Verdict.FAILS for layer in trace.layers)


def _alternatives(
    request: TraceRequest,
    facts: Facts,
    stand_on: Grounds,
    settings: Settings,
    progress: Progress | None,
) -> tuple[Alternative, ...]:
    trace, texts = facts.trace, facts.call_texts
    assert trace is not None
    has_clamp = bool(request.checkpoint.text_config.get("swiglu_limit"))
    lost = has_clamp and any(
        drops_clamp(layer, text_at(texts, layer)) for layer in trace.of(Role.MAIN)
    )
    stored = next((layer.stored_format for layer in request.checkpoint.main_layers), None)
    options = candidates(trace, written_out(request.launch), stored, clamp_lost=lost)
    if not options:
        return ()
    if progress is not None:
        progress("tracing what else could run")
    # What stopped before its hot paths says nothing of them.
    with_paths = request.with_paths and not trace.paths
    plain = replace(request, with_path=False, with_paths=with_paths)
    requests = [
        replace(plain, launch=replace(request.launch, flags=option.flags, configured=()))
        for option in options
    ]
    results = trace_launches(requests, use_cache=settings.use_cache, timeout=settings.timeout)
    return tuple(
        _alternative(option, result, facts, stand_on, has_clamp)
        for option, result in zip(options, results, strict=True)
    )


def _alternative(
    option: Candidate,
    result: Trace | DoctorError,
    facts: Facts,
    stand_on: Grounds,
    has_clamp: bool,
) -> Alternative:
    if isinstance(result, DoctorError):
        return outcome(option, result, {}, has_clamp)
    texts = call_texts(Path(result.sglang.root), result.layers)
    trace = judged(result, texts, stand_on)
    found = outcome(option, trace, texts, has_clamp)
    if found.problem is not None:
        return found
    return replace(found, problem=_left(replace(facts, trace=trace, call_texts=texts), found))


def _path_alternatives(
    request: TraceRequest,
    facts: Facts,
    stand_on: Grounds,
    settings: Settings,
    progress: Progress | None,
) -> tuple[Alternative, ...]:
    """Tried one after the other, up to the first that helps: each is an import of its own."""
    trace, launch = facts.trace, request.launch
    assert trace is not None
    defaults = facts.features.environment_defaults if facts.features else {}
    tried: list[Alternative] = []
    for option in path_candidates(trace, written_out(launch), request.variables(), defaults):
        if progress is not None:
            progress(f"tracing with {option.change}")
        environment = {**launch.environment, **option.environment}
        changed = replace(launch, flags=option.flags, configured=(), environment=environment)
        asked = replace(request, launch=changed, with_path=False)
        [result] = trace_launches([asked], use_cache=settings.use_cache, timeout=settings.timeout)
        if not isinstance(result, DoctorError):
            result = _of_roles(result, settings.roles)
            texts = call_texts(Path(result.sglang.root), result.layers)
            result = judged(result, texts, stand_on)
        tried.append(path_outcome(option, result, trace))
        if tried[-1].problem is None:
            break
    return tuple(tried)


def _left(facts: Facts, option: Alternative) -> str | None:
    """The error about the routed experts that stays with `option`'s flags; None: there is none."""
    launch = facts.snapshot.launch
    if launch is not None:
        changed = replace(launch, flags=option.flags, configured=())
        facts = replace(facts, snapshot=replace(facts.snapshot, launch=changed))
    for result in run_rules([rule for rule in RULES if rule.id.startswith(_EXPERTS)], facts):
        if any(finding.severity is Severity.ERROR for finding in result.findings):
            return f"leaves {result.rule}, {result.title}"
    return None


# ------------------------------------------------------------------------------ rules


def run_rules(rules: Iterable[Rule], facts: Facts) -> tuple[RuleResult, ...]:
    """One result a rule: a missing fact skips it, its own failure leaves the others alone."""
    return tuple(_run(rule, facts) for rule in rules)


def _run(rule: Rule, facts: Facts) -> RuleResult:
    for name in rule.reads:
        absent = FACTS[name](facts)
        if absent is not None:
            return _skip(rule, absent)
    try:
        findings = tuple(_with_command(finding, facts) for finding in rule.check(facts))
    except NotChecked as missing:
        return _skip(rule, str(missing), missing.required)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return RuleResult(rule.id, rule.title, Outcome.CRASH, reason=reason)
    outcome = Outcome.FINDING if findings else Outcome.PASS
    return RuleResult(rule.id, rule.title, outcome, findings)


def _with_command(finding: Finding, facts: Facts) -> Finding:
    """`finding` with the whole command that says whether the fix it names helps this launch."""
    remedy = finding.remedy
    if remedy is None or remedy.fix is None:
        return finding
    command = doctor_command(facts, "fix", "--only", remedy.fix)
    commands, text = remedy.commands, remedy.text
    if command is not None and command not in commands:
        commands = (*commands, command)
    if facts.said.snapshot is not None:
        is_other = is_for_another_machine(facts)
        where = "that serves" if is_other else f"that {facts.said.snapshot} is of"
        text += (
            f"\nA patch goes in on the machine {where}: `dsv4doctor fix "
            f"--apply --only {remedy.fix}` there, with its launch."
        )
    return replace(finding, remedy=replace(remedy, text=text, commands=commands))


def _skip(rule: Rule, reason: str, required: bool = True) -> RuleResult:
    required = required and not rule.about_machine
    return RuleResult(rule.id, rule.title, Outcome.SKIP, reason=reason, required=required)


def undetermined(report: Report, strict: bool, strict_paths: bool = False) -> str | None:
    """Why the answer is not complete, or None.

    With `strict` a rule that was skipped and a layer whose kernel is not known count too, and
    with `strict_paths` any hot path of which that is not known.
    """
    trace = report.facts.trace
    for result in report.results:
        if result.outcome is Outcome.CRASH:
            return f"rule {result.rule} crashed ({result.reason})"
        if strict and result.outcome is Outcome.SKIP and result.required:
            return f"rule {result.rule} was skipped ({result.reason})"
    if trace is None:
        return report.facts.trace_failure or "there is no trace"
    if trace.unresolved:
        return f"the trace stopped short ({trace.unresolved[0]})"
    unknown = (text for layer in trace.layers if (text := _unknown(layer, strict)))
    return next(unknown, _unknown_path(trace) if strict and strict_paths else None)


def _unknown_path(trace: Trace) -> str | None:
    unknown = (path for path in trace.paths if path.verdict is Verdict.UNKNOWN)
    return next((f"{path.role.value} {path.name}: {path.reason}" for path in unknown), None)


def _unknown(layer: Layer, strict: bool) -> str | None:
    if layer.verdict is not Verdict.UNKNOWN or (layer.kernel is not None and not strict):
        return None
    return f"{layer.name}: {layer.reason}"


def exit_code(
    report: Report, fail_on: Severity | None, strict: bool, strict_paths: bool = False
) -> int:
    """0, 1 (findings at or above `fail_on`) or 3 (not determined); the same for every format."""
    if undetermined(report, strict, strict_paths) is not None:
        return 3
    if fail_on is None:
        return 0
    bar = _SEVERITIES.index(fail_on)
    return int(any(_SEVERITIES.index(found.severity) >= bar for found in report.findings))
