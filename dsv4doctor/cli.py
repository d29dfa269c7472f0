"""The command line: parse, call, render, exit code.

Nothing but click is imported before a command runs: `--help` has to be instant.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dsv4doctor import __version__
from dsv4doctor.cli_options import (
    FLAGS_KEY,
    FORMATS,
    FlagsCommand,
    facts_options,
    gate_options,
    report_options,
)
from dsv4doctor.diagnose_cli import diagnose_command, explain_command
from dsv4doctor.diff_cli import diff_command
from dsv4doctor.errors import DoctorError, UsageError, shortened
from dsv4doctor.fix_cli import fix_command, run_command
from dsv4doctor.kernels_cli import kernels_group
from dsv4doctor.matrix_cli import matrix_command
from dsv4doctor.outputs import read_by, refuse_inputs
from dsv4doctor.plan_cli import plan_group
from dsv4doctor.profile_cli import profile_command
from dsv4doctor.terminal import (
    Progress,
    check_writable,
    deliver,
    full_output,
    prepare,
    say,
    silence,
    wants_color,
    width,
)
from dsv4doctor.trace_cli import trace_command

if TYPE_CHECKING:
    from dsv4doctor.asked import Options
    from dsv4doctor.models import Report, Run

_INTERRUPTED = 130
_BROKEN_PIPE = 141
_CANNOT_BE_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_COMPLETE = "_DSV4DOCTOR_COMPLETE"


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 nothing at or above --fail-on, 1 findings, 2 wrong usage or unreadable "
    "input, 3 could not be determined, 4 a patch was refused.",
)
@click.version_option(__version__, prog_name="dsv4doctor")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """A doctor for serving DeepSeek-V4 with SGLang: which kernel every hot path really
    reaches on this GPU, why, whether that works, and what mends it, before a server is started.

    \b
    Examples:
      dsv4doctor check --launch serve.sh
      dsv4doctor check /models/DeepSeek-V4-Flash-NVFP4 --arch sm_120 --sglang 0.5.23 -- --tp 4
      dsv4doctor trace-moe --draft --why --launch serve.sh
      dsv4doctor fix --launch serve.sh --diff
      dsv4doctor diagnose server.log
      dsv4doctor snapshot -o box.json --launch serve.sh
    """
    if ctx.invoked_subcommand is None:
        say(ctx.get_help())
        ctx.exit(2)


@cli.command(cls=FlagsCommand, options_metavar="[OPTIONS]")
@report_options(FORMATS)
@gate_options
@click.pass_context
def check(ctx: click.Context, /, **options: Any) -> None:
    """Read all facts, trace the launch, run every rule, report the findings.

    MODEL is a checkpoint folder or a Hugging Face id in the local hub cache; by default the
    launch's own.

    \b
    Examples:
      dsv4doctor check --launch serve.sh
      dsv4doctor check --launch serve.sh --arch sm_120 --sglang 0.5.14
      dsv4doctor check nvidia/DeepSeek-V4-Flash-NVFP4 -- --tp 4 --moe-runner-backend triton
      dsv4doctor check --snapshot box.json --format json -o report.json
      dsv4doctor check --report sarif=out.sarif --report html=report.html
      dsv4doctor check --baseline known.json --update-baseline
    """
    report_launch(ctx, options, "check", ("main", "draft"))


@cli.command("trace-moe", cls=FlagsCommand)
@click.option("--main", is_flag=True, help="Only the main model's layers.")
@click.option("--draft", is_flag=True, help="Only the draft model's layers.")
@report_options(("console", "json"))
@click.pass_context
def trace_moe(ctx: click.Context, /, main: bool, draft: bool, **options: Any) -> None:
    """Show what every routed-expert layer resolves to, and where that was decided.

    \b
    Examples:
      dsv4doctor trace-moe --launch serve.sh
      dsv4doctor trace-moe --draft --why --launch serve.sh
      dsv4doctor trace-moe MODEL --arch sm_120 --sglang 0.5.23 -- --tp 4
    """
    if main and draft:
        raise UsageError("--main and --draft are both given", "without either, both are shown")
    roles = tuple(role for role, given in (("main", main), ("draft", draft)) if given)
    report_launch(ctx, options, "trace-moe", roles or ("main", "draft"))


@cli.command(cls=FlagsCommand)
@facts_options
@click.pass_context
def snapshot(ctx: click.Context, /, output: str | None, debug: bool, **options: Any) -> None:
    """Write the facts of this machine, without secrets, for `--snapshot` elsewhere.

    \b
    Examples:
      dsv4doctor snapshot -o box.json --launch serve.sh
      dsv4doctor snapshot -o box.json /models/DeepSeek-V4-Flash-NVFP4 --python /venv/bin/python
    """
    from dsv4doctor.facts.snapshot import text_of
    from dsv4doctor.target import facts_of_machine

    ctx.obj.update(debug=debug, output=output)
    check_writable(output)
    asked = _options(ctx, options)
    refuse_inputs([("--output", output)], read_by(asked))
    with Progress() as progress:
        taken = facts_of_machine(asked, progress.download)
    deliver(text_of(taken), output)
    parts = {
        "GPU": taken.gpu.gpus,
        "SGLang": taken.sglang,
        "checkpoint": taken.checkpoint,
        "launch": taken.launch,
    }
    missing = [name for name, part in parts.items() if not part]
    lacking = f"; without: {', '.join(missing)}" if missing else ""
    say(f"dsv4doctor: snapshot of {len(parts) - len(missing)} of {len(parts)} facts{lacking}")


cli.add_command(kernels_group)
cli.add_command(matrix_command)
cli.add_command(diagnose_command)
cli.add_command(explain_command)
cli.add_command(plan_group)
cli.add_command(profile_command)
cli.add_command(fix_command)
cli.add_command(run_command)
cli.add_command(trace_command)
cli.add_command(diff_command)


def _options(ctx: click.Context, options: dict[str, Any]) -> Options:
    from pathlib import Path

    from dsv4doctor.asked import Options

    launch, saved = options["launch"], options.get("snapshot")
    return Options(
        model=options["model"],
        flags=ctx.meta.get(FLAGS_KEY, ()),
        launch=Path(launch) if launch else None,
        snapshot=Path(saved) if saved else None,
        sglang=options["sglang"],
        python=options["python"],
        arch=options.get("arch", "auto"),
        env=options["env"],
    )


def report_launch(
    ctx: click.Context,
    options: dict[str, Any],
    name: str,
    roles: tuple[str, ...],
    paths: tuple[str, ...] = (),
) -> None:
    """Trace, judge and report as the command `name`; `paths`: only these hot paths (empty: all)."""
    ctx.obj.update(debug=options["debug"], format=options["format"], output=options["output"])
    from datetime import date

    from dsv4doctor import checking, gate
    from dsv4doctor.audit import Settings
    from dsv4doctor.models import Role

    check_writable(options["output"])
    files = checking.parse_reports(options.get("reports", ()), FORMATS)
    update = options.get("update_baseline", False)
    said = {**_said(ctx, options), "strict_paths": name == "trace"}
    planned = checking.plan(said, options["targets"], checking.read_config(options["config"]))
    checking.check_outputs(planned, options["output"], files, update)
    checking.check_baseline(planned, update)
    settings = Settings(
        roles=tuple(Role(role) for role in roles),
        with_path=options["why"] or "html" in {options["format"], *files.values()},
        use_cache=not options["no_cache"],
        timeout=options["timeout"],
        alternatives=name == "check",
        with_paths=name != "trace-moe",
        paths=paths,
    )
    outcomes = checking.examine(planned, settings, files, _complain)
    run, baseline = checking.judge(planned, outcomes, update, date.today())
    deliver(_rendered(run, options, name), options["output"])
    checking.write(run, files)
    if baseline is not None and planned.baseline is not None:
        deliver(baseline, planned.baseline, "--baseline")
        say(f"dsv4doctor: {planned.baseline} written")
    for report in run.reports:
        say(_summary(report, name, several=len(run.outcomes) > 1))
    ctx.exit(gate.worst(run))


def _said(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """The options that the user gave, on the command line or by a variable."""
    given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    said = {
        name: value for name, value in options.items() if ctx.get_parameter_source(name) in given
    }
    return {**said, "flags": ctx.meta.get(FLAGS_KEY, ())}


def _rendered(run: Run, options: dict[str, Any], name: str) -> str:
    if options["format"] != "console":
        from dsv4doctor.report.formats import render

        return render(options["format"], run)
    from dsv4doctor.report.console import Style, render_run

    on_screen = options["output"] is None
    style = Style(
        width(on_screen and sys.stdout.isatty()),
        color=on_screen and wants_color(sys.stdout),
        verbose=options["verbose"],
        why=options["why"],
    )
    return render_run(run, style, with_findings=name == "check")


def _summary(report: Report, command: str, several: bool) -> str:
    from dsv4doctor.report.console import layer_summary, summary
    from dsv4doctor.report.hot_paths import only_paths, path_summary

    cached = ", trace from the cache" if report.facts.trace and report.facts.trace.cached else ""
    name = f"{report.gate.target}: " if several else ""
    said = summary(report)
    if command in ("trace", "trace-moe"):
        trace = report.facts.trace
        found = f"{said}, see `dsv4doctor check`" if report.findings else ""
        layers = "" if only_paths(trace) else layer_summary(report)
        said = "; ".join(part for part in (layers, path_summary(trace), found) if part)
    line = f"dsv4doctor: {name}{said} in {report.timings['total']:.1f} s{cached}"
    gap = report.gate.undetermined
    return f"{line}; not determined: {gap}" if gap else line


# ------------------------------------------------------------------------------ errors


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the command line `arguments` (by default the process's own)."""
    state: dict[str, Any] = {"debug": False, "format": "console", "output": None}
    try:
        with _output_errors_are_quiet():
            # Not cli.main: it has its own answers to an interrupt and to a reader that left.
            words = sys.argv[1:] if arguments is None else list(arguments)
            with cli.make_context("dsv4doctor", words, obj=state) as context:
                cli.invoke(context)
        return 0
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except DoctorError as error:
        return _failed(state, error)
    except click.ClickException as error:
        return _misused(error)
    except (click.Abort, KeyboardInterrupt):
        say("dsv4doctor: interrupted")
        return _INTERRUPTED
    except BrokenPipeError:
        return _BROKEN_PIPE
    except Exception as error:
        return _broken(state, error)


