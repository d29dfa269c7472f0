"""`dsv4doctor profile`.  Parse, call, render, exit code."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from dsv4doctor.cli_options import debug_option, format_option, output_option
from dsv4doctor.outputs import refuse_inputs
from dsv4doctor.terminal import Progress, check_writable, deliver, say, wants_color, width

if TYPE_CHECKING:
    from dsv4doctor.profiling.types import Profile

_SEVERITIES = ("info", "warning", "error")


@click.command(
    "profile",
    epilog="Exit codes: 0 nothing at or above --fail-on, 1 findings, 2 wrong usage, or a file "
    "that is no trace or holds no GPU events.",
)
@click.argument("trace")
@click.argument("trace2", required=False)
@click.option(
    "--expect",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="JSON report of `check`, `trace` or `trace-moe`: whether what it predicts ran.",
)
@click.option(
    "--top",
    type=click.IntRange(1, 10000),
    default=15,
    show_default=True,
    metavar="N",
    help="Kernels shown in the terminal.",
)
@format_option("console", "json", "html")
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning", "never"]),
    default="error",
    show_default=True,
    help="The least severity of a finding that gives exit code 1.",
)
@output_option
@debug_option
@click.pass_context
def profile_command(ctx: click.Context, /, trace: str, trace2: str | None, **options: Any) -> None:
    """Where the GPU's time goes in TRACE, a trace of the torch profiler (.json or .json.gz, of any
    size) or a folder with one trace a rank; with TRACE2, what moved from TRACE to TRACE2.

    \b
    Examples:
      dsv4doctor profile server-TP-0.trace.json.gz
      dsv4doctor profile before.trace.json.gz after.trace.json.gz
      dsv4doctor profile traces/ --format html -o profile.html
      dsv4doctor profile server-TP-0.trace.json.gz --expect report.json
    """  # fmt: skip
    if ctx.obj is not None:
        ctx.obj.update(debug=options["debug"], format=options["style"], output=options["output"])
    from dataclasses import replace

    from dsv4doctor.profiling.build import read_profile, trace_files
    from dsv4doctor.profiling.findings import expectation_note, judge, read_expected
    from dsv4doctor.profiling.render import summary

    traces = [path for path in (trace, trace2) if path is not None]
    check_writable(options["output"])
    refuse_inputs(
        [("--output", options["output"])],
        [
            *((file, "a trace") for path in traces for file in trace_files(path)),
            (options["expect"], "the report of --expect"),
        ],
    )
    expected = read_expected(options["expect"]) if options["expect"] else None
    with Progress() as progress:
        read = [
            read_profile(path, lambda done, total: progress.reading(done, total, "the trace"))
            for path in traces
        ]
    profile, before = read[-1], read[0] if trace2 is not None else None
    note = expectation_note(profile, expected) if expected else None
    profile = replace(
        profile,
        findings=judge(profile, expected),
        notes=(*profile.notes, note) if note else profile.notes,
    )
    deliver(_rendered(profile, before, options), options["output"])
    say(f"dsv4doctor: {summary(profile)}")
    ctx.exit(_exit_code(profile, options["fail_on"]))


def _rendered(profile: Profile, before: Profile | None, options: dict[str, Any]) -> str:
    from dsv4doctor.profiling import render
    from dsv4doctor.profiling.compare import compare

    comparison = compare(before, profile) if before is not None else None
    if options["style"] == "json":
        return render.as_json(profile, before, comparison)
    if options["style"] == "html":
        from dsv4doctor.profiling.page import page

        return page(profile, before, comparison)
    on_screen = options["output"] is None
    style = render.Style(
        width(on_screen and sys.stdout.isatty()),
        color=on_screen and wants_color(sys.stdout),
        top=options["top"],
        block="█" if not on_screen or _can_draw() else "#",
    )
    if before is not None and comparison is not None:
        return render.console_comparison(before, profile, comparison, style)
    return render.console(profile, style)


def _can_draw() -> bool:
    """Whether standard output takes block characters."""
    try:
        "█·".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _exit_code(profile: Profile, fail_on: str) -> int:
    if fail_on == "never":
        return 0
    bar = _SEVERITIES.index(fail_on)
    return int(any(_SEVERITIES.index(one.severity.value) >= bar for one in profile.findings))
