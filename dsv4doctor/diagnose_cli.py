"""`dsv4doctor diagnose` and `dsv4doctor explain`.  Parse, call, render, exit code."""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING, Any

import click

from dsv4doctor.cli_options import debug_option, format_option, output_option, timeout_option
from dsv4doctor.errors import DoctorError, UsageError
from dsv4doctor.outputs import read_by, refuse_inputs
from dsv4doctor.terminal import Progress, check_writable, deliver, say, width

if TYPE_CHECKING:
    from dsv4doctor.diagnose.judge import Diagnosis
    from dsv4doctor.models import Report, SglangTree

_ARCHS = ("auto", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")


@click.command(
    "diagnose",
    epilog="Exit codes: 0 nothing wrong in the log, 1 a cause was found, 2 wrong usage or "
    "unreadable input, 3 an error that no signature explains, or that the log does not show.",
)
@click.argument("log")
@click.option(
    "--sglang",
    metavar="PATH|VERSION",
    help="SGLang tree (or release to fetch) for file:line evidence and --trace.",
)
@click.option(
    "--arch",
    type=click.Choice(_ARCHS),
    default="auto",
    show_default=True,
    help="GPU architecture; auto takes what the log says.",
)
@click.option("--trace", is_flag=True, help="Go on to trace the launch that the log names.")
@click.option("--model", metavar="PATH", help="With --trace: the checkpoint on this machine.")
@click.option("--python", metavar="INTERPRETER", help="With --trace: the serving environment's.")
@click.option(
    "--env",
    multiple=True,
    metavar="KEY=VALUE",
    help="With --trace: environment variable of the server; several times.",
)
@timeout_option("With --trace: limit for it.")
@format_option("console", "json")
@output_option
@debug_option
@click.pass_context
def diagnose_command(ctx: click.Context, /, log: str, **options: Any) -> None:
    """Say what went wrong in a server's LOG ("-": standard input): what came first, the likeliest
    cause, and the fix.

    \b
    Examples:
      dsv4doctor diagnose server.log
      kubectl logs pod/sglang-0 | dsv4doctor diagnose -
      dsv4doctor diagnose server.log.gz --sglang 0.5.23 --arch sm_120
      dsv4doctor diagnose server.log --trace --model /models/DeepSeek-V4-Flash-NVFP4
    """  # fmt: skip
    if ctx.obj is not None:
        ctx.obj.update(debug=options["debug"], format=options["style"], output=options["output"])
    from dsv4doctor.asked import Options
    from dsv4doctor.diagnose.render import summary
    from dsv4doctor.diagnose.run import diagnose

    check_writable(options["output"])
    read = Options(model=options["model"], python=options["python"])
    given = "/dev/stdin" if log == "-" else log
    refuse_inputs([("--output", options["output"])], [(given, "the log"), *read_by(read)])
    arch = None if options["arch"] == "auto" else options["arch"]
    report, failure = None, None
    with Progress() as progress:
        tree = _tree(options, progress)
        progress.phase(_reading(log))
        diagnosis = diagnose(log, arch, progress.reading)
        if options["trace"]:
            try:
                report = _checked(diagnosis, options, arch, progress)
            except DoctorError as error:
                failure = error  # the log's own answer is not lost over it
    deliver(_rendered(diagnosis, tree, report, options), options["output"])
    say(f"dsv4doctor: {summary(diagnosis)}")
    if failure is not None:
        if ctx.obj is not None:
            ctx.obj.update(format="console")  # standard output has its one JSON object
        raise failure
    ctx.exit(diagnosis.exit_code)


def _reading(log: str) -> str:
    try:
        if log != "-" and stat.S_ISFIFO(os.stat(log).st_mode):
            return f"reading the pipe {log[:200]}, as soon as somebody writes to it"
    except (OSError, ValueError):
        pass
    return "reading the log"


def _tree(options: dict[str, Any], progress: Progress) -> SglangTree | None:
    if options["sglang"] is None:
        return None
    from pathlib import Path

    from packaging.version import InvalidVersion, Version

    from dsv4doctor.facts.tree import read_tree
    from dsv4doctor.wheels import default_cache, fetch_tree

    named = options["sglang"]
    path = Path(os.path.expanduser(named))
    if os.sep in named or os.path.exists(path):
        return read_tree(path)
    try:
        Version(named)
    except InvalidVersion as error:
        raise UsageError(
            f"--sglang {named}: neither a folder nor a version",
            "write it like --sglang 0.5.23, or give a folder",
        ) from error
    return fetch_tree(named, default_cache(), progress.download, sys.executable)


def _checked(
    diagnosis: Diagnosis, options: dict[str, Any], arch: str | None, progress: Progress
) -> Report:
    from dsv4doctor.diagnose.run import check_launch

    return check_launch(
        diagnosis,
        model=options["model"],
        sglang=options["sglang"],
        python=options["python"],
        arch=arch,
        env=options["env"],
        timeout=options["timeout"],
        download=progress.download,
        phase=progress.phase,
    )


def _rendered(
    diagnosis: Diagnosis,
    tree: SglangTree | None,
    report: Report | None,
    options: dict[str, Any],
) -> str:
    from dsv4doctor.diagnose import render

    if options["style"] == "json":
        import json

        from dsv4doctor.report.json import render as as_report

        checked = json.loads(as_report(report)) if report is not None else None
        return render.as_json(diagnosis, tree, checked)
    is_terminal = options["output"] is None and sys.stdout.isatty()
    columns = width(is_terminal)
    color = is_terminal and "NO_COLOR" not in os.environ
    text = render.console(diagnosis, tree, columns, color)
    if report is None:
        return text + _hint(diagnosis, options)
    from dsv4doctor.report.console import render_check

    shown = render_check(report, columns, color, verbose=False, why=False)
    return f"{text}\nThe launch of the log, traced:\n\n{shown}"


def _hint(diagnosis: Diagnosis, options: dict[str, Any]) -> str:
    """How to get more out of the log, in one line, or nothing."""
    version = diagnosis.facts.sglang
    if options["sglang"] is None and version is not None and diagnosis.exit_code:
        return f"For source lines: --sglang {version} (the release the log names; fetches it)\n"
    if diagnosis.launch is not None and diagnosis.exit_code:
        return "To trace this very launch: --trace\n"
    return ""


@click.command("explain")
@click.argument("name", metavar="ID", required=False)
@click.option("--list", "show_list", is_flag=True, help="Every id, one a line.")
def explain_command(name: str | None, show_list: bool) -> None:
    """The long form of a rule, log signature, fix or finding of a profile, by its ID.

    \b
    Examples:
      dsv4doctor explain DSV102
      dsv4doctor explain LOG401
      dsv4doctor explain FIX101
      dsv4doctor explain PRF101
      dsv4doctor explain --list
    """
    from dsv4doctor.explain import explain, listing

    if show_list:
        deliver(listing(), None)
    elif name is None:
        raise UsageError("explain: no ID given", "`dsv4doctor explain --list`")
    else:
        deliver(explain(name, width(sys.stdout.isatty())), None)
