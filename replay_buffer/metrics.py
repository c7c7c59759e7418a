"""The buffer's Prometheus series, read from its figures as of about a second ago."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from areal_async.wire.messages import BufferStats
from replay_buffer.errors import Trouble

GAUGES = {
    "areal_buffer_outstanding_groups": ("Groups leased and not yet trained or dropped.", "outstanding"),
    "areal_buffer_capacity_groups": ("Most groups outstanding, for a worker that is up to date.", "capacity"),
    "areal_buffer_payload_bytes": ("Bytes of the episodes held.", "payload_bytes"),
    "areal_buffer_redis_bytes": ("Memory that Redis uses.", "redis_bytes"),
    "areal_buffer_version": ("Committed steps.", "v_train"),
    "areal_buffer_max_staleness_seen": ("Largest staleness of a trained unit.", "max_staleness_seen"),
    "areal_buffer_queue_age_milliseconds": (
        "Age of the oldest group's state before training.",
        "queue_age_ms",
    ),
}
COUNTERS = {
    "areal_buffer_episodes_trained": ("Episodes in a committed step.", "episodes_trained"),
    "areal_buffer_episodes_dropped": ("Episodes of dropped groups.", "episodes_dropped"),
}


WAITS: dict[Trouble, str] = {
    "gone": "Redis does not answer",
    "disk": "Redis cannot write to its disk",
    "memory": "Redis is at its memory limit",
    "replica": "Redis has no master for the buffer to write to",
    "refused": "Redis refuses what the buffer asks, see the log of the buffer",
}
"""What the buffer waits for while it cannot write, in the words that a stall is reported with."""


class BufferCollector(Collector):
    """Shows the last figures it was given. The scrape runs in a thread of its own, so it never touches the
    ledger."""

    def __init__(self) -> None:
        self._stats: BufferStats | None = None
        self._lost_writes = 0
        self._trouble: Trouble | None = None

    def waits(self, trouble: Trouble | None) -> None:
        """Why nothing can be written just now; None when it can."""
        self._trouble = trouble

    def show(self, stats: BufferStats, lost_writes: int) -> None:
        self._stats, self._lost_writes = stats, lost_writes

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        if stats is None:
            return
        for name, (text, field) in GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        for name, (text, field) in COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(stats, field))
        lost = "Acknowledged writes that Redis came back without."
        yield CounterMetricFamily("areal_buffer_lost_writes", lost, value=self._lost_writes)
        waits = GaugeMetricFamily(
            "areal_buffer_waits_for_redis", "1 while nothing can be written.", labels=["why"]
        )
        if self._trouble is not None:
            waits.add_metric([WAITS[self._trouble]], 1)
        yield waits
        yield _labelled(GaugeMetricFamily, "areal_buffer_groups", "Groups held.", "state", stats.groups)
        yield _labelled(GaugeMetricFamily, "areal_buffer_episodes", "Episodes held.", "state", stats.episodes)
        yield _labelled(
            CounterMetricFamily,
            "areal_buffer_transitions",
            "Transitions of groups and episodes, and refusals.",
            "reason",
            stats.reasons,
        )


def _labelled(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, int],
) -> Metric:
    metric = family(name, text, labels=[label])
    for value, count in values.items():
        metric.add_metric([value.lower()], count)
    return metric


def register() -> BufferCollector:
    """The collector of this process, on the default registry."""
    collector = BufferCollector()
    prometheus_client.REGISTRY.register(collector)
    return collector
