"""`dsv4doctor matrix`.  Parse, call, render, exit code."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsv4doctor.cli_options import FLAGS_KEY, FlagsCommand, Seconds
from dsv4doctor.errors import UndeterminedError, UsageError
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
    from dsv4doctor.matrix import FlagSet, Matrix
    from dsv4doctor.matrix_run import Model, Plan, Release
    from dsv4doctor.models import Arch, SglangTree
    from dsv4doctor.report.matrix import Advice

_FORMATS = ("console", "json", "csv", "markdown", "html")
_INTERRUPTED = 130
_INSTALLED = "installed"
_MODEL_FLAGS = ("--model-path", "--model")


@click.command(
    "matrix",
    cls=FlagsCommand,
    epilog="Exit codes: 0 every cell has an answer, 1 --recommend found nothing that works, 2 "
    "wrong usage or unreadable input, 3 a cell could not be determined, 130 interrupted.",
)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--sglang",
    metavar="LIST",
    help="Releases, SGLang trees, or `installed` for the interpreter's own, with commas. "
    "[default: the interpreter's, if it has one, and the releases in the cache]",
)
@click.option(
    "--arch",
    default="auto",
    show_default=True,
    metavar="LIST",
    help="GPU architectures, with commas, or all; auto asks the driver.",
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
@click.option(
    "--timeout",
    type=Seconds(),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Limit for a trace.",
)
@click.option("--no-cache", is_flag=True, help="Trace again even if nothing has changed.")
@click.option(
    "--format", "style", type=click.Choice(_FORMATS), default="console", show_default=True
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write there instead of standard output.",
)
@click.option("-v", "--verbose", is_flag=True, help="Also print why what runs does.")
@click.option("--debug", is_flag=True, help="Show the traceback of an internal error.")
@click.pass_context
def matrix_command(ctx: click.Context, /, models: tuple[str, ...], **options: Any) -> None:
    """Which release runs which checkpoint on which GPU, with which flags: a table of verdicts
    for the routed experts of main and draft.

    \b
    Examples:
      dsv4doctor matrix MODEL --sglang 0.5.14,0.5.23 --arch sm_120,sm_100 -- --tp 4
      dsv4doctor matrix MODEL --recommend -- --tp 4 --speculative-algorithm EAGLE
      dsv4doctor matrix A B --arch all --format html -o matrix.html
      dsv4doctor matrix MODEL --flags-set marlin="--moe-runner-backend marlin" -- --tp 4
    """  # fmt: skip
    if ctx.obj is not None:
        ctx.obj.update(debug=options["debug"], format=options["style"], output=options["output"])
    from dsv4doctor.matrix_run import run
    from dsv4doctor.report.matrix import counted

    check_writable(options["output"])
    plan = _plan(models, ctx.meta.get(FLAGS_KEY, ()), options)
    say(f"dsv4doctor: {_size(plan)}")
    with _Bar(plan.size) as bar:
        matrix = run(plan, bar)
    advice = _advice(matrix, plan) if options["recommend"] else ()
    deliver(_rendered(matrix, advice, options), options["output"])
    say(f"dsv4doctor: {counted(matrix)}")
    ctx.exit(_exit_code(matrix, advice))


def _exit_code(matrix: Matrix, advice: Sequence[Advice]) -> int:
    if matrix.interrupted:
        return _INTERRUPTED
    if not all(cell.traced for cell in matrix.cells):
        return 3
    return int(any(not one.choices for one in advice))


# ------------------------------------------------------------------------------ what is asked


def _plan(models: Sequence[str], flags: tuple[str, ...], options: dict[str, Any]) -> Plan:
    from dsv4doctor.facts.stack import read_stack
    from dsv4doctor.matrix_run import Plan, cores

    if not models:
        raise UsageError(
            "no MODEL given", "give checkpoint folders or Hugging Face ids: dsv4doctor matrix MODEL"
        )
    archs = _archs(options["arch"])
    given = _pairs(options["env"])
    found = _models(models, {**os.environ, **given})
    formats = [layer.stored_format for model in found for layer in model.checkpoint.layers]
    sets = _flag_sets(flags, options["flag_sets"], formats, options["recommend"])
    interpreter = Path(os.path.expanduser(options["python"] or sys.executable))
    stack, own = read_stack(interpreter, {**os.environ, **given})
    return Plan(
        releases=_releases(options["sglang"], own, interpreter),
        archs=archs,
        models=found,
        flag_sets=sets,
        interpreter=Path(stack.interpreter),
        stack=stack,
        environment=dict(os.environ),
        given=given,
        jobs=options["jobs"] or cores(),
        timeout=options["timeout"],
        use_cache=not options["no_cache"],
        read_flashinfer=options["read_flashinfer"],
    )


def _size(plan: Plan) -> str:
    releases = ", ".join(release.name for release in plan.releases)
    archs = ", ".join(arch.name for arch in plan.archs)
    count = f"{len(plan.models)} checkpoint(s), {len(plan.flag_sets)} flag set(s)"
    return f"{plan.size} cells: SGLang {releases}; {archs}; {count}"


def _archs(text: str) -> tuple[Arch, ...]:
    from dsv4doctor.facts.gpu import read_gpus
    from dsv4doctor.models import ARCHS

    if text == "all":
        return tuple(ARCHS.values())
    if text == "auto":
        gpus = read_gpus()
        if gpus.gpus:
            return tuple(dict.fromkeys(gpu.arch for gpu in gpus.gpus))
        reason = f" ({gpus.unavailable})" if gpus.unavailable else ""
        raise UsageError(
            f"no GPU on this machine{reason}",
            f"say which ones are meant: --arch {','.join(ARCHS)} or --arch all",
        )
    names = _listed(text, "--arch")
    unknown = [name for name in names if name not in ARCHS]
    if unknown:
        raise UsageError(f"--arch {unknown[0]}: not known", f"known: {', '.join(ARCHS)}")
    return tuple(ARCHS[name] for name in names)


def _listed(text: str, flag: str) -> list[str]:
    names = list(dict.fromkeys(piece.strip() for piece in text.split(",") if piece.strip()))
    if not names:
        raise UsageError(f"{flag}: nothing in the list", f"write it like {flag} one,other")
    return names


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for said in texts:
        name, equals, value = said.partition("=")
        if not equals or not name.isidentifier() or "\0" in value:
            raise UsageError(
                f"--env {name.split()[0] if name.split() else ''}...: not KEY=VALUE",
                "write it like --env SGLANG_X=1",
            )
        found[name] = value
    return found


def _models(named: Sequence[str], environment: dict[str, str]) -> tuple[Model, ...]:
    from dsv4doctor.facts.checkpoint import read_checkpoint, resolve_model
    from dsv4doctor.matrix_run import Model
    from dsv4doctor.wheels import default_cache

    found: list[Model] = []
    for name in dict.fromkeys(named):
        path = resolve_model(name, environment)
        checkpoint = read_checkpoint(path, default_cache() / "checkpoints")
        taken = any(model.name == checkpoint.name for model in found)
        found.append(Model(name if taken else checkpoint.name, path, checkpoint, name))
    return tuple(found)


def _releases(text: str | None, own: SglangTree | None, interpreter: Path) -> tuple[Release, ...]:
    """The trees to trace; one that cannot be fetched is there with the reason.

    `own` is the interpreter's.
    """
    from dsv4doctor.matrix_run import Release
    from dsv4doctor.target import Options, resolve_tree

    if text is None:
        names = [*([_INSTALLED] if own else []), *_cached(needed=own is None)]
    else:
        names = _listed(text, "--sglang")
    if own is None and _INSTALLED in names:
        raise UsageError(
            f"{interpreter}: no SGLang in this interpreter",
            "give the serving environment's with --python",
        )
    found: list[Release] = []
    with Progress() as progress:
        for name in names:
            try:
                chosen = own if name == _INSTALLED else None
                tree = chosen or resolve_tree(Options(sglang=name), progress.download)
                taken = any(release.name == tree.version for release in found)
                found.append(Release(name if taken else tree.version, tree))
            except UndeterminedError as error:
                found.append(Release(name, None, error))
    return tuple(found)


def _cached(needed: bool) -> list[str]:
    """The releases in the cache, the oldest first; UsageError when there is none and one is
    `needed`."""
    from packaging.version import InvalidVersion, Version

    from dsv4doctor.wheels import default_cache

    found: list[tuple[Version, str]] = []
    folder = default_cache() / "sglang"
    for entry in folder.iterdir() if folder.is_dir() else ():
        try:
            found.append((Version(entry.name), entry.name))
        except InvalidVersion:
            continue  # what a fetch has not finished
    if needed and not found:
        raise UsageError(
            "no SGLang release in the cache", "name some: --sglang 0.5.14,0.5.23 (they are fetched)"
        )
    return [name for _, name in sorted(found)]


def _flag_sets(
    flags: tuple[str, ...], named: Sequence[str], formats: Sequence[Any], recommend: bool
) -> tuple[FlagSet, ...]:
    from dsv4doctor.matrix import FlagSet, flag_sets_to_try

    found: dict[str, tuple[str, ...]] = {}
    for said in named:
        name, equals, text = said.partition("=")
        if not equals or not name.strip() or name in found:
            what = "given twice" if name in found else "not NAME=FLAGS"
            raise UsageError(
                f"--flags-set {name[:40]}: {what}",
                'write it like --flags-set marlin="--moe-runner-backend marlin"',
            )
        try:
            found[name.strip()] = (*flags, *shlex.split(text))
        except ValueError as error:
            raise UsageError(
                f"--flags-set {name[:40]}: {error}", "close the quotes as in a shell"
            ) from error
    for flag in [*flags, *(flag for one in found.values() for flag in one)]:
        if flag.partition("=")[0] in _MODEL_FLAGS:
            raise UsageError(
                f"{flag.partition('=')[0]} among SGLang's flags", "the model is matrix's own MODEL"
            )
    if found:
        return tuple(FlagSet(name, one) for name, one in found.items())
    if recommend:
        return flag_sets_to_try(flags, formats)
    return (FlagSet("as given", flags),)


# ------------------------------------------------------------------------------ what is said


def _advice(matrix: Matrix, plan: Plan) -> tuple[Advice, ...]:
    from packaging.version import InvalidVersion, Version

    from dsv4doctor.matrix import recommend
    from dsv4doctor.report.matrix import Advice

    def age(release: Release) -> Version:
        try:
            return Version(release.tree.version if release.tree else "0")
        except InvalidVersion:
            return Version("0")

    newest = [one.name for one in sorted(plan.releases, key=age, reverse=True)]
    return tuple(
        Advice(
            arch,
            model.name,
            model.given,
            recommend(matrix, arch, model.name, newest),
            plan.given,
        )
        for model in plan.models
        for arch in plan.archs
    )


def _rendered(matrix: Matrix, advice: Sequence[Advice], options: dict[str, Any]) -> str:
    from dsv4doctor.report import matrix as report
    from dsv4doctor.report.console import Style

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
    return report.as_console(matrix, advice, look)


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
