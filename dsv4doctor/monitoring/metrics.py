"""The metrics that an SGLang tree exports, read from its source: nothing of the tree is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KINDS = ("Counter", "Gauge", "Histogram", "Summary")
_FOLDERS = ("sglang/srt/observability", "sglang/srt/metrics")
_PREFIX = "sglang:"


@dataclass(frozen=True)
class Metric:
    name: str
    """As written in the source, e.g. "sglang:num_running_reqs"."""
    kind: str
    """Of `KINDS`."""
    documentation: str
    file: str
    line: int

    @property
    def exported(self) -> str:
        """The name of its series: a counter's ends in _total."""
        if self.kind == "Counter" and not self.name.endswith("_total"):
            return f"{self.name}_total"
        return self.name


def read_metrics(root: Path) -> dict[str, Metric]:
    """Name -> metric, of the tree whose `sglang/` lies in `root`; empty where it has none."""
    found: dict[str, Metric] = {}
    for folder in _FOLDERS:
        for file in sorted((root / folder).glob("*.py")):
            for metric in _of_file(file, root):
                found.setdefault(metric.name, metric)
    return found


def _of_file(file: Path, root: Path) -> Iterator[Metric]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(text) if _PREFIX in text else None
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.Call):
            continue
        kind = getattr(node.func, "id", getattr(node.func, "attr", None))
        if kind not in KINDS:
            continue
        said = {keyword.arg: keyword.value for keyword in node.keywords}
        name = _text(said.get("name", node.args[0] if node.args else None))
        if name.startswith(_PREFIX):
            documentation = said.get("documentation", node.args[1] if node.args[1:] else None)
            where = file.relative_to(root).as_posix()
            yield Metric(name, kind, _text(documentation), where, node.lineno)


def _text(node: ast.expr | None) -> str:
    """A string constant, also of pieces; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""
