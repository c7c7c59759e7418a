"""The client side of the RPC: a DEALER socket that survives a restart of its server.

    async with Client("ipc:///run/job/buffer", job="job", role="…", name="…", access=secret) as buffer:
        leases = await buffer.call(Lease(…))              # a `Leases`
        claims, blobs = await buffer.exchange(Claim(…))   # a `Claims` and its attachments

`SyncClient` is the blocking client.

Promises:
- `call` ends by its deadline. It returns the reply or raises the service's `FaultError`, `RpcTimeout`,
  `PeerGone`, or `ProtocolError` for a reply of the wrong type.
- A request keeps its id through every retry, so a running server handles it once. After a restart of the
  server, the client says hello again and repeats unanswered requests.
- `busy` and `unavailable` are retried with back-off within the deadline.
- At most `CallLimits.in_flight` requests are in flight. Further calls wait in line, within their deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import zmq
import zmq.utils.monitor
from typing_extensions import Buffer

from areal_async.base.addresses import Address
from areal_async.base.errors import ArealError, EndpointError, FaultError, PeerGone, ProtocolError, RpcTimeout
from areal_async.base.log import get_logger
from areal_async.base.loop_thread import LoopThread
from areal_async.base.retry import pause_s
from areal_async.rpc import endpoints
from areal_async.rpc.frames import (
    MAX_MESSAGE_BYTES,
    Kind,
    read_attachments,
    read_header,
    read_reply,
    write_frames,
)
from areal_async.rpc.schema import SCHEMA, Fault, Hello, Message, R, Request, Welcome, replies_to
from areal_async.rpc.secret import Access
from areal_async.rpc.sockets import PolledSocket, drop_context, end_context, open_context

TIMEOUT_S = 60.0  # how long a service may take to answer, beyond the wait that a request asks for
SWEEP_S = 0.25
RESEND_AFTER_S = 2.0
FIRST_BACKOFF_S = 0.01
LAST_BACKOFF_S = 1.0
INCURABLE = ("schema", "invalid", "fenced")  # Kinds of faults that a retry cannot fix
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH

T = TypeVar("T")
log = get_logger("rpc")


async def wait_out(error: RpcTimeout | FaultError, call: str, pause_s: float) -> None:
    """Sleep if the error is temporary: the buffer is unavailable, busy or restarting. Raise any other
    error."""
    if isinstance(error, FaultError) and error.kind in INCURABLE:
        raise error
    log.warning("buffer does not answer", call=call, error=str(error))
    await asyncio.sleep(pause_s)


class _Link(Enum):
    DOWN = 0
    GREETING = 1
    UP = 2


@dataclass(slots=True)
class _Pending:
    """One call in flight. `answer` is None before the request is sent and during a back-off pause."""

    frames: list[Buffer] = field(default_factory=list)
    answer: asyncio.Future[tuple[Message, list[memoryview]]] | None = None
    sent_s: float = 0.0
    resend_after_s: float = 0.0
    fault: Fault | None = None  # the last `busy` or `unavailable`

    @property
    def waits(self) -> bool:
        return self.answer is not None and not self.answer.done()


@dataclass(frozen=True)
class CallLimits:
    """Limits of a client: calls in flight, and bytes of one part of a reply. A longer part closes the
    connection."""

    in_flight: int = 64
    part_bytes: int = MAX_MESSAGE_BYTES


class Client:
    """A client of the server at an address.

    The address is an `Address`, which may move, or a fixed endpoint. All methods belong to one event loop.
    Calls may run concurrently.

    `timeout_s` applies to every call without a timeout of its own. An unanswered request is repeated after
    `resend_after_s`, then after twice as long, and so on. The repetition is for lost replies only. A lost
    connection is noticed at once, and its requests are repeated over the next one. `async with` connects and
    closes.
    """

    def __init__(
        self,
        address: str | Address,
        *,
        job: str,
        role: str,
        name: str,
        access: Access,
        timeout_s: float = TIMEOUT_S,
        limits: CallLimits | None = None,
    ) -> None:
        limits = limits or CallLimits()
        self.address = address if isinstance(address, Address) else Address(address)
        self._connected_to = self.endpoint
        self._hello = Hello(SCHEMA, job, role, name)
        self._access = access
        self._timeout_s = timeout_s
        self.resend_after_s = RESEND_AFTER_S
        self._part_bytes = limits.part_bytes
        self._rng = random.Random()
        self._uid = secrets.randbits(64)
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._in_line = asyncio.Semaphore(limits.in_flight)
        self._link = _Link.DOWN
        self._hello_id = 0
        self._hello_sent_s = 0.0
        self._greeted: asyncio.Future[Welcome] | None = None
        self._fatal: ArealError | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: PolledSocket | None = None
        self._monitor: PolledSocket | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Client:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def endpoint(self) -> str:
        """Current endpoint of the server."""
        return self.address.endpoint

    async def connect(self, timeout_s: float = 10.0) -> Welcome:
        """Say hello and wait for the welcome. The server may start in the meantime.

        Raises `FaultError("schema")` for a server of another schema or job, and `RpcTimeout` if no answer
        comes.
        """
        if self._socket is None:
            self._open()
        if self._fatal is not None:
            raise self._fatal
        assert self._greeted is not None
        done, _ = await asyncio.wait([self._greeted], timeout=timeout_s)
        if not done:
            raise RpcTimeout(
                f"nobody answered at {self.endpoint} within {timeout_s:g} s: does that service run?"
            )
        return self._greeted.result()

    async def call(
        self, request: Request[R], *, timeout_s: float | None = None, attachments: Sequence[Buffer] = ()
    ) -> R:
        """Send `request` and return its reply. `attachments` must not change before the reply.

        The limit is `timeout_s` plus the time for which the request asks the server to wait (`wait_ms`).
        """
        return (await self.exchange(request, timeout_s=timeout_s, attachments=attachments))[0]

    async def exchange(
        self, request: Request[R], *, timeout_s: float | None = None, attachments: Sequence[Buffer] = ()
    ) -> tuple[R, list[memoryview]]:
        """Send `request` as `call` does and return its reply and the reply's attachments."""
        self._check_open()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        limit_s += getattr(request, "wait_ms", 0) / 1000
        pending = _Pending()
        try:
            async with asyncio.timeout(limit_s), self._in_line:
                self._check_open()
                reply, received = await self._ask(pending, request, attachments)
        except TimeoutError:
            raise self._too_late(request, limit_s, pending.fault) from None
        if not isinstance(reply, replies_to(type(request))):
            raise ProtocolError(
                f"{self.endpoint} answered {type(request).__name__} with {type(reply).__name__}"
            )
        return reply, received  # type: ignore[return-value]

    async def close(self) -> None:
        """End all calls in flight with `PeerGone`, and close sockets and tasks."""
        if self._socket is None or self._context is None or self._monitor is None:
            return
        if self._link is _Link.UP:
            self._socket.send(write_frames(Kind.BYE, self._uid, next(self._ids), 0, None, ()))
        self._fail_all(PeerGone(f"the client of {self.endpoint} was closed"))
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._monitor.close()
        self._socket.close()
        context, self._context, self._socket, self._monitor = self._context, None, None, None
        self._link = _Link.DOWN
        await end_context(context)

    # --- one call ------------------------------------------------------------------------------------

    async def _ask(
        self, pending: _Pending, request: Message, attachments: Sequence[Buffer]
    ) -> tuple[Message, list[memoryview]]:
        """Send the request and await the reply."""
        number = next(self._ids)
        self._pending[number] = pending
        try:
            floor = next(iter(self._pending))
            pending.frames = write_frames(Kind.REQUEST, self._uid, number, floor, request, attachments)
            return await self._until_answered(pending)
        finally:
            self._pending.pop(number, None)

    async def _until_answered(self, pending: _Pending) -> tuple[Message, list[memoryview]]:
        for tries in itertools.count(1):
            self._redial()
            answer = pending.answer = asyncio.get_running_loop().create_future()
            pending.resend_after_s = self.resend_after_s
            if self._link is _Link.UP:
                self._transmit(pending)
            try:
                reply, attachments = await answer
            finally:
                pending.answer = None
            if not isinstance(reply, Fault):
                return reply, attachments
            if reply.kind not in ("busy", "unavailable"):
                raise FaultError.of(reply)
            pending.fault = reply
            back_off_s = pause_s(tries, self._rng, first_s=FIRST_BACKOFF_S, longest_s=LAST_BACKOFF_S)
            await asyncio.sleep(max(reply.retry_after_ms / 1000, back_off_s))
            self._check_open()
        raise AssertionError("unreachable")

    def _transmit(self, pending: _Pending) -> None:
        assert self._socket is not None
        sent = self._socket.send(pending.frames)
        pending.sent_s = asyncio.get_running_loop().time() if sent else float("-inf")

    def _too_late(self, message: Message, timeout_s: float, fault: Fault | None) -> RpcTimeout:
        what = f"{type(message).__name__} to {self.endpoint} had no answer within {timeout_s:g} s"
        if fault is not None:
            text = f"{what}; the service said {fault.kind}: {fault.message}"
            return RpcTimeout(text, FaultError.of(fault))
        if self._link is not _Link.UP:
            return RpcTimeout(f"{what}: there is no connection; does that service run?")
        return RpcTimeout(what)

    def _check_open(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._socket is None:
            raise PeerGone(f"the client of {self.endpoint} is not connected")

    # --- the connection ------------------------------------------------------------------------------

    def _open(self) -> None:
        loop = asyncio.get_running_loop()
        context = open_context()
        sock = context.socket(zmq.DEALER)
        try:
            endpoints.tune(sock, max_part_bytes=self._part_bytes)
            # zmq.IMMEDIATE is not set: with it, libzmq drops replies that arrived just before a disconnect.
            # Without it, libzmq may queue requests while the server is down. The next server answers them
            # with WHO, and the client repeats them.
            sock.setsockopt(zmq.RECONNECT_IVL, 20)
            sock.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
            monitor = sock.get_monitor_socket(_EVENTS)
            self._connected_to = self.endpoint
            endpoints.connect(sock, self._connected_to, self._access, self.address.server)
        except BaseException:
            drop_context(context)
            raise
        self._context = context
        self._fatal = None
        self._greeted = loop.create_future()
        self._socket = PolledSocket(sock, 1, self._on_frames)
        self._monitor = PolledSocket(monitor, 2, self._on_event)
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)

    def _redial(self) -> None:
        """Connect to the server's current endpoint and repeat unanswered requests there."""
        if self._socket is not None and self._connected_to != self.endpoint:
            self._link = _Link.DOWN
            self._socket.redial(self._connected_to, self.endpoint)
            self._connected_to = self.endpoint

    def _on_event(self, copied: list[bytes], rest: list[Buffer]) -> None:
        event = zmq.utils.monitor.parse_monitor_message(copied)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._greet()
        elif event == zmq.EVENT_DISCONNECTED:
            self._link = _Link.DOWN
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._give_up(EndpointError(f"{self.endpoint} does not accept this client's secret or keys"))

    def _greet(self) -> None:
        if self._socket is None or self._fatal is not None:
            return
        self._link = _Link.GREETING
        self._hello_id = next(self._ids)
        self._hello_sent_s = asyncio.get_running_loop().time()
        self._socket.send(write_frames(Kind.REQUEST, self._uid, self._hello_id, 0, self._hello, ()))

    def _on_frames(self, copied: list[bytes], rest: list[Buffer]) -> None:
        try:
            header = read_header(copied[0] if copied else b"")
        except ProtocolError:
            return
        if header.client != self._uid:
            return
        if header.kind == Kind.WHO:
            if self._link is _Link.UP:
                self._greet()
            return
        pending = self._pending.get(header.request)
        answer = pending.answer if pending is not None and pending.waits else None
        try:
            reply = read_reply(copied[0])
            attachments = read_attachments(header, rest)
        except ProtocolError as error:
            if answer is not None:
                answer.set_exception(error)
            return
        if header.request == self._hello_id:
            self._on_greeting(reply)
        elif answer is not None:
            answer.set_result((reply, attachments))

    def _on_greeting(self, reply: Message) -> None:
        assert self._greeted is not None
        if isinstance(reply, Fault):
            self._give_up(FaultError.of(reply))
        elif isinstance(reply, Welcome):
            self._link = _Link.UP
            if not self._greeted.done():
                self._greeted.set_result(reply)
            for pending in self._pending.values():
                if pending.waits:
                    self._transmit(pending)

    def _sweep(self) -> None:
        """Repeat requests that seem lost, because no reply came or the socket did not accept the request."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._redial()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        if self._link is _Link.GREETING and now_s - self._hello_sent_s > RESEND_AFTER_S:
            self._greet()
        elif self._link is _Link.UP:
            for pending in self._pending.values():
                if pending.waits and now_s - pending.sent_s > pending.resend_after_s:
                    pending.resend_after_s *= 2
                    self._transmit(pending)

    def _give_up(self, error: ArealError) -> None:
        self._fatal = error
        self._fail_all(error)

    def _fail_all(self, error: ArealError) -> None:
        answers: list[asyncio.Future[Any] | None] = [p.answer for p in self._pending.values()]
        for answer in [*answers, self._greeted]:
            if answer is not None and not answer.done():
                answer.set_exception(error)
        if self._greeted is not None and not self._greeted.cancelled():
            self._greeted.exception()  # marks the error as seen: `connect` may have no waiter


class SyncClient:
    """A blocking client: a `Client` on the event loop of a separate thread.

    Any thread may call its methods. They raise the errors of `Client`.
    """

    def __init__(
        self,
        address: str | Address,
        *,
        job: str,
        role: str,
        name: str,
        access: Access,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._client = Client(address, job=job, role=role, name=name, access=access, timeout_s=timeout_s)
        self._thread: LoopThread | None = None
        self._starting = threading.Lock()

    @property
    def endpoint(self) -> str:
        return self._client.endpoint

    def connect(self, timeout_s: float = 10.0) -> Welcome:
        with self._starting:  # several threads may call first, but the client has one loop
            if self._thread is None:
                self._thread = LoopThread(f"rpc-{self.endpoint.rpartition('/')[2]}")
        return self._wait(self._client.connect(timeout_s))

    def call(
        self, request: Request[R], *, timeout_s: float | None = None, attachments: Sequence[Buffer] = ()
    ) -> R:
        """Send a request and wait for its answer, as `Client.call` does."""
        return self.exchange(request, timeout_s=timeout_s, attachments=attachments)[0]

    def exchange(
        self, request: Request[R], *, timeout_s: float | None = None, attachments: Sequence[Buffer] = ()
    ) -> tuple[R, list[memoryview]]:
        """Send a request and wait for its answer and attachments, as `Client.exchange` does."""
        return self._wait(self._client.exchange(request, timeout_s=timeout_s, attachments=attachments))

    def close(self) -> None:
        """End calls of other threads with `PeerGone`, and end the thread."""
        if self._thread is not None:
            self._wait(self._client.close())
            thread, self._thread = self._thread, None
            thread.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        thread = self._thread
        if thread is None:
            work.close()
            raise PeerGone(f"the client of {self.endpoint} is not connected")
        return thread.run(work)
