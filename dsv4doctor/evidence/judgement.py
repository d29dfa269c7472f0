"""What the evidence alone says of one kernel on one GPU.

A "no" ends the question; a "yes" is given only for what was found to be there.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4doctor.evidence.archs import admits, holds_code_for
from dsv4doctor.models import Arch, Declaration, KernelEvidence


@dataclass(frozen=True)
class Judgement:
    exists: bool | None
    """None: the evidence does not settle it."""
    source: str
    """What said so, for the reader."""
    refusal: str | None = None
    """The error to expect where it does not exist."""


def of_kernel(symbol: str, arch: Arch, evidence: KernelEvidence) -> Judgement | None:
    """None: the evidence is silent about this kernel."""
    if symbol.startswith("flashinfer"):
        return _flashinfer(symbol, arch, evidence)
    if symbol.startswith(("sgl_kernel.", "torch.ops.sgl_kernel.")):
        return _library(symbol.rpartition(".")[2], arch, evidence)
    return None


def refusal(symbol: str, arch: Arch, evidence: KernelEvidence) -> str | None:
    """The error line of this FlashInfer for a kernel that does not exist for `arch`."""
    said = declarations(symbol, evidence)
    rejecting = [one for one in said if one.kind != "failure" and not admits(one.admits, arch)]
    last = [one for one in said if one.kind == "failure"]
    for one in (*_in_order(rejecting), *last):
        if one.refusal:
            return one.refusal.replace("{sm}", f"{arch.major}{arch.minor}")
    return None


def declarations(symbol: str, evidence: KernelEvidence) -> tuple[Declaration, ...]:
    """What is said of the function `symbol`; a re-export from elsewhere counts by its name."""
    exact = tuple(one for one in evidence.declarations if one.symbol == symbol)
    if exact:
        return exact
    name = symbol.rpartition(".")[2]
    same = [one for one in evidence.declarations if one.symbol.rpartition(".")[2] == name]
    first = {one.symbol for one in same[:1]}
    return tuple(one for one in same if one.symbol in first)


_ORDER = ("decorator", "jit", "launcher", "cubins", "manifest")


def _in_order(said: list[Declaration]) -> list[Declaration]:
    """In the order in which a call meets them."""
    return sorted(said, key=lambda one: _ORDER.index(one.kind))


def _flashinfer(symbol: str, arch: Arch, evidence: KernelEvidence) -> Judgement | None:
    said = [one for one in declarations(symbol, evidence) if one.kind != "failure"]
    if not said:
        return None
    version = f"FlashInfer {evidence.flashinfer}"
    jit = [one for one in said if one.kind == "jit"]
    others = [one for one in said if one.kind != "jit"]
    # Several modules: one that is refused need not be the one that is called.
    rejecting = [one for one in others if not admits(one.admits, arch)]
    if jit and not any(admits(one.admits, arch) for one in jit):
        rejecting += jit
    if rejecting:
        first = _in_order(rejecting)[0]
        return Judgement(
            False, f"{version} {_says(first)} ({_at(first)})", refusal(symbol, arch, evidence)
        )
    kinds = ("cubins", "manifest", "decorator")
    proofs = [one for one in others if one.kind in kinds and not one.by_backend]
    if jit and all(admits(one.admits, arch) and not one.prebuilt for one in jit):
        proofs += jit
    if any(one.prebuilt for one in jit):
        proofs = [one for one in proofs if one.kind in ("cubins", "manifest")]
    if proofs:
        return Judgement(True, f"{version} {_says(proofs[0])} ({_at(proofs[0])})")
    first = _in_order(said)[0]
    unsettled = (
        "which only launches prebuilt kernels" if first.prebuilt else "which settles nothing"
    )
    return Judgement(None, f"{version} {_says(first)}, {unsettled} ({_at(first)})")


def _says(one: Declaration) -> str:
    gpus = ", ".join(one.admits)
    return {
        "decorator": f"declares it for {gpus}",
        "jit": f"compiles it for {gpus}",
        "launcher": f"admits {gpus} in its launcher",
        "cubins": f"picks prebuilt kernels for {gpus} only",
        "manifest": f"has prebuilt kernels for {gpus} only",
    }[one.kind]


def _at(one: Declaration) -> str:
    return f"{one.at.file}:{one.at.line}"


def _library(operator: str, arch: Arch, evidence: KernelEvidence) -> Judgement | None:
    holding = [one for one in evidence.libraries if operator in one.ops and not one.problem]
    # sm_90 has a library of its own, which no other GPU loads.
    loaded = [one for one in holding if ("/sm90/" in one.path) == (arch.major == 9)]
    chosen = (loaded or holding)[:1]
    if not chosen:
        return None
    library = chosen[0]
    targets = ", ".join([*library.cubins, *(f"PTX {name}" for name in library.ptx)]) or "no GPU"
    source = f"{library.path}, which holds it, has code for {targets}"
    if not holds_code_for(library, arch):
        return Judgement(
            False, source, "CUDA error: no kernel image is available for execution on the device"
        )
    # That a library has code for a GPU does not say that each of its operators has.
    return Judgement(None, source)
