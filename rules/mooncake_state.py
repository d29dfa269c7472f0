"""Prefill/decode over mooncake in an SGLang that only sends part of DeepSeek-V4's cache.

The model keeps state beside its keys: the window, the compressor's and the indexer's.  A transfer
that knows only keys and values leaves it behind; the decode side goes on with what was there, and
no error says so.  The tree's transfer code is what is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import flag
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import SOURCES, scene

_MODE = "--disaggregation-mode"
_BACKEND = "--disaggregation-transfer-backend"


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.features is not None
    backend = flag(facts, _BACKEND) or "mooncake"  # the default
    if flag(facts, _MODE) not in ("prefill", "decode") or backend != "mooncake":
        return
    if facts.features.mooncake_sends_state is not False:
        return
    yield Finding(
        rule=RULE.id,
        severity=Severity.ERROR,
        subject=_BACKEND,
        message=(
            "This SGLang's mooncake transfer does not send DeepSeek-V4's state: window, "
            "compressed keys and indexer."
        ),
        consequence="The decode side answers with wrong text, and no error is raised.",
        evidence=(
            "sglang/srt/disaggregation/mooncake/conn.py sends no state",
            "sgl-project/sglang pull request 24878",
        ),
        remedy=Remedy(f"Use {_BACKEND} nixl, or a newer SGLang."),
    )


RULE = Rule(
    id="DSV504",
    title="Mooncake transfer without DeepSeek-V4's state",
    severity=Severity.ERROR,
    reads=("launch", "features"),
    check=check,
)

_OLD = replace(SOURCES, mooncake_sends_state=False)
_PREFILL = (_MODE, "prefill")

EXAMPLES = (
    Example("an old transfer", scene(flags=_PREFILL, features=_OLD), expect=(_BACKEND,)),
    Example("NIXL", scene(flags=(*_PREFILL, _BACKEND, "nixl"), features=_OLD)),
    Example("a transfer that sends it", scene(flags=_PREFILL)),
    Example("one server", scene(features=_OLD)),
)
