"""A thread that watches a run: it asks the services for their status, and reports a stall with its cause.

Promises: the cost is low, because each poll sends one small request per service, and at most one request is
in flight. A failure here never ends a run: the next poll asks again."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

import psutil

from areal_async.base.addresses import Address
from areal_async.base.errors import ArealError, PeerGone
from areal_async.base.log import get_logger
from areal_async.base.loop_thread import LoopThread
from areal_async.base.metrics import STALL
from areal_async.base.topology import Topology
from areal_async.launch.aggregator import RunStatus, StatusAggregator
from areal_async.launch.watchdog import Stall
from areal_async.rpc.board import SILENT_S
from areal_async.rpc.client import CallLimits, Client
from areal_async.rpc.control_messages import ReadMetrics, ServiceStatus, Status
from areal_async.rpc.schema import R, Request
from areal_async.rpc.secret import Access
from areal_async.service.record import RunLog

log = get_logger("watchdog")

POLL_S = 0.5
ANSWER_S = 5.0  # Longest wait for a status before the service is asked again
SCRAPE_S = 1.5  # Longest wait for metrics; shorter than the timeout of Prometheus
MAX_PART_BYTES = 16 << 20  # Longest part of an answer; a longer part closes the connection
LOOK_S = 2.0  # Longest time for one poll of all services
STOP_WAIT_S = 10.0  # Longest wait for the last look
LOAD_EVERY_S = 5.0  # Interval of the records of used resources
REPORT_S = 30.0  # Interval of log lines while a stall lasts
ASKED = frozenset({"starting", "serving", "draining"})  # Phases in which a service can answer


class StatusClients:
    """Asks the services of one run, each over a persistent connection. Belongs to one event loop."""

    def __init__(self, topology: Callable[[], Topology], job: str, access: Access) -> None:
        self._topology = topology
        self._job = job
        self._access = access
        self._clients: dict[str, Client] = {}

    async def ask(self, name: str, threads: int = 0) -> ServiceStatus:
        """Return the status of a service, and set its number of CPU threads to `threads` (0: unchanged).

        Raises ArealError if the service does not answer within `ANSWER_S`."""
        topology = self._topology()
        endpoints = {"buffer": topology.buffer, "weights": topology.weights}
        status, _ = await self._exchange(name, Status(threads, endpoints))
        return status

    async def metrics(self, name: str) -> bytes:
        """Return the current series of a service as text for Prometheus.

        Raises ArealError or TimeoutError if the service does not answer within `SCRAPE_S`, and KeyError if no
        service has this name."""
        async with asyncio.timeout(SCRAPE_S):
            _, parts = await self._exchange(name, ReadMetrics())
        return b"".join(parts)

    async def _exchange(self, name: str, request: Request[R]) -> tuple[R, list[memoryview]]:
        place = self._topology().place(name)
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = Client(
                Address(place.status, place.role),
                job=self._job,
                role="supervisor",
                name="monitor",
                access=self._access,
                limits=CallLimits(part_bytes=MAX_PART_BYTES),
            )
        client.address.move(place.status)
        try:
            await client.connect(ANSWER_S)
            return await client.exchange(request, timeout_s=ANSWER_S)
        except Exception:  # the end of one call's time leaves the client to the other calls
            if self._clients.get(name) is client:
                del self._clients[name]
            await client.close()
            raise

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()


class LoadLog:
    """Records of the resources that a run's processes have used.

    `areal-async simulate --from` computes costs from two of these records. For every service a record has its
    CPU seconds (with its children), busy seconds, tokens and sums of durations. It also has the buffer's
    counts of state changes. A record is written every `LOAD_EVERY_S` seconds if a step has finished
    meanwhile."""

    def __init__(self, run_log: RunLog) -> None:
        self._run_log = run_log
        self._due_s = 0.0
        self._steps = -1

    def look(self, services: Mapping[str, ServiceStatus], steps: int, now_s: float) -> None:
        """Write a record if it is due. `services` has the newest status of each service; `steps` is the
        number of finished steps at `now_s`."""
        if now_s < self._due_s or steps == self._steps or not services:
            return
        self._due_s, self._steps = now_s + LOAD_EVERY_S, steps
        counts = [status.figures.buffer.reasons for status in services.values() if status.figures.buffer]
        try:
            cpu_s = _cpu_s({status.pid for status in services.values()})
            told: dict[str, dict[str, Any]] = {
                name: {
                    "cpu_s": round(cpu_s[status.pid], 3),
                    "busy_s": {activity: round(busy_s, 4) for activity, busy_s in status.busy_s.items()},
                    "tokens": status.figures.tokens,
                    **status.figures.sums,
                }
                for name, status in services.items()
            }
        except KeyError:
            return  # A process has just ended, so its usage is no longer known
        told["supervisor"] = {"cpu_s": round(time.process_time(), 3)}
        cores = len(os.sched_getaffinity(0))
        self._run_log.write(
            "load", steps=steps, cores=cores, services=told, counts=counts[0] if counts else {}
        )


def _cpu_s(pids: set[int]) -> dict[int, float]:
    """Return the CPU seconds of these processes, including their children and children that have exited.

    All processes of this machine are read once. Raises `KeyError` if a process does not run."""
    spent_s: dict[int, float] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for process in psutil.process_iter(["ppid", "cpu_times"]):
        spent_s[process.pid] = sum((process.info["cpu_times"] or ())[:4])
        children[process.info["ppid"]].append(process.pid)

    def with_children(pid: int) -> float:
        return spent_s[pid] + sum(map(with_children, children[pid]))

    return {pid: with_children(pid) for pid in pids}


class Monitor:
    """Feeds a `StatusAggregator` and passes each status of the run to `show`, including the last, until it is
    stopped."""

    def __init__(
        self,
        aggregator: StatusAggregator,
        *,
        clients: StatusClients,
        phases: Callable[[], Mapping[str, str]],
        show: Callable[[RunStatus], None],
        load: LoadLog | None,
        threads: Callable[[RunStatus], Mapping[str, int]] = lambda status: {},
    ) -> None:
        """Prepare the thread.

        `load` is possible only for a run with all processes on this machine. `threads` returns the number of
        CPU threads for services, by the prefixes of their names."""
        self._thread: LoopThread | None = None
        self._watching: Future[None] | None = None
        self._stopping = asyncio.Event()
        self._aggregator = aggregator
        self._clients = clients
        self._phases = phases
        self._show = show
        self._split = threads
        self._threads: Mapping[str, int] = {}
        self._load = load
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._stall: Stall | None = None
        self._reported_s = 0.0
        self.newest: RunStatus | None = None  # Status at the last look

    def start(self) -> None:
        """Watch from now on, until `stop`."""
        self._thread = LoopThread("monitor")
        self._watching = self._thread.begin(self._watch())

    def stop(self) -> None:
        """Query the services once more, then end the thread. May be called again."""
        thread, self._thread = self._thread, None
        if thread is not None and self._watching is not None:
            thread.loop.call_soon_threadsafe(self._stopping.set)
            if wait([self._watching], STOP_WAIT_S).not_done:
                log.warning("the last look at the run has not ended in time")
            thread.close()

    def look(self) -> None:
        """Query every service once, now. Other threads may call this."""
        if (thread := self._thread) is not None:
            with suppress(TimeoutError):
                thread.begin(self._look(LOOK_S)).result(2 * LOOK_S)

    async def metrics(self, name: str) -> bytes:
        """Return `StatusClients.metrics` to a caller in another event loop. Raises PeerGone once this thread
        has ended."""
        if (thread := self._thread) is None:
            raise PeerGone("The run is not watched any more.")
        return await asyncio.wrap_future(thread.begin(self._clients.metrics(name)))

    async def _watch(self) -> None:
        try:
            looked_s = time.monotonic()
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), POLL_S)
                before_s, looked_s = looked_s, time.monotonic()
                if (late_s := looked_s - before_s - POLL_S) > SILENT_S:
                    self._aggregator.held_up(late_s, looked_s)
                await self._look(0.0)
                self.newest = self._aggregator.status(time.monotonic())
                self._report_stall(self.newest)
                self._threads = self._split(self.newest)
                if self._load is not None:
                    with suppress(OSError):  # the services that need the records report a full disk
                        steps = self._aggregator.steps_done
                        self._load.look(self._aggregator.answers, steps, time.monotonic())
                try:
                    self._show(self.newest)
                except (Exception, SystemExit):  # rich's console exits if a pipe is broken
                    log.exception("the view has failed; nothing more is shown")
                    self._show = lambda status: None
                if self._stopping.is_set():
                    return
        except Exception:
            log.exception("the watch of the run has failed")
        finally:
            for task in self._asking.values():
                task.cancel()
            await asyncio.gather(*self._asking.values(), return_exceptions=True)
            await self._clients.close()

    async def _look(self, wait_s: float) -> None:
        """Ask all services that have no request in flight. With `wait_s`, wait this long for answers."""
        phases = self._phases()
        self._aggregator.set_phases(phases)
        for name, phase in phases.items():
            if phase in ASKED and (name not in self._asking or self._asking[name].done()):
                self._asking[name] = asyncio.create_task(self._ask(name))
        if wait_s and self._asking:
            await asyncio.wait(self._asking.values(), timeout=wait_s)

    async def _ask(self, name: str) -> None:
        with suppress(ArealError):  # it starts, ends or is busy: the next poll asks again
            status = await self._clients.ask(name, self._threads.get(name.partition("-")[0], 0))
            self._aggregator.feed_status(name, status, time.monotonic())

    def _report_stall(self, status: RunStatus) -> None:
        """Log a stall when its cause changes and every `REPORT_S`. Set its metric."""
        stall, told = status.stall, self._stall
        edge = stall.edge if stall is not None else None
        if told is not None and told.edge != edge:
            STALL.labels(told.edge).set(0)
            if stall is None:
                log.info("training goes on", was_waiting_for=told.edge)
        if stall is not None:
            STALL.labels(stall.edge).set(round(status.stall_s, 3))
            if told is None or told.edge != edge or status.elapsed_s - self._reported_s >= REPORT_S:
                self._reported_s = status.elapsed_s
                stalled_s = round(status.stall_s, 1)
                log.warning("training stands still", edge=edge, stalled_s=stalled_s, detail=stall.detail)
        self._stall = stall
