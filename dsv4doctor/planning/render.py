"""A proved plan as files, by kind."""

from __future__ import annotations

from pathlib import Path

from dsv4doctor.monitoring.files import GRAFANA, PROMETHEUS, grafana, prometheus
from dsv4doctor.monitoring.metrics import read_metrics
from dsv4doctor.planning.containers import (
    SERVICE,
    compose,
    image_of,
    in_pod,
    kubernetes,
    scraped,
)
from dsv4doctor.planning.layout import INSIDE, Plan, without_numactl
from dsv4doctor.planning.scripts import ENV_FILE, scripts
from dsv4doctor.planning.systemd import units

KINDS = ("scripts", "systemd", "compose", "k8s")
_EVERYWHERE = ("0.0.0.0", "::")


def files(plan: Plan, kind: str, root: Path, image: str | None) -> dict[str, str]:
    """File name -> text; `root` holds the plan's SGLang, whose metrics are read."""
    image = image or image_of(plan.release)
    plan = of_kind(plan, kind)
    if kind == "systemd":
        found = units(plan)
    elif kind == "compose":
        found = compose(plan, image)
    elif kind == "k8s":
        found = kubernetes(plan, image)
    else:
        found = scripts(plan)
    return {
        **found,
        PROMETHEUS: prometheus(_endpoints(plan, kind)),
        GRAFANA: grafana(read_metrics(root), f"SGLang, {plan.model_name}"),
    }


def of_kind(plan: Plan, kind: str) -> Plan:
    """`plan` as files of that kind carry it out."""
    if kind == "k8s":
        return in_pod(plan)
    return without_numactl(plan) if kind == "systemd" else plan


def check_kind(plan: Plan, kind: str) -> None:
    """UsageError for a plan that cannot be written as `kind`, before the work is done."""
    if kind == "systemd":
        units(plan)


def names(pair: bool, kind: str) -> tuple[str, ...]:
    """The names of the files that there will be."""
    parts = ("prefill", "decode", "router") if pair else ("server",)
    own = {
        "systemd": [f"dsv4-{part}.service" for part in parts] + [ENV_FILE],
        "compose": ["compose.yaml", ENV_FILE],
        "k8s": ["dsv4.yaml"],
    }.get(kind, [f"{part}.sh" for part in parts] + [ENV_FILE])
    return (*own, PROMETHEUS, GRAFANA)


def _endpoints(plan: Plan, kind: str) -> list[tuple[str, str]]:
    """(job, "host:port") of what has metrics, as Prometheus on the machine, or in the cluster,
    reaches it."""
    if kind == "k8s":
        return [(f"sglang-{name}", f"{SERVICE}:{port}") for name, port in scraped(plan)]
    host = INSIDE if plan.is_pair or plan.host in _EVERYWHERE else plan.host
    host = f"[{host}]" if ":" in host else host
    found = [
        (f"sglang-{server.part.value}", f"{host}:{server.ports.service}") for server in plan.servers
    ]
    if plan.router is not None:
        found.append(("sglang-router", f"{INSIDE}:{plan.router.metrics_port}"))
    return found
