"""Installed packages that do not satisfy what the installed SGLang asks for.

Only where SGLang is installed beside them: a borrowed tree says nothing about this environment.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.commands import is_for_another_machine
from dsv4doctor.models import Facts, Finding, Package, Remedy, Severity
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import flashinfer, scene


def check(facts: Facts) -> Iterator[Finding]:
    stack = facts.snapshot.stack
    assert stack is not None
    tree = facts.snapshot.sglang
    if tree is None or tree.borrowed:
        raise NotChecked("SGLang is not installed in this environment: it is not the server's")
    is_other = is_for_another_machine(facts)
    python = "python" if is_other else stack.interpreter
    for package in stack.packages:
        if package.satisfied is not False or package.required is None:
            continue
        has = f"is {package.version}" if package.version else "is not installed"
        yield Finding(
            rule=RULE.id,
            severity=Severity.WARNING,
            subject=package.name,
            message=f"{package.name} {has}; SGLang {tree.version} asks for {package.required}.",
            consequence="SGLang may not start, or reach kernels that it was not tested with.",
            evidence=(f"{stack.interpreter}: {package.name} {package.version or 'missing'}",),
            remedy=Remedy(
                f"Install what SGLang pins{' on the machine that serves' if is_other else ''}.",
                (f"{python} -m pip install '{package.name}{_pin(package)}'",),
            ),
        )


def _pin(package: Package) -> str:
    return "" if package.required in (None, "*") else str(package.required)


RULE = Rule(
    id="DSV405",
    title="Installed packages against SGLang's own pins",
    severity=Severity.WARNING,
    reads=("stack",),
    check=check,
    about_machine=True,
)

EXAMPLES = (
    Example(
        "an older FlashInfer",
        scene(packages=(Package("flashinfer-python", "0.6.12", "==0.7.2", False),)),
        expect=("flashinfer-python",),
    ),
    Example(
        "not installed",
        scene(packages=(Package("tilelang", None, "==0.1.12", False),)),
        expect=("tilelang",),
    ),
    Example("as pinned", scene(packages=flashinfer("0.7.2"))),
    Example("no pin", scene(packages=(Package("triton", "3.6.0", None, None),))),
)
