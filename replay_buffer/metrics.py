"""The buffer's Prometheus series, exported from figures that are at most about one second old."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from areal_async.rpc.board import SILENT_S, board
from areal_async.rpc.control_messages import ServiceFigures
from areal_async.rpc.messages import BufferStats
from replay_buffer.ledger.rules import Rules
from replay_buffer.redis.address import Trouble

OF_POLICY = {
    "areal_buffer_outstanding_groups": ("Groups leased and not yet trained or dropped.", "outstanding"),
    "areal_buffer_capacity_groups": ("Most groups outstanding, for a worker that is up to date.", "capacity"),
    "areal_buffer_ahead_groups": ("Groups held beyond those that the trainer works on.", "ahead"),
    "areal_buffer_version": ("Committed steps.", "v_train"),
    "areal_buffer_max_staleness_seen": ("Largest staleness of a trained unit.", "max_staleness_seen"),
}
"""Gauges with the label `policy`."""
GAUGES = {
    "areal_buffer_payload_bytes": ("Bytes of the episodes held.", "payload_bytes"),
    "areal_buffer_redis_bytes": ("Memory that Redis uses.", "redis_bytes"),
    "areal_buffer_queue_age_milliseconds": (
        "Age of the oldest group's state before training.",
        "queue_age_ms",
    ),
}
LastWrite = Callable[[], "asyncio.Future[None] | None"]


WAITS: dict[Trouble, str] = {
    "gone": "Redis does not answer",
    "disk": "Redis cannot write to its disk",
    "memory": "Redis is at its memory limit",
    "replica": "Redis has no master for the buffer to write to",
    "refused": "Redis refuses what the buffer asks, see the log of the buffer",
}
"""Words of a stall report for each reason why a buffer cannot write."""


class BufferCollector(Collector):
    """Collector that exports the last figures it was given. A scrape runs in a thread of its own, so it must
    not read the ledger.

    `last_write` returns the future for the confirmation of the last write. While it is pending, the buffer
    waits for Redis. `rules` has the limits that are exported beside the figures."""

    def __init__(
        self,
        last_write: LastWrite = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        rules: Rules | None = None,
    ) -> None:
        self._last_write = last_write
        self._clock = clock
        self._rules = rules
        self._awaited: tuple[asyncio.Future[None], float] | None = None
        self._stats: BufferStats | None = None
        self._lost_writes = 0
        self._trouble: Trouble | None = None

    def waits(self, trouble: Trouble | None) -> None:
        """Set the reason why nothing can be written now, or None."""
        self._trouble = trouble

    def show(self, stats: BufferStats, lost_writes: int) -> None:
        self._stats, self._lost_writes = stats, lost_writes

    def figures(self) -> ServiceFigures:
        """Return the buffer's figures for status requests, and what it waits for."""
        silent_s = self.unconfirmed_s()
        unconfirmed = f"no write confirmed for {silent_s:.0f} s" if silent_s > SILENT_S else ""
        board.waits("redis", WAITS[self._trouble] if self._trouble is not None else unconfirmed)
        return ServiceFigures(buffer=self._stats)

    def unconfirmed_s(self) -> float:
        """Return a lower bound of the seconds for which Redis has confirmed nothing although writes are
        pending, or 0 if none is pending.

        Writes are confirmed in order, so checking the last write of the previous call is enough."""
        if self._awaited is not None and not self._awaited[0].done():
            return self._clock() - self._awaited[1]
        write = self._last_write()
        self._awaited = (write, self._clock()) if write is not None and not write.done() else None
        return 0.0

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        if stats is None:
            return
        for name, (text, field) in GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        for name, (text, field) in OF_POLICY.items():
            values = {policy: getattr(each, field) for policy, each in stats.policies.items()}
            yield _labelled(GaugeMetricFamily, name, text, "policy", values)
        if self._rules is not None:
            limit = "Most bytes of episodes held at once."
            yield GaugeMetricFamily("areal_buffer_limit_bytes", limit, value=self._rules.max_bytes)
            bounds = {policy: each.max_staleness for policy, each in self._rules.consumers.items()}
            text = "Largest staleness that a trained unit may have."
            yield _labelled(GaugeMetricFamily, "areal_buffer_staleness_bound", text, "policy", bounds)
        trained = {policy: each.episodes_trained for policy, each in stats.policies.items()}
        text = "Episodes in a committed step."
        yield _labelled(CounterMetricFamily, "areal_buffer_episodes_trained", text, "policy", trained)
        unconfirmed = "Since Redis was found to confirm no write; 0 while it does."
        yield GaugeMetricFamily("areal_buffer_unconfirmed_seconds", unconfirmed, value=self.unconfirmed_s())
        dropped = "Episodes of dropped groups."
        yield CounterMetricFamily("areal_buffer_episodes_dropped", dropped, value=stats.episodes_dropped)
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
