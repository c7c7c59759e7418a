"""Prometheus metrics of a process, and its busy seconds.

Every service declares its own series in its `metrics.py` on the default registry. This module serves them
over HTTP from one thread with its own event loop. It also declares the only series that all services share,
`areal_busy_seconds_total{activity}`. Requests of clients cannot slow down the process. The supervisor also
serves the series of processes on other hosts, each at its own path (`elsewhere`). It requests these series
from the process at each scrape and never stores them, so a scrape fails if the process does not answer.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import prometheus_client
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from areal_async.base.addresses import LOOPBACK
from areal_async.base.errors import ArealError
from areal_async.base.http_server import HttpLimits, HttpServer, listen
from areal_async.base.loop_thread import LoopThread

# A `_created` series beside every counter would double the scraped data and has no use here.
prometheus_client.disable_created_metrics()

PATH = "/metrics"
LIMITS = HttpLimits(connections=64, header_bytes=16 << 10, header_s=5.0, answer_s=30.0)
other_hosts: list[Callable[[str], Awaitable[bytes]]] = []
"""Function that reads the metrics of a process on another host, given the name of the process. Set while a
supervisor watches a run."""
_own_series = prometheus_client.make_asgi_app()


def elsewhere(name: str) -> str:
    """Return the path at which the supervisor serves the metrics of the process `name`."""
    return f"{PATH}/{name}"


class MetricsPortError(ArealError):
    """The process cannot listen on the metrics port."""


def start_metrics_server(port: int) -> int:
    """Serve the default registry at `/metrics` on a port of the loopback interface, until the process ends.

    `port` 0 picks a free one. Return the port. Raises `MetricsPortError` if it is taken.
    """
    return _start(port)[2]


@contextmanager
def serve_metrics(port: int) -> Iterator[int]:
    """Serve the default registry for the duration of a block."""
    server, thread, port = _start(port)
    try:
        yield port
    finally:
        thread.run(server.close(grace_s=0.0))
        thread.close()


def _start(port: int) -> tuple[HttpServer, LoopThread, int]:
    listening = _listen(port)
    server, thread = HttpServer(answer_scrape, listening, LIMITS, name="metrics"), LoopThread("metrics")
    thread.loop.call_soon_threadsafe(server.start)
    return server, thread, int(listening.getsockname()[1])


def _listen(port: int) -> socket.socket:
    try:
        return listen(LOOPBACK, port)
    except OSError as error:
        reason = "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror
        raise MetricsPortError(
            f"cannot serve metrics on {LOOPBACK}:{port}: {reason}. Set observe.metrics_port in the job file "
            "to the first of some free consecutive ports, or to 0 to let every service pick its own."
        ) from error


async def answer_scrape(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a scrape with the default registry, or with the series of a process on another host. This is an
    ASGI application."""
    name = scope["path"].removeprefix(elsewhere(""))
    if scope["method"] != "GET":
        response = PlainTextResponse("metrics are read with GET", 405, {"allow": "GET"})
        await response(scope, receive, send)
    elif name == scope["path"]:
        await _own_series(scope, receive, send)
    else:
        await (await _of_other_host(name))(scope, receive, send)


async def _of_other_host(name: str) -> Response:
    try:
        return Response(await other_hosts[0](name), media_type=CONTENT_TYPE_PLAIN_0_0_4)
    except (IndexError, KeyError):
        return PlainTextResponse(f"nothing is known of a process {name}", 404)
    except (ArealError, TimeoutError) as error:
        return PlainTextResponse(f"{name} does not answer. {error}", 504)


@dataclass
class _Activity:
    finished_s: float = 0.0
    depth: int = 0
    since_s: float = 0.0


class Busy(Collector):
    """Seconds during which at least one piece of an activity ran: `with busy("train"): …`.

    Overlapping pieces (coroutines, threads, nested calls) count once. The rate of an activity is therefore a
    share of time, never above 1. A running piece counts up to the time of the query.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._activities: dict[str, _Activity] = {}

    @contextmanager
    def __call__(self, activity: str) -> Iterator[None]:
        self.begin(activity)
        try:
            yield
        finally:
            self.end(activity)

    def begin(self, activity: str) -> None:
        """Begin a piece of an activity that is not a `with` block. Each call needs a call of `end`."""
        with self._lock:
            entry = self._activities.setdefault(activity, _Activity())
            if entry.depth == 0:
                entry.since_s = self._clock()
            entry.depth += 1

    def end(self, activity: str) -> None:
        with self._lock:
            entry = self._activities[activity]
            entry.depth -= 1
            if entry.depth == 0:
                entry.finished_s += self._clock() - entry.since_s

    def seconds(self, activity: str) -> float:
        """Return the busy seconds of `activity` so far, or 0 if it never began."""
        return self.totals().get(activity, 0.0)

    def totals(self) -> dict[str, float]:
        """Return the busy seconds so far, by activity."""
        with self._lock:
            return {activity: self._until_now(entry) for activity, entry in self._activities.items()}

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "areal_busy_seconds",
            "Seconds in which at least one piece of the activity ran.",
            labels=["activity"],
        )
        for activity, seconds in self.totals().items():
            family.add_metric([activity], seconds)
        yield family

    def _until_now(self, entry: _Activity) -> float:
        running_s = self._clock() - entry.since_s if entry.depth else 0.0
        return entry.finished_s + running_s


busy = Busy()
prometheus_client.REGISTRY.register(busy)


def sums_of(histogram: prometheus_client.Histogram) -> list[float]:
    """Return the number and the sum of a histogram's values, over all its labels."""
    samples = [sample for metric in histogram.collect() for sample in metric.samples]
    return [
        float(sum(sample.value for sample in samples if sample.name.endswith(end)))
        for end in ("_count", "_sum")
    ]


STALL = prometheus_client.Gauge(
    "areal_stall_seconds",
    "Seconds since the trainer last computed, by the edge that starves it; 0 while it does.",
    ["edge"],
)
