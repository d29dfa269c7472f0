"""The long form of a rule, a log signature, a fix or a profile's finding: cause, evidence, fix."""

from __future__ import annotations

import difflib
import functools
import re
import sys
from collections.abc import Sequence
from importlib import resources
from types import ModuleType
from typing import Any

from dsv4doctor.diagnose.signature import Signature, signatures
from dsv4doctor.errors import UsageError
from dsv4doctor.fixes import ALL
from dsv4doctor.fixes.fix import Fix
from dsv4doctor.models import Finding
from dsv4doctor.profiling.findings import KINDS, Kind
from dsv4doctor.rules import MODULES
from dsv4doctor.terminal import wrapped

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def listing() -> str:
    """Every rule, signature, fix and finding of a profile, one a line."""
    rows = [(module.RULE.id, module.RULE.severity.value, module.RULE.title) for module in MODULES]
    rows += [(entry.id, entry.severity.value, entry.title) for entry in signatures()]
    rows += [(fix.id, "fix", fix.title) for fix in ALL]
    rows += [(kind.id, kind.severity.value, kind.title) for kind in KINDS]
    wide = max(len(row[0]) for row in rows)
    return "".join(f"{name:<{wide}}  {severity:<7}  {title}\n" for name, severity, title in rows)


def explain(name: str, columns: int = 100) -> str:
    """The text for the id of a rule, signature, fix or finding, whatever its case, on `columns`.

    UsageError for another one."""
    return wrapped(_explained(name), columns)


def _explained(name: str) -> str:
    wanted = name.strip().upper()
    for module in MODULES:
        if module.RULE.id.upper() == wanted:
            return _rule(module)
    for signature in signatures():
        if signature.id.upper() == wanted:
            return _signature(signature)
    for fix in ALL:
        if fix.id == wanted:
            return _fix(fix)
    for kind in KINDS:
        if kind.id == wanted:
            return _kind(kind)
    known = [module.RULE.id for module in MODULES] + [entry.id for entry in signatures()]
    known += [fix.id for fix in ALL] + [kind.id for kind in KINDS]
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.4) or known[:3]
    raise UsageError(
        f'"{name[:60]}": no such rule, signature, fix or finding',
        f"closest: {', '.join(near)}; `dsv4doctor explain --list` shows all",
    )


def _rule(module: ModuleType) -> str:
    rule = module.RULE
    known = _background().get(rule.id, {})
    parts = [f"{rule.id}  {rule.title} ({rule.severity.value})", "", _flowing(module.__doc__)]
    findings = _findings(module)
    consequences = dict.fromkeys(" ".join(found.consequence.split()) for found in findings)
    parts += ["", "What happens, e.g.:", *(f"  {text}" for text in [*consequences][:2])]
    if "releases" in known:
        parts += ["", "Releases:", f"  {known['releases']}"]
    parts += ["", f"Needs: {', '.join(rule.reads) or 'nothing'}", "", "Examples:"]
    for example in module.EXAMPLES:
        outcome = f"reports {', '.join(example.expect)}" if example.expect else "reports nothing"
        parts.append(f"  {example.title}: {outcome}")
    remedies = _remedies(findings)
    if remedies:
        parts += ["", "Fix, e.g.:", *(f"  {remedy}" for remedy in remedies)]
    links = [*known.get("links", ()), *_related(rule.id)]
    if links:
        parts += ["", "See also:", *(f"  {link}" for link in dict.fromkeys(links))]
    return "\n".join(parts) + "\n"


def _fix(fix: Fix) -> str:
    doc = sys.modules[fix.plan.__module__].__doc__
    parts = [f"{fix.id}  {fix.title} (fix)", "", _flowing(doc), "", "Reads or changes:"]
    parts += [f"  {file}" for file in fix.files]
    parts += ["", f"Verified by: {fix.verified_by}", "", "See whether a launch needs it, and how:"]
    parts += [f"  $ dsv4doctor fix --only {fix.id} --launch serve.sh", "", "See also:"]
    parts += [f"  dsv4doctor explain {rule}" for rule in fix.rules]
    return "\n".join(parts) + "\n"


def _kind(kind: Kind) -> str:
    parts = [f"{kind.id}  {kind.title} ({kind.severity.value})", "", kind.when, ""]
    parts += ["What happens:", f"  {kind.consequence}", "", "Fix:", f"  {kind.remedy}", ""]
    parts += ["Found in a trace of the torch profiler by:", "  $ dsv4doctor profile TRACE"]
    return "\n".join(parts) + "\n"


def _flowing(doc: str | None) -> str:
    """A docstring with each paragraph on one line; lists and what is indented stay as they are."""
    paragraphs = (doc or "").strip().split("\n\n")
    return "\n\n".join(
        text if re.search(r"^(\s|[*-] )", text, re.MULTILINE) else " ".join(text.split())
        for text in paragraphs
    )


@functools.cache
def _background() -> dict[str, dict[str, Any]]:
    """Rule -> the releases that were looked at, and where it was reported."""
    folder = resources.files("dsv4doctor.rules")
    return tomllib.loads(folder.joinpath("data/background.toml").read_text("utf-8"))


def _findings(module: ModuleType) -> list[Finding]:
    """What the rule finds in its own examples."""
    examples = [example for example in module.EXAMPLES if example.expect]
    return [found for example in examples for found in module.RULE.check(example.facts)]


def _remedies(findings: Sequence[Finding]) -> list[str]:
    found: dict[str, None] = {}
    for finding in findings:
        if finding.remedy is not None:
            text = " ".join([*finding.remedy.text.split(), *finding.remedy.commands[:1]])
            found[text] = None
    return list(found)[:4]


def _related(rule: str) -> list[str]:
    """The patches for what `rule` finds, and how a crash log shows it."""
    patches = [
        f"dsv4doctor explain {fix.id} (a patch: {fix.title})" for fix in ALL if rule in fix.rules
    ]
    return patches + [
        f"dsv4doctor explain {signature.id} (in a log: {signature.title})"
        for signature in signatures()
        if rule in signature.rules
    ]


def _signature(signature: Signature) -> str:
    parts = [
        f"{signature.id}  {signature.title} ({signature.severity.value})",
        "",
        f"In the log: {_plain(signature.message)}",
        f"Releases: {signature.releases}",
        "",
    ]
    for number, cause in enumerate(signature.causes, 1):
        parts.append(f"Cause {number}: {cause.text}")
        parts += [f"  speaks for it: {sign.says}" for sign in cause.confirms]
        parts += [f"  speaks against it: {sign.says}" for sign in cause.refutes]
        parts.append(f"  fix: {cause.remedy}")
        parts += [f"    $ {command}" for command in cause.commands]
        parts.append("")
    if signature.emitted_at:
        parts.append("Written by SGLang in:")
        parts += [f"  {file} ({text})" for file, text in signature.emitted_at]
        parts.append("")
    example = next((one for one in signature.examples if one.matches), None)
    if example is not None:
        parts += [f"Looks like ({example.title}):"]
        parts += [f"  {line[:300]}" for line in example.text.strip().splitlines()]
        parts.append("")
    parts += [f"Before a start, `dsv4doctor check` finds it as {rule}." for rule in signature.rules]
    parts += [*signature.links]
    return "\n".join(parts).rstrip() + "\n"


def _plain(message: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: f"<{found[1].upper()}>", message)
