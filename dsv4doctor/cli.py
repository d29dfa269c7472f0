"""The command line: parse, call, render, exit code.

Nothing but click is imported before a command runs: `--help` has to be instant.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dsv4doctor import __version__
from dsv4doctor.errors import DoctorError
from dsv4doctor.kernels_cli import kernels_group
from dsv4doctor.terminal import Progress, check_writable, deliver, say, width

if TYPE_CHECKING:
    from dsv4doctor.models import Report
    from dsv4doctor.target import Options

F = TypeVar("F", bound=Callable[..., Any])
_ARCHS = ("auto", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
_FLAGS_KEY = "dsv4doctor.sglang_flags"
_INTERRUPTED = 130
_BROKEN_PIPE = 141


class _Command(click.Command):
    """A command whose arguments after `--` are SGLang's and not looked at here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            cut = args.index("--")
            ctx.meta[_FLAGS_KEY] = tuple(args[cut + 1 :])
            args = args[:cut]
        return super().parse_args(ctx, args)


def _option(*names: str, **settings: Any) -> Callable[[F], F]:
    """A click option with its environment variable, DSV4DOCTOR_<NAME>."""
    long = next(name for name in names if name.startswith("--"))
    variable = f"DSV4DOCTOR_{long[2:].upper().replace('-', '_')}"
    return click.option(*names, envvar=variable, show_envvar=True, **settings)


def _apply(decorators: Sequence[Callable[[F], F]], function: F) -> F:
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


_DEBUG = click.option("--debug", is_flag=True, help="Show the traceback of an internal error.")


def _facts_options(function: F) -> F:
    return _apply(
        [
            click.argument("model", required=False),
            _option(
                "--launch",
                type=click.Path(dir_okay=False),
                metavar="FILE[:LINE]",
                help="Shell script with the SGLang command. Instead: SGLang's flags after `--`.",
            ),
            _option(
                "--sglang",
                metavar="PATH|VERSION",
                help="SGLang tree, or a release to fetch into the cache. "
                "[default: the interpreter's]",
            ),
            _option(
                "--python",
                metavar="INTERPRETER",
                help="Python of the serving environment. [default: the launch script's, else "
                "the one that runs dsv4doctor]",
            ),
            click.option(
                "--env",
                multiple=True,
                metavar="KEY=VALUE",
                help="Environment variable of the server; can be given several times.",
            ),
            _option(
                "-o",
                "--output",
                type=click.Path(dir_okay=False),
                metavar="FILE",
                help="Write there instead of standard output.",
            ),
            _DEBUG,
        ],
        function,
    )


def _report_options(function: F) -> F:
    return _apply(
        [
            _option(
                "--arch",
                type=click.Choice(_ARCHS),
                default="auto",
                show_default=True,
                help="GPU architecture; auto asks the driver.",
            ),
            _option(
                "--snapshot",
                type=click.Path(dir_okay=False),
                metavar="FILE",
                help="Facts of another machine, from `dsv4doctor snapshot`.",
            ),
            _option(
                "--format",
                type=click.Choice(["console", "json"]),
                default="console",
                show_default=True,
            ),
            _option(
                "--fail-on",
                type=click.Choice(["error", "warning", "never"]),
                default="error",
                show_default=True,
                help="The least severity of a finding that gives exit code 1.",
            ),
            _option(
                "--strict",
                is_flag=True,
                help="Exit code 3 also for a skipped rule or a kernel that is not known.",
            ),
            _option(
                "--timeout",
                type=click.FloatRange(min=0, min_open=True),
                default=300.0,
                show_default=True,
                metavar="SECONDS",
                help="Limit for a trace.",
            ),
            _option("--no-cache", is_flag=True, help="Trace again even if nothing has changed."),
            _option("--why", is_flag=True, help="Also print the decision path: every branch."),
            _option(
                "-v",
                "--verbose",
                is_flag=True,
                help="Also print rules that were not checked, packages, changed arguments.",
            ),
        ],
        _facts_options(function),
    )


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 nothing at or above --fail-on, 1 findings, 2 wrong usage or unreadable "
    "input, 3 could not be determined.",
)
@click.version_option(__version__, prog_name="dsv4doctor")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """A doctor for serving DeepSeek-V4 with SGLang: which kernel every routed-expert layer
    really runs on this GPU, why, and whether that works, before a server is started.

    \b
    Examples:
      dsv4doctor check --launch serve.sh
      dsv4doctor check /models/DeepSeek-V4-Flash-NVFP4 --arch sm_120 --sglang 0.5.23 -- --tp 4
      dsv4doctor trace-moe --draft --why --launch serve.sh
      dsv4doctor snapshot -o box.json --launch serve.sh
    """
    if ctx.invoked_subcommand is None:
        say(ctx.get_help())
        ctx.exit(2)


