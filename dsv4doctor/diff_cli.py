"""`dsv4doctor diff`: a prediction against what the server recorded."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsv4doctor.cli_options import format_option, output_option
from dsv4doctor.errors import UsageError
from dsv4doctor.outputs import refuse_inputs
from dsv4doctor.terminal import check_writable, deliver, say, wants_color

if TYPE_CHECKING:
    from dsv4doctor.drift import Comparison


@click.command("diff")
@click.argument("predicted", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("recorded", type=click.Path(dir_okay=False, path_type=Path))
@format_option("console", "json", "markdown")
@output_option
@click.pass_context
def diff_command(
    ctx: click.Context, predicted: Path, recorded: Path, style: str, output: str | None
) -> None:
    """Compare PREDICTED, from `dsv4doctor trace --format json`, with RECORDED, written by a server
    that ran with DSV4DOCTOR_RECORD=FILE: per layer and hot path, what drifted.

    Exit codes: 0 the same, 1 drift, 2 unreadable input, 3 something is not known.

    \b
    Examples:
      dsv4doctor trace --launch serve.sh --format json -o predicted.json
      DSV4DOCTOR_RECORD=recorded.json ./serve.sh
      dsv4doctor diff predicted.json recorded.json
    """
    from dsv4doctor.drift import compare, read_report
    from dsv4doctor.report import drift as rendering

    ctx.obj.update(format=style, output=output)
    check_writable(output)
    reports = [(predicted, "the prediction"), (recorded, "the recording")]
    refuse_inputs([("--output", output)], reports)
    one, other = read_report(predicted), read_report(recorded)
    if _is_recording(one) and not _is_recording(other):
        raise UsageError(
            f"{predicted}: a recording, where the prediction should be",
            f"the other way round: dsv4doctor diff {shlex.join((str(recorded), str(predicted)))}",
        )
    comparison = compare(one, other)
    if style == "json":
        text = rendering.as_json(comparison)
    elif style == "markdown":
        text = rendering.as_markdown(comparison)
    else:
        import sys

        text = rendering.as_console(comparison, output is None and wants_color(sys.stdout))
    deliver(text, output)
    say(f"dsv4doctor: {_summary(comparison)}")
    ctx.exit(comparison.exit_code)


def _is_recording(report: dict[str, Any]) -> bool:
    from dsv4doctor.recording.report import RAN

    notes = report.get("notes")
    return isinstance(notes, list) and RAN in notes


def _summary(comparison: Comparison) -> str:
    from dsv4doctor.drift import Standing

    counts = [f"{len(comparison.of(standing))} {standing.value}" for standing in Standing]
    return ", ".join(counts)
