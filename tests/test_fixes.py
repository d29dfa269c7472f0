"""Every fix: its examples, and what it makes of each release."""

import pytest

from dsv4doctor import fixes
from dsv4doctor.fixes.fix import Change, Example, Fix, Present

EXAMPLES = [(fix, example) for fix in fixes.ALL for example in fix.examples]


@pytest.mark.parametrize(
    ("fix", "example"), EXAMPLES, ids=[f"{fix.id}: {example.title}" for fix, example in EXAMPLES]
)
def test_examples(fix: Fix, example: Example) -> None:
    outcome = fix.plan(example.before, example.choice)
    assert type(outcome) is example.outcome
    if isinstance(outcome, Change):
        assert outcome.sources == example.after
        again = fix.plan({**example.before, **outcome.sources}, example.choice)
        assert isinstance(again, Present)
        assert again.how == "applied by dsv4doctor"
