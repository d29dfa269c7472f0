"""What a verdict may stand on: the evidence of an interpreter, where it is about this SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from dsv4doctor.facts.tree import requirements
from dsv4doctor.models import KernelEvidence, SglangTree, Stack

_FLASHINFER = "flashinfer-python"
_KERNELS = ("sglang-kernel", "sgl-kernel")


@dataclass(frozen=True)
class Grounds:
    evidence: KernelEvidence = field(default_factory=KernelEvidence)
    flashinfer: str | None = None
    """The version that will serve: installed, or pinned by SGLang."""
    missing: str = "nothing installed was looked at"
    """Why the evidence does not speak of FlashInfer; empty where it does."""
    verified: Mapping[str, str] = field(default_factory=dict)
    """Our own kernels that were verified on the machine of this launch, and the day."""


def grounds(stack: Stack | None, tree: SglangTree) -> Grounds:
    """What of `stack` holds for `tree`.

    What is installed counts for the SGLang installed beside it.  For another SGLang it counts
    where that SGLang requires this very version; else the version that it pins is named, and
    there is no evidence.
    """
    pins = _pins(tree)
    pinned = _pinned(pins.get(_FLASHINFER))
    if stack is None:
        return Grounds(flashinfer=pinned, missing=_missing("no packages were read", tree, pinned))
    evidence = stack.evidence
    installed = {package.name: package.version for package in stack.packages}
    kernels = next((name for name in _KERNELS if installed.get(name)), None)
    if kernels is not None and not _fits(tree, pins.get(kernels), installed[kernels]):
        evidence = replace(evidence, libraries=())
    if evidence.flashinfer is None:
        version = installed.get(_FLASHINFER)
        if version is not None and _fits(tree, pins.get(_FLASHINFER), version):
            return Grounds(evidence, version, f"FlashInfer {version} was not looked into")
        missing = _missing("no FlashInfer in this interpreter", tree, pinned)
        return Grounds(evidence, pinned, missing)
    if not _fits(tree, pins.get(_FLASHINFER), evidence.flashinfer):
        here = f"FlashInfer {evidence.flashinfer} in this interpreter is another one"
        return Grounds(
            replace(evidence, flashinfer=None, declarations=()),
            pinned,
            _missing(here, tree, pinned),
        )
    problem = evidence.flashinfer_problem
    silent = f"of FlashInfer {evidence.flashinfer} {problem}" if problem else ""
    return Grounds(evidence, evidence.flashinfer, missing=silent)


def _missing(what: str, tree: SglangTree, pinned: str | None) -> str:
    return f"{what}, SGLang {tree.version} pins {pinned}" if pinned else what


def _pins(tree: SglangTree) -> dict[str, SpecifierSet]:
    return {
        canonicalize_name(requirement.name): requirement.specifier
        for requirement in requirements(tree)
    }


def _pinned(specifier: SpecifierSet | None) -> str | None:
    exact = [one.version for one in specifier or () if one.operator == "=="]
    return exact[0] if exact else None


def _fits(tree: SglangTree, specifier: SpecifierSet | None, version: str | None) -> bool:
    if not tree.borrowed or specifier is None:
        return not tree.borrowed
    try:
        return specifier.contains(Version(version or ""), prereleases=True)
    except InvalidVersion:
        return False
