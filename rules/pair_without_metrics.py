"""A prefill/decode pair that cannot be watched."""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.pd_pair import name_of, pair
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import scene

_FLAG = "--enable-metrics"


def check(facts: Facts) -> Iterator[Finding]:
    if facts.peer is None:
        return
    for side in (facts, facts.peer):
        launch = side.snapshot.launch
        if launch is not None and _FLAG not in launch.all_flags:
            yield Finding(
                rule=RULE.id,
                severity=Severity.INFO,
                subject=_FLAG,
                message=f"The {name_of(side)} side exports no metrics.",
                consequence=(
                    "A queue between the sides, a slow transfer or a full cache cannot be seen."
                ),
                evidence=(f"{launch.source}: no {_FLAG}",),
                remedy=Remedy(
                    f"Add {_FLAG}; `dsv4doctor plan` writes the Prometheus and Grafana files."
                ),
            )


RULE = Rule(
    id="DSV802",
    title="A pair without metrics",
    severity=Severity.INFO,
    reads=("launch",),
    check=check,
    about_machine=True,
)

EXAMPLES = (
    Example("neither side", pair(), expect=(_FLAG, _FLAG)),
    Example("one side", pair(decode=(_FLAG,)), expect=(_FLAG,)),
    Example("both", pair((_FLAG,), (_FLAG,))),
    Example("one server", scene()),
)
