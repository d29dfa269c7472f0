"""The formats by name."""

from __future__ import annotations

from collections.abc import Callable

from dsv4doctor.models import Run
from dsv4doctor.report import console, github, html, json, junit, markdown, sarif

_PLAIN = console.Style(width=100)

RENDERERS: dict[str, Callable[[Run], str]] = {
    "console": lambda run: console.render_run(run, _PLAIN, with_findings=True),
    "json": json.render_run,
    "sarif": sarif.render,
    "junit": junit.render,
    "github": github.render,
    "markdown": markdown.render,
    "html": html.render,
}


def render(name: str, run: Run) -> str:
    """`run` in the format `name`."""
    return RENDERERS[name](run)
