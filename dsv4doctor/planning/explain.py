"""A plan in words: every value and its reason."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4doctor.planning.layout import Plan, Server, Setting
from dsv4doctor.planning.scripts import binding
from dsv4doctor.terminal import harmless, wrapped


def explained(plan: Plan, columns: int) -> str:
    """For people in a terminal of `columns`."""
    lines = [f"{plan.model_name} on SGLang {plan.release} for {plan.arch.name}", ""]
    for server in plan.servers:
        lines += [_title(server), *_values(server.environment)]
        if server.bind:
            lines += _values([Setting(" ".join(binding(server)), (), "next to its GPUs")])
        lines += [*_values(server.flags), ""]
    if plan.router is not None:
        lines += ["router", *_values(plan.router.flags), ""]
    lines += ["every server", *_values(plan.shared)]
    patches = ("patches that help, see `dsv4doctor fix`", plan.patches)
    for title, texts in (("noted", plan.notes), patches, ("not sound", plan.problems)):
        if texts:
            lines += ["", title, *(f"  {text}" for text in texts)]
    return wrapped(harmless("\n".join(lines)), columns)


def _title(server: Server) -> str:
    devices = ", ".join(str(gpu.index) for gpu in server.gpus)
    nodes = ", ".join(str(node) for node in server.nodes)
    where = f", NUMA node {nodes}" if nodes else ""
    return f"{server.part.value}: GPU {devices}{where}"


def _values(settings: Sequence[Setting]) -> list[str]:
    lines = []
    for one in settings:
        name = one.shown if one.values else one.name
        lines += [f"  {name}", f"      {one.why}"]
    return lines
