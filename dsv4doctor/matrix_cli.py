"""`dsv4doctor matrix`.  Parse, call, render, exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dsv4doctor.cli_options import (
    FLAGS_KEY,
    FlagsCommand,
    debug_option,
    format_option,
    output_option,
    timeout_option,
)
from dsv4doctor.outputs import read_by, refuse_inputs
from dsv4doctor.terminal import (
    Progress,
    check_writable,
    deliver,
    is_interactive,
    say,
    wants_color,
    width,
)

if TYPE_CHECKING:
    from dsv4doctor.matrix import Matrix
    from dsv4doctor.matrix_run import Plan, Release
    from dsv4doctor.outputs import Input
    from dsv4doctor.report.matrix import Advice

_FORMATS = ("console", "json", "csv", "markdown", "html")
_INTERRUPTED = 130


@click.command(
    "matrix",
    cls=FlagsCommand,
    epilog="Exit codes: 0 every cell has an answer, 1 --recommend found nothing that works, 2 "
    "wrong usage or unreadable input, 3 a cell could not be determined, 130 interrupted.",
)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--launch",
    type=click.Path(dir_okay=False),
    metavar="FILE[:LINE]",
    help="Shell script with the SGLang command: its model, flags and variables.",
)
@click.option(
    "--snapshot",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Facts of another machine, from `dsv4doctor snapshot`: its GPU, packages and launch.",
)
@click.option(
    "--sglang",
    multiple=True,
    metavar="LIST",
    help="Releases, SGLang trees, or `installed` for the interpreter's own, with commas or given "
    "several times. [default: the interpreter's, if it has one, and the releases in the cache]",
)
@click.option(
    "--arch",
    multiple=True,
    metavar="LIST",
    help="GPU architectures, with commas or given several times, or all; auto asks the driver. "
    "[default: auto]",
)
@click.option(
    "--flags-set",
    "flag_sets",
    multiple=True,
    metavar="NAME=FLAGS",
    help='Another set of SGLang flags, added to those after `--`: marlin="--moe-runner-backend '
    'marlin"; can be given several times.',
)
@click.option(
    "--recommend",
    is_flag=True,
    help="Rank what works; without --flags-set also try the MoE backends that fit.",
)
@click.option(
    "--read-flashinfer",
    is_flag=True,
    help="Fetch the FlashInfer that each release pins (15 to 65 MB each, once) and judge by what "
    "its sources say.",
)
@click.option("--python", metavar="INTERPRETER", help="Python whose torch runs the traces.")
@click.option(
    "--env",
    multiple=True,
    metavar="KEY=VALUE",
    help="Environment variable of the server; can be given several times.",
)
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(1, 256),
    help="Traces side by side, 0.4 GB each. [default: the CPUs]",
)
@timeout_option()
@click.option("--no-cache", is_flag=True, help="Trace again even if nothing has changed.")
@format_option(*_FORMATS)
@output_option
@click.option("-v", "--verbose", is_flag=True, help="Also print why what runs does.")
@debug_option
@click.pass_context
def matrix_command(ctx: click.Context, /, models: tuple[str, ...], **options: Any) -> None:
    """Which release runs which checkpoint on which GPU, with which flags: a table of verdicts
    for the routed experts of main and draft.

    \b
    Examples:
      dsv4doctor matrix MODEL --sglang 0.5.14,0.5.23 --arch sm_120,sm_100 -- --tp 4
      dsv4doctor matrix --launch serve.sh --recommend
      dsv4doctor matrix --snapshot box.json --recommend
      dsv4doctor matrix A B --arch all --format html -o matrix.html
      dsv4doctor matrix MODEL --flags-set marlin="--moe-runner-backend marlin" -- --tp 4
    """  # fmt: skip
    if ctx.obj is not None:
        ctx.obj.update(debug=options["debug"], format=options["style"], output=options["output"])
    from dsv4doctor.matrix_plan import Asked
    from dsv4doctor.matrix_plan import plan as plan_of
    from dsv4doctor.matrix_run import run
    from dsv4doctor.report.matrix import counted

    check_writable(options["output"])
    refuse_inputs([("--output", options["output"])], _read(models, options))
    asked = Asked(
        models=models,
        flags=ctx.meta.get(FLAGS_KEY, ()),
        launch=options["launch"],
        snapshot=options["snapshot"],
        sglang=",".join(options["sglang"]) if options["sglang"] else None,
        arch=",".join(options["arch"]) if options["arch"] else "auto",
        flag_sets=options["flag_sets"],
        recommend=options["recommend"],
        read_flashinfer=options["read_flashinfer"],
        python=options["python"],
        env=options["env"],
        jobs=options["jobs"],
        timeout=options["timeout"],
        use_cache=not options["no_cache"],
    )
    with Progress() as progress:
        plan = plan_of(asked, progress.download)
    say(f"dsv4doctor: {_size(plan)}")
    with _Bar(plan.size) as bar:
        matrix = run(plan, bar)
    advice = _advice(matrix, plan) if options["recommend"] else ()
    deliver(_rendered(matrix, advice, options), options["output"])
    say(f"dsv4doctor: {counted(matrix)}")
    ctx.exit(_exit_code(matrix, advice))


def _read(models: Sequence[str], options: dict[str, Any]) -> list[Input]:
    from pathlib import Path

    from dsv4doctor.asked import Options

    launch, snapshot = options["launch"], options["snapshot"]
    named = Options(
        launch=Path(launch) if launch else None,
        snapshot=Path(snapshot) if snapshot else None,
        python=options["python"],
    )
    return [*((model, "a model") for model in models), *read_by(named)]


def _size(plan: Plan) -> str:
    releases = ", ".join(release.name for release in plan.releases)
    archs = ", ".join(arch.name for arch in plan.archs)
    count = f"{len(plan.models)} checkpoint(s), {len(plan.flag_sets)} flag set(s)"
    return f"{plan.size} cells: SGLang {releases}; {archs}; {count}"


def _exit_code(matrix: Matrix, advice: Sequence[Advice]) -> int:
    if matrix.interrupted:
        return _INTERRUPTED
    if not all(cell.is_determined for cell in matrix.cells):
        return 3
    return int(any(not one.choices for one in advice))


# ------------------------------------------------------------------------------ what is said


def _advice(matrix: Matrix, plan: Plan) -> tuple[Advice, ...]:
    from packaging.version import InvalidVersion, Version

    from dsv4doctor.matrix import left_out, recommend
    from dsv4doctor.matrix_fix import cautions, patch_for_draft
    from dsv4doctor.report.matrix import Advice

    def age(release: Release) -> Version:
        try:
            return Version(release.tree.version if release.tree else "0")
        except InvalidVersion:
            return Version("0")

    newest = [one.name for one in sorted(plan.releases, key=age, reverse=True)]
    trees = {one.name: one.tree for one in plan.releases if one.tree is not None}
    found = []
    for model in plan.models:
        for arch in plan.archs:
            choices = recommend(matrix, arch, model.name, newest)
            left = left_out(matrix, arch, model.name)
            patch = None
            if not choices or choices[0].cell.draft is None:
                patch, more = patch_for_draft(matrix, arch, model.name, newest, trees)
                left = tuple(dict.fromkeys((*left, *more)))
            found.append(
                Advice(
                    arch,
                    model.name,
                    model.given,
                    choices,
                    plan.given,
                    left,
                    cautions(choices, trees),
                    patch,
                )
            )
    return tuple(found)


def _rendered(matrix: Matrix, advice: Sequence[Advice], options: dict[str, Any]) -> str:
    from dsv4doctor.report import matrix as report
    from dsv4doctor.report.console import Style
    from dsv4doctor.report.matrix_console import as_console

    style = options["style"]
    if style == "json":
        return report.as_json(matrix, advice)
    if style == "csv":
        return report.as_csv(matrix)
    if style == "markdown":
        return report.as_markdown(matrix, advice)
    if style == "html":
        from dsv4doctor.report.matrix_html import render

        return render(matrix, advice)
    on_screen = options["output"] is None
    look = Style(
        width(on_screen and sys.stdout.isatty()),
        color=on_screen and wants_color(sys.stdout),
        verbose=options["verbose"],
    )
    return as_console(matrix, advice, look)


class _Bar:
    """A progress bar with the time left on standard error, where somebody watches."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _Bar:
        if is_interactive(sys.stderr):
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                TextColumn,
                TimeRemainingColumn,
            )
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("tracing", total=self.total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begun(self, done: int, total: int, text: str) -> None:
        if self._bar is not None:
            # One that has begun is not done yet.
            self._bar.update(self._task, completed=max(0, done - 1), total=total, description=text)
