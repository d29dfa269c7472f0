"""The options that commands share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from dsv4doctor.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
FLAGS_KEY = "dsv4doctor.sglang_flags"
FORMATS = ("console", "json", "sarif", "junit", "github", "markdown", "html")
_ARCHS = ("auto", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")


class Seconds(click.FloatRange):
    """A limit above 0 and up to a day."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True, max=86400)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds: float = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a number of seconds.", param, ctx)
        return seconds


class FlagsCommand(click.Command):
    """A command whose arguments after `--` are SGLang's and not looked at here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            cut = args.index("--")
            ctx.meta[FLAGS_KEY] = tuple(args[cut + 1 :])
            args = args[:cut]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        for parameter in self.params:
            _refuse_empty(ctx, parameter)
        return super().invoke(ctx)


_NEVER_EMPTY = ("model", "launch", "sglang", "python", "snapshot", "config", "host")


def _refuse_empty(ctx: click.Context, parameter: click.Parameter) -> None:
    """UsageError for "" on the command line, as of a shell's unset variable: what is meant would be
    the default, and another tree or launch than the user's."""
    name = parameter.name or ""
    is_given = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    value = ctx.params.get(name)
    is_empty = value == "" or (
        name == "launch" and value == ("",)
    )  # of a list, its own reader says
    if name in _NEVER_EMPTY and is_given and is_empty:
        called = "MODEL" if isinstance(parameter, click.Argument) else parameter.opts[-1]
        raise UsageError(f"{called}: empty", "leave it out, or give a value")


def option(*names: str, **settings: Any) -> Callable[[F], F]:
    """A click option with its environment variable, DSV4DOCTOR_<NAME>."""
    long = next(name for name in names if name.startswith("--"))
    variable = f"DSV4DOCTOR_{long[2:].upper().replace('-', '_')}"
    return click.option(*names, envvar=variable, show_envvar=True, **settings)


def _apply(decorators: Sequence[Callable[[F], F]], function: F) -> F:
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


debug_option = click.option(
    "--debug", is_flag=True, help="Show the traceback of an internal error."
)
output_option = click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write there instead of standard output.",
)


def timeout_option(text: str = "Limit for a trace.") -> Callable[[F], F]:
    """--timeout of a command that takes it from the command line only."""
    return click.option(
        "--timeout",
        type=Seconds(),
        default=300.0,
        show_default=True,
        metavar="SECONDS",
        help=text,
    )


def format_option(*formats: str) -> Callable[[F], F]:
    """--format as the parameter `style`."""
    return click.option(
        "--format", "style", type=click.Choice(formats), default="console", show_default=True
    )


class Script(click.Path):
    """A script or `script:LINE`; in a variable only one, for the colon is the line's."""

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return [rv]


_LAUNCH = option(
    "--launch",
    type=Script(dir_okay=False),
    metavar="FILE[:LINE]",
    help="Shell script with the SGLang command. Instead: SGLang's flags after `--`.",
)
_LAUNCHES = option(
    "--launch",
    type=Script(dir_okay=False),
    multiple=True,
    metavar="FILE[:LINE]",
    help="Shell script with the SGLang command; given several times: servers that belong "
    "together, e.g. prefill and decode, and their router. Instead: SGLang's flags after `--`.",
)


def facts_options(function: F, launch: Callable[[F], F] = _LAUNCH) -> F:
    return _apply(
        [
            click.argument("model", required=False),
            launch,
            option(
                "--sglang",
                metavar="PATH|VERSION",
                help="SGLang tree, or a release to fetch into the cache. "
                "[default: the interpreter's]",
            ),
            option(
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
            option(
                "-o",
                "--output",
                type=click.Path(dir_okay=False),
                metavar="FILE",
                help="Write there instead of standard output.",
            ),
            debug_option,
        ],
        function,
    )


def report_options(formats: Sequence[str]) -> Callable[[F], F]:
    """The options of a command that reports in one of `formats`."""

    def decorate(function: F) -> F:
        own = [*_trace_options(formats), *_verdict_options()]
        return _apply(own, facts_options(function, _LAUNCHES))

    return decorate


def launch_options(formats: Sequence[str]) -> Callable[[F], F]:
    """The options that say which launch is traced, without those that judge findings."""

    def decorate(function: F) -> F:
        return _apply([*_trace_options(formats)], facts_options(function))

    return decorate


def _verdict_options() -> list[Callable[[F], F]]:
    return [
        option(
            "--fail-on",
            type=click.Choice(["error", "warning", "never"]),
            default="error",
            show_default=True,
            help="The least severity of a finding that gives exit code 1.",
        ),
        option(
            "--strict",
            is_flag=True,
            help="Exit code 3 also for a skipped rule or a kernel that is not known.",
        ),
        option("--why", is_flag=True, help="Also print the decision path: every branch."),
    ]


def _trace_options(formats: Sequence[str]) -> list[Callable[[F], F]]:
    return [
        option(
            "--arch",
            type=click.Choice(_ARCHS),
            default="auto",
            show_default=True,
            help="GPU architecture; auto asks the driver.",
        ),
        option(
            "--snapshot",
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="Facts of another machine, from `dsv4doctor snapshot`.",
        ),
        option("--format", type=click.Choice(formats), default="console", show_default=True),
        option(
            "--timeout",
            type=Seconds(),
            default=300.0,
            show_default=True,
            metavar="SECONDS",
            help="Limit for a trace.",
        ),
        option("--no-cache", is_flag=True, help="Trace again even if nothing has changed."),
        option(
            "-v",
            "--verbose",
            is_flag=True,
            help="Also print rules that were not checked, packages, changed arguments.",
        ),
        option(
            "--config",
            type=click.Path(dir_okay=False),
            metavar="FILE",
            help="dsv4doctor.toml or pyproject.toml. [default: the nearest one in the working "
            "directory or above]",
        ),
        click.option(
            "--target",
            "targets",
            multiple=True,
            metavar="NAME",
            help="Only this target of the configuration; can be given several times.",
        ),
    ]


def gate_options(function: F) -> F:
    return _apply(
        [
            option(
                "--level",
                type=click.Choice(["quick", "full"]),
                default="quick",
                show_default=True,
                help="full: also measure all-reduce and copies on this machine's GPUs, for "
                "minutes at most; not beside a running server.",
            ),
            click.option(
                "--report",
                "reports",
                multiple=True,
                metavar="FORMAT=FILE",
                help="Also write FILE in that format; can be given several times.",
            ),
            option(
                "--baseline",
                type=click.Path(dir_okay=False),
                metavar="FILE",
                help="Findings that are known and do not fail.",
            ),
            click.option(
                "--update-baseline",
                is_flag=True,
                help="Write the findings of this run into the --baseline file.",
            ),
        ],
        function,
    )
