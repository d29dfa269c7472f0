"""The profile as one self-contained HTML page: no script, no request, light and dark."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4doctor import __version__
from dsv4doctor.models import Finding
from dsv4doctor.profiling.compare import Comparison, Moved
from dsv4doctor.profiling.findings import short
from dsv4doctor.profiling.render import LABELS, summary
from dsv4doctor.profiling.types import SHOWN, Gpu, Kernel, Profile, Step
from dsv4doctor.report.html_path import prose, text
from dsv4doctor.report.html_style import STYLE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_NONE = '<p class="card">None.</p>'
_KERNELS = 40
_STEPS = 40
_MOVED = 25
_BANDS = """
:root {
  --moe: #2f6fdb; --attention: #8a4fd0; --indexer: #0f8b8d; --gemm: #2c8a4b; --other: #7a8794;
  --glue: #c98a00; --none-known: #c62f2f; --communication: #d0558f; --idle: #e3e7eb;
}
@media (prefers-color-scheme: dark) {
  :root {
    --moe: #5b95f5; --attention: #b285f0; --indexer: #43c2c4; --gemm: #52bd79; --other: #98a5b3;
    --glue: #e9b949; --none-known: #f47070; --communication: #ee8ebb; --idle: #2a323b;
  }
}
.band { display: flex; height: 1.9rem; border-radius: 6px; overflow: hidden; margin: .3rem 0; }
.band i { display: block; background: var(--tone); }
.keys { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: .6rem 0 0; }
.keys span::before {
  content: ""; display: inline-block; width: .8rem; height: .8rem; border-radius: 3px;
  margin-right: .4rem; vertical-align: -1px; background: var(--tone);
}
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.bar { width: 26%; } td.bar i { display: block; height: .9rem; border-radius: 3px;
  background: var(--tone); }
