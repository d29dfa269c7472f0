"""`dsv4doctor plan`.  Parse, call, render, exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dsv4doctor.cli_options import FLAGS_KEY, FlagsCommand, debug_option, timeout_option
from dsv4doctor.outputs import read_by, refuse_inputs
from dsv4doctor.terminal import Progress, deliver, say, width

if TYPE_CHECKING:
    from dsv4doctor.planning.build import Ask
    from dsv4doctor.planning.prove import Proof

F = TypeVar("F", bound=Callable[..., Any])
_ARCHS = ("auto", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
_KINDS = ("scripts", "systemd", "compose", "k8s")
_PORT = click.IntRange(1, 65535)


@click.group("plan")
def plan_group() -> None:
    """Write launch files for a machine: GPUs by NUMA node, ports, memory, and what this SGLang
    needs for the model on this GPU, every flag checked by SGLang's own parser.

    \b
    Examples:
      dsv4doctor plan single /models/DeepSeek-V4-Flash --out deploy --explain
      dsv4doctor plan pd --snapshot box.json --kind compose
    """


def _options(function: F) -> F:
    for decorate in reversed(_OPTIONS):
        function = decorate(function)
    return function


_OPTIONS: list[Callable[[Any], Any]] = [
    click.argument("model", required=False),
    click.option(
        "--snapshot",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="The serving machine, from `dsv4doctor snapshot`. [default: this machine]",
    ),
    click.option(
        "--gpus",
        metavar="LIST",
        help="The GPUs to use, with their NUMA nodes where they are not known: 0-3@0,4-7@1.",
    ),
    click.option(
        "--gpu-memory",
        type=click.FloatRange(min=1, max=10000),
        metavar="GIB",
        help="Memory of each, where it is not known.",
    ),
    click.option(
        "--arch",
        type=click.Choice(_ARCHS),
        default="auto",
        show_default=True,
        help="GPU architecture; auto asks the driver or the snapshot.",
    ),
    click.option(
        "--sglang",
        metavar="PATH|VERSION",
        help="SGLang tree, or a release to fetch. [default: the interpreter's]",
    ),
    click.option("--python", metavar="INTERPRETER", help="Python of the serving environment."),
    click.option(
        "--context",
        type=click.IntRange(1024, 1 << 24),
        metavar="TOKENS",
        help="The longest request. [default: 131072, or the model's limit]",
    ),
    click.option(
        "--requests",
        type=click.IntRange(1, 4096),
        default=32,
        show_default=True,
        metavar="N",
        help="Requests that run at once.",
    ),
    click.option(
        "--speculative",
        type=click.Choice(["none", "auto"]),
        default="none",
        show_default=True,
        help="auto: with the draft that the checkpoint stores. Other flags go after `--`.",
    ),
    click.option(
        "--thinking",
        type=click.Choice(["on", "off"]),
        help="Whether the model thinks where a request does not say. [default: as released]",
    ),
    click.option("--host", default="127.0.0.1", show_default=True, help="What clients reach."),
    click.option(
        "--port",
        type=_PORT,
        help="What clients reach. [default: 8000 for a router, 30000 for one server]",
    ),
    click.option(
        "--port-base",
        type=click.IntRange(1024, 64000),
        default=30000,
        show_default=True,
        help="Where the other ports begin.",
    ),
    click.option(
        "--env",
        multiple=True,
        metavar="KEY=VALUE",
        help="Environment variable of every server; several times.",
    ),
    click.option(
        "--kind",
        type=click.Choice(_KINDS),
        default="scripts",
        show_default=True,
        help="What to write.",
    ),
    click.option("--image", metavar="IMAGE", help="For compose and k8s. [default: SGLang's own]"),
    click.option(
        "--out",
        type=click.Path(),
        default="dsv4-plan",
        show_default=True,
        metavar="DIR",
        help="The folder to write to.",
    ),
    click.option("--force", is_flag=True, help="Write over files that are there."),
    click.option("--explain", is_flag=True, help="Print every value with its reason."),
    timeout_option(),
    debug_option,
]


@plan_group.command("pd", cls=FlagsCommand, options_metavar="[OPTIONS]")
@_options
@click.option(
    "--transfer",
    default="nixl",
    show_default=True,
    metavar="BACKEND",
    help="What moves the KV cache between the sides.",
)
@click.pass_context
def pd_command(ctx: click.Context, /, **options: Any) -> None:
    """A prefill server, a decode server and a router, each side on its own half of the GPUs.

    MODEL is a checkpoint folder or a Hugging Face id; by default the snapshot's own.

    \b
    Examples:
      dsv4doctor plan pd /models/DeepSeek-V4-Flash-NVFP4 --out deploy --explain
      dsv4doctor plan pd --snapshot box.json --context 65536 --speculative auto
      dsv4doctor plan pd MODEL --gpus 0-3@0,4-7@1 --gpu-memory 95 --arch sm_120 --sglang 0.5.23
    """
    _run(ctx, options, pair=True)


@plan_group.command("single", cls=FlagsCommand, options_metavar="[OPTIONS]")
@_options
@click.pass_context
def single_command(ctx: click.Context, /, **options: Any) -> None:
    """One server on all GPUs.

    \b
    Examples:
      dsv4doctor plan single /models/DeepSeek-V4-Flash --kind systemd --python /opt/sg/bin/python
      dsv4doctor plan single --snapshot box.json --gpus 0-3 -- --disable-radix-cache
    """  # fmt: skip
    _run(ctx, options, pair=False)


def _run(ctx: click.Context, options: dict[str, Any], pair: bool) -> None:
    if ctx.obj is not None:
        ctx.obj.update(debug=options["debug"])
    from dataclasses import replace
    from pathlib import Path

    from dsv4doctor.asked import Options
    from dsv4doctor.errors import UsageError
    from dsv4doctor.planning import build, files, prove, render
    from dsv4doctor.planning.containers import check_image
    from dsv4doctor.planning.explain import explained
    from dsv4doctor.planning.ports import listening
    from dsv4doctor.planning.topology import parse_gpus
    from dsv4doctor.target import resolve

    if not options["out"]:
        raise UsageError("--out: no folder", "leave it out for dsv4-plan")
    out, kind, saved = Path(options["out"]), options["kind"], options["snapshot"]
    if options["image"] is not None:
        check_image(options["image"])
    if options["gpus"] is not None:
        parse_gpus(options["gpus"])
    asked = Options(
        model=options["model"],
        snapshot=Path(saved) if saved else None,
        sglang=options["sglang"],
        python=options["python"],
        arch=options["arch"],
        env=options["env"],
        takes_launch=False,
    )
    names = render.names(pair, kind)
    refuse_inputs([("--out", out / name) for name in names], read_by(asked))
    files.check_folder(out, names, options["force"])
    with Progress() as progress:
        target = resolve(asked, progress.download)
        ask = _ask(options, pair, ctx.meta.get(FLAGS_KEY, ()), target.launch.environment)
        on = build.ground(ask, target, None if saved else listening)
        planned = build.plan(ask, on)
        render.check_kind(planned, kind)
        proof = prove.prove(planned, on, options["timeout"], progress.phase)
    shown = render.of_kind(proof.plan, kind)
    written = render.files(proof.plan, kind, Path(target.tree.root), options["image"])
    files.write(out, written, options["force"])
    if options["explain"]:
        deliver(explained(shown, width(sys.stdout.isatty())), None)
    _report(replace(proof, plan=shown), out.as_posix(), list(written), options["explain"])
    ctx.exit(proof.exit_code)


def _ask(
    options: dict[str, Any], pair: bool, flags: tuple[str, ...], environment: Mapping[str, str]
) -> Ask:
    from dsv4doctor.planning.build import Ask

    named = dict.fromkeys(text.partition("=")[0] for text in options["env"])
    return Ask(
        pair=pair,
        gpus=options["gpus"],
        gpu_memory=options["gpu_memory"],
        context=options["context"],
        requests=options["requests"],
        transfer=options.get("transfer", "nixl"),
        speculative=options["speculative"],
        thinking=options["thinking"] or "as-released",
        host=options["host"],
        port=options["port"],
        port_base=options["port_base"],
        flags=flags,
        python=options["python"],
        variables=tuple((name, environment[name]) for name in named),
    )


def _report(proof: Proof, out: str, names: list[str], explained: bool) -> None:
    """To standard error; notes and patches are in what was `explained`."""
    from dsv4doctor.models import Severity

    if not explained:
        for note in proof.plan.notes:
            say(f"dsv4doctor: note: {note}")
        for patch in proof.plan.patches:
            say(f"dsv4doctor: a patch that helps: {patch}; see `dsv4doctor fix`")
    for finding in proof.findings:
        if finding.severity is Severity.INFO:
            continue
        say(f"dsv4doctor: {finding.severity.value}: {finding.rule} {finding.message}")
    for problem in proof.plan.problems:
        say(f"dsv4doctor: not sound: {problem}")
    state = "sound"
    if proof.undetermined is not None:
        state = f"not determined: {proof.undetermined}"
    elif proof.plan.problems:
        state = "NOT SOUND, and its files say so"
    say(f"dsv4doctor: {out}: {', '.join(names)} written; {state}")
