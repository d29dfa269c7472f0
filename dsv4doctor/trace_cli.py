"""`dsv4doctor trace`: every hot path of a launch, to the kernel it reaches."""

from __future__ import annotations

from typing import Any

import click

from dsv4doctor.cli_options import FlagsCommand, report_options
from dsv4doctor.errors import UsageError

PATHS = ("moe", "dense-fp8", "sparse-mla", "indexer", "mhc", "kv-cache", "all-reduce")


@click.command("trace", cls=FlagsCommand)
@click.option("--main", is_flag=True, help="Only the main model.")
@click.option("--draft", is_flag=True, help="Only the draft model.")
@click.option(
    "--path",
    "paths",
    multiple=True,
    type=click.Choice(PATHS),
    help="Only this path; can be given several times.",
)
@report_options(("console", "json"))
@click.pass_context
def trace_command(
    ctx: click.Context, /, main: bool, draft: bool, paths: tuple[str, ...], **options: Any
) -> None:
    """Show which kernel every hot path reaches on this GPU, and where that was decided: routed
    experts, sparse MLA, the indexer, dense FP8, mHC, the KV cache, the all-reduce.

    \b
    Examples:
      dsv4doctor trace --launch serve.sh
      dsv4doctor trace --path sparse-mla --path indexer --launch serve.sh
      dsv4doctor trace MODEL --arch sm_120 --sglang 0.5.23 --format json -- --tp 4
    """
    from dsv4doctor.cli import report_launch

    if main and draft:
        raise UsageError("--main and --draft are both given", "without either, both are shown")
    roles = tuple(role for role, given in (("main", main), ("draft", draft)) if given)
    report_launch(ctx, options, "trace", roles or ("main", "draft"), paths=paths)
