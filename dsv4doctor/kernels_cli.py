"""`dsv4doctor kernels`: list, compile, verify, bench.  Parse, call, render, exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsv4doctor.errors import UsageError
from dsv4doctor.kernels_table import table
from dsv4doctor.terminal import check_writable, deliver, say

if TYPE_CHECKING:
    from rich.console import Console

    from dsv4doctor.kernels.bench import Timed
    from dsv4doctor.kernels.compile import Compiled
    from dsv4doctor.kernels.verify import Checked

FINDINGS = 1
"""Exit code when a configuration does not fit, a check fails or a row could not be timed."""
UNDETERMINED = 3
"""Exit code when there was nothing to check on this GPU."""


def _writable(_: click.Context, parameter: click.Parameter, output: Path | None) -> Path | None:
    """`output`, looked at before the work is done."""
    if output is not None:
        check_writable(str(output), f"--{parameter.name}")
    return output


_only = click.option("--only", multiple=True, metavar="NAME", help="This kernel; may be repeated.")
_format = click.option(
    "--format", "style", type=click.Choice(["console", "json"]), default="console",
    show_default=True, help="How to write the result.",
)  # fmt: skip
_output = click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), callback=_writable,
    help="Write to this file instead of standard output.",
)  # fmt: skip


@click.group("kernels")
def kernels_group() -> None:
    """The Triton kernels that stand in where SGLang has none for this GPU.

    \b
    Examples:
      dsv4doctor kernels list
      dsv4doctor kernels compile --arch sm_120
      dsv4doctor kernels verify
    """


# ------------------------------------------------------------------------------ list


@kernels_group.command("list")
@_format
@_output
def list_command(style: str, output: Path | None) -> None:
    """Which kernels there are, what each replaces, and where it is offered.

    \b
    Examples:
      dsv4doctor kernels list
      dsv4doctor kernels list --format json
    """
    from dsv4doctor.kernels import catalog

    metas = [catalog.meta(name) for name in catalog.select(())]
    if style == "json":
        _write(_json([vars(meta) for meta in metas]), output)
        return
    rows = [
        (
            meta.name,
            meta.title + (f"\n{meta.notes}" if meta.notes else ""),
            "\n".join(meta.replaces),
            f"{meta.error_bar:g}",
            " ".join(arch.removeprefix("sm_") for arch in meta.archs),
        )
        for meta in metas
    ]
    _write(table(("kernel", "what it does", "replaces", "error bar", "sm_"), rows), output)


# ------------------------------------------------------------------------------ compile


@kernels_group.command("compile")
@click.option(
    "--arch", "archs", default="sm_120,sm_121", show_default=True, metavar="ARCH[,ARCH...]",
    help="sm_90, sm_100, sm_103, sm_120, sm_121.",
)  # fmt: skip
@_only
@click.option("--processes", "-j", type=click.IntRange(1), default=2, show_default=True)
@_format
@_output
def compile_command(
    archs: str, only: tuple[str, ...], processes: int, style: str, output: Path | None
) -> None:
    """Compile every configuration for a GPU that need not be here, and read the result.

    Exit code 1 when one spills registers, needs more shared memory than a block can have, or
    does not compile.

    \b
    Examples:
      dsv4doctor kernels compile
      dsv4doctor kernels compile --arch sm_120,sm_121 --only moe_nvfp4 -j 8
    """
    from dsv4doctor.kernels import catalog, compile

    _need("triton")
    names = catalog.select(only)
    stream = compile.compile_all(names, compile.parse_archs(archs), processes)
    results = _with_progress("compiling", stream)
    if style == "json":
        text = _json({"schema": "dsv4doctor-kernel-compile/1", "rows": compile.as_plain(results)})
    else:
        text = _compile_table(results)
    _write(text, output)
    bad = [result for result in results if not result.passed]
    say(
        f"{len(results)} configurations: {len(results) - len(bad)} fit or are withheld, "
        f"{len(bad)} do not"
    )
    if bad:
        sys.exit(FINDINGS)


def _compile_table(results: Sequence[Compiled]) -> str:
    ordered = sorted(results, key=lambda r: (r.operation, r.case, r.arch))
    rows = [
        (
            result.operation,
            result.case,
            result.arch,
            str(result.registers or ""),
            str(result.stack_bytes) if result.registers else "",
            f"{result.shared_bytes}/{result.shared_limit_bytes}" if result.registers else "",
            " ".join(f"{count} {name}" for name, count in result.mma.items()),
            f"{result.status}: {result.detail}" if result.detail else result.status,
        )
        for result in ordered
    ]
    head = ("kernel", "configuration", "arch", "registers", "stack", "shared", "MMA", "result")
    return table(head, rows)


def _with_progress(what: str, stream: Iterable[Compiled | int]) -> list[Compiled]:
    """All results of `stream`, whose first item is their number, with a bar on stderr."""
    from rich.progress import Progress

    results: list[Compiled] = []
    with Progress(console=_stderr(), transient=True) as progress:
        task = progress.add_task(what, total=None)
        for item in stream:
            if isinstance(item, int):
                progress.update(task, total=item)
            else:
                results.append(item)
                progress.advance(task)
    return results


# ------------------------------------------------------------------------------ verify


@kernels_group.command("verify")
@_only
@click.option("--quick", is_flag=True, help="The short checks only.")
@click.option("--device", default="cuda", show_default=True, help="The torch device.")
@_format
@_output
def verify_command(
    only: tuple[str, ...], quick: bool, device: str, style: str, output: Path | None
) -> None:
    """Check every kernel's numbers on this GPU, and stamp those that are right.

    Exit code 1 when a check fails (that kernel's stamp is removed), 3 without a GPU, or with one
    that none of the kernels is for.

    \b
    Examples:
      dsv4doctor kernels verify
      dsv4doctor kernels verify --only indexer_logits --device cuda:1
    """
    from dsv4doctor.kernels import catalog, registry, stamps, verify

    names = catalog.select(only)
    _check_device(device)
    platform = stamps.current_platform(device)
    say(f"{platform.gpu} (driver {platform.driver}, torch {platform.torch}, "
         f"triton {platform.triton})")  # fmt: skip
    arch = "sm_" + platform.capability.replace(".", "")
    results: list[Checked] = []
    stamped: dict[str, str | None] = {}
    for name in names:
        if not catalog.offered(name, arch):
            say(f"{name}: not offered on {arch}")
            continue
        done: list[Checked] = []
        with _stderr().status(f"verifying {name}"):
            done.extend(verify.run_checks(name, registry.load(name), device, quick))
        path = verify.record(name, done, platform, quick)
        stamped[name] = str(path) if path else None
        results.extend(done)
    if style == "json":
        _write(_json(_verify_document(results, vars(platform), stamped)), output)
    else:
        _write(_verify_table(results), output)
    for name, stamp in stamped.items():
        say(f"{name}: " + (f"verified, {stamp}" if stamp else "NOT verified, no stamp"))
    if not stamped:
        sys.exit(UNDETERMINED)
    if not all(result.passed for result in results):
        sys.exit(FINDINGS)


def _check_device(device: str) -> None:
    kind, _, index = device.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise UsageError(f"--device {device}: not a CUDA device", "e.g. cuda or cuda:1")


def _verify_document(
    results: Sequence[Checked], platform: dict[str, str], stamped: dict[str, str | None]
) -> dict[str, Any]:
    rows = [{**vars(result), "passed": result.passed} for result in results]
    return {
        "schema": "dsv4doctor-kernel-verify/1",
        "machine": platform,
        "rows": rows,
        "stamps": stamped,
    }


def _verify_table(results: Sequence[Checked]) -> str:
    rows = [
        (
            result.kernel,
            result.check,
            "" if result.error is None else f"{result.error:.2e}",
            f"{result.bar:.0e}",
            f"{result.seconds:.1f} s",
            "ok" if result.passed else f"FAILED {result.failure}".strip(),
        )
        for result in results
    ]
    return table(("kernel", "check", "error", "bar", "time", "result"), rows)


# ------------------------------------------------------------------------------ bench


@kernels_group.command("bench")
@_only
@click.option("--device", default="cuda", show_default=True, help="The torch device.")
@click.option(
    "--sglang", type=click.Path(file_okay=False, path_type=Path),
    help="An unpacked SGLang to take upstream's implementations from; default: the installed one.",
)  # fmt: skip
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), callback=_writable,
    help="Write the results as JSON to this file.",
)  # fmt: skip
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), callback=_writable,
    help="Draw them: a .png or .svg.",
)  # fmt: skip
def bench_command(
    only: tuple[str, ...], device: str, sglang: Path | None, output: Path | None, plot: Path | None
) -> None:
    """Time every kernel against upstream's and against this GPU's floor, in one run.

    Exit code 1 when one of ours could not be timed, 3 without a GPU.

    \b
    Examples:
      dsv4doctor kernels bench --output bench.json
      dsv4doctor kernels bench --only moe_mxfp4 --sglang /opt/sglang --plot bench.svg
    """
    from dsv4doctor.kernels import bench, catalog, registry, stamps, upstream

    names = catalog.select(only)
    _check_device(device)
    if plot is not None:
        bench.need_matplotlib()
    version = upstream.use_tree(sglang) if sglang else upstream.installed_version()
    platform = stamps.current_platform(device)
    with _stderr().status("measuring what this GPU reaches"):
        rates = bench.measure_rates(device)
    say(
        f"{platform.gpu}: copy {rates.copy_bytes_per_second / 1e9:.0f} GB/s, "
        f"bf16 matmul {rates.bf16_flops_per_second / 1e12:.0f} TFLOP/s; upstream: "
        + (f"SGLang {version}" if version else "no SGLang, only ours is timed")
    )
    results: list[Timed] = []
    for name in names:
        with _stderr().status(f"timing {name}") as status:
            for row in bench.run_cases(name, registry.load(name), rates, device):
                results.append(row)
                status.update(f"timing {name}: {row.case} done")
    if output is not None:
        _write(_json(bench.document(results, rates, platform, version)), output)
    _write(_bench_table(results), None)
    for name, why in upstream.problems.items():
        say(f"upstream's {name} is not here: {why}")
    if plot is not None:
        bench.plot(results, platform, plot)
    if any(row.ours_us is None for row in results):
        sys.exit(FINDINGS)


def _bench_table(results: Sequence[Timed]) -> str:
    rows = []
    for row in results:
        peers = [
            f"{name} {us:.1f} ({row.ratios[name]:.1f}x)" if row.ours_us else f"{name} {us:.1f}"
            for name, us in row.peers_us.items()
        ]
        peers += [f"{name}: {why}" for name, why in row.failures.items()]
        rows.append(
            (
                row.kernel,
                row.case,
                "" if row.ours_us is None else f"{row.ours_us:.1f}",
                f"{row.floor_us:.1f}",
                "" if row.of_floor is None else f"{row.of_floor:.0%}",
                "\n".join(peers),
            )
        )
    return table(("kernel", "case", "ours us", "floor us", "of floor", "upstream us"), rows)


# ------------------------------------------------------------------------------ output


def _need(package: str) -> None:
    """Raises UsageError when `package` is not installed."""
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"{package} is not installed for {sys.executable}",
            "run dsv4doctor from an environment that has it, e.g. the one that serves",
        )


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _write(text: str, output: Path | None) -> None:
    """To standard output or `output`.  Raises UsageError when the file cannot be written."""
    deliver(text + "\n", None if output is None else str(output))
