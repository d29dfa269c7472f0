"""What FIX104, FIX105 and FIX106 share: our kernel where it is verified, SGLang's code otherwise.

All three look for one statement in one function and put ours in front of it or in its place; what
was there stays as the way without a stamp, and off sm_12x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from dsv4doctor.fixes import edit
from dsv4doctor.fixes.fix import Absent, Asks, Change, Choice, Outcome, Sources
from dsv4doctor.models import HotPath, Layer, Trace


def ours(fix: str, variable: str, operation: str, name: str) -> str:
    """Statements that leave our function, or None, in `variable`."""
    return edit.from_ours(fix, "verified", "verified") + (
        f'\n{variable} = verified("{operation}", "{name}")\n'
    )


@dataclass(frozen=True)
class Site:
    """A statement to change, and the code that takes its place."""

    files: tuple[str, ...]
    """Where its function may lie; the first that has it counts."""
    function: str
    """Its name; "*.name" for a method of whichever class."""
    word: str
    """Without it in the function there is nothing to do."""
    matcher: m.BaseMatcherNode
    code: Callable[[edit.Piece, cst.CSTNode], str]
    """The new statements, that of SGLang among them."""
    expected: str
    reason: str


@dataclass(frozen=True)
class Found:
    piece: edit.Piece
    node: cst.CSTNode


def find(sources: Sources, site: Site) -> Found | Outcome:
    """The one statement of a site; Absent without its function, Refused without the statement."""
    last: Outcome | None = None
    for piece in _pieces(sources, site):
        if site.word not in piece.text:
            continue
        nodes = piece.find(site.matcher)
        if len(nodes) == 1:
            return Found(piece, nodes[0])
        last = edit.refused(piece, nodes[0] if nodes else None, site.expected, site.reason)
    return last or Absent(f"{site.function.rpartition('.')[2]} has no {site.word} here")


def _pieces(sources: Sources, site: Site) -> Iterator[edit.Piece]:
    for file in site.files:
        if site.function.startswith("*."):
            yield from edit.find_methods(sources, file, site.function[2:])
        else:
            piece = edit.find_piece(sources, file, site.function)
            if piece is not None:
                yield piece


def plan(
    sources: Sources,
    choice: Choice,
    fix: str,
    sites: tuple[Site, ...],
    summary: str,
    operation: str,
) -> Outcome:
    """A Change of every site that is there; the first other outcome where there is none."""
    files = tuple(dict.fromkeys(file for site in sites for file in site.files))
    present = edit.own_mark(sources, files, fix)
    if present is not None:
        return present
    changed, at, others = dict(sources), [], []
    for site in sites:
        before = find(sources, site)
        now = find(changed, site)
        if not isinstance(before, Found) or not isinstance(now, Found):
            others.append(before)
            continue
        code = edit.in_place(site.code(now.piece, now.node), now.piece.newline)
        new = now.piece.replaced([(now.node, code)])
        changed[now.piece.file] = edit.with_piece(changed, now.piece, new)
        at.append(before.piece.at(before.node))
    refusals = [other for other in others if not isinstance(other, Absent)]
    if refusals or not at:
        outcome = (refusals or others)[0]
        assert not isinstance(outcome, Found)
        return outcome
    return Change(
        sources={file: text for file, text in changed.items() if text != sources[file]},
        at=tuple(at),
        summary=summary,
        target="triton",
        asks=Asks(operation, stops=False),
    )


# ------------------------------------------------------------------------ who needs it


def on_path(trace: Trace | None, names: tuple[str, ...], symbol: str) -> bool:
    """Whether one of the trace's hot paths of these names reaches a kernel with that word in it."""
    return any(reaches(path, names, symbol) for path in (trace.paths if trace else ()))


def reaches(path: HotPath, names: tuple[str, ...], symbol: str) -> bool:
    return path.name in names and path.kernel is not None and symbol in path.kernel.symbol


def still_on(after: Trace | None, names: tuple[str, ...], symbol: str) -> tuple[str, ...]:
    """What the fix was to change and did not, of the hot paths that were traced."""
    wrong = []
    for path in after.paths if after else ():
        if path.name not in names:
            continue
        if path.error is not None:
            wrong.append(f"{path.name}: {path.error.type}: {path.error.message}")
        elif path.kernel is not None and symbol in path.kernel.symbol:
            wrong.append(f"{path.name} still reaches {path.kernel.symbol}")
    return tuple(wrong)


def no_layer(layer: Layer) -> bool:
    """These fixes change no routed-expert layer."""
    return False
