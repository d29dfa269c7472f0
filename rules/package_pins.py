"""Installed packages that do not satisfy what the installed SGLang asks for.

Only where SGLang is installed beside them: a borrowed tree says nothing about this environment.
One that is not there, and that SGLang imports as it starts with nothing to catch the error, is the
end of the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dsv4doctor.commands import is_for_another_machine
from dsv4doctor.models import (
    Facts,
    Finding,
    Location,
    MissingImport,
    Package,
    Remedy,
    Severity,
    SglangTree,
    Stack,
)
from dsv4doctor.rules.common import with_source
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
    missing = facts.trace.missing if facts.trace is not None else ()
    for one in missing:
        yield _stops(one, stack, tree)
    told = [_distribution(one) for one in missing]
    for package in stack.packages:
        if package.satisfied is not False or package.required is None or package.name in told:
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


def _stops(missing: MissingImport, stack: Stack, tree: SglangTree) -> Finding:
    name, required = _distribution(missing), missing.requirement
    pin = Requirement(required).specifier if required else None
    asks = f"asks for {pin}" if pin else "imports it" if pin is None else "requires it"
    text = "Install what SGLang pins." if required else f"Install the package that has {name}."
    return Finding(
        rule=RULE.id,
        severity=Severity.ERROR,
        subject=name,
        message=f"{name} is not installed; SGLang {tree.version} {asks}.",
        consequence=(
            f"The server does not start: SGLang imports {missing.package}, and nothing catches "
            f"the {missing.error.type}."
        ),
        evidence=(
            f"{stack.interpreter}: {missing.error.message}",
            f"imported at {with_source(missing.at)}",
        ),
        locations=(missing.at,),
        remedy=Remedy(
            f"{text} If another environment serves, name it with --python, or the release with "
            f"--sglang {tree.version}.",
            (f"{stack.interpreter} -m pip install '{required}'",) if required else (),
        ),
    )


def _distribution(missing: MissingImport) -> str:
    if missing.requirement is None:
        return missing.package
    return canonicalize_name(Requirement(missing.requirement).name)


def _pin(package: Package) -> str:
    return "" if package.required in (None, "*") else str(package.required)


RULE = Rule(
    id="DSV405",
    title="Installed packages against SGLang's own pins",
    severity=Severity.ERROR,
    reads=("stack",),
    check=check,
    about_machine=True,
)

_PLACE = Location("sglang/srt/layers/quantization/utils.py", 27, None, "import sgl_kernel")


def _stopped(*packages: Package) -> Facts:
    shown = scene(packages=packages)
    assert shown.trace is not None
    missing = (MissingImport("sgl_kernel", "sglang-kernel==0.4.10", _PLACE),)
    return replace(shown, trace=replace(shown.trace, missing=missing))


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
    Example(
        "not installed, and imported as SGLang starts",
        _stopped(Package("sglang-kernel", None, "==0.4.10", False)),
        expect=("sglang-kernel",),
    ),
    Example("as pinned", scene(packages=flashinfer("0.7.2"))),
    Example("no pin", scene(packages=(Package("triton", "3.6.0", None, None),))),
)
