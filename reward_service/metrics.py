"""Prometheus series of the reward service."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

VERDICTS = Counter(
    "areal_reward_verdicts", "Verdicts reached, by kind: score, timeout, error, abstain.", ["kind"]
)
REFUSED = Counter(
    "areal_reward_verdicts_refused",
    "Verdicts that the buffer did not take, such as those of an expired claim.",
)
CALL_SECONDS = Histogram(
    "areal_reward_call_seconds",
    "Duration of one reward call inside its worker.",
    buckets=(1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
PENDING = Gauge("areal_reward_pending_episodes", "Episodes claimed whose verdict the buffer has not got yet.")
WORKERS_ALIVE = Gauge("areal_reward_workers_alive", "Scoring processes that are ready for calls.")
