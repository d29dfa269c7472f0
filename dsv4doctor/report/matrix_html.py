"""The matrix as one self-contained page: a heat map whose cells open their explanation.

No script and no request: a cell is a `details` element.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from dsv4doctor import __version__
from dsv4doctor.matrix import TIERS_TEXT, Cell, FlagSet, Matrix, Part
from dsv4doctor.models import Verdict
from dsv4doctor.report.html_path import text
from dsv4doctor.report.html_style import STYLE
from dsv4doctor.report.matrix import MARKS, Advice, counted, row, tables

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_LOOK = """
.heat { border-collapse: separate; border-spacing: 3px; table-layout: fixed; }
.heat th { border: 0; } .heat th:first-child { width: 8rem; }
.heat td { border: 0; padding: 0; }
.heat details { margin: 0; border-radius: 5px; background: var(--tone); color: var(--on); }
.heat summary { padding: .45rem .6rem; font-weight: 600; list-style: none; }
.heat summary::-webkit-details-marker { display: none; }
.heat summary span { display: block; white-space: nowrap; }
.heat summary:hover, .heat summary:focus-visible {
  outline: 2px solid var(--link); border-radius: 5px;
}
.heat details[open] { outline: 2px solid var(--tone); background: var(--card); color: var(--ink); }
.heat details[open] > summary { background: var(--tone); color: var(--on); }
.heat details > :not(summary) { margin: 0; padding: .5rem .6rem; }
.heat dl { grid-template-columns: 1fr; gap: 0; } .heat dd { margin-bottom: .35rem; }
.heat .none { padding: .45rem .6rem; color: var(--soft); }
.heat h4 { margin: .2rem 0; font-size: 13px; }
ol { padding-left: 1.3rem; } ol li { margin-bottom: .75rem; }
"""


def render(matrix: Matrix, advice: Sequence[Advice]) -> str:
    """The whole page."""
    body = "".join(_section(matrix, name, flag_set) for name, flag_set in tables(matrix))
    chosen = "".join(_advice(one) for one in advice)
    notes = "".join(f'<p class="card">{text(note)}</p>' for note in matrix.notes)
    stopped = '<p class="card fails">Interrupted: this is what there was.</p>'
    title = text(f"dsv4doctor matrix: {', '.join(matrix.checkpoints)}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}{_LOOK}</style>\n</head>\n<body>\n"
        f"<h1>Which SGLang runs it</h1><p>{text(counted(matrix))}</p>{_legend()}"
        f"{stopped if matrix.interrupted else ''}{chosen}{body}{notes}"
        f'<p class="soft">dsv4doctor {text(__version__)}</p>\n</body>\n</html>\n'
    )


def _legend() -> str:
    words = {
        Verdict.RUNS: "runs",
        Verdict.FALLBACK: "runs, far slower than the GPU can",
        Verdict.FAILS: "fails, or gives wrong output",
        Verdict.UNKNOWN: "not known",
    }
    marks = "".join(
        f'<span class="{verdict.value}">{MARKS[verdict]} {word}</span>'
        for verdict, word in words.items()
    )
    return (
        f'<p class="legend">{marks}</p>'
        '<p class="soft">Upper line: main model, lower line: draft model. A cell opens.</p>'
    )


def _section(matrix: Matrix, checkpoint: str, flag_set: FlagSet) -> str:
    heads = "".join(f"<th>{text(arch.name)}</th>" for arch in matrix.archs)
    rows = "".join(
        f"<tr><th>{text(release)}</th>"
        f"{''.join(_cell(one) for one in row(matrix, checkpoint, flag_set, release))}</tr>"
        for release in matrix.releases
    )
    flags = shlex.join(flag_set.flags) or "none"
    wide = 8 + 7 * len(matrix.archs)
    return (
        f"<h2>{text(checkpoint)}</h2>"
        f'<p class="soft">Flags ({text(flag_set.name)}): <code>{text(flags)}</code></p>'
        f'<div class="card scroll"><table class="heat" style="min-width: {wide}rem">'
        f"<tr><th>SGLang</th>{heads}</tr>{rows}"
        "</table></div>"
    )


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return '<td><div class="none">not reached</div></td>'
    marks = "".join(
        f"<span>{MARKS[part.verdict]} {part.verdict.value}</span>" for part in cell.parts
    )
    names = ("Main model", "Draft model")
    parts = "".join(_part(name, part) for name, part in zip(names, cell.parts, strict=False))
    return (
        f'<td><details class="{cell.verdict.value}"><summary>{marks}</summary>'
        f"<div>{parts}</div></details></td>"
    )


def _part(name: str, part: Part) -> str:
    rows = (
        ("layers", part.layers),
        ("stored", part.stored_format.value if part.stored_format else None),
        ("quant method", part.quant_method),
        ("runner", part.runner_backend),
        ("kernel", part.kernel),
        ("decided at", part.decided_at),
    )
    listed = "".join(f"<dt>{label}</dt><dd>{text(value)}</dd>" for label, value in rows if value)
    return f"<h4>{name}: {part.verdict.value}</h4><p>{text(part.reason)}</p><dl>{listed}</dl>"


def _advice(one: Advice) -> str:
    caveat = f"<p>{text(one.caveat)}</p>" if one.caveat else ""
    if one.patch_command:
        caveat += f"<pre>{text(one.patch_command)}</pre>"
    items = "".join(
        f"<li><b>SGLang {text(choice.cell.key.release)}</b>, {text(choice.cell.key.flag_set)}: "
        f"{text(choice.why)}<pre>{text(one.command(choice))}</pre></li>"
        for choice in one.choices[:3]
    )
    listed = f'<ol>{items}</ol><p class="soft">{text(TIERS_TEXT)}</p>' if items else ""
    return (
        f"<h2>What to use on {text(one.arch.name)}: {text(one.checkpoint)}</h2>"
        f'<div class="card">{caveat}{listed}</div>'
    )