@cli.command(cls=_Command, options_metavar="[OPTIONS]")
@_report_options
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
    """
    _report(ctx, options, "check", ("main", "draft"))


@cli.command("trace-moe", cls=_Command)
@click.option("--main", "only", flag_value="main", help="Only the main model's layers.")
@click.option("--draft", "only", flag_value="draft", help="Only the draft model's layers.")
@_report_options
@click.pass_context
def trace_moe(ctx: click.Context, /, only: str | None, **options: Any) -> None:
    """Show what every routed-expert layer resolves to, and where that was decided.

    \b
    Examples:
      dsv4doctor trace-moe --launch serve.sh
      dsv4doctor trace-moe --draft --why --launch serve.sh
      dsv4doctor trace-moe MODEL --arch sm_120 --sglang 0.5.23 -- --tp 4
    """
    _report(ctx, options, "trace-moe", (only,) if only else ("main", "draft"))


@cli.command(cls=_Command)
@_facts_options
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
    with Progress() as progress:
        taken = facts_of_machine(_options(ctx, options), progress.download)
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


def _options(ctx: click.Context, options: dict[str, Any]) -> Options:
    from pathlib import Path

    from dsv4doctor.target import Options

    launch, saved = options["launch"], options.get("snapshot")
    return Options(
        model=options["model"],
        flags=ctx.meta.get(_FLAGS_KEY, ()),
        launch=Path(launch) if launch else None,
        snapshot=Path(saved) if saved else None,
        sglang=options["sglang"],
        python=options["python"],
        arch=options.get("arch", "auto"),
        env=options["env"],
    )


def _report(ctx: click.Context, options: dict[str, Any], name: str, roles: tuple[str, ...]) -> None:
    ctx.obj.update(debug=options["debug"], format=options["format"], output=options["output"])
    from dsv4doctor.audit import Settings, audit, exit_code, undetermined
    from dsv4doctor.models import Role, Severity
    from dsv4doctor.target import resolve

    check_writable(options["output"])
    settings = Settings(
        roles=tuple(Role(role) for role in roles),
        with_path=options["why"],
        use_cache=not options["no_cache"],
        timeout=options["timeout"],
        alternatives=name == "check",
    )
    with Progress() as progress:
        target = resolve(_options(ctx, options), progress.download)
        report = audit(target, settings, progress.phase)
    deliver(_rendered(report, options, name), options["output"])
    fail_on = None if options["fail_on"] == "never" else Severity(options["fail_on"])
    say(_summary(report, undetermined(report, options["strict"])))
    ctx.exit(exit_code(report, fail_on, options["strict"]))


def _rendered(report: Report, options: dict[str, Any], name: str) -> str:
    if options["format"] == "json":
        from dsv4doctor.report import json

        return json.render(report)
    from dsv4doctor.report import console

    is_terminal = options["output"] is None and sys.stdout.isatty()
    render = console.render_check if name == "check" else console.render_trace
    return render(
        report,
        width(is_terminal),
        is_terminal and "NO_COLOR" not in os.environ,
        verbose=options["verbose"],
        why=options["why"],
    )


def _summary(report: Report, gap: str | None) -> str:
    from dsv4doctor.report.console import summary

    cached = ", trace from the cache" if report.facts.trace and report.facts.trace.cached else ""
    line = f"dsv4doctor: {summary(report)} in {report.timings['total']:.1f} s{cached}"
    return f"{line}; not determined: {gap}" if gap else line


# ------------------------------------------------------------------------------ errors


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the command line `arguments` (by default the process's own)."""
    state: dict[str, Any] = {"debug": False, "format": "console", "output": None}
    try:
        with _broken_pipe_is_quiet():
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
    sys.exit(run())


@contextlib.contextmanager
def _broken_pipe_is_quiet() -> Iterator[None]:
    """Whoever read our output has gone: let the interpreter's last flush go nowhere."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _failed(state: dict[str, Any], error: DoctorError) -> int:
    if state["format"] == "json" and state["output"] is None:
        from dsv4doctor.report.json import render_error

        sys.stdout.write(render_error(error))
    _complain(error.message, error.hint)
    return error.exit_code


def _misused(error: click.ClickException) -> int:
    hint = None
    if isinstance(error, click.NoSuchOption):
        hint = "SGLang's own flags go after `--`"
    elif isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f"see {error.ctx.command_path} --help"
    _complain(error.format_message().rstrip("."), hint)
    return 2


def _broken(state: dict[str, Any], error: Exception) -> int:
    if state["debug"] or "--debug" in sys.argv:
        import traceback

        traceback.print_exc()
    message = f"internal error ({type(error).__name__}: {error})"
    if state["format"] == "json" and state["output"] is None:
        from dsv4doctor.report.json import render_failure

        sys.stdout.write(render_failure("internal", message, None))
    _complain(message, "please report it; --debug shows the traceback")
    return 3


def _complain(message: str, hint: str | None) -> None:
    text = f"{message.rstrip('.')}. {hint[0].upper()}{hint[1:]}" if hint else message
    say(f"dsv4doctor: {' '.join(text.split())}")
