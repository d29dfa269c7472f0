"""The Prometheus scrape file and the Grafana dashboard of a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dsv4doctor.monitoring.metrics import Metric
from dsv4doctor.monitoring.panels import Panel, panels
from dsv4doctor.planning.yaml_text import yaml_text

PROMETHEUS, GRAFANA = "prometheus.yml", "grafana-dashboard.json"
_WIDTH, _HEIGHT = 12, 8


def prometheus(endpoints: Sequence[tuple[str, str]]) -> str:
    """A scrape file for (job, "host:port") each; a job's metrics lie under /metrics."""
    return yaml_text(
        {
            "global": {"scrape_interval": "5s"},
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [target]}]}
                for job, target in endpoints
            ],
        }
    )


def grafana(metrics: Mapping[str, Metric], title: str) -> str:
    """A dashboard of what this release exports; it asks for its data source when imported."""
    document = {
        "__inputs": [
            {
                "name": "DS_PROMETHEUS",
                "label": "Prometheus",
                "type": "datasource",
                "pluginId": "prometheus",
                "pluginName": "Prometheus",
            }
        ],
        "title": title,
        "uid": None,
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_jobs()]},
        "panels": [_panel(panel, number) for number, panel in enumerate(panels(metrics))],
    }
    return json.dumps(document, indent=2) + "\n"


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def _jobs() -> dict[str, Any]:
    query = "label_values(up, job)"
    return {
        "name": "job",
        "type": "query",
        "datasource": _source(),
        "query": {"query": query, "refId": "jobs"},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    row, column = divmod(number, 2)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _source(),
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": f"Q{index}",
                "datasource": _source(),
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }
