"""Every rule and signature can be explained; unknown names are answered with the closest."""

from __future__ import annotations

import re
import sys
from importlib import resources
from pathlib import Path
from types import ModuleType

import pytest

from dsv4doctor.cli import run
from dsv4doctor.diagnose.signature import signatures
from dsv4doctor.errors import UsageError
from dsv4doctor.explain import explain, listing
from dsv4doctor.fixes import ALL
from dsv4doctor.profiling.findings import KINDS
from dsv4doctor.rules import MODULES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_RULES = [module.RULE.id for module in MODULES]
_SIGNATURES = [entry.id for entry in signatures()]
_FIXES = [fix.id for fix in ALL]
_KINDS = [kind.id for kind in KINDS]
_ROOT = Path(__file__).parent.parent
_ID = re.compile(r"\b(?!SIM|RUF)[A-Z]{3}[1-9]\d\d\b")


@pytest.mark.parametrize("name", [*_RULES, *_SIGNATURES, *_FIXES, *_KINDS])
def test_every_id_has_a_long_form(name: str) -> None:
    text = explain(name.lower())
    assert text.startswith(f"{name}  ")
    assert "fix" in text.lower() or name in _RULES
    assert len(text.splitlines()) >= 6


def test_every_id_that_anything_prints_is_known() -> None:
    named: set[str] = set()
    for folder in ("dsv4doctor", "rules", "fixes", "kernels", "docs"):
        for path in (_ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".toml", ".md"):
                named.update(_ID.findall(path.read_text("utf-8")))
    assert {name[:3] for name in named} == {"DSV", "LOG", "FIX", "PRF"}
    for name in named:
        assert explain(name)


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
    for part in ("HybridFp8NvFp4Config", "Fix, e.g.:", "explain LOG101", "Needs: trace"):
        assert part in text


def test_rule_tells_what_happens_releases_and_reports() -> None:
    text = explain("DSV107")
    for part in ("What happens", "SGLang 0.5.14 to 0.5.20", "sglang/pull/39939", "Examples:"):
        assert part in text


def test_what_is_said_of_releases_is_about_rules_that_exist() -> None:
    known = tomllib.loads(
        resources.files("dsv4doctor.rules").joinpath("data/background.toml").read_text("utf-8")
    )
    assert set(known) <= set(_RULES)
    for entry in known.values():
        assert set(entry) <= {"releases", "links"}
        assert all(link.startswith("https://github.com/") for link in entry.get("links", ()))


@pytest.mark.parametrize("module", MODULES, ids=_RULES)
def test_a_rule_s_own_text_is_for_its_readers(module: ModuleType) -> None:
    """More than a repeated title, and nothing about this package's inside."""
    text = (module.__doc__ or "").strip()
    assert "dsv4doctor.rules" not in text
    assert ".py (" not in text
    assert len(text.split()) >= 7


def test_listing_holds_everything_once() -> None:
    first_words = [line.split()[0] for line in listing().splitlines()]
    assert first_words == [*_RULES, *_SIGNATURES, *_FIXES, *_KINDS]


@pytest.mark.parametrize("name", ["LOG40", "DSV-102", "nonsense", "", "x" * 5000, "LOG\x1b[1m"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(UsageError, match="no such rule, signature, fix or finding") as raised:
        explain(name)
    assert "closest: " in str(raised.value.hint)
    assert len(raised.value.message) < 200


def test_closest_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "DSV10"]) == 2
    said = capsys.readouterr()
    assert said.err.count("DSV1") >= 3
    assert said.out == ""


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "LOG401"]) == 0
    assert "old nvcc" in capsys.readouterr().out
    assert run(["explain", "--list"]) == 0
    assert "LOG401" in capsys.readouterr().out
    assert run(["explain"]) == 2
    assert "--list" in capsys.readouterr().err


def test_a_rule_and_its_patch_name_each_other() -> None:
    assert "explain FIX104" in explain("DSV204")
    text = explain("FIX104")
    assert "explain DSV204" in text
    assert "$ dsv4doctor fix --only FIX104 --launch serve.sh" in text


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("name", ["DSV204", "FIX101"])
def test_the_text_fits_the_terminal(name: str, columns: int) -> None:
    lines = explain(name, columns).splitlines()
    longest = max(len(line) for line in lines if not line.lstrip().startswith("$ "))
    assert min(columns, 100) * 0.8 < longest <= max(columns, 72)
    assert explain(name, columns).split() == explain(name, 9999).split()
