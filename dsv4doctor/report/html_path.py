"""The decision path as a diagram: a box a function, a row a condition, an arrow to the next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from dsv4doctor.folding import fold
from dsv4doctor.models import Branch, Layer, Location, Step, Trace

_NOT_TEXT = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0001fffd]"
)
_PHASES = {
    "arguments": "SGLang resolves its arguments",
    "main": "Main model: how its routed experts are decided",
    "draft": "Draft model: how its routed experts are decided",
}


def text(value: str) -> str:
    """`value` as HTML text or attribute: nothing in it is markup, nothing is invisible."""
    return escape(_NOT_TEXT.sub("\N{REPLACEMENT CHARACTER}", value))


def prose(value: str) -> str:
    """A sentence of ours: what stands between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", text(value))


def place(location: Location | None) -> str:
    return f"{location.file}:{location.line}" if location else "-"


def diagrams(trace: Trace) -> str:
    """One diagram a phase; the last line of main and draft is what it comes to."""
    phases = list(dict.fromkeys(step.phase for step in trace.steps))
    return "".join(_diagram(phase, trace) for phase in phases)


def _diagram(phase: str, trace: Trace) -> str:
    layers = [one.layer for one in fold(trace.layers) if one.layer.role.value == phase]
    decided = {place(layer.decided_at) for layer in layers}
    steps = [step for step in trace.steps if step.phase == phase]
    # What decides nothing about the layers is there for completeness, folded in.
    opened = "" if phase == "arguments" else " open"
    boxes = [f"<li>{_step(step, decided)}</li>" for step in steps]
    boxes += [f"<li>{_end(layer)}</li>" for layer in layers]
    title = text(_PHASES.get(phase, phase))
    return (
        f'<details class="card"{opened}><summary>{title}</summary>'
        f'<ol class="path">{"".join(boxes)}</ol></details>'
    )


def _step(step: Step, decided: set[str]) -> str:
    times = f' <span class="soft">{step.times} times</span>' if step.times > 1 else ""
    returned = ""
    if step.returned not in (None, "None"):
        returned = f"<footer>returns <code>{text(step.returned or '')}</code></footer>"
    rows = "".join(_branch(branch) for branch in step.branches)
    branches = f'<ul class="branches">{rows}</ul>' if rows else ""
    decides = " decides" if _decides(step, decided) else ""
    return (
        f'<div class="step"><header class="{decides.strip()}"><b class="mono">'
        f"{text(step.function)}</b>{times}"
        f'<br><span class="soft mono">{text(step.file)}</span></header>{branches}{returned}</div>'
    )


def _decides(step: Step, decided: set[str]) -> bool:
    """True for the function whose return is what the layers were decided by."""
    files = {where.rpartition(":")[0] for where in decided}
    return step.file in files and step.function.rpartition(".")[2] == "get_quant_method"


def _branch(branch: Branch) -> str:
    way, label = {True: ("yes", "yes"), False: ("no", "no"), None: ("open", "?")}[branch.taken]
    values = "".join(
        f'<br><span class="soft">{text(name)} = {text(value)}</span>'
        for name, value in branch.values.items()
    )
    return (
        f'<li><span class="way {way}">{label}</span><span class="mono">{text(branch.condition)}'
        f"{values}"
        f'<br><span class="soft">{text(place(branch.location))}</span></span></li>'
    )


def _end(layer: Layer) -> str:
    kernel = ""
    if layer.kernel is not None:
        site = layer.kernel.call_site
        called = f' <span class="soft">called at {text(place(site))}</span>' if site else ""
        kernel = f" reaches <code>{text(layer.kernel.symbol)}</code>{called}"
    return (
        f'<div class="end {layer.verdict.value}"><b>{text(layer.quant_method or "no method")}</b>'
        f' <span class="soft">decided at {text(place(layer.decided_at))},</span>{kernel}'
        f'<br><span class="verdict">{layer.verdict.value}</span> {text(layer.reason)}</div>'
    )


def sources(locations: Sequence[Location]) -> str:
    """Lines of the SGLang tree, with their text."""
    return "".join(_source(location) for location in locations)


def _source(location: Location) -> str:
    function = f" in {text(location.function)}" if location.function else ""
    body = ""
    if location.source:
        body = (
            f'<div class="number">{location.line}</div>'
            f'<div class="text">{text(location.source)}</div>'
        )
    return (
        f'<div class="source mono"><div class="at">{text(place(location))}{function}</div>'
        f"{body}</div>"
    )
