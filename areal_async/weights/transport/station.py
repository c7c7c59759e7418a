"""One thread that hands out chunks and fetches them, for a whole process.

Promises:
- A chunk goes out from the mapped file without a copy in Python, and only because it was asked for: what a
  receiver has not asked for is not queued, and a slow receiver holds up nobody else.
- A chunk that comes in is hashed before it is written, and written before it is handed on; one that came
  while others wait for it is handed on at once.
- A fetch ends: with the directory under its name, or with a `SnapshotError` once nothing has come for
  `give_up_s`, or when it is cancelled; verified chunks stay for the next try.
- Closing leaves no thread and no socket.

Encrypted, and only for who has the run's secret or its hosts' keys; bound beyond loopback only with
keys (`wire.endpoints`). The thread waits for nothing but its sockets;
hashing and writing are done by a small pool, without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import zmq

from areal_async.errors import ProtocolError, SnapshotError
from areal_async.rpc import endpoints
from areal_async.rpc.endpoints import Access
from areal_async.rpc.sockets import drop_context, open_context
from areal_async.runtime.failpoint import failpoint
from areal_async.runtime.log import get_logger
from areal_async.weights import metrics
from areal_async.weights.transport import frames
from areal_async.weights.transport.fetch import Arrival, Fetch
from areal_async.weights.transport.frames import Kind
from areal_async.weights.transport.holding import Growing, Holding

log = get_logger("weights")
T = TypeVar("T")

TICK_S = 0.05
"""How often deadlines are looked at."""
POOL_THREADS = 2
"""That verify and write chunks: one alone is slower than what a socket delivers."""
BURST = 32
"""Messages of one socket that are handled before the others get their turn."""
EARLY_S = 2.0
"""How long a wish waits for a snapshot that is not held yet: one's parent in line may begin later."""
MAX_EARLY = 1024
MAX_WAITING = 1 << 16
"""Wishes for chunks that are not here yet, of all fetchers together."""


