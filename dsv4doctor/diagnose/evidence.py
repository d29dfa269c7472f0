"""file:line evidence: the frames of a log's traceback, and a message's own statement, in a tree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsv4doctor.diagnose.judge import Match
from dsv4doctor.diagnose.traces import Frame
from dsv4doctor.models import Location, SglangTree

_MAX_FILE = 4 << 20
_SHOWN = 12


@dataclass(frozen=True)
class Evidence:
    location: Location
    note: str


def evidence(match: Match, tree: SglangTree) -> tuple[Evidence, ...]:
    """Source lines of `tree` behind `match`, the innermost frame last."""
    root = Path(tree.root).resolve()
    found: list[Evidence] = []
    for file, text in match.signature.emitted_at:
        lines = _lines(root, file)
        at = next((number for number, line in enumerate(lines, 1) if text in line), None)
        if at is not None:
            shown = Location(file, at, source=lines[at - 1].strip())
            found.append(Evidence(shown, "writes this message"))
    trace = match.sighting.traceback
    for frame in trace.frames[-60:] if trace else ():
        mapped = _mapped(root, frame)
        if mapped is not None:
            found.append(mapped)
    return tuple(found[-_SHOWN:])


def _mapped(root: Path, frame: Frame) -> Evidence | None:
    """The frame's line in the tree; where the text differs, the nearest line that has it."""
    file = _relative(frame.file)
    lines = _lines(root, file) if file is not None else []
    if file is None or not lines:
        return None
    wanted = frame.source
    here = lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else None
    if wanted is None or here == wanted:
        if here is None:
            return None
        note = "as in the log" if wanted is not None else "the log has no source text to compare"
        return Evidence(Location(file, frame.line, frame.function, here), note)
    same = [number for number, line in enumerate(lines, 1) if line.strip() == wanted]
    if same:
        nearest = min(same, key=lambda number: abs(number - frame.line))
        note = f"line {frame.line} in the log: another release or a changed file"
        return Evidence(Location(file, nearest, frame.function, wanted), note)
    note = f"the log shows `{wanted}` there: another release"
    return Evidence(Location(file, frame.line, frame.function, here), note)


def _relative(file: str) -> str | None:
    """`sglang/...` of a path in a log; None when it is not SGLang's."""
    parts = file.replace("\\", "/").split("/")
    if ".." in parts or "sglang" not in parts:
        return None
    start = len(parts) - 1 - parts[::-1].index("sglang")
    return "/".join(parts[start:])


def _lines(root: Path, file: str) -> list[str]:
    """The file's lines; empty when it is not there, not inside the tree, or unreasonably large."""
    try:
        path = (root / file).resolve()
        if root not in path.parents or not path.is_file() or path.stat().st_size > _MAX_FILE:
            return []
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return []
