"""What real SGLang releases write while all is well is not taken for a failure."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsv4doctor.diagnose.judge import judge
from dsv4doctor.diagnose.scan import Scanner
from dsv4doctor.diagnose.signature import signatures
from dsv4doctor.models import SglangTree

pytestmark = pytest.mark.wheels

_PARTS = ("srt/model_executor", "srt/managers", "srt/entrypoints", "srt/layers", "srt/models",
          "srt/arg_groups", "srt/speculative", "srt/mem_cache", "srt/disaggregation")  # fmt: skip
_CALM = ("info", "debug", "log_info_on_rank0")
_TRUE_SIGNS = {"LOG101", "LOG102", "LOG108"}
"""Lines at level info that are themselves the sign."""


def messages(root: Path) -> Iterator[str]:
    """The texts of the calm log statements, a number in place of every value."""
    for part in _PARTS:
        for file in sorted((root / "sglang" / part).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.Call) and _name(node.func) in _CALM:
                    for argument in node.args:
                        text = _text(argument)
                        if text:
                            yield " ".join(text.split())


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "7" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return ""


@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
def test_calm_statements_match_nothing(
    version: str, sglang_tree: Callable[[str], SglangTree]
) -> None:
    lines = sorted(set(messages(Path(sglang_tree(version).root))))
    assert len(lines) > 500
    scanner = Scanner(signatures())
    log = "".join(f"[2026-11-29 14:00:00 TP0 EP0] {line}\n" for line in lines)
    scanner.feed(log.encode())
    diagnosis = judge(scanner.finish(), "log", "sm_120", ())
    found = {match.signature.id: match.line.text for match in diagnosis.matches}
    assert {name: text for name, text in found.items() if name not in _TRUE_SIGNS} == {}
    assert len(diagnosis.unexplained) <= 2, diagnosis.unexplained


@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
def test_signatures_quote_what_the_release_writes(
    version: str, sglang_tree: Callable[[str], SglangTree]
) -> None:
    """Every statement a signature names is there, in one of the files it names."""
    root = Path(sglang_tree(version).root)
    for signature in signatures():
        texts = {text for _, text in signature.emitted_at}
        present = [
            text
            for file, text in signature.emitted_at
            if (root / file).is_file() and text in (root / file).read_text(encoding="utf-8")
        ]
        since_later = signature.id in ("LOG106", "LOG205", "LOG301")
        assert not texts or present or (version == "0.5.14" and since_later), signature.id
