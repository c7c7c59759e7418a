"""One snapshot on its way into this process: its sockets, and what comes over them.

Belongs to the station's thread; only `result`, `progress` and `words` are for others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from pathlib import Path
from typing import NamedTuple

import zmq

from areal_async.errors import EndpointError, ProtocolError, SnapshotError
from areal_async.rpc import endpoints
from areal_async.rpc.endpoints import Access
from areal_async.runtime.failpoint import failpoint
from areal_async.runtime.log import get_logger
from areal_async.weights import metrics
from areal_async.weights.transport import frames
from areal_async.weights.transport.frames import Kind
from areal_async.weights.transport.holding import Growing
from areal_async.weights.transport.schedule import Schedule

log = get_logger("weights")


class Arrival(NamedTuple):
    """A chunk as it came, not verified."""

    source: str
    number: int
    data: memoryview


class Fetch:
    """Fills `growing` from `sources`, best first. `origin` is the one among them that is no peer."""

    def __init__(
        self,
        growing: Growing,
        sources: Sequence[str],
        *,
        access: Access,
        own: str,
        origin: str = "",
        have: Sequence[int] = (),
        patience_s: float = 5.0,
        give_up_s: float = 60.0,
        window_bytes: int = 16 << 20,
    ) -> None:
        self.growing = growing
        self.result: Future[Path] = Future()
        # Who waits for it may give up; it is settled by the station all the same.
        self.result.set_running_or_notify_cancel()
        self.failed: set[str] = set()
        """Sources that lied, were gone or too slow."""
        self.sockets: dict[zmq.Socket[bytes], str] = {}
        self.schedule = Schedule(growing.layout, have, window_bytes=window_bytes, patience_s=patience_s)
        self.schedule.use([name for name in sources if name != own])
        self.origin = origin
        self._access = access
        self._give_up_s = give_up_s
        self._fed_s = time.monotonic()
        self._began_s = self._fed_s
        self._in_hand: dict[int, Future[bool]] = {}
        """Chunks that are being verified and written."""
        self._passed_over: set[int] = set()
        """Chunks of which another copy came meanwhile: should the one in hand be wrong, they come again."""
        self._by_endpoint: dict[str, zmq.Socket[bytes]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._poller: zmq.Poller | None = None

    @property
    def progress(self) -> float:
        """Share of the chunks that are here."""
        return self.schedule.progress

    @property
    def starved_s(self) -> float:
        """Since the last chunk came."""
        return time.monotonic() - self._fed_s

    def words(self) -> str:
        """What it waits for, for a person."""
        name = self.growing.final.name
        share = f"{100 * self.progress:.0f} % of {name} are here"
        return f"{share}; {self.schedule.active or 'no source'} has sent nothing for {self.starved_s:.0f} s"

    def begin(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller) -> None:
        self._context, self._poller = context, poller
        self._began_s = self._fed_s = time.monotonic()

    def advance(self, now_s: float) -> bool:
        """Ask for what may be asked for now; True when nothing is missing."""
        if self.schedule.done:
            return True
        if now_s - self._fed_s > self._give_up_s:
            raise SnapshotError(f"no source sent anything for {self._give_up_s:g} s: {self.words()}")
        if self.schedule.hopeless:
            raise SnapshotError(f"every source of {self.growing.final.name} sent other bytes than announced")
        source, wanted = self.schedule.next(now_s)
        if wanted:
            self._tell(source, frames.want(self.growing.key, wanted))
        return False

    def tick(self, now_s: float) -> None:
        """Leave a source that is too slow."""
        if slow := self.schedule.overdue(now_s):
            metrics.REFUSED.labels("late").inc()
            self._complain(slow, "sends no chunk in time")
            self._tell(slow, frames.head(Kind.DROP, self.growing.key))

    def receive(self, sock: zmq.Socket[bytes]) -> Arrival | None:
        """Take one message; the chunk that it brought, if it is wanted. Raises `zmq.Again`."""
        source = self.sockets[sock]
        head = sock.recv(zmq.NOBLOCK)
        more: list[zmq.Frame] = []
        while sock.getsockopt(zmq.RCVMORE):
            more.append(sock.recv(zmq.NOBLOCK, copy=False))
        try:
            message = frames.read(head)
            if message.key != self.growing.key:
                return None
            if len(more) != (message.kind == Kind.CHUNK):
                raise ProtocolError(f"{len(more)} frames behind a {message.kind.name}")
        except ProtocolError as error:
            self._refuse(source, "malformed", str(error))
            return None
        if message.kind == Kind.GONE:
            self.schedule.gone(source)
            self._complain(source, "does not hold it")
            return None
        index = message.number
        if message.kind != Kind.CHUNK or not self.schedule.wants(index):
            return None
        if index in self._in_hand:
            self._passed_over.add(index)
            return None
        data = more[0].buffer
        kind = "publisher" if source == self.origin else "peer"
        metrics.RECEIVED.labels("zmq", kind).inc(data.nbytes)
        return Arrival(source, index, data)

    def take(self, arrival: Arrival, pool: Executor, then: Callable[[Future[bool]], None]) -> None:
        """Verify and write a chunk on a thread of `pool`; `then` is called there with the outcome."""
        put = self._in_hand[arrival.number] = pool.submit(self.growing.put, arrival.number, arrival.data)
        put.add_done_callback(then)

    def taken(self, arrival: Arrival, put: Future[bool]) -> bool:
        """Whether the chunk was the right one. Raises `SnapshotError` when it could not be written."""
        del self._in_hand[arrival.number]
        passed_over = arrival.number in self._passed_over
        self._passed_over.discard(arrival.number)
        if not put.result():
            self._refuse(arrival.source, "hash", f"chunk {arrival.number} does not match its hash")
            if passed_over:
                self.schedule.again(arrival.number)
            return False
        failpoint("weights.received")
        self._fed_s = time.monotonic()
        self.schedule.took(arrival.number)
        return True

    def end(self, error: BaseException | None) -> None:
        """Close the sockets and settle the result."""
        wait(self._in_hand.values())  # a few chunks at most; their files are closed next
        for sock in self.sockets:
            if self._poller is not None:
                self._poller.unregister(sock)
            sock.close(linger=0)
        self.sockets.clear()
        self._by_endpoint.clear()
        if error is None:
            metrics.FETCH_SECONDS.observe(time.monotonic() - self._began_s)
            self.result.set_result(self.growing.final)
        else:
            self.growing.close()
            self.result.set_exception(error)

    def _refuse(self, source: str, reason: str, text: str) -> None:
        metrics.REFUSED.labels(reason).inc()
        self.schedule.lied(source)
        self._complain(source, text)

    def _complain(self, source: str, text: str) -> None:
        if source not in self.failed:
            log.warning("source left", source=source, snapshot=self.growing.final.name, reason=text)
        self.failed.add(source)

    def _tell(self, source: str, message: bytes) -> None:
        try:
            self._socket(source).send(message, zmq.NOBLOCK)
        except (zmq.Again, EndpointError) as error:
            self.schedule.gone(source)
            self._complain(source, f"cannot be asked: {error}")

    def _socket(self, source: str) -> zmq.Socket[bytes]:
        if source in self._by_endpoint:
            return self._by_endpoint[source]
        assert self._context is not None
        assert self._poller is not None
        sock = self._context.socket(zmq.DEALER)
        endpoints.tune(sock)
        sock.setsockopt(zmq.RCVHWM, 2 * frames.MAX_WANTED)
        sock.setsockopt(zmq.RECONNECT_IVL, 20)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        try:
            endpoints.connect(sock, source, self._access)
        except EndpointError:
            sock.close(linger=0)
            raise
        self._poller.register(sock, zmq.POLLIN)
        self.sockets[sock] = source
        self._by_endpoint[source] = sock
        return sock
