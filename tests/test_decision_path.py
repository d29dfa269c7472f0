"""Which way the conditions of SGLang's dispatch code went."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

_SOURCE = """\
def deepseek_v4_topk(topk, draft):
    if draft:
        assert topk == 1, (
            f"not {topk}"
        )


def deepseek_v4_caught(topk):
    try:
        assert topk == 1
    except AssertionError:
        return "caught"
    return "fine"


def deepseek_v4_one_line(topk):
    assert topk == 1, "one"


def deepseek_v4_raises(topk):
    if topk.value:
        return 1
    return 2
"""


@pytest.mark.parametrize(
    ("function", "arguments", "taken"),
    [
        ("topk", (1, True), [True, True]),
        ("topk", (2, True), [True, False]),
        ("topk", (2, False), [False]),
        ("caught", (1,), [True]),
        ("caught", (2,), [False]),
        ("one_line", (1,), [True]),
        ("one_line", (2,), [False]),
        ("raises", (2,), [None]),
    ],
)
def test_an_assertion_holds_unless_it_raised(
    function: str, arguments: tuple[Any, ...], taken: list[bool | None], tmp_path: Path
) -> None:
    """Also one that ends its function, or that tells why on lines of its own."""
    from dsv4doctor.trace.worker.path_watch import PathWatch

    file = tmp_path / "sglang" / "srt" / "arg_groups" / "hook.py"
    file.parent.mkdir(parents=True)
    file.write_text(_SOURCE)
    found: dict[str, Any] = {}
    exec(compile(_SOURCE, str(file), "exec"), found)
    with PathWatch() as watch, contextlib.suppress(AssertionError, AttributeError):
        found[f"deepseek_v4_{function}"](*arguments)
    [step] = watch.result()
    assert [branch["taken"] for branch in step["branches"]] == taken
