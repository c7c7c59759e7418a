"""Prometheus series of the reward service. The label `reward` is a built-in name or `file.py:function`."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

from prometheus_client import Counter, Gauge, Histogram

from areal_async.base.verdicts import Failure, Score, Verdict, kind_of

VERDICTS = Counter(
    "areal_reward_verdicts",
    "Verdicts reached, by reward and kind: score, timeout, error, abstain.",
    ["reward", "kind"],
)
ERRORS = Counter(
    "areal_reward_errors",
    "Verdicts `error`, by reward and kind of error; `other`: what comes after the first 32 kinds.",
    ["reward", "error"],
)
MOST_KINDS = 32
"""Largest number of error kinds to count per reward. The limit is necessary because users' functions and
servers choose the names of kinds."""
LONGEST_KIND = 64
REFUSED = Counter(
    "areal_reward_verdicts_refused",
    "Verdicts that the buffer did not take, such as those of an expired claim.",
)
CALL_SECONDS = Histogram(
    "areal_reward_call_seconds",
    "Duration of one call by itself, without its wait for a worker.",
    ["reward"],
    buckets=(1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
SCORE = Histogram(
    "areal_reward_score",
    "Scores given.",
    ["reward"],
    buckets=(-10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 2, 5, 10),
)
SANDBOXED = Counter(
    "areal_reward_sandboxed_verdicts",
    "Verdicts about programs that were run: isolated, none (without protection), other.",
    ["reward", "sandbox"],
)
PENDING = Gauge("areal_reward_pending_episodes", "Episodes claimed whose verdict the buffer has not got yet.")
QUEUE_AGE = Gauge(
    "areal_reward_queue_age_seconds", "Since the oldest call without verdicts was claimed.", ["reward"]
)
QUEUED = Gauge("areal_reward_queued_calls", "Calls that wait for a scoring process.")
WORKERS_ALIVE = Gauge("areal_reward_workers_alive", "Scoring processes that are ready for calls.")
WORKERS_BUSY = Gauge("areal_reward_workers_busy", "Scoring processes that have a call.")
RENEWED = Counter("areal_reward_workers_renewed", "Scoring processes renewed between calls for their memory.")
OVERDUE = Counter(
    "areal_reward_overdue_calls", "Calls that a remote reward or a model never answered.", ["reward"]
)


_kinds: dict[str, set[str]] = defaultdict(set)


# Series are cached, because every verdict uses this look-up.
_verdicts = cache(VERDICTS.labels)
_scores = cache(SCORE.labels)


def count(label: str, verdict: Verdict) -> None:
    """Count a verdict of the reward `label`."""
    _verdicts(label, kind_of(verdict)).inc()
    if sandbox := verdict.sandbox:
        SANDBOXED.labels(label, sandbox if sandbox in ("isolated", "none") else "other").inc()
    if isinstance(verdict, Score):
        _scores(label).observe(verdict.value)
    elif isinstance(verdict, Failure):
        kind, kinds = verdict.kind, _kinds[label]
        if len(kind) <= LONGEST_KIND and len(kinds) < MOST_KINDS:
            kinds.add(kind)
        ERRORS.labels(label, kind if kind in kinds else "other").inc()


JUDGE_REQUESTS = Counter(
    "areal_reward_judge_requests",
    "Requests to judges, by outcome: ok, no_grade, rate_limited, unreachable, refused, abandoned.",
    ["outcome"],
)
REMOTE_REQUESTS = Counter(
    "areal_reward_remote_requests",
    "Requests to a reward server, by how they ended: ok, gone, late, broken, refused.",
    ["server", "outcome"],
)
REMOTE_REQUEST_SECONDS = Histogram(
    "areal_reward_remote_request_seconds",
    "From sending a request to its answer.",
    ["server"],
    buckets=(1e-3, 1e-2, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
REMOTE_READY = Gauge(
    "areal_reward_remote_ready", "Whether a reward server can be used: 1, else 0.", ["server"]
)
REMOTE_RESENT = Counter(
    "areal_reward_remote_resent_calls", "Calls that were sent again, by cause.", ["cause"]
)
