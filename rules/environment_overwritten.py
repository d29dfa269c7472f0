"""A variable that the user set and SGLang sets to something else.

SGLang sets some of its own variables while it resolves the launch, among them those that choose the
paths of sm_12x.  A value from the launch script is then replaced, and no message says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import same_value, set_by_user
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import scene


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    for name, (before, after) in facts.trace.environment_overwritten.items():
        wanted = set_by_user(facts, name)
        if wanted is None or before is None or same_value(wanted, after):
            continue
        yield Finding(
            rule=RULE.id,
            severity=Severity.WARNING,
            subject=name,
            message=(
                f"SGLang sets {name} to {after} while it resolves this launch; you set {wanted}."
            ),
            consequence="The value that was set has no effect.",
            evidence=(f"set: {name}={wanted}", f"after SGLang's resolution: {name}={after}"),
            remedy=Remedy(
                f"Remove {name} from the launch: this SGLang does not let it be chosen on "
                f"{facts.arch.name}.",
                fix="FIX107" if facts.arch.is_sm12x else None,
            ),
        )


RULE = Rule(
    id="DSV401",
    title="Environment variable overwritten by SGLang",
    severity=Severity.WARNING,
    reads=("trace", "launch"),
    check=check,
)

_NAME = "SGLANG_OPT_USE_TOPK_V2"

EXAMPLES = (
    Example(
        "top-k v2 asked for on sm_120",
        scene(environment={_NAME: "1"}, overwritten={_NAME: ("1", "False")}),
        expect=(_NAME,),
    ),
    Example(
        "another spelling of the same",
        scene(environment={_NAME: "0"}, overwritten={_NAME: ("0", "False")}),
    ),
    Example("not set by the user", scene(overwritten={_NAME: (None, "False")})),
    Example("left alone", scene(environment={_NAME: "1"}, overwritten={})),
)
