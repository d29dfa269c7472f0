"""Reasoning and tool-call parsers, and a chat template, that are not the model family's.

SGLang writes the prompts of DeepSeek-V4 itself, without the checkpoint's chat template, and asks
the tool-call parser's name first which family's prompts to write.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import flag, is_v41
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import scene

_TOOLS, _REASONING, _TEMPLATE = "--tool-call-parser", "--reasoning-parser", "--chat-template"
_WRITES_PROMPTS = ("deepseekv4", "deepseekv41", "deepseekv32", "kimi_k3")
"""Tool-call parsers by whose name SGLang chooses how a prompt is written."""


def check(facts: Facts) -> Iterator[Finding]:
    stored = facts.snapshot.checkpoint
    assert stored is not None
    if not str(stored.config.get("model_type", "")).startswith("deepseek_v4"):
        return
    expected = "deepseekv41" if is_v41(facts) else "deepseekv4"
    tools, reasoning = flag(facts, _TOOLS), flag(facts, _REASONING)
    if tools not in (None, "auto", expected):
        yield _other_tools(facts, str(tools), expected)
    if reasoning not in (None, "auto") and not str(reasoning).startswith("deepseek-v4"):
        yield _finding(
            Severity.WARNING,
            _REASONING,
            f"{_REASONING} {reasoning} reads the answers of another model family",
            "Thinking and answer are not told apart, or parts of the answer are lost.",
            "Use --reasoning-parser deepseek-v4.",
        )
    if tools is not None and reasoning is None:
        yield _finding(
            Severity.WARNING,
            _REASONING,
            f"{_TOOLS} is given and {_REASONING} is not",
            "The model's thinking stays in the answer, and a tool call that it only thought of is "
            "taken for one.",
            "Add --reasoning-parser deepseek-v4.",
        )
    if flag(facts, _TEMPLATE) is not None and tools in (None, *_WRITES_PROMPTS):
        yield _finding(
            Severity.INFO,
            _TEMPLATE,
            f"{_TEMPLATE} is not used: SGLang writes this model's prompts itself",
            "The prompt is not the one of the template.",
            "Leave it out.",
        )


def _other_tools(facts: Facts, said: str, expected: str) -> Finding:
    writes = said in _WRITES_PROMPTS
    return _finding(
        Severity.ERROR if writes else Severity.WARNING,
        _TOOLS,
        f"{_TOOLS} {said} is another model family's",
        "SGLang writes the prompts in that family's language too: the answers get worse, and tool "
        "calls are not made or not read."
        if writes
        else "Tool calls are not found in the answers.",
        f"Use {_TOOLS} {expected}.",
    )


def _finding(severity: Severity, subject: str, what: str, consequence: str, remedy: str) -> Finding:
    return Finding(
        rule=RULE.id,
        severity=severity,
        subject=subject,
        message=f"{what}.",
        consequence=consequence,
        evidence=("SGLang's resolve_chat_encoding_spec asks the tool-call parser first",)
        if subject != _REASONING
        else ("the parsers as the launch names them",),
        remedy=Remedy(remedy),
    )


RULE = Rule(
    id="DSV801",
    title="Parsers of another model family",
    severity=Severity.ERROR,
    reads=("launch", "checkpoint"),
    check=check,
)

_GOOD = (_TOOLS, "deepseekv4", _REASONING, "deepseek-v4")

EXAMPLES = (
    Example(
        "prompts of V3.2",
        scene(flags=(_TOOLS, "deepseekv32", _REASONING, "deepseek-v4")),
        expect=(_TOOLS,),
    ),
    Example(
        "V4's parser on V4.1",
        scene(flags=_GOOD, model="deepseek_v41"),
        expect=(_TOOLS,),
    ),
    Example(
        "other parsers",
        scene(flags=(_TOOLS, "qwen25", _REASONING, "deepseek-r1")),
        expect=(_TOOLS, _REASONING),
    ),
    Example("no reasoning parser", scene(flags=_GOOD[:2]), expect=(_REASONING,)),
    Example("a template", scene(flags=(*_GOOD, _TEMPLATE, "x.jinja")), expect=(_TEMPLATE,)),
    Example("the family's own", scene(flags=_GOOD)),
    Example("no parsers", scene()),
    Example("another model", scene(flags=_GOOD, model="deepseek_v3")),
)
