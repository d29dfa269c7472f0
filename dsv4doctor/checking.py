"""From the command line and the configuration to reports: targets, outputs, baseline, exit code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from dsv4doctor import baseline as baselines
from dsv4doctor import config as configs
from dsv4doctor import gate
from dsv4doctor import target as launches
from dsv4doctor.asked import Options
from dsv4doctor.audit import Settings, audit
from dsv4doctor.config import Config, TargetConfig
from dsv4doctor.errors import DoctorError, UsageError
from dsv4doctor.models import Failure, Report, RouterLaunch, Run, Severity
from dsv4doctor.outputs import Input, Output, read_by, refuse_inputs
from dsv4doctor.pair import is_pair, paired, sort_scripts
from dsv4doctor.terminal import Progress, check_writable, deliver

_NAMES_A_LAUNCH = ("model", "launch", "flags", "snapshot")


@dataclass(frozen=True)
class Asked:
    """One target, with what it is held against."""

    options: Options
    policy: gate.Policy


@dataclass(frozen=True)
class Plan:
    targets: tuple[Asked, ...]
    configured: tuple[str | None, ...]
    """The names of all targets there are, asked for or not."""
    baseline: str | None
    source: str | None
    """The configuration that was read."""
    router: RouterLaunch | None = None
    """What stands in front of the servers."""


def plan(said: Mapping[str, Any], only: Sequence[str], config: Config | None) -> Plan:
    """The targets to look at.

    `said` holds what the command line and its variables really say, by option name (`flags` are
    SGLang's); each goes before the configuration.  A command line that names a launch of its own
    is one target, with the configuration's settings outside its targets.

    Raises UsageError for a name in `only` that is no target.
    """
    chosen = config or Config("")
    targets = chosen.targets
    names = tuple(target.name for target in targets)
    said, several, router = _several(said)
    if any(said.get(name) for name in _NAMES_A_LAUNCH):
        if only:
            raise UsageError("--target and a launch are both given", "give one of the two")
        targets = tuple(replace(chosen.defaults, name=name) for name in several or (None,))
    unknown = next((name for name in only if name not in names), None)
    if unknown is not None:
        known = ", ".join(name for name in names if name) or "none"
        raise UsageError(f"--target {unknown}: no such target", f"there are: {known}")
    if only:
        targets = tuple(target for target in targets if target.name in only)
    return Plan(
        targets=tuple(
            _asked(target, {**said, "launch": target.name} if several else said, chosen)
            for target in targets
        ),
        configured=names,
        baseline=said.get("baseline") or chosen.baseline,
        source=chosen.source or None,
        router=router,
    )


def _several(
    said: Mapping[str, Any],
) -> tuple[Mapping[str, Any], tuple[str, ...], RouterLaunch | None]:
    """`said` with one launch; or several servers' scripts, and the router among them."""
    launches = said.get("launch")
    if launches is None or isinstance(launches, str):
        return said, (), None
    if len(launches) < 2:
        return {**said, "launch": next(iter(launches), None)}, (), None
    twice = next((one for one in launches if launches.count(one) > 1), None)
    if twice is not None:
        raise UsageError(f"--launch {twice}: given twice", "each server has a script or a line")
    sorted_ = sort_scripts([Path(one) for one in launches], os.environ)
    return said, tuple(str(one) for one in sorted_.servers), sorted_.router


def _asked(target: TargetConfig, said: Mapping[str, Any], config: Config) -> Asked:
    own_launch = bool(said.get("launch") or said.get("flags"))
    launch = said.get("launch") if own_launch else target.launch
    flags = said.get("flags") if own_launch else target.flags
    snapshot = said.get("snapshot") or target.snapshot
    options = Options(
        model=said.get("model") or target.model,
        flags=tuple(flags or ()),
        launch=Path(launch) if launch else None,
        snapshot=Path(snapshot) if snapshot else None,
        sglang=said.get("sglang") or target.sglang,
        python=said.get("python") or target.python,
        arch=said.get("arch") or target.arch or "auto",
        env=(*target.env, *said.get("env", ())),
        level=said.get("level") or "quick",
    )
    if options.level == "full" and options.snapshot is not None:
        raise UsageError(
            "--level full and a snapshot are both given",
            "measure on the machine itself: dsv4doctor check --level full there",
        )
    fail_on = said.get("fail_on") or target.fail_on or "error"
    strict = said["strict"] if "strict" in said else bool(target.strict)
    policy = gate.Policy(
        target=target.name,
        fail_on=None if fail_on == "never" else Severity(fail_on),
        strict=strict,
        strict_paths=said.get("strict_paths", False),
        suppressions=config.suppressions,
    )
    return Asked(options, policy)


def read_config(named: str | None) -> Config | None:
    """The configuration given or found above the working directory; None: there is none."""
    if named is not None:
        return configs.read(Path(named))
    try:
        here = Path.cwd()
    except OSError:  # the folder we were started in is gone
        return None
    found = configs.find(here)
    return None if found is None else configs.read(found)


def parse_reports(texts: Sequence[str], formats: Sequence[str]) -> dict[str, str]:
    """File -> format of each `FORMAT=FILE`."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        if not equals or not file or name not in formats:
            raise UsageError(
                f"--report {text}: not FORMAT=FILE with a format that there is",
                f"write it like --report sarif=out.sarif; formats: {', '.join(formats)}",
            )
        if file in found:
            raise UsageError(f"--report {text}: {file} is written twice", "give another file")
        check_writable(file, "--report")
        found[file] = name
    return found


def check_outputs(
    planned: Plan, output: str | None, reports: Iterable[str], update: bool = False
) -> None:
    """UsageError for an output file that is an input, or that another output is written to.

    With `update` the baseline is an output too.
    """
    outputs: list[Output] = [("--output", output)]
    outputs += [("--report", file) for file in reports]
    inputs: list[Input] = [(planned.source, "the configuration")]
    if update:
        outputs.insert(0, ("--baseline", planned.baseline))
    else:
        inputs.append((planned.baseline, "the baseline"))
    for asked in planned.targets:
        inputs += read_by(asked.options)
    if planned.router is not None:
        inputs.append((planned.router.source, "the router's script"))
    refuse_inputs(outputs, inputs)


def examine(
    planned: Plan,
    settings: Settings,
    files: Mapping[str, str],
    complain: Callable[[str, str | None], None],
) -> tuple[Report | Failure, ...]:
    """What every target gave, findings not yet held against anything.

    One target that fails stops the run with its DoctorError, written into `files` (file -> format)
    first; of several it is a Failure, told to `complain` at once, and the others still run.
    """
    outcomes: list[Report | Failure] = []
    for asked in planned.targets:
        try:
            outcomes.append(_examined(asked.options, planned.source, settings))
        except DoctorError as error:
            name = asked.policy.target or "launch"
            failure = Failure(name, error.message, error.hint, error.exit_code)
            if len(planned.targets) == 1:
                write(Run((failure,)), files)
                raise
            complain(f"{name}: {error.message}", error.hint)
            outcomes.append(failure)
    return _with_peers(outcomes, planned.router)


def _with_peers(
    outcomes: Sequence[Report | Failure], router: RouterLaunch | None
) -> tuple[Report | Failure, ...]:
    """The outcomes; of a prefill and a decode server each knows the other one."""
    reports = [outcome for outcome in outcomes if isinstance(outcome, Report)]
    if len(reports) != len(outcomes) or not is_pair(reports):
        return tuple(outcomes)
    pair = paired(reports, router)
    mine = {id(report.facts.snapshot): report for report in pair}
    return tuple(mine[id(report.facts.snapshot)] for report in reports)


def _examined(options: Options, source: str | None, settings: Settings) -> Report:
    with Progress() as progress:
        target = launches.resolve(options, progress.download)
        if options.level == "full":
            target = launches.measured(target, progress.phase)
        if source is not None:
            target = replace(target, notes=(*target.notes, f"settings of {source}"))
        return audit(target, settings, progress.phase)


def judge(
    planned: Plan, outcomes: Sequence[Report | Failure], update: bool, today: date
) -> tuple[Run, str | None]:
    """The outcomes held against suppressions and baseline; with `update` the baseline's new text.

    A target whose answer is not complete keeps its old entries.
    """
    known, text = _baseline(planned, update), None
    pairs = list(zip(planned.targets, outcomes, strict=True))
    if update and known is not None:
        fresh = [_decided(asked, outcome, None, today) for asked, outcome in pairs]
        known = _updated(known, fresh, planned)
        text = baselines.render(known.entries)
    return Run(tuple(_decided(asked, outcome, known, today) for asked, outcome in pairs)), text


def _baseline(planned: Plan, update: bool) -> baselines.Baseline | None:
    if planned.baseline is None:
        if update:
            raise UsageError("--update-baseline: no --baseline", "say which file: --baseline FILE")
        return None
    if update:
        check_writable(planned.baseline, "--baseline")
    return baselines.read(Path(planned.baseline), may_be_missing=update)


def check_baseline(planned: Plan, update: bool) -> None:
    """UsageError for a baseline that cannot be used, before the work is done."""
    _baseline(planned, update)


def _decided(
    asked: Asked, outcome: Report | Failure, known: baselines.Baseline | None, today: date
) -> Report | Failure:
    if isinstance(outcome, Failure):
        return outcome
    return gate.decide(outcome, replace(asked.policy, baseline=known), today)


def _updated(
    known: baselines.Baseline, fresh: Sequence[Report | Failure], planned: Plan
) -> baselines.Baseline:
    complete = [
        outcome
        for outcome in fresh
        if isinstance(outcome, Report) and outcome.gate.undetermined is None
    ]
    renewed = {report.gate.target for report in complete}
    kept = [
        entry
        for entry in known.entries
        if entry.target in planned.configured and entry.target not in renewed
    ]
    found = [entry for report in complete for entry in gate.entries(report)]
    return replace(known, entries=(*kept, *found))


def write(run: Run, destinations: Mapping[str, str]) -> None:
    """The run in each format, file -> format."""
    if not destinations:
        return
    from dsv4doctor.report.formats import render  # every format's code: most runs write none

    for file, name in destinations.items():
        deliver(render(name, run), file, "--report")