class Station:
    """Hand out at `listen` (tcp, port 0 picks one: see `endpoint`) what was given to `hold`.

    `source` is what this process is for metrics: "publisher" or "peer"."""

    def __init__(self, listen: str, *, source: str, access: Access) -> None:
        self.endpoint = listen
        self.bytes_sent = 0
        self.bytes_received = 0
        self._sent_point = f"weights.{source}_sent"
        self._access = access
        self._holdings: dict[bytes, Holding] = {}
        self._fetches: list[Fetch] = []
        self._waiting = 0
        self._early: list[tuple[float, bytes, frames.Head]] = []
        """Wishes for snapshots that are not held yet: until when, whose, for what."""
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake_fd = -1
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._serving = False
        """Whether the thread takes jobs."""
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor
        self._router: zmq.Socket[bytes]
        self._poller: zmq.Poller
        self._sent = metrics.SENT.labels("zmq", source)

    def start(self) -> None:
        """Bind and serve. Raises `EndpointError`."""
        context = open_context()
        router = context.socket(zmq.ROUTER)
        try:
            endpoints.tune(router, max_part_bytes=frames.MAX_ASKED_BYTES)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.setsockopt(zmq.SNDHWM, 2 * frames.MAX_WANTED)
            zap_sock = endpoints.bind_zap(context)
            self.endpoint = endpoints.bind(router, self.endpoint, self._access)
        except BaseException:
            drop_context(context)
            raise
        self._context = context
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pool = ThreadPoolExecutor(POOL_THREADS, "weights-verify")
        self._closing = False
        self._serving = True
        self._thread = threading.Thread(
            target=self._run, args=(router, zap_sock), name="weights-station", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread; fetches under way fail."""
        if self._thread is None or self._context is None:
            return
        self._closing = True
        self._wake()
        self._thread.join()
        self._pool.shutdown()
        drop_context(self._context)
        os.close(self._wake_fd)
        self._thread = self._context = None

    # --- for other threads ---------------------------------------------------------------------------

    def hold(self, holding: Holding) -> None:
        """Hand out its chunks from now on."""
        self._do(lambda: self._holdings.__setitem__(holding.key, holding))

    def release(self, key: bytes, timeout_s: float = 5.0) -> bool:
        """Hand out the snapshot no more; whether no socket reads its files any longer."""
        try:
            return self._do(lambda: self._release(key)).result(timeout_s)
        except (TimeoutError, SnapshotError):
            return False

    def fetch(self, growing: Growing, sources: Sequence[str], **options: Any) -> Fetch:
        """Begin to fetch; its `result` is a future. The chunks that came are handed out at once."""
        fetch = Fetch(growing, sources, access=self._access, own=self.endpoint, **options)
        begun = self._do(lambda: self._begin(fetch))
        begun.add_done_callback(lambda done: fetch.end(done.exception()) if done.exception() else None)
        return fetch

    def use(self, fetch: Fetch, sources: Sequence[str]) -> None:
        """Other sources for a fetch under way."""
        self._do(lambda: fetch.schedule.use([name for name in sources if name != self.endpoint]))

    def cancel(self, fetch: Fetch) -> Future[None]:
        """End a fetch; what it verified stays on disk."""
        return self._do(lambda: self._end(fetch, SnapshotError("the fetch was ended")))

    def _do(self, job: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(job())
            except BaseException as error:  # it belongs to whoever asked
                done.set_exception(error)

        with self._lock:
            if self._serving:
                self._jobs.append(run)
                self._wake()
            else:
                done.set_exception(SnapshotError("this process serves no chunks now"))
        return done

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self, router: zmq.Socket[bytes], zap_sock: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        poller.register(router, zmq.POLLIN)
        poller.register(zap_sock, zmq.POLLIN)
        self._router, self._poller = router, poller
        try:
            self._work(zap_sock)
        except Exception as error:
            log.error("no chunks are served or fetched any more", error=repr(error))
        with self._lock:
            self._serving = False
        while self._jobs:
            self._jobs.popleft()()
        for fetch in [*self._fetches]:
            self._end(fetch, SnapshotError("the station of this process ends"))
        router.close(linger=0)
        zap_sock.close(linger=0)
        self._holdings.clear()

    def _work(self, zap_sock: zmq.Socket[bytes]) -> None:
        router, poller, next_tick_s = self._router, self._poller, 0.0
        while not self._closing:
            ready = dict(poller.poll(int(TICK_S * 1000)))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            while self._jobs:
                self._jobs.popleft()()
            if zap_sock in ready:
                endpoints.answer_zap(zap_sock, endpoints.shown_at(self.endpoint, self._access))
            if router in ready:
                self._serve()
            for fetch in [*self._fetches]:
                for sock in [sock for sock in fetch.sockets if sock in ready]:
                    self._receive(fetch, sock)
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + TICK_S
                self._answer_early(now_s)
                for fetch in [*self._fetches]:
                    fetch.tick(now_s)
                    self._advance(fetch)

    # --- handing out ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        for _ in range(BURST):
            try:
                message = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(message) != 2:
                    raise ProtocolError(f"a chunk message of {len(message)} frames")
                asked = frames.read(message[1])
            except ProtocolError as error:
                log.warning("chunk message refused", error=str(error))
                continue
            self._answer(message[0], asked)

    def _answer(self, fetcher: bytes, asked: frames.Head) -> None:
        holding = self._holdings.get(asked.key)
        if asked.kind == Kind.DROP:
            self._early = [one for one in self._early if (one[1], one[2].key) != (fetcher, asked.key)]
            if holding is not None:
                self._forget(holding, fetcher)
        elif asked.kind == Kind.WANT:
            if holding is None and len(self._early) < MAX_EARLY:
                self._early.append((time.monotonic() + EARLY_S, fetcher, asked))
                return
            if holding is None or any(index >= holding.layout.n_chunks for index in asked.wanted):
                self._send(fetcher, frames.head(Kind.GONE, asked.key))
                return
            for index in asked.wanted:
                if holding.has(index):
                    self._send_chunk(fetcher, holding, index)
                else:
                    self._let_wait(fetcher, holding, index)

    def _answer_early(self, now_s: float) -> None:
        """Answer wishes for snapshots that have come meanwhile, or have not in time."""
        early, self._early = self._early, []
        for until_s, fetcher, asked in early:
            if asked.key in self._holdings:
                self._answer(fetcher, asked)
            elif until_s <= now_s:
                self._send(fetcher, frames.head(Kind.GONE, asked.key))
            else:
                self._early.append((until_s, fetcher, asked))

    def _let_wait(self, fetcher: bytes, holding: Holding, index: int) -> None:
        those = holding.waiting.setdefault(index, [])
        if fetcher not in those and self._waiting < MAX_WAITING:
            those.append(fetcher)
            self._waiting += 1

    def _forget(self, holding: Holding, fetcher: bytes) -> None:
        for index, those in [*holding.waiting.items()]:
            if fetcher in those:
                those.remove(fetcher)
                self._waiting -= 1
            if not those:
                del holding.waiting[index]

    def _send_chunk(self, fetcher: bytes, holding: Holding, index: int) -> None:
        try:
            data = holding.data(index)
        except (OSError, SnapshotError) as error:
            log.warning("a snapshot to hand out is gone", path=str(holding.directory), error=str(error))
            self._release(holding.key)
            self._send(fetcher, frames.head(Kind.GONE, holding.key))
            return
        router = self._router
        try:
            router.send(fetcher, zmq.SNDMORE | zmq.NOBLOCK)
            router.send(frames.head(Kind.CHUNK, holding.key, index), zmq.SNDMORE | zmq.NOBLOCK)
            # Once the first frame is taken the message goes; it is counted before it can have arrived.
            self.bytes_sent += data.nbytes
            tracker = router.send(data, zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            # It is gone, or has asked for more than it may: what it still wants it asks for again.
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return
        if tracker is not None:
            holding.handed(tracker)
        self._sent.inc(data.nbytes)
        failpoint(self._sent_point)

    def _send(self, fetcher: bytes, head: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            try:
                self._router.send_multipart([fetcher, head], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise

    def _release(self, key: bytes) -> bool:
        holding = self._holdings.pop(key, None)
        if holding is None:
            return True
        self._dismiss(holding)
        return holding.quiet

    def _dismiss(self, holding: Holding) -> None:
        """Tell those who wait for chunks of it that none will come."""
        told = {fetcher for those in holding.waiting.values() for fetcher in those}
        self._waiting -= sum(map(len, holding.waiting.values()))
        holding.waiting.clear()
        for fetcher in told:
            self._send(fetcher, frames.head(Kind.GONE, holding.key))

    # --- fetching ------------------------------------------------------------------------------------

    def _begin(self, fetch: Fetch) -> None:
        assert self._context is not None
        fetch.begin(self._context, self._poller)
        self._fetches.append(fetch)
        self._holdings[fetch.growing.key] = fetch.growing
        self._answer_early(time.monotonic())
        self._advance(fetch)

    def _receive(self, fetch: Fetch, sock: zmq.Socket[bytes]) -> None:
        for _ in range(BURST):
            if sock not in fetch.sockets:
                return
            try:
                arrival = fetch.receive(sock)
            except zmq.Again:
                return
            if arrival is None:
                self._advance(fetch)
            else:
                fetch.take(arrival, self._pool, partial(self._put, fetch, arrival))

    def _put(self, fetch: Fetch, arrival: Arrival, put: Future[bool]) -> None:
        """On a thread of the pool: let the station go on with a chunk that is written, or was refused."""
        self._jobs.append(lambda: self._taken(fetch, arrival, put))
        self._wake()

    def _taken(self, fetch: Fetch, arrival: Arrival, put: Future[bool]) -> None:
        if fetch not in self._fetches:
            return
        try:
            right = fetch.taken(arrival, put)
        except SnapshotError as error:
            self._end(fetch, error)
            return
        if right:
            self.bytes_received += arrival.data.nbytes
            for fetcher in fetch.growing.waiting.pop(arrival.number, ()):
                self._waiting -= 1
                self._send_chunk(fetcher, fetch.growing, arrival.number)
        self._advance(fetch)

    def _advance(self, fetch: Fetch) -> None:
        if fetch.result.done():
            return
        try:
            if fetch.advance(time.monotonic()):
                fetch.growing.finish()
                self._end(fetch, None)
        except SnapshotError as error:
            self._end(fetch, error)

    def _end(self, fetch: Fetch, error: SnapshotError | None) -> None:
        if fetch not in self._fetches:
            return
        self._fetches.remove(fetch)
        if error is not None:
            self._holdings.pop(fetch.growing.key, None)
            self._dismiss(fetch.growing)
        fetch.end(error)
