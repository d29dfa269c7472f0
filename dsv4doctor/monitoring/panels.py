"""The dashboard's panels: what each shows, and the metrics that it can be drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsv4doctor.monitoring.metrics import Metric


@dataclass(frozen=True)
class Query:
    expression: str
    """PromQL."""
    legend: str
    metrics: tuple[str, ...]
    """What it reads, by the source's names."""


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    """Grafana's."""
    about: str
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class _Wanted:
    title: str
    unit: str
    about: str
    names: tuple[str, ...]
    """Metrics without their prefix; each that the release has gives its queries."""
    first_only: bool = False
    """The names are spellings of one thing: only the first that exists counts."""


_JOB = 'job=~"$job"'
_WANTED = (
    _Wanted(
        "Throughput",
        "short",
        "Tokens a second: generated as the scheduler measures it, prompt and generated as counted.",
        ("gen_throughput", "prompt_tokens_total", "generation_tokens_total"),
    ),
    _Wanted(
        "Time to first token",
        "s",
        "From the request to its first token; with a prefill/decode pair the decode side's.",
        ("time_to_first_token_seconds",),
    ),
    _Wanted(
        "Time per output token",
        "s",
        "Between tokens of one request.",
        (
            "request_time_per_output_token_seconds",
            "time_per_output_token_seconds",
            "inter_token_latency_seconds",
        ),
        first_only=True,
    ),
    _Wanted("End to end", "s", "A whole request.", ("e2e_request_latency_seconds",)),
    _Wanted(
        "Requests",
        "short",
        "Running and waiting; a queue that stays is a server that is too small.",
        ("num_running_reqs", "num_queue_reqs"),
    ),
    _Wanted(
        "Prefill/decode queues",
        "short",
        "Between the sides: waiting for the bootstrap, for memory, for the transfer.",
        (
            "num_prefill_bootstrap_queue_reqs",
            "num_prefill_prealloc_queue_reqs",
            "num_prefill_inflight_queue_reqs",
            "num_decode_prealloc_queue_reqs",
            "num_decode_transfer_queue_reqs",
        ),
    ),
    _Wanted(
        "KV cache in use",
        "percentunit",
        "Share of the cache's tokens; close to 1 requests are retracted.",
        ("token_usage", "full_token_usage", "swa_token_usage"),
    ),
    _Wanted(
        "KV transfer",
        "short",
        "What moves the cache from prefill to decode.",
        ("kv_transfer_speed_gb_s", "kv_transfer_latency_ms", "kv_transfer_total_mb"),
    ),
    _Wanted(
        "Accept length",
        "short",
        "Tokens that speculation gains a step; 1 is none.",
        ("spec_accept_length",),
    ),
    _Wanted("Prefix cache", "percentunit", "Prompt tokens already cached.", ("cache_hit_rate",)),
    _Wanted(
        "Retracted and failed",
        "short",
        "Requests that lost their memory, and transfers that failed.",
        (
            "num_retracted_reqs",
            "num_bootstrap_failed_reqs",
            "num_bootstrap_failed_reqs_total",
            "num_transfer_failed_reqs",
            "num_transfer_failed_reqs_total",
        ),
    ),
)


def panels(metrics: Mapping[str, Metric]) -> tuple[Panel, ...]:
    """Those that this release's metrics can fill."""
    found = []
    for wanted in _WANTED:
        there = [metrics[f"sglang:{name}"] for name in wanted.names if f"sglang:{name}" in metrics]
        if wanted.first_only:
            there = there[:1]
        queries = tuple(query for metric in there for query in _queries(metric))
        if queries:
            found.append(Panel(wanted.title, wanted.unit, wanted.about, queries))
    return tuple(found)


def _queries(metric: Metric) -> list[Query]:
    name, short = metric.exported, metric.name.removeprefix("sglang:")
    if metric.kind == "Histogram":
        return [
            Query(
                f"histogram_quantile({share}, "
                f"sum by (le, job) (rate({name}_bucket{{{_JOB}}}[$__rate_interval])))",
                f"{{{{job}}}} {short} p{round(share * 100)}",
                (metric.name,),
            )
            for share in (0.5, 0.95, 0.99)
        ]
    if metric.kind == "Counter":
        text = f"sum by (job) (rate({name}{{{_JOB}}}[$__rate_interval]))"
    elif metric.kind == "Summary":
        text = f"sum by (job) (rate({name}_sum{{{_JOB}}}[$__rate_interval]))"
    elif short.startswith("num_") or short == "gen_throughput":
        text = f"sum by (job) ({name}{{{_JOB}}})"
    else:
        text = f"avg by (job) ({name}{{{_JOB}}})"
    return [Query(text, f"{{{{job}}}} {short}", (metric.name,))]
