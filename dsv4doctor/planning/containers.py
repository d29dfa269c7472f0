"""A plan as a Compose file, or as Kubernetes objects."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from dsv4doctor.errors import UsageError
from dsv4doctor.planning.layout import Plan, Server, Setting, without_numactl
from dsv4doctor.planning.scripts import ENV_FILE, binding, env_file, head, reasons
from dsv4doctor.planning.yaml_text import yaml_text

_INSIDE = "/models/dsv4"
"""Where containers see a model that is a folder of the host."""
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}")
_READY_SECONDS = 3600
"""For a server to load its weights and capture its graphs."""

_KUBELET = (
    "# The kubelet chooses the GPUs. For those of one NUMA node, with the CPUs beside them:",
    "# topologyManagerPolicy: single-numa-node, topologyManagerScope: container.",
)


def image_of(release: str) -> str:
    """SGLang's own image of a release."""
    return f"lmsysorg/sglang:v{release}"


def check_image(image: str) -> None:
    """UsageError for what cannot be the name of an image."""
    if not _IMAGE.fullmatch(image):
        raise UsageError(
            f"--image {image[:80]!r}: not an image's name",
            "write it like --image registry.example/sglang:v0.5.23",
        )


def compose(plan: Plan, image: str) -> dict[str, str]:
    """File name -> text."""
    services: dict[str, Any] = {
        server.part.value: _compose_server(plan, server, image) for server in plan.servers
    }
    if plan.router is not None:
        services["router"] = {
            "image": image,
            "network_mode": "host",
            "restart": "unless-stopped",
            "command": [_escaped(word) for word in _router_words(plan)],
            "depends_on": [server.part.value for server in plan.servers],
        }
    text = yaml_text({"services": services})
    env = env_file(plan) if not _is_folder(plan) else env_file(_seen_inside(plan))
    return {ENV_FILE: env, "compose.yaml": "\n".join([*_comments(plan), text])}


def _compose_server(plan: Plan, server: Server, image: str) -> dict[str, Any]:
    devices = {
        "driver": "nvidia",
        "device_ids": [str(gpu.index) for gpu in server.gpus],
        "capabilities": ["gpu"],
    }
    service: dict[str, Any] = {
        "image": image,
        "network_mode": "host",
        "ipc": "host",
        "restart": "unless-stopped",
        "ulimits": {"memlock": -1, "stack": 67108864},
        "env_file": [ENV_FILE],
        "command": [_escaped(word) for word in _words(plan, server)],
        "deploy": {"resources": {"reservations": {"devices": [devices]}}},
    }
    if server.bind:
        service["cap_add"] = ["SYS_NICE"]  # set_mempolicy, which numactl calls
    if _is_folder(plan):
        service["volumes"] = [f"{_escaped(plan.model)}:{_INSIDE}:ro"]
    return service


def _escaped(text: str) -> str:
    """Compose replaces variables."""
    return text.replace("$", "$$")


# ------------------------------------------------------------------------------ Kubernetes


def kubernetes(plan: Plan, image: str) -> dict[str, str]:
    """File name -> text; `plan` is one `in_pod`.

    One pod: the sides talk over its loopback.  The kubelet gives each container GPUs of its own;
    with the Topology Manager's policy single-numa-node and scope container they are those of one
    NUMA node, and the CPUs with them.
    """
    seen = _seen_inside(plan) if _is_folder(plan) else plan
    variables = {"MODEL_PATH": seen.model, **_plain(plan.shared)}
    asked = [{"name": name, "port": port, "targetPort": name} for name, port in _asked(plan)]
    service = {
        "selector": _LABELS,
        "ports": [{"name": "http", "port": _HTTP, "targetPort": "http"}, *asked],
    }
    objects = [
        _object("v1", "ConfigMap", f"{_NAME}-env", {"data": variables}),
        _object("apps/v1", "Deployment", _NAME, {"spec": _deployment(plan, seen, image)}),
        _object("v1", "Service", _NAME, {"spec": service}),
    ]
    text = "---\n".join(yaml_text(one) for one in objects)
    return {"dsv4.yaml": "\n".join([*_comments(plan), *_KUBELET, text])}


def in_pod(plan: Plan) -> Plan:
    """`plan` as a pod has it: what the Service reaches listens everywhere, the kubelet binds."""
    servers = tuple(
        replace(server, bind=False, environment=(), flags=_listening(server.flags))
        for server in plan.servers
    )
    router = plan.router and replace(plan.router, flags=_listening(plan.router.flags))
    return replace(without_numactl(plan), servers=servers, router=router)


