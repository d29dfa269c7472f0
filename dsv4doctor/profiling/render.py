"""A profile for a terminal and for programs (docs/profile.schema.json)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from typing import Any

from rich.console import Console
from rich.text import Text

from dsv4doctor import __version__
from dsv4doctor.jsonio import dump, to_plain
from dsv4doctor.models import Finding
from dsv4doctor.profiling.compare import Comparison, Moved
from dsv4doctor.profiling.findings import short
from dsv4doctor.profiling.types import IDLE, SHOWN, Gpu, Kernel, Profile, Step

SCHEMA = "dsv4doctor-profile/1"
LABELS = {
    "moe": "MoE",
    "attention": "attention",
    "indexer": "indexer",
    "gemm": "dense GEMM",
    "other": "norm, RoPE, other",
    "glue": "glue",
    "unknown": "unknown",
    "communication": "communication",
    IDLE: "idle",
}
_COLOURS = {
    "moe": "blue",
    "attention": "magenta",
    "indexer": "cyan",
    "gemm": "green",
    "other": "white",
    "glue": "yellow",
    "unknown": "red",
    "communication": "bright_red",
    IDLE: "bright_black",
}
_SEVERITIES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
_STEPS_SHOWN = 12
_MOVED_SHOWN = 12


@dataclass(frozen=True)
class Style:
    width: int
    color: bool
    top: int = 15
    """Kernels shown."""
    block: str = "█"
    """What bars are made of."""


Line = Text


def summary(profile: Profile) -> str:
    """One line for standard error."""
    busy = profile.span_ns - profile.by_category[IDLE]
    events = sum(gpu.events for gpu in profile.gpus)
    return (
        f"{len(profile.gpus)} GPU{'s' if len(profile.gpus) > 1 else ''}, {events} GPU events, "
        f"{_ms(profile.span_ns)} ms, busy {_share(busy, profile.span_ns)}; "
        f"{profile.bytes_read / 1e6:.0f} MB in {profile.seconds:.1f} s"
    )


# ------------------------------------------------------------------------------ console


def console(profile: Profile, style: Style) -> str:
    return _printed(_profile_lines(profile, style), style)


def console_comparison(
    before: Profile, after: Profile, comparison: Comparison, style: Style
) -> str:
    return _printed(_comparison_lines(before, after, comparison, style), style)


def _printed(lines: Iterator[Line], style: Style) -> str:
    out = Console(
        file=StringIO(),
        width=style.width,
        color_system="standard" if style.color else None,
        force_terminal=style.color,
        highlight=False,
    )
    for line in lines:
        line.rstrip()
        out.print(line, soft_wrap=True)
    assert isinstance(out.file, StringIO)
    return out.file.getvalue()


def _profile_lines(profile: Profile, style: Style) -> Iterator[Line]:
    yield Text(f"{profile.source}: {summary(profile)}", style="bold")
    for note in profile.notes:
        yield from _wrapped(f"note: {note}", style, "dim")
    yield Text()
    yield from _bars(profile.by_category, profile.span_ns, style)
    if len(profile.gpus) > 1:
        yield Text()
        yield from _gpus(profile.gpus, style)
    if profile.steps:
        yield Text()
        yield from _steps(profile.steps, style)
    yield Text()
    yield from _kernels(profile.kernels, style)
    for finding in profile.findings:
        yield Text()
        yield from _finding(finding, style)


def _bars(by_category: dict[str, int], whole: int, style: Style) -> Iterator[Line]:
    room = max(10, style.width - 42)
    largest = max(1, *(by_category[name] for name in SHOWN))
    for name in SHOWN:
        time = by_category[name]
        bar = style.block * round(room * time / largest)
        line = Text(f"{LABELS[name]:<18} {_share(time, whole):>6} {_ms(time):>12} ms  ")
        line.append(bar or ("." if time else ""), style=_COLOURS[name])
        yield line


def _gpus(gpus: tuple[Gpu, ...], style: Style) -> Iterator[Line]:
    room = max(20, style.width - 32)
    for gpu in gpus:
        line = Text(f"{short(gpu.name, 20):<20} {_ms(gpu.span_ns):>9} ms ")
        for name in SHOWN:
            length = round(room * gpu.by_category[name] / max(1, gpu.span_ns))
            block = style.block if name != IDLE else "·" if style.block != "#" else "."
            line.append(block * length, style=_COLOURS[name])
        yield line


def _steps(steps: tuple[Step, ...], style: Style) -> Iterator[Line]:
    yield Text(f"{'steps':<24} {'times':>6} {'mean ms':>10}  largest shares", style="bold")
    largest = sorted(steps, key=lambda one: -one.total_ns)[:_STEPS_SHOWN]
    for step in (one for one in steps if one in largest):
        shares = sorted(step.by_category.items(), key=lambda one: -one[1])[:4]
        text = ", ".join(
            f"{LABELS[name]} {_share(time, step.total_ns)}" for name, time in shares if time
        )
        mean = _ms(step.total_ns // step.count)
        yield Text(f"{short(step.name, 24):<24} {step.count:>6} {mean:>10}  {text}")
    if len(steps) > _STEPS_SHOWN:
        yield Text(f"and {len(steps) - _STEPS_SHOWN} more names of steps", style="dim")


def _kernels(kernels: tuple[Kernel, ...], style: Style) -> Iterator[Line]:
    total = max(1, sum(one.total_ns for one in kernels))
    head = f"{'kernels by time':<15} {'ms':>8} {'times':>7}  {'category':<13} {'rule':<19} name"
    yield Text(head, style="bold")
    for one in kernels[: style.top]:
        room = max(20, style.width - 68)
        line = Text(
            f"{_share(one.total_ns, total):>15} {_ms(one.total_ns):>8} {one.count:>7}  "
            f"{one.category:<13} {one.rule or '-':<19} "
        )
        line.append(short(one.name, room), style=_COLOURS[one.category])
        yield line
    if len(kernels) > style.top:
        yield Text(f"and {len(kernels) - style.top} more kernels: --top, --format json", "dim")


def _finding(finding: Finding, style: Style) -> Iterator[Line]:
    severity = finding.severity.value
    yield Text(f"{severity} {finding.rule} {finding.subject}", style=_SEVERITIES[severity])
    yield from _wrapped(finding.message, style, indent="  ")
    yield from _wrapped(finding.consequence, style, indent="  ")
    for line in finding.evidence:
        yield Text(f"  - {short(line, max(40, style.width - 4))}", style="dim")
    if finding.remedy is not None:
        yield from _wrapped(finding.remedy.text, style, indent="  ")


def _wrapped(text: str, style: Style, tone: str = "", indent: str = "") -> Iterator[Line]:
    width = max(30, style.width)
    for line in textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent):
        yield Text(line, style=tone)


def _comparison_lines(
    before: Profile, after: Profile, comparison: Comparison, style: Style
) -> Iterator[Line]:
    yield Text(f"before: {before.source}: {summary(before)}", style="bold")
    yield Text(f"after:  {after.source}: {summary(after)}", style="bold")
    for profile in (before, after):
        for note in profile.notes:
            yield from _wrapped(f"note: {profile.source}: {note}", style, "dim")
    yield Text()
    head = f"ms per {comparison.unit}"
    yield Text(f"{head:<18} {'before':>10} {'after':>10} {'change':>10}", style="bold")
    for row in (*comparison.categories, comparison.whole):
        yield _moved_line(LABELS.get(row.name, row.name), row)
    yield Text()
    yield Text("kernels that moved most", style="bold")
    for row in comparison.kernels[:_MOVED_SHOWN]:
        if row.change_ns:
            yield _moved_line(row.category, row, short(row.name, max(20, style.width - 62)))
    for finding in after.findings:
        yield Text()
        yield from _finding(finding, style)


def _moved_line(label: str, row: Moved, name: str = "") -> Line:
    change = row.change_ns
    tone = "" if not change else "green" if change < 0 else "red"
    line = Text(f"{label:<18} {_ms(row.before_ns):>10} {_ms(row.after_ns):>10} ")
    line.append(f"{change / 1e6:>+10.3f}".replace("-0.000", "+0.000"), style=tone)
    line.append(f"  {_relative(row):>7}  {name}".rstrip())
    return line


def _relative(row: Moved) -> str:
    if not row.before_ns:
        return "new" if row.after_ns else ""
    text = f"{row.change_ns / row.before_ns:+.0%}"
    return "gone" if not row.after_ns else "+0%" if text == "-0%" else text


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


# ------------------------------------------------------------------------------ JSON


def as_json(profile: Profile, before: Profile | None, comparison: Comparison | None) -> str:
    return dump(
        {
            "schema": SCHEMA,
            "tool": {"name": "dsv4doctor", "version": __version__},
            "profile": _document(profile),
            "before": _document(before) if before else None,
            "comparison": _comparison(comparison) if comparison else None,
            "findings": [to_plain(finding) for finding in profile.findings],
        }
    )


def _document(profile: Profile) -> dict[str, Any]:
    return {
        "source": profile.source,
        "notes": list(profile.notes),
        "bytes_read": profile.bytes_read,
        "seconds": round(profile.seconds, 3),
        "span_ns": profile.span_ns,
        "categories": _categories(profile.by_category, profile.span_ns),
        "steps": [_step(step) for step in profile.steps],
        "kernels": [to_plain(kernel) for kernel in profile.kernels],
        "gpus": [_gpu(gpu) for gpu in profile.gpus],
    }


def _categories(by_category: dict[str, int], whole: int) -> dict[str, Any]:
    return {
        name: {"ns": by_category[name], "share": by_category[name] / whole if whole else 0.0}
        for name in SHOWN
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "name": step.name,
        "count": step.count,
        "total_ns": step.total_ns,
        "categories": _categories(step.by_category, step.total_ns),
    }


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "model": gpu.model,
        "events": gpu.events,
        "span_ns": gpu.span_ns,
        "outside_steps_ns": gpu.outside_steps_ns,
        "categories": _categories(gpu.by_category, gpu.span_ns),
        "steps": [_step(step) for step in gpu.steps],
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "unit": comparison.unit,
        "whole": to_plain(comparison.whole),
        "categories": [to_plain(row) for row in comparison.categories],
        "kernels": [to_plain(row) for row in comparison.kernels],
    }
