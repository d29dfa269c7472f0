"""A plan as shell scripts with one environment file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from dsv4doctor.planning.layout import Plan, Server, Setting
from dsv4doctor.terminal import harmless

ENV_FILE = "dsv4.env"
_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


def scripts(plan: Plan) -> dict[str, str]:
    """File name -> text."""
    files = {ENV_FILE: env_file(plan)}
    for server in plan.servers:
        files[f"{server.part.value}.sh"] = _server(plan, server)
    if plan.router is not None:
        files["router.sh"] = _router(plan)
    return files


def env_file(plan: Plan) -> str:
    """NAME=VALUE lines: for a shell, systemd and docker alike."""
    lines = [*head(plan, "shared by every server of the plan"), *reasons(plan.shared)]
    lines.append(f"MODEL_PATH={plain_value(plan.model)}")
    lines += [f"{one.name}={plain_value(one.values[0])}" for one in plan.shared]
    return "\n".join(lines) + "\n"


def plain_value(text: str) -> str:
    """`text`, quoted where needed as a shell, systemd and docker's env files all read it."""
    return text if _PLAIN.fullmatch(text) else shlex.quote(text)


def reasons(settings: Iterable[Setting], mark: str = "#") -> list[str]:
    """A comment of one line for each."""
    return [f"{mark} {_line(f'{one.shown}: {one.why}')}" for one in settings]


def _line(text: str) -> str:
    """`text` as one line of a comment."""
    return " ".join(harmless(text).split())


def binding(server: Server) -> tuple[str, ...]:
    """numactl in front of the server, or nothing."""
    if not server.bind:
        return ()
    nodes = ",".join(str(node) for node in server.nodes)
    return ("numactl", f"--cpunodebind={nodes}", f"--membind={nodes}")


def head(plan: Plan, what: str) -> list[str]:
    """The comment at the top of a file."""
    lines = [
        f"{plan.model_name} on SGLang {plan.release} for {plan.arch.name}: {what}.",
        "Written by dsv4doctor plan.",
        *(f"NOT SOUND: {problem}" for problem in plan.problems),
        *(f"A patch that helps, see `dsv4doctor fix`: {patch}" for patch in plan.patches),
    ]
    return [f"# {_line(text)}" for text in lines]


def _server(plan: Plan, server: Server) -> str:
    bound = [f"# {' '.join(binding(server))}: next to its GPUs"] if server.bind else []
    lines = [
        "#!/usr/bin/env bash",
        *head(plan, f"the {server.part.value} side" if plan.is_pair else "one server"),
        *reasons(server.environment),
        *bound,
        *reasons(server.flags),
        *_start(),
        *(f"export {one.name}={plain_value(one.values[0])}" for one in server.environment),
        "",
    ]
    words = [
        " ".join(("exec", *binding(server), shlex.quote(plan.interpreter))),
        "-m sglang.launch_server",
        '--model-path "$MODEL_PATH"',
        *(shlex.join(flag.words) for flag in server.flags),
    ]
    return "\n".join(lines) + "\n" + " \\\n  ".join(words) + "\n"


def _router(plan: Plan) -> str:
    assert plan.router is not None
    lines = [
        "#!/usr/bin/env bash",
        *head(plan, "the router in front of the prefill and the decode side"),
        *reasons(plan.router.flags),
        "set -euo pipefail",
        "",
    ]
    words = [
        f"exec {shlex.quote(plan.interpreter)}",
        "-m sglang_router.launch_router",
        *(shlex.join(flag.words) for flag in plan.router.flags),
    ]
    return "\n".join(lines) + "\n" + " \\\n  ".join(words) + "\n"


def _start() -> Sequence[str]:
    return (
        "set -euo pipefail",
        "",
        'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
        "set -a",
        f"# shellcheck source={ENV_FILE}",
        f'. "$here/{ENV_FILE}"',
        "set +a",
    )
