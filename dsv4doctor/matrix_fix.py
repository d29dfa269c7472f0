"""What `dsv4doctor fix` has for a draft that no flag set of a matrix runs.  Nothing is proved."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsv4doctor import fixes
from dsv4doctor.facts.features import read_features
from dsv4doctor.fixes.fix import Change, Choice
from dsv4doctor.matrix import WORKING, Cell, Matrix, path_text
from dsv4doctor.matrix import Choice as ToChoose
from dsv4doctor.models import Arch, SglangTree, Verdict
from dsv4doctor.planning.release import text_of
from dsv4doctor.rules.common import marlin_scale
from dsv4doctor.verdicts import NO_CLAMP

_DRAFT, _CLAMP = "FIX101", "FIX103"
_DRAFT_METHOD = "Mxfp4FlashinferTrtllmMoEMethod"
_MAIN_METHOD = "ModelOptNvFp4FusedMoEMethod"
_UNRANKED = 9
_SHOWN = 3
"""Choices that reports for people print."""


@dataclass(frozen=True)
class Patch:
    """Fixes that change an SGLang tree so that a launch keeps its draft, by their own account."""

    fixes: tuple[str, ...]
    cell: Cell
    tree: SglangTree
    flags: tuple[str, ...]

    @property
    def text(self) -> str:
        names = " and ".join(self.fixes)
        return (
            f"`dsv4doctor fix` has {names} for the draft of SGLang {self.cell.key.release} "
            f"({self.cell.key.flag_set}); with --apply it proves by a trace that it runs, or "
            "changes nothing."
        )

    def command(self, model: str, environment: Mapping[str, str]) -> str:
        """The plan of those fixes, as a shell line."""
        said = ["dsv4doctor", "fix"]
        for name in self.fixes:
            said += ["--only", name]
        said += [model, "--arch", self.cell.key.arch.name]
        if self.tree.borrowed:
            is_wheel = self.tree.origin == "wheel"
            said += ["--sglang", self.tree.version if is_wheel else self.tree.root]
        for name, value in environment.items():
            said += ["--env", f"{name}={value}"]
        return shlex.join([*said, *(["--", *self.flags] if self.flags else [])])


def patch_for_draft(
    matrix: Matrix,
    arch: Arch,
    checkpoint: str,
    newest_first: Sequence[str],
    trees: Mapping[str, SglangTree],
) -> tuple[Patch | None, tuple[str, ...]]:
    """The best launch whose draft alone fails, or its draft and the main experts' clamp, where
    fixes know both places in its tree; and what comes before it but for a hot path that fails,
    as `left_out` names it.

    Ordered as `recommend` does: no fallback, the main kernel's tier, the newer release.
    """
    names = [one.name for one in matrix.flag_sets]

    def place(one: Cell) -> tuple[object, ...]:
        return (
            one.main.verdict is Verdict.FALLBACK,
            one.main.tier or _UNRANKED,
            newest_first.index(one.key.release),
            names.index(one.key.flag_set),
        )

    own = [one for one in matrix.cells if (one.key.arch, one.key.checkpoint) == (arch, checkpoint)]
    left: list[str] = []
    for one in sorted(own, key=place):
        needed, tree = fixes_for(one), trees.get(one.key.release)
        if not needed or tree is None or not all(_changes(name, tree) for name in needed):
            continue
        if not one.path_problem:
            flags = matrix.flag_sets[names.index(one.key.flag_set)].flags
            return Patch(needed, one, tree, flags), tuple(dict.fromkeys(left))
        left.append(path_text(one))
    return None, tuple(dict.fromkeys(left))


def fixes_for(one: Cell) -> tuple[str, ...]:
    """The fixes that leave none of the cell's experts failing; empty: there are none."""
    draft, main = one.draft, one.main
    if draft is None or not (one.key.arch.is_sm12x or one.key.arch.major == 9):
        return ()
    if draft.verdict is not Verdict.FAILS or draft.quant_method != _DRAFT_METHOD:
        return ()
    if main.verdict in WORKING:
        return (_DRAFT,)
    by_cutlass = main.quant_method == _MAIN_METHOD and (main.kernel or "").endswith(
        "cutlass_fused_moe"
    )
    return (_DRAFT, _CLAMP) if by_cutlass and main.reason.startswith(NO_CLAMP) else ()


def _changes(name: str, tree: SglangTree) -> bool:
    """Whether the fix finds what it changes."""
    [fix] = [one for one in fixes.ALL if one.id == name]
    try:
        texts = {file: text_of(Path(tree.root) / file) for file in fix.files}
        outcome = fix.plan({file: text for file, text in texts.items() if text}, Choice())
    except Exception:  # a fix that fails on a tree is no help for it
        return False
    return isinstance(outcome, Change)


def cautions(choices: Sequence[ToChoose], trees: Mapping[str, SglangTree]) -> tuple[str, ...]:
    """What the choices that are printed take for granted: attention that no trace promises, and
    of the first on Marlin with NVFP4 experts its scale."""
    unknown = dict.fromkeys(
        f"Not known to run on SGLang {choice.cell.key.release}: {choice.cell.attention_caveat}."
        for choice in choices[:_SHOWN]
        if choice.cell.attention_caveat
    )
    for choice in choices[:_SHOWN]:
        tree, main = trees.get(choice.cell.key.release), choice.cell.main
        if tree is None or "marlin" not in (main.kernel or ""):
            continue
        said = marlin_scale(read_features(Path(tree.root)), main.stored_format, main.kernel)
        if said is not None:
            return (*unknown, said)
    return tuple(unknown)