def main() -> None:
    prepare()
    if _COMPLETE in os.environ:
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(cli, {}, "dsv4doctor", _COMPLETE, os.environ[_COMPLETE]))
    code = run()
    # Python's last collections would walk through all that is held: a tenth of a repeated trace.
    gc.freeze()
    sys.exit(code)


@contextlib.contextmanager
def _output_errors_are_quiet() -> Iterator[None]:
    """Whoever read our output has gone, or its disk is full: nothing is flushed at the end."""
    try:
        yield
    except BrokenPipeError:
        silence(sys.stdout)
        raise
    except OSError as error:
        # A library's own write, e.g. of --help; our files' errors have a name or are caught.
        if error.filename is None and error.errno in _CANNOT_BE_WRITTEN:
            raise full_output(error) from error
        raise


def _failed(state: dict[str, Any], error: DoctorError) -> int:
    if state["format"] == "json" and state["output"] is None:
        from dsv4doctor.report.json import render_error

        _say_json(render_error(error))
    _complain(error.message, error.hint)
    return error.exit_code


def _say_json(text: str) -> None:
    """On standard output, if that can be written: the error itself goes to standard error."""
    try:
        deliver(text, None)
    except (DoctorError, BrokenPipeError):
        silence(sys.stdout)


def _misused(error: click.ClickException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        say(error.ctx.get_help() if error.ctx else error.format_message())
        return 2
    message, hint = error.format_message().rstrip("."), None
    if isinstance(error, click.NoSuchOption):
        hint = "SGLang's own flags go after `--`"
    elif isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f"see {error.ctx.command_path} --help"
    if isinstance(error, click.BadParameter) and error.param is not None:
        is_missing = isinstance(error, click.MissingParameter)
        why = " is missing" if is_missing else f": {error.message.rstrip('.')}"
        message = f"{_given_as(error)}{why}"
    _complain(shortened(message), hint)
    return 2


def _given_as(error: click.BadParameter) -> str:
    """The option or argument, or the variable that stands for it where that is what was set."""
    parameter, ctx = error.param, error.ctx
    assert parameter is not None
    source = ctx.get_parameter_source(parameter.name or "") if ctx else None
    if source is ParameterSource.ENVIRONMENT and isinstance(parameter.envvar, str):
        return parameter.envvar
    if isinstance(parameter, click.Argument):
        return parameter.human_readable_name
    return next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0])


def _broken(state: dict[str, Any], error: Exception) -> int:
    if state["debug"] or "--debug" in sys.argv:
        import traceback

        traceback.print_exc()
    message = f"internal error ({type(error).__name__}: {error})"
    if state["format"] == "json" and state["output"] is None:
        from dsv4doctor.report.json import render_failure

        _say_json(render_failure("internal", message, None))
    _complain(message, "please report it; --debug shows the traceback")
    return 3


def _complain(message: str, hint: str | None) -> None:
    text = f"{message.rstrip('.')}. {hint[0].upper()}{hint[1:]}" if hint else message
    say(f"dsv4doctor: {' '.join(text.split())}")
