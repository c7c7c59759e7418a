"""Prometheus series about reward servers, kept by whoever asks them."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter(
    "areal_reward_remote_requests",
    "Requests to a reward server, by how they ended: ok, gone, late, broken, refused.",
    ["server", "outcome"],
)
REQUEST_SECONDS = Histogram(
    "areal_reward_remote_request_seconds",
    "From sending a request to its answer.",
    ["server"],
    buckets=(1e-3, 1e-2, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
READY = Gauge(
    "areal_reward_remote_ready", "Whether a reward server may get requests now: 1, else 0.", ["server"]
)
_users: dict[str, list[Callable[[], bool]]] = {}


def watch_ready(url: str, ready: Callable[[], bool]) -> None:
    """Have the gauge show whether the server at `url` is ready to one of those who ask it."""
    users = _users.setdefault(url, [])
    users.append(ready)
    READY.labels(url).set_function(lambda: float(any(ready() for ready in users)))


def unwatch_ready(url: str, ready: Callable[[], bool]) -> None:
    """`ready` counts no longer; a server that nobody asks any more is not shown."""
    users = _users[url]
    users.remove(ready)
    if not users:
        del _users[url]
        READY.remove(url)


BREAKS = Counter(
    "areal_reward_remote_breaks",
    "Times that a server was left alone for failing again and again.",
    ["server"],
)
RESENT = Counter("areal_reward_remote_resent_calls", "Calls that were sent again, by cause.", ["cause"])
