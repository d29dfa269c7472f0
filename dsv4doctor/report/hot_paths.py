"""The hot paths beside the routed experts, for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dsv4doctor.models import HotPath, Trace, Verdict

Overwritten = Mapping[str, tuple[str | None, str]]
_STYLES = {
    Verdict.RUNS: "green",
    Verdict.FALLBACK: "yellow",
    Verdict.FAILS: "bold red",
    Verdict.UNKNOWN: "yellow",
}


def only_paths(trace: Trace | None) -> bool:
    """True where the routed experts were not asked for, and nothing has to be said of them."""
    if trace is None or not trace.paths:
        return False
    return not (trace.layers or trace.errors or trace.unresolved)


def path_summary(trace: Trace | None) -> str:
    """The paths' verdicts counted, in one line; "" when none were traced."""
    counts = Counter(path.verdict for path in trace.paths) if trace is not None else Counter()
    said = [f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict]]
    return f"other paths: {', '.join(said)}" if said else ""


def path_parts(trace: Trace | None) -> Iterator[RenderableType]:
    """A table of the paths, main model first; nothing when none were traced."""
    if trace is None or not trace.paths:
        return
    yield Text()
    yield Text("Other hot paths", style="bold")
    for path in trace.paths:
        yield _heading(path)
        yield _details(path, trace.environment_overwritten)


def _heading(path: HotPath) -> Text:
    line = Text(f"  {path.role.value} {path.name}", style="bold")
    line.append(f"  {path.choice or 'unknown'}", style="cyan" if path.choice else "yellow")
    line.append(f"  {path.verdict.value}", style=_STYLES[path.verdict])
    return line


def _details(path: HotPath, overwritten: Overwritten) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _rows(path, overwritten):
        if text:
            grid.add_row(f"    {label}", text)
    return grid


def _rows(path: HotPath, overwritten: Overwritten) -> Iterator[tuple[str, str]]:
    yield "layers", layers_text(path)
    if path.kernel is not None:
        site = path.kernel.call_site
        at = f" called at {site.file}:{site.line}" if site else ""
        yield "kernel", f"{path.kernel.symbol}{at}"
    if path.decided_at is not None:
        where = path.decided_at
        yield "decided", f"{where.file}:{where.line} {where.function or ''}".rstrip()
    yield "reads", ", ".join(_flag(name, overwritten) for name in path.flags_consulted)
    yield "detail", path.detail
    yield "why", path.reason


def _flag(name: str, overwritten: Overwritten) -> str:
    """A flag, and what SGLang set it to whatever the user says."""
    if name not in overwritten:
        return name
    return f"{name} (SGLang sets it to {overwritten[name][1]})"


def layers_text(path: HotPath) -> str:
    """How many layers, and the first of them."""
    count = len(path.layers)
    if count <= 1:
        return "".join(path.layers)
    return f"{count}, {path.layers[0]} first"
