"""Every rule and signature can be explained; unknown names are answered with the closest."""

from __future__ import annotations

import pytest

from dsv4doctor.cli import run
from dsv4doctor.diagnose.signature import signatures
from dsv4doctor.errors import UsageError
from dsv4doctor.explain import explain, listing
from dsv4doctor.rules import MODULES

_RULES = [module.RULE.id for module in MODULES]
_SIGNATURES = [entry.id for entry in signatures()]


@pytest.mark.parametrize("name", [*_RULES, *_SIGNATURES])
def test_every_id_has_a_long_form(name: str) -> None:
    text = explain(name.lower())
    assert text.startswith(f"{name}  ")
    assert "fix" in text.lower() or name in _RULES
    assert len(text.splitlines()) >= 6


def test_signature_names_causes_releases_and_links() -> None:
    text = explain("LOG201")
    for part in (
        "0.5.16, 0.5.17 and 0.5.18",
        "SGLANG_SM120_FLASHMLA_BACKEND=triton",
        "issues/33943",
    ):
        assert part in text
    assert "{" not in explain("LOG104").split("Looks like")[0]


def test_rule_tells_its_cause_fix_and_relations() -> None:
    text = explain("DSV102")
    for part in ("HybridFp8NvFp4Config", "Fix:", "explain LOG101", "Needs: trace"):
        assert part in text


def test_listing_holds_everything_once() -> None:
    first_words = [line.split()[0] for line in listing().splitlines()]
    assert first_words == [*_RULES, *_SIGNATURES]


@pytest.mark.parametrize("name", ["LOG40", "DSV-102", "nonsense", "", "x" * 5000, "LOG\x1b[1m"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(UsageError, match="no such rule or signature") as raised:
        explain(name)
    assert "closest: " in str(raised.value.hint)
    assert len(raised.value.message) < 200


def test_closest_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "DSV10"]) == 2
    said = capsys.readouterr()
    assert said.err.count("DSV10") >= 3
    assert said.out == ""


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "LOG401"]) == 0
    assert "old nvcc" in capsys.readouterr().out
    assert run(["explain", "--list"]) == 0
    assert "LOG401" in capsys.readouterr().out
    assert run(["explain"]) == 2
    assert "--list" in capsys.readouterr().err
