"""Metric names from real trees, and the files made of them."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dsv4doctor.models import SglangTree
from dsv4doctor.monitoring.files import grafana, prometheus
from dsv4doctor.monitoring.metrics import Metric, read_metrics
from dsv4doctor.monitoring.panels import panels

Trees = Callable[[str], SglangTree]
RELEASES = ("0.5.14", "0.5.23")
_NAME = re.compile(r"sglang:\w+")


@pytest.mark.parametrize("version", RELEASES)
def test_names_are_the_sources_own(version: str, sglang_tree: Trees) -> None:
    root = Path(sglang_tree(version).root)
    metrics = read_metrics(root)
    assert len(metrics) > 100
    for metric in metrics.values():
        lines = (root / metric.file).read_text(encoding="utf-8").splitlines()
        call = "\n".join(lines[metric.line - 1 : metric.line + 3])
        assert metric.kind in call
        assert metric.name in call
    assert metrics["sglang:time_to_first_token_seconds"].kind == "Histogram"
    assert metrics["sglang:num_queue_reqs"].documentation


@pytest.mark.parametrize("version", RELEASES)
def test_the_dashboard_asks_for_nothing_else(version: str, sglang_tree: Trees) -> None:
    metrics = read_metrics(Path(sglang_tree(version).root))
    series = {metric.exported for metric in metrics.values()}
    series |= {f"{m.name}_bucket" for m in metrics.values() if m.kind == "Histogram"}
    series |= {f"{m.name}_sum" for m in metrics.values() if m.kind == "Summary"}
    board = json.loads(grafana(metrics, "test"))
    titles = {panel["title"] for panel in board["panels"]}
    assert titles >= {
        "Throughput",
        "Time to first token",
        "Time per output token",
        "Requests",
        "KV cache in use",
        "KV transfer",
        "Accept length",
    }
    asked = [
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in _NAME.findall(target["expr"])
    ]
    assert asked
    assert set(asked) <= series
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_the_spelling_of_a_release(sglang_tree: Trees) -> None:
    """The time between tokens has had another name."""
    for version, name in (
        ("0.5.14", "sglang:inter_token_latency_seconds"),
        ("0.5.23", "sglang:request_time_per_output_token_seconds"),
    ):
        found = panels(read_metrics(Path(sglang_tree(version).root)))
        (panel,) = (one for one in found if one.title == "Time per output token")
        assert {metric for query in panel.queries for metric in query.metrics} == {name}


def test_a_panel_without_metrics_is_left_out() -> None:
    only = Metric("sglang:num_retries", "Counter", "", "x.py", 1)
    assert only.exported == "sglang:num_retries_total"
    assert panels({only.name: only}) == ()
    queue = Metric("sglang:num_queue_reqs", "Gauge", "", "x.py", 1)
    (panel,) = panels({queue.name: queue})
    assert [query.expression for query in panel.queries] == [
        'sum by (job) (sglang:num_queue_reqs{job=~"$job"})'
    ]


def test_a_source_that_is_none(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == {}
    folder = tmp_path / "sglang" / "srt" / "observability"
    folder.mkdir(parents=True)
    (folder / "broken.py").write_text('Counter(name="sglang:x"')
    (folder / "odd.py").write_text(
        'x = Gauge(name=prefix + "y", documentation="")\n'
        'y = prom.Counter("sglang:failures", "How many.", labelnames=[])\n'
        'z = Gauge("other:z", "")\n'
        "w = Gauge()\n"
    )
    assert read_metrics(tmp_path) == {
        "sglang:failures": Metric(
            "sglang:failures", "Counter", "How many.", "sglang/srt/observability/odd.py", 2
        )
    }


def test_scrape_file() -> None:
    read = yaml.safe_load(prometheus([("sglang-prefill", "127.0.0.1:30000")]))
    assert read["scrape_configs"] == [
        {"job_name": "sglang-prefill", "static_configs": [{"targets": ["127.0.0.1:30000"]}]}
    ]
