"""The Prometheus series of a rollout worker and of the evaluator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from areal_async.base.versions import VersionTag
from rollout_service.statistics import Statistics

EPISODES = Counter("areal_rollout_episodes_total", "Episodes that the buffer has acknowledged.")
FAILED = Counter("areal_rollout_episodes_failed_total", "Episodes whose workflow or request failed.")
AT_FAULT = Counter("areal_rollout_episodes_at_fault_total", "Episodes ended early by their own answers.")
TIMED_OUT = Counter("areal_rollout_episodes_timed_out_total", "Failed episodes that took too long.")
PROMPT_TOKENS = Counter("areal_rollout_prompt_tokens_total", "Prompt tokens sent to servers with a cache.")
CACHED_TOKENS = Counter("areal_rollout_cached_tokens_total", "Prompt tokens found in a prefix cache.")
RERUN = Counter("areal_rollout_requests_rerun_total", "Requests run again because their engine was lost.")
ENGINE_DEATHS = Counter("areal_rollout_engine_deaths_total", "Engines lost, or not started again.")
REPLICAS = Gauge("areal_rollout_replicas_serving", "Engines of this worker that serve.")
DRAINING = Gauge("areal_rollout_draining", "1 while this worker finishes its episodes and leases no more.")
CONCURRENCY = Gauge("areal_rollout_concurrency_limit", "Most episodes that this worker runs at once, now.")
REFUSED = Counter("areal_rollout_episodes_refused_total", "Episodes that the buffer refused.", ["reason"])
LOST = Counter("areal_rollout_leases_lost_total", "Leases that the buffer took back.")
UNSENT = Gauge("areal_rollout_unsent_episodes", "Finished episodes that the buffer has not acknowledged.")
STALL = Histogram(
    "areal_rollout_update_stall_seconds",
    "Time in which an update kept the engine from sampling: pause, load and resume.",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
)
TOOL_CALLS = Counter("areal_rollout_tool_calls_total", "Calls of tools by episodes.", ["tool", "outcome"])
REWRITES = Counter("areal_rollout_template_rewrites_total", "New roots: the chat template rewrote the past.")
ENGINE_MEMORY = Gauge(
    "areal_rollout_engine_memory_bytes", "Memory in use on the engines' device at the last turn.", ["state"]
)
SWITCH_SECONDS = Counter(
    "areal_rollout_switch_seconds_total", "Time in which the engines released or restored their memory."
)
UPDATES = Counter("areal_rollout_updates_total", "Snapshots offered to this worker.", ["outcome"])

SCORE = Gauge(
    "areal_evaluation_score", "Held-out figure by data source.", ["policy", "data_source", "statistic"]
)
UNSCORED = Gauge(
    "areal_evaluation_unscored_samples", "Unscored samples of the last evaluation.", ["policy", "data_source"]
)
GATEWAY_CALLS = Counter("areal_gateway_calls_total", "Calls of agents, by their outcome.", ["outcome"])
GATEWAY_ROOTS = Counter("areal_gateway_roots_total", "Paths begun by calls of agents.", ["reason"])
GATEWAY_TOKENS = Counter("areal_gateway_tokens_total", "Units sampled for agents and recorded.")
GATEWAY_SESSIONS = Gauge("areal_gateway_sessions", "Episodes with access.")

ACCURACY = Gauge("areal_evaluation_accuracy", "Mean reward over the held-out tasks.", ["policy"])
EVALUATED_VERSION = Gauge("areal_evaluation_version", "Version of the last snapshot evaluated.", ["policy"])


class EngineMetrics(Collector):
    """Collector of the figures of started engines, one engine per policy. It reads the figures only when
    metrics are requested, so they do not slow down a decode step. Figures without the label `policy` are
    totals. The figure of KV use is not a total, but that of the fullest cache."""

    def __init__(self, *engines: Any) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        stats = [engine.stats() for engine in self._engines]
        tokens, running = sum(one.tokens_total for one in stats), sum(one.running for one in stats)
        waiting, kv_used = sum(one.waiting for one in stats), max(one.kv_used for one in stats)
        yield CounterMetricFamily("areal_rollout_tokens", "Units sampled.", tokens)
        yield GaugeMetricFamily("areal_rollout_active_requests", "Requests being computed.", running)
        yield GaugeMetricFamily("areal_rollout_waiting_requests", "Requests not yet begun.", waiting)
        yield GaugeMetricFamily("areal_rollout_kv_used_ratio", "Share of the KV room in use.", kv_used)
        text = "Version of the weights that sample now."
        version = GaugeMetricFamily("areal_rollout_version", text, labels=["policy"])
        for tag in (engine.version for engine in self._engines):
            version.add_metric([tag.policy], tag.version)
        yield version


ALL_SOURCES = "*"  # Label of the figures over all data sources


def show_evaluation(
    tag: VersionTag, overall: Statistics, by_source: Mapping[str, Statistics], unscored: Mapping[str, int]
) -> None:
    """Set the figures of the evaluation of `tag` by data source. Remove the figures of sources without
    results."""
    ACCURACY.labels(tag.policy).set(overall.mean.value)
    EVALUATED_VERSION.labels(tag.policy).set(tag.version)
    for gauge in (SCORE, UNSCORED):
        gauge.remove_by_labels({"policy": tag.policy})
    for source, one in {ALL_SOURCES: overall, **by_source}.items():
        for name, figure in (("mean", one.mean), ("best", one.best), ("maj", one.maj)):
            SCORE.labels(tag.policy, source, name).set(figure.value)
    UNSCORED.labels(tag.policy, ALL_SOURCES).set(sum(unscored.values()))
    for source, count in unscored.items():
        UNSCORED.labels(tag.policy, source).set(count)
