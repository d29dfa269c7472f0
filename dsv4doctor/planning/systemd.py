"""A plan as systemd units with one environment file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from dsv4doctor.errors import UsageError
from dsv4doctor.planning.layout import Plan, Server
from dsv4doctor.planning.scripts import ENV_FILE, env_file, head, reasons
from dsv4doctor.terminal import harmless

_FOLDER = "/etc/dsv4"
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@+=:,./-")


def units(plan: Plan) -> dict[str, str]:
    """File name -> text; UsageError without an interpreter by its whole path, which systemd
    needs."""
    if not PurePosixPath(plan.interpreter).is_absolute():
        raise UsageError(
            "--kind systemd: the Python of the serving environment is not known",
            "give its path with --python /opt/sglang/bin/python",
        )
    files = {ENV_FILE: env_file(plan)}
    for server in plan.servers:
        files[_name(server.part.value)] = _server(plan, server)
    if plan.router is not None:
        files[_name("router")] = _router(plan)
    return files


def _name(part: str) -> str:
    return f"dsv4-{part}.service"


def _server(plan: Plan, server: Server) -> str:
    words = [plan.interpreter, "-m", "sglang.launch_server", "--model-path", "${MODEL_PATH}"]
    what = f"the {server.part.value} side" if plan.is_pair else "one server"
    return _unit(
        [*head(plan, what), *reasons(server.environment), *reasons(server.flags)],
        f"SGLang, {plan.model_name}: {what}",
        [
            f"EnvironmentFile={_FOLDER}/{ENV_FILE}",
            *(_variable(one.name, one.values[0]) for one in server.environment),
            *_binding(server),
            _command(words, (flag.words for flag in server.flags)),
        ],
        ["After=network-online.target", "Wants=network-online.target"],
    )


def _router(plan: Plan) -> str:
    assert plan.router is not None
    servers = " ".join(_name(server.part.value) for server in plan.servers)
    words = [plan.interpreter, "-m", "sglang_router.launch_router"]
    what = "the router in front of both"
    return _unit(
        [*head(plan, what), *reasons(plan.router.flags)],
        f"SGLang, {plan.model_name}: {what}",
        [_command(words, (flag.words for flag in plan.router.flags))],
        [f"After=network-online.target {servers}", f"Wants=network-online.target {servers}"],
    )


def _unit(comments: Sequence[str], title: str, service: Sequence[str], order: Sequence[str]) -> str:
    lines = [
        *comments,
        "[Unit]",
        f"Description={_plain(title)}",
        *order,
        "",
        "[Service]",
        *service,
        "Restart=on-failure",
        "RestartSec=10",
        # Weights take minutes to load, and a server that is told to stop finishes its requests.
        "TimeoutStartSec=infinity",
        "TimeoutStopSec=120",
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=1048576",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def _binding(server: Server) -> list[str]:
    """systemd's own, in place of numactl."""
    if not server.bind:
        return []
    nodes = ",".join(str(node) for node in server.nodes)
    return ["NUMAPolicy=bind", f"NUMAMask={nodes}", "CPUAffinity=numa"]


def _variable(name: str, value: str) -> str:
    return f"Environment={_quoted(f'{name}={value}')}"


def _command(start: Sequence[str], flags: Iterable[Sequence[str]]) -> str:
    lines = [" ".join(_word(word) for word in start)]
    lines += [" ".join(_quoted(word, command=True) for word in words) for words in flags]
    return "ExecStart=" + " \\\n  ".join(lines)


def _word(word: str) -> str:
    return word if word == "${MODEL_PATH}" else _quoted(word, command=True)


def _quoted(text: str, command: bool = False) -> str:
    """As systemd reads it: specifiers doubled, and in a command variables too."""
    text = text.replace("%", "%%")
    if command:
        text = text.replace("$", "$$")
    if text and set(text) <= _SAFE:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _plain(text: str) -> str:
    return " ".join(harmless(text).replace("%", "%%").split())
