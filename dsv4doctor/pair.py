"""Several launch scripts of one deployment: which are servers, which is the router, and what the
rules about a pair say of two audited servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4doctor.audit import run_rules
from dsv4doctor.errors import UsageError
from dsv4doctor.flags import flag_value
from dsv4doctor.models import Facts, Outcome, Report, RouterLaunch, RuleResult
from dsv4doctor.router import read_router, reads_as_router
from dsv4doctor.rules import PAIR_RULES

_MODE = "--disaggregation-mode"


@dataclass(frozen=True)
class Deployment:
    """The scripts of `--launch`, sorted."""

    servers: tuple[Path, ...]
    router: RouterLaunch | None = None


def sort_scripts(scripts: Sequence[Path], environment: Mapping[str, str]) -> Deployment:
    """Which of `scripts` start servers, and the one that starts a router.

    `scripts` may name a line (`serve.sh:12`): those are servers.  Raises UsageError for a script
    that cannot be read, for two routers, and for a router without servers.
    """
    routers = [
        script for script in scripts if script.is_file() and reads_as_router(script, environment)
    ]
    servers = tuple(script for script in scripts if script not in routers)
    if not routers:
        return Deployment(servers)
    if len(routers) > 1:
        names = ", ".join(str(script) for script in routers)
        raise UsageError(f"--launch: {len(routers)} routers ({names})", "give one")
    if not servers:
        raise UsageError(
            f"--launch {routers[0]}: a router and no server",
            "give the servers' scripts too: --launch prefill.sh --launch decode.sh",
        )
    return Deployment(servers, read_router(routers[0], environment))


def is_pair(reports: Sequence[Report]) -> bool:
    """True for two audited launches of which one says that it is half of a pair."""
    modes = [_mode(report.facts) for report in reports]
    return len(reports) == 2 and any(mode in ("prefill", "decode") for mode in modes)


def paired(reports: Sequence[Report], router: RouterLaunch | None = None) -> tuple[Report, Report]:
    """The two reports, each knowing the other side.

    What the rules about a pair find stands in the first one, the prefill side's where there is
    one; in the other they are not checked, and say where to look.
    """
    one, other = in_order(reports)
    mine = replace(one.facts, peer=other.facts, router=router)
    theirs = replace(other.facts, peer=one.facts, router=router)
    found = {result.rule: result for result in run_rules(PAIR_RULES, mine)}
    elsewhere = {rule: _elsewhere(result, one) for rule, result in found.items()}
    return (
        replace(one, facts=mine, results=_with(one.results, found)),
        replace(other, facts=theirs, results=_with(other.results, elsewhere)),
    )


def in_order(reports: Sequence[Report]) -> list[Report]:
    """The prefill side first, where there is one."""
    return sorted(reports, key=lambda report: _mode(report.facts) != "prefill")


def _mode(facts: Facts) -> str | None:
    launch = facts.snapshot.launch
    return flag_value(launch.all_flags, _MODE) if launch else None


def _elsewhere(result: RuleResult, one: Report) -> RuleResult:
    launch = one.facts.snapshot.launch
    reason = f"in the report on {launch.source if launch else 'the other side'}"
    return RuleResult(result.rule, result.title, Outcome.SKIP, reason=reason, required=False)


def _with(results: Sequence[RuleResult], new: Mapping[str, RuleResult]) -> tuple[RuleResult, ...]:
    return tuple(new.get(result.rule, result) for result in results)
