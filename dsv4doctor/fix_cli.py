"""`dsv4doctor fix` and `dsv4doctor run`.  Parse, call, render, exit code."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dsv4doctor.cli_options import FLAGS_KEY, FlagsCommand, launch_options
from dsv4doctor.errors import DoctorError, UsageError
from dsv4doctor.terminal import Progress, check_writable, deliver, say, wants_color, width

if TYPE_CHECKING:
    from pathlib import Path

    from dsv4doctor.asked import Options
    from dsv4doctor.fixes.fix import Fix
    from dsv4doctor.models import SglangTree
    from dsv4doctor.patching.journal import Store
    from dsv4doctor.patching.view import Asked, Outcome

_KERNELS = ("auto", "triton", "cutlass", "marlin")
_MODES = ("diff", "apply", "status", "revert", "check", "recover")


@click.command(
    "fix",
    cls=FlagsCommand,
    epilog="Exit codes: 0 done, or nothing to do; 1 --check: a needed fix is missing, --status: "
    "files are not as they were left; 2 wrong usage or unreadable input; 3 could not be "
    "determined; 4 refused, and the tree is as it was.",
)
@click.option("--diff", is_flag=True, help="Print the change, for `git apply` in the tree.")
@click.option("--apply", is_flag=True, help="Change the tree, and prove it by tracing again.")
@click.option("--status", is_flag=True, help="What is in the tree; needs no launch.")
@click.option("--revert", is_flag=True, help="Give the tree its own bytes back; needs no launch.")
@click.option("--check", is_flag=True, help="Exit code 1 if a needed fix is missing: for CI.")
@click.option("--recover", is_flag=True, help="Put a tree right whose change was interrupted.")
@click.option(
    "--only", multiple=True, metavar="ID", help="Only this fix; can be given several times."
)
@click.option(
    "--kernel",
    type=click.Choice(_KERNELS),
    help="What routed experts are sent to. [default: auto, or what a fix was applied with]",
)
@click.option(
    "--overlay",
    type=click.Path(),
    metavar="DIR",
    help="Write the patched modules there and leave the tree alone; see `dsv4doctor run`.",
)
@click.option("--force", is_flag=True, help="Also while a server runs from the tree.")
@launch_options(("console", "json"))
@click.pass_context
def fix_command(ctx: click.Context, /, **options: Any) -> None:
    """Patch an installed SGLang so that the launch reaches kernels that work, prove it, and take
    it back.  Without an option: show the plan.

    \b
    Examples:
      dsv4doctor fix --launch serve.sh
      dsv4doctor fix --diff --launch serve.sh > sm120.patch
      dsv4doctor fix --apply --launch serve.sh --python /venv/bin/python
      dsv4doctor fix --check --launch serve.sh
      dsv4doctor fix --overlay /data/overlay --launch serve.sh
      dsv4doctor fix --status --python /venv/bin/python
      dsv4doctor fix --revert --only FIX101 --python /venv/bin/python
    """  # fmt: skip
    mode, style = "plan", options["format"]
    # An error is rendered here, in this command's own schema.
    ctx.obj.update(debug=options["debug"], format="console", output=options["output"])
    try:
        mode = _mode(options)
        check_writable(options["output"])
        with Progress() as progress:
            outcome = _outcome(ctx, mode, options, progress)
    except DoctorError as error:
        if style == "json" and options["output"] is None:
            from dsv4doctor.patching.render import error_as_json

            deliver(error_as_json(mode, error), None)
        raise
    deliver(_rendered(outcome, options), options["output"])
    say(f"dsv4doctor: {outcome.said}")
    ctx.exit(outcome.exit_code)


@click.command("run", cls=FlagsCommand)
@click.option(
    "--overlay", type=click.Path(), metavar="DIR", required=True, help="From `fix --overlay DIR`."
)
@click.pass_context
def run_command(ctx: click.Context, /, overlay: str) -> None:
    """Start a command, and every Python that it starts, with an overlay's modules in front.

    \b
    Examples:
      dsv4doctor run --overlay /data/overlay -- python -m sglang.launch_server --model-path M
      dsv4doctor run --overlay /data/overlay -- sglang serve M --tp 4
    """
    from dsv4doctor.patching import overlay as overlays

    command = ctx.meta.get(FLAGS_KEY, ())
    if not command:
        raise UsageError(
            "run: no command", "write it after `--`: dsv4doctor run --overlay DIR -- python ..."
        )
    folder = _overlay_folder(overlay)
    overlays.refuse_outdated(folder, overlays.read(folder))
    overlays.refuse_blind(command)
    overlays.start(command, overlays.environment(folder, os.environ))


def _mode(options: dict[str, Any]) -> str:
    """The one thing that is asked for; UsageError for two."""
    given = [mode for mode in _MODES if options[mode]]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} are both given", "give one of the two")
    mode = given[0] if given else "plan"
    if options["overlay"] is not None:
        _overlay_folder(options["overlay"])
        if mode != "plan":
            raise UsageError(f"--{mode} and --overlay are both given", "give one of the two")
        return "overlay"
    return mode


def _outcome(ctx: click.Context, mode: str, options: dict[str, Any], progress: Progress) -> Outcome:
    from dsv4doctor.fixes import ALL
    from dsv4doctor.patching.view import Asked

    asked = Asked(_ids(options["only"], ALL), options["kernel"], options["force"])
    said = _said(ctx, options)
    if mode in ("status", "revert", "recover"):
        return _of_tree(mode, said, asked, ALL, progress)
    return _of_launch(mode, options, said, asked, ALL, progress)


def _overlay_folder(text: str) -> Path:
    """The folder of --overlay; UsageError for none."""
    from pathlib import Path

    if not text:
        raise UsageError("--overlay: no folder", "write it like --overlay /data/overlay")
    return Path(os.path.expanduser(text))


def _refuse_inputs(options: dict[str, Any], said: Options, source: str | None) -> None:
    """UsageError for an output over what is read, or over what fixes are taken back with."""
    from dsv4doctor.outputs import read_by, refuse_inputs
    from dsv4doctor.state import state_folder

    overlay = _overlay_folder(options["overlay"]) if options["overlay"] is not None else None
    refuse_inputs(
        [("--overlay", overlay), ("--output", options["output"])],
        [
            *read_by(said),
            (source, "the configuration"),
            (state_folder() / "trees", "what fixes are taken back with"),
        ],
    )


def _ids(only: tuple[str, ...], fixes: tuple[Fix, ...]) -> tuple[str, ...]:
    names = tuple(name.upper() for name in only)
    known = [fix.id for fix in fixes]
    for name in names:
        if name not in known:
            raise UsageError(f"--only {name}: no such fix", f"there are: {', '.join(known)}")
    return names


def _of_tree(
    mode: str,
    said: Options,
    asked: Asked,
    fixes: tuple[Fix, ...],
    progress: Progress,
) -> Outcome:
    from dsv4doctor.patching import restore
    from dsv4doctor.target import resolve_verified

    tree, verified = resolve_verified(said, progress.download)
    store = _store(tree)
    if mode == "recover":
        return restore.recover_tree(store)
    if mode == "status":
        return restore.status(store, fixes, verified)
    return restore.revert(store, fixes, asked, verified)


def _of_launch(
    mode: str,
    options: dict[str, Any],
    said: Options,
    asked: Asked,
    fixes: tuple[Fix, ...],
    progress: Progress,
) -> Outcome:
    from dsv4doctor.audit import Settings
    from dsv4doctor.patching import work
    from dsv4doctor.target import resolve

    target = resolve(said, progress.download)
    settings = Settings(
        use_cache=not options["no_cache"], timeout=options["timeout"], alternatives=False
    )
    job = work.Job(_store(target.tree), fixes, target, asked, settings, progress.phase)
    if mode == "overlay":
        return work.write_overlay(job, _overlay_folder(options["overlay"]))
    return work.apply(job) if mode == "apply" else work.make_plan(job, mode)


def _said(ctx: click.Context, options: dict[str, Any]) -> Options:
    """The one launch that is meant, from the command line, its variables and the configuration."""
    from dsv4doctor import checking

    given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    said = {
        name: value for name, value in options.items() if ctx.get_parameter_source(name) in given
    }
    said["flags"] = ctx.meta.get(FLAGS_KEY, ())
    config = checking.read_config(options["config"])
    planned = checking.plan(said, options["targets"], config)
    targets = planned.targets
    if len(targets) > 1:
        names = ", ".join(asked.policy.target or "launch" for asked in targets)
        raise UsageError(
            f"the configuration has several targets ({names})", "say which one: --target NAME"
        )
    _refuse_inputs(options, targets[0].options, planned.source)
    return targets[0].options


def _store(tree: SglangTree) -> Store:
    from dsv4doctor.patching.journal import Store
    from dsv4doctor.state import state_folder

    return Store(state_folder(), tree)


def _rendered(outcome: Outcome, options: dict[str, Any]) -> str:
    from dsv4doctor.patching import render
    from dsv4doctor.report.console import Style

    if options["format"] == "json":
        return render.as_json(outcome)
    if outcome.command == "diff":
        return render.as_diff(outcome)
    on_screen = options["output"] is None
    style = Style(
        width(on_screen and sys.stdout.isatty()),
        color=on_screen and wants_color(sys.stdout),
        verbose=options["verbose"],
    )
    return render.console(outcome, style)
