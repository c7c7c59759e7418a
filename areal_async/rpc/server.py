"""The server side of the RPC: a ROUTER socket in front of one async handler.

Promises:
- A request runs at most once at a time. It does not run again while its reply is remembered
  (`reply_book.py`).
- No message of a peer without the secret is received, because the handshake asks for the secret.
- Every well-formed request gets an answer: the handler's reply, or a typed `Fault`.
- No message of a peer ends the server. An invalid message with a readable request id is answered `invalid`.
  Other invalid messages are counted and dropped. No request is handled before a hello of the same schema and
  job.
- The number of requests in flight per client is limited (`busy`). So are the size of frames, and the queues
  (by high-water marks).
- `stop` leaves no task, socket or ipc file. Interrupted requests are answered `unavailable`. The last answers
  reach every peer that reads them within `linger_ms`.
- Requests begin in the order of their lanes (`lanes.py`), so a flood of one kind does not delay others. A
  request whose lane is full is answered `busy`.

Concurrent requests have no guaranteed order. A handler is not cancelled if its client disconnects, because it
may be in the middle of a write.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import zmq
from typing_extensions import Buffer

from areal_async.base.errors import FaultError, ProtocolError
from areal_async.rpc import endpoints
from areal_async.rpc.endpoints import ANYBODY
from areal_async.rpc.frames import Header, Kind, read_attachments, read_header, read_request, write_frames
from areal_async.rpc.lanes import Lane, Lanes
from areal_async.rpc.metrics import REFUSED
from areal_async.rpc.permissions import may_ask
from areal_async.rpc.reply_book import Admission, ReplyBook, ServerLimits
from areal_async.rpc.schema import SCHEMA, Fault, Hello, Message, Request, Welcome
from areal_async.rpc.secret import Access, RoleKeys, is_tcp
from areal_async.rpc.sockets import PolledSocket, drop_context, end_context, open_context

log = logging.getLogger("areal.wire")

MAX_SESSIONS = 4096
BUSY_RETRY_MS = 10
FULL_RETRY_MS = 50
STOP_RETRY_MS = 100
CANCEL_LIMIT_S = 5.0
CROWD_LOGGED = 1000  # connections closed for lack of room per log line
ANSWERS_LINGER_MS = 2000


@dataclass(frozen=True)
class Peer:
    """The sender of a request, as described in its hello.

    All connections of a client share the id `client`. `key` is the role of its key or password, or empty if
    roles are not distinguished.
    """

    role: str
    name: str
    client: int = 0
    key: str = ""


Answer = Message | tuple[Message, Sequence[Buffer]]
Handler = Callable[[Peer, Any, list[memoryview]], Awaitable[Answer]]


class WaitingRequest(NamedTuple):
    """A request that waits for its turn."""

    peer: Peer
    header: Header
    message: Request[Any]
    attachments: list[memoryview]


def by_type(service: str, handlers: Mapping[type[Request[Any]], Handler]) -> Handler:
    """Return a handler that calls the function in `handlers` for the type of each request."""

    async def handle(peer: Peer, request: Request[Any], attachments: list[memoryview]) -> Answer:
        handler = handlers.get(type(request))
        if handler is None:
            raise FaultError("invalid", f"the {service} does not answer {type(request).__name__}")
        return await handler(peer, request, attachments)

    return handle


class Server:
    """A server of `handler` at `endpoint` (`ipc://PATH` or `tcp://HOST:PORT`).

    Port 0 picks a free port (see `.endpoint`). Peers need the secret or keys of `access`. `identity` is the
    name of the server's key, by default the name of its role. With keys of roles, each peer may only send
    requests of its role (`permissions.py`).

    `handler(peer, message, attachments)` returns a message, or a message and its attachments. If it raises a
    `FaultError`, the fault is the answer. Any other error is logged and answered `internal`. `lanes` must not
    be shared with another server.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        service: str,
        job: str,
        access: Access,
        handler: Handler,
        limits: ServerLimits | None = None,
        lanes: Lanes[WaitingRequest] | None = None,
        identity: str = "",
    ) -> None:
        self.endpoint = endpoint
        self.counters: Counter[str] = Counter()
        """Numbers of events since the start, by name.

        `unknown` counts requests before a hello, for example after a restart. `strangers` counts connections
        that were refused. `crowd` counts connections that were closed to make room. `forbidden` counts
        requests that the peer's role may not send.
        """
        self._service = service
        self._job = job
        self._limits = limits or ServerLimits()
        self._handler = handler
        self._access = access
        self._identity = identity
        self._book = ReplyBook(self._limits, MAX_SESSIONS)
        self.sessions: OrderedDict[bytes, Peer] = OrderedDict()  # at most `MAX_SESSIONS`
        self._identities: dict[int, bytes] = {}
        self._lanes = lanes if lanes is not None else Lanes({"all": Lane()})
        self._starting: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: PolledSocket | None = None
        self._guards: list[endpoints.StrangerLimit | PolledSocket] = []
        self._stopping = False

    async def start(self) -> None:
        """Bind and serve. Raises `EndpointError` if the address cannot or must not be served."""
        context = open_context()
        sock = context.socket(zmq.ROUTER)
        try:
            endpoints.tune(sock, max_part_bytes=self._limits.part_bytes)
            sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
            guard = self._access.guard(self.endpoint, self._identity)
            self._guards = [endpoints.serve_zap(context, guard, self._on_refused)]
            if is_tcp(self.endpoint):
                self._guards.append(endpoints.StrangerLimit(context, sock, self._on_crowd))
            self.endpoint = endpoints.bind(sock, self.endpoint, guard)
        except BaseException:
            while self._guards:
                self._guards.pop().close()
            drop_context(context)
            raise
        self._context = context
        self._stopping = False
        self._socket = PolledSocket(sock, 2, self._on_frames)

    async def stop(self, grace_s: float = 0.5, linger_ms: int = ANSWERS_LINGER_MS) -> None:
        """Let handlers finish for `grace_s` and answer the rest `unavailable`.

        Peers that are slow to read have `linger_ms` to receive the last answers. All tasks, sockets and ipc
        files are gone at the end.
        """
        if self._socket is None or self._context is None:
            return
        self._stopping = True
        if self._starting is not None:
            self._starting.cancel()
        for arrival in self._lanes.drain():
            self._refuse(arrival, Fault("unavailable", "stopping", STOP_RETRY_MS))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks and (stuck := (await asyncio.wait(self._tasks, timeout=CANCEL_LIMIT_S))[1]):
            log.error("%d handlers of %s do not end when cancelled", len(stuck), self._service)
        *limit, zap = reversed(self._guards)
        for each in limit:
            each.close()
        self._socket.close(linger_ms)
        zap.close()
        context, self._context, self._socket, self._guards = self._context, None, None, []
        await end_context(context)
        endpoints.remove_ipc_file(self.endpoint)
        self.sessions.clear()
        self._identities.clear()

    # --- arrivals ------------------------------------------------------------------------------------

    def _on_frames(self, copied: list[bytes], rest: list[Buffer]) -> None:
        try:
            identity, head = copied
            header = read_header(head)
        except (ValueError, ProtocolError):
            self.counters["malformed"] += 1
            return
        session = self.sessions.get(identity)
        if session is not None and session.client != header.client:
            self.counters["malformed"] += 1
        elif header.kind == Kind.REQUEST:
            self._on_request(identity, session, header, head, rest)
        elif header.kind == Kind.BYE:
            if session is not None:
                self._drop_session(identity)
                self._book.forget(session.client)
        else:
            self.counters["malformed"] += 1

    def _on_request(
        self, identity: bytes, session: Peer | None, header: Header, head: bytes, rest: list[Buffer]
    ) -> None:
        try:
            message = read_request(head)
            attachments = read_attachments(header, rest)
        except ProtocolError as error:
            self.counters["malformed"] += 1
            self._send(identity, self._frames(header, Fault("invalid", str(error))))
            return
        if isinstance(message, Hello):
            self._send(identity, self._frames(header, self._greet(identity, header.client, message)))
        elif session is None:
            self.counters["unknown"] += 1
            self._send(identity, write_frames(Kind.WHO, header.client, header.request, 0, None, ()))
        elif self._stopping:
            self._send(identity, self._frames(header, Fault("unavailable", "stopping", STOP_RETRY_MS)))
        elif isinstance(self._access, RoleKeys) and not may_ask(session.key, type(message)):
            self._count_refused("forbidden", "forbidden")
            what = type(message).__name__
            log.warning("%s of role %s asked the %s for %s", session.name, session.key, self._service, what)
            text = f"the role {session.key} may not ask the {self._service} for {what}"
            self._send(identity, self._frames(header, Fault("forbidden", text)))
        else:
            self.sessions.move_to_end(identity)
            self._admit(identity, WaitingRequest(session, header, message, attachments))

    def _on_refused(self) -> None:
        self._count_refused("strangers", "stranger")
        log.warning("a connection without a key of this run was refused by the %s", self._service)

    def _on_crowd(self) -> None:
        self._count_refused("crowd", "crowd")
        if self.counters["crowd"] % CROWD_LOGGED == 1:
            log.warning("too many connections without a key: the %s closes the oldest", self._service)

    def _count_refused(self, counter: str, reason: str) -> None:
        self.counters[counter] += 1
        REFUSED.labels(self._service, reason).inc()

    def _admit(self, identity: bytes, arrival: WaitingRequest) -> None:
        header = arrival.header
        admission = self._book.admit(header.client, header.request, header.floor)
        if admission is Admission.RUN:
            size_bytes = sum(map(len, arrival.attachments))
            if self._lanes.push(self._lanes.lane_of(arrival.message), arrival, size_bytes):
                self.counters["requests"] += 1
                self._start_soon()
            else:
                self.counters["busy"] += 1
                self._refuse(arrival, Fault("busy", f"{self._service} has its fill of these", FULL_RETRY_MS))
        elif admission is Admission.JOIN:
            self.counters["joined"] += 1
        elif admission is Admission.REPLAY:
            self.counters["replayed"] += 1
            self._send(identity, self._book.reply(header.client, header.request))
        elif admission is Admission.BUSY:
            self.counters["busy"] += 1
            fault = Fault("busy", f"{arrival.peer.name} has too many requests under way", BUSY_RETRY_MS)
            self._send(identity, self._frames(header, fault))

    def _refuse(self, arrival: WaitingRequest, fault: Fault) -> None:
        """Answer a request that has not begun with a fault. If the client retries it, it runs."""
        header = arrival.header
        if self._book.finish(header.client, header.request, None):
            self._send(self._identities.get(header.client), self._frames(header, fault))

    def _start_soon(self) -> None:
        if self._starting is None:
            self._starting = asyncio.get_running_loop().call_soon(self._start_next)

    def _start_next(self) -> None:
        """Begin one request.

        Between the beginnings of two requests the event loop runs: it reads the socket and continues the
        running requests. A newly arrived request may therefore overtake waiting ones, and the answer to a
        finished request waits for the beginning of at most one other request.
        """
        self._starting = None
        if (following := self._lanes.pop()) is None:
            return
        lane, arrival = following
        task = asyncio.get_running_loop().create_task(self._run(arrival))
        self._tasks.add(task)
        task.add_done_callback(partial(self._over, lane))
        self._start_soon()

    def _over(self, lane: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._lanes.done(lane)
        if len(self._lanes) and not self._stopping:
            self._start_soon()

    def _greet(self, identity: bytes, client: int, hello: Hello) -> Message:
        if hello.schema != SCHEMA:
            text = f"{hello.name} speaks schema {hello.schema}, {self._service} speaks {SCHEMA}"
            return Fault("schema", f"{text}: update the older one")
        if hello.job != self._job:
            return Fault("schema", f"{self._service} here belongs to job {self._job!r}, not to {hello.job!r}")
        before = self._identities.get(client)
        if before is not None and before != identity:
            self._drop_session(before)
        elif before is None and len(self.sessions) >= MAX_SESSIONS:
            self._drop_session(next(iter(self.sessions)))
        assert self._socket is not None
        key = self._socket.user
        self.sessions[identity] = Peer(hello.role, hello.name, client, key="" if key == ANYBODY else key)
        self._identities[client] = identity
        return Welcome(SCHEMA, self._service)

    def _drop_session(self, identity: bytes) -> None:
        session = self.sessions.pop(identity, None)
        if session is not None and self._identities.get(session.client) == identity:
            del self._identities[session.client]

    # --- answers -------------------------------------------------------------------------------------

    async def _run(self, arrival: WaitingRequest) -> None:
        session, header, message, attachments = arrival
        reply: Message
        reply_attachments: Sequence[Buffer] = ()
        try:
            answer = await self._handler(session, message, attachments)
            reply, reply_attachments = answer if isinstance(answer, tuple) else (answer, ())
        except FaultError as error:
            reply = Fault(error.kind, error.message, error.retry_after_ms)
        except ProtocolError as error:
            reply = Fault("invalid", str(error))
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            reply = Fault("unavailable", f"{self._service} stops", STOP_RETRY_MS)
        except Exception as error:
            log.exception("handler of %s failed", type(message).__name__)
            reply = Fault("internal", f"{type(error).__name__}: {error}")
        try:
            frames = self._frames(header, reply, reply_attachments)
        except ProtocolError as error:
            log.exception("reply to %s cannot be sent", type(message).__name__)
            reply = Fault("internal", str(error))
            frames = self._frames(header, reply)
        passing = isinstance(reply, Fault) and reply.kind in ("busy", "unavailable")
        if self._book.finish(header.client, header.request, None if passing else frames):
            self._send(self._identities.get(header.client), frames)

    def _frames(self, header: Header, reply: Message, attachments: Sequence[Buffer] = ()) -> list[Buffer]:
        if isinstance(reply, Fault):
            self.counters["faults"] += 1
        return write_frames(Kind.REPLY, header.client, header.request, 0, reply, attachments)

    def _send(self, identity: bytes | None, frames: Sequence[Buffer]) -> None:
        if identity is None or self._socket is None or not self._socket.send([identity, *frames]):
            self.counters["undelivered"] += 1