td.name { font: 12px/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  word-break: break-all; }
.moe { --tone: var(--moe); } .attention { --tone: var(--attention); }
.indexer { --tone: var(--indexer); } .gemm { --tone: var(--gemm); }
.other { --tone: var(--other); } .glue { --tone: var(--glue); }
.band .unknown, .keys .unknown, .bar.unknown, .tag.unknown { --tone: var(--none-known); }
.communication { --tone: var(--communication); } .idle { --tone: var(--idle); }
.tag { color: var(--tone); font-weight: 600; white-space: nowrap; }
.tag.idle { color: var(--soft); }
.less { color: var(--runs); } .more { color: var(--fails); }
"""


def page(profile: Profile, before: Profile | None, comparison: Comparison | None) -> str:
    title = text(f"dsv4doctor profile: {profile.source}")
    parts = [_head(profile, before)]
    if comparison is not None:
        parts.append(_comparison(comparison))
    parts += [_shares(profile), _gpus(profile.gpus), _steps(profile.steps)]
    parts += [_kernels(profile.kernels), _findings(profile.findings)]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}{_BANDS}</style>\n</head>\n<body>\n"
        f"{''.join(parts)}"
        f'<p class="soft">dsv4doctor {text(__version__)}</p>\n</body>\n</html>\n'
    )


def _head(profile: Profile, before: Profile | None) -> str:
    notes = "".join(f'<p class="card">Note: {text(note)}</p>' for note in profile.notes)
    compared = ""
    if before is not None:
        compared = f'<p class="soft">before: {text(before.source)}: {text(summary(before))}</p>'
        notes += "".join(
            f'<p class="card">Note: {text(before.source)}: {text(note)}</p>'
            for note in before.notes
        )
    return (
        f"<h1>{text(profile.source)}</h1>"
        f'<p class="soft">{text(summary(profile))}</p>{compared}{notes}'
    )


def _shares(profile: Profile) -> str:
    largest = max(1, *profile.by_category.values())
    rows = "".join(
        f'<tr><td><span class="tag {name}">{LABELS[name]}</span></td>'
        f'<td class="number">{_share(time, profile.span_ns)}</td>'
        f'<td class="number">{_ms(time)}</td>'
        f'<td class="bar {name}"><i style="width:{100 * time / largest:.2f}%"></i></td></tr>'
        for name, time in profile.by_category.items()
    )
    return (
        "<h2>Shares of GPU time</h2>"
        f'<div class="card">{_band(profile.by_category, profile.span_ns)}{_legend()}'
        f'<div class="scroll"><table>{_row("th", "", "share", "ms", "")}{rows}</table></div></div>'
    )


def _band(by_category: dict[str, int], whole: int) -> str:
    cells = "".join(
        f'<i class="{name}" style="width:{100 * by_category[name] / max(1, whole):.3f}%" '
        f'title="{text(f"{LABELS[name]} {_share(by_category[name], whole)}")}"></i>'
        for name in SHOWN
        if by_category[name]
    )
    return f'<div class="band">{cells}</div>'


def _legend() -> str:
    keys = "".join(f'<span class="{name}">{LABELS[name]}</span>' for name in SHOWN)
    return f'<p class="keys soft">{keys}</p>'


def _gpus(gpus: Sequence[Gpu]) -> str:
    if len(gpus) < 2:
        return ""
    rows = "".join(
        f'<p><b>{text(gpu.name)}</b> <span class="soft">{text(gpu.model or "")} '
        f"{_ms(gpu.span_ns)} ms</span></p>{_band(gpu.by_category, gpu.span_ns)}"
        for gpu in gpus
    )
    return f'<h2>GPUs</h2><div class="card">{rows}</div>'


def _steps(steps: Sequence[Step]) -> str:
    if not steps:
        return ""
    shown = sorted(steps, key=lambda one: -one.total_ns)[:_STEPS]
    rows = "".join(
        f'<tr><td>{text(step.name)}</td><td class="number">{step.count}</td>'
        f'<td class="number">{_ms(step.total_ns / step.count)}</td>'
        f'<td style="width:55%">{_band(step.by_category, step.total_ns)}</td></tr>'
        for step in steps
        if step in shown
    )
    more = len(steps) - len(shown)
    rest = f'<p class="soft">and {more} more</p>' if more > 0 else ""
    return (
        '<h2>Steps</h2><div class="card scroll"><table>'
        f"{_row('th', 'step', 'times', 'mean ms', '')}{rows}</table>{rest}</div>"
    )


def _kernels(kernels: Sequence[Kernel]) -> str:
    total = max(1, sum(one.total_ns for one in kernels))
    rows = "".join(
        f'<tr><td class="number">{_share(one.total_ns, total)}</td>'
        f'<td class="number">{_ms(one.total_ns)}</td><td class="number">{one.count}</td>'
        f'<td><span class="tag {one.category}">{LABELS[one.category]}</span><br>'
        f'<span class="soft">{text(one.rule or "no rule")}</span></td>'
        f'<td class="name">{text(short(one.name, 400))}</td></tr>'
        for one in kernels[:_KERNELS]
    )
    more = len(kernels) - _KERNELS
    rest = f'<p class="soft">and {more} more kernels</p>' if more > 0 else ""
    return (
        '<h2>Kernels</h2><div class="card scroll"><table>'
        f"{_row('th', 'of all', 'ms', 'times', 'category', 'name')}{rows}</table>{rest}</div>"
    )


def _findings(findings: Sequence[Finding]) -> str:
    body = "".join(_finding(finding) for finding in findings)
    return f"<h2>Findings</h2>{body or _NONE}"


def _finding(finding: Finding) -> str:
    evidence = "".join(f"<li>{text(line)}</li>" for line in finding.evidence)
    todo = f"<h4>What to do</h4><p>{prose(finding.remedy.text)}</p>" if finding.remedy else ""
    severity = finding.severity.value
    return (
        f'<article class="card finding {severity}"><h3><span class="severity">{severity}</span> '
        f"{text(finding.rule)} <code>{text(finding.subject)}</code></h3>"
        f"<p>{text(finding.message)}</p><p>{text(finding.consequence)}</p>"
        f"<h4>Evidence</h4><ul>{evidence}</ul>{todo}</article>"
    )


def _comparison(comparison: Comparison) -> str:
    heads = _row("th", "", "before", "after", "change", "")
    rows = "".join(
        _moved(f'<span class="tag {row.name}">{LABELS.get(row.name, "all")}</span>', row)
        for row in (*comparison.categories, comparison.whole)
    )
    kernels = "".join(
        _moved(f'<span class="tag {row.category}">{LABELS[row.category]}</span>', row, row.name)
        for row in comparison.kernels[:_MOVED]
        if row.change_ns
    )
    return (
        f"<h2>What moved, ms per {comparison.unit}</h2>"
        f'<div class="card scroll"><table>{heads}{rows}</table></div>'
        f'<h3>Kernels</h3><div class="card scroll"><table>{heads}{kernels}</table></div>'
    )


def _moved(label: str, row: Moved, name: str = "") -> str:
    tone = "less" if row.change_ns < 0 else "more" if row.change_ns > 0 else "soft"
    return (
        f'<tr><td>{label}</td><td class="number">{_ms(row.before_ns)}</td>'
        f'<td class="number">{_ms(row.after_ns)}</td>'
        f'<td class="number {tone}">{row.change_ns / 1e6:+.3f}</td>'
        f'<td class="name">{text(short(name, 300))}</td></tr>'
    )


def _row(tag: str, *cells: str) -> str:
    numbers = ("share", "ms", "times", "mean ms", "before", "after", "change", "of all")
    made = "".join(
        f"<{tag}{' class=number' if cell in numbers else ''}>{text(cell)}</{tag}>" for cell in cells
    )
    return f"<tr>{made}</tr>"


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