def scraped(plan: Plan) -> list[tuple[str, int]]:
    """(name, port of the Service) of what has metrics; `plan` is one `in_pod`."""
    return _asked(plan) or [(server.part.value, _HTTP) for server in plan.servers]


def _asked(plan: Plan) -> list[tuple[str, int]]:
    """What Prometheus asks beside the port that clients reach."""
    if plan.router is None:
        return []
    sides = [(server.part.value, server.ports.service) for server in plan.servers]
    return [*sides, ("router", plan.router.metrics_port)]


def _listening(flags: tuple[Setting, ...]) -> tuple[Setting, ...]:
    why = "inside the pod; what asks comes through the Service"
    hosts = ("--host", "--prometheus-host")
    return tuple(
        Setting(flag.name, ("0.0.0.0",), why) if flag.name in hosts else flag for flag in flags
    )


SERVICE = _NAME = "dsv4"
_HTTP = 8000
_LABELS = {"app": _NAME}


def _deployment(plan: Plan, seen: Plan, image: str) -> dict[str, Any]:
    """`seen`: the plan as its containers see it."""
    containers = [_container(seen, server, image) for server in plan.servers]
    if plan.router is not None:
        containers.append(
            {
                "name": "router",
                "image": image,
                "command": _literal(_router_words(seen)),
                "ports": [
                    {"name": "http", "containerPort": plan.router.port},
                    {"name": "router", "containerPort": plan.router.metrics_port},
                ],
            }
        )
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if _is_folder(plan):
        volumes.append({"name": "model", "hostPath": {"path": plan.model, "type": "Directory"}})
    return {
        "replicas": 1,
        # Two pods at a time would want twice the GPUs.
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": _LABELS},
        "template": {
            "metadata": {"labels": _LABELS},
            "spec": {"containers": containers, "volumes": volumes, "restartPolicy": "Always"},
        },
    }


def _literal(words: list[str]) -> list[str]:
    """Kubernetes replaces $(NAME)."""
    return [word.replace("$(", "$$(") for word in words]


def _object(version: str, kind: str, name: str, rest: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **rest}


def _container(plan: Plan, server: Server, image: str) -> dict[str, Any]:
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if plan.model == _INSIDE:
        mounts.append({"name": "model", "mountPath": _INSIDE})
    count = str(len(server.gpus))
    service = server.ports.service
    container: dict[str, Any] = {
        "name": server.part.value,
        "image": image,
        "command": _literal(_words(plan, server)),
        "envFrom": [{"configMapRef": {"name": f"{_NAME}-env"}}],
        "resources": {"limits": {"nvidia.com/gpu": count}},
        "volumeMounts": mounts,
        "ports": [
            {"name": server.part.value if plan.is_pair else "http", "containerPort": service}
        ],
    }
    if not plan.is_pair:
        container["startupProbe"] = {
            "httpGet": {"path": "/health", "port": service},
            "periodSeconds": 10,
            "failureThreshold": _READY_SECONDS // 10,
        }
    return container


# ------------------------------------------------------------------------------ commands


def _words(plan: Plan, server: Server) -> list[str]:
    """The server's command; the container has the GPUs that it is given and no others."""
    model = _INSIDE if _is_folder(plan) else plan.model
    words = [*binding(server), "python3", "-m", "sglang.launch_server"]
    return [*words, "--model-path", model, *server.words]


def _router_words(plan: Plan) -> list[str]:
    assert plan.router is not None
    words = ["python3", "-m", "sglang_router.launch_router"]
    return [*words, *(word for flag in plan.router.flags for word in flag.words)]


def _is_folder(plan: Plan) -> bool:
    return plan.model.startswith("/")


def _seen_inside(plan: Plan) -> Plan:
    return replace(plan, model=_INSIDE)


def _plain(settings: tuple[Setting, ...]) -> dict[str, str]:
    return {one.name: one.values[0] for one in settings}


def _comments(plan: Plan) -> list[str]:
    lines = head(plan, "all of it")
    for server in plan.servers:
        lines += [f"# {server.part.value}:", *reasons(server.flags, "#  ")]
    if plan.router is not None:
        lines += ["# router:", *reasons(plan.router.flags, "#  ")]
    return lines
