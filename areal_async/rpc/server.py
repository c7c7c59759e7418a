"""The answering side of the RPC: a ROUTER socket in front of one async handler.

Promises:
- A request runs at most once at a time, and not again while its reply is remembered (`reply_book.py`).
- The handshake requires the secret, so no message of a peer without it is received.
- Every well-formed request is answered: with the handler's reply, or with a typed `Fault`.
- No input of a peer ends the server. An invalid message is answered `invalid` if it names a request, and
  otherwise counted and dropped. No request is handled before a hello with our schema and job.
- Requests in flight are limited per client (`busy`), frames by size, queues by high-water marks.
- After `stop`, no task, socket or ipc file is left; requests cut short were answered `unavailable`, and the
  last answers reached every peer that reads within `linger_ms`.
- Requests begin in the order of their lanes (`lanes.py`): a flood of one kind does not delay the others. If
  its lane is full, a request is answered `busy`.

It does not promise order between concurrent requests, and it never cancels a handler because its client left:
the handler may be half-way through a write.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import zmq
from typing_extensions import Buffer

from areal_async.base.errors import FaultError, ProtocolError
from areal_async.rpc import endpoints
from areal_async.rpc.by_file import FilePart, ServerFiles, read_parts, write_parts
from areal_async.rpc.endpoints import ANYBODY
from areal_async.rpc.frames import (
    BY_FILE,
    MAX_MESSAGE_BYTES,
    READS_FILES,
    Header,
    Kind,
    read_attachments,
    read_header,
    read_request,
    write_frames,
)
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
READ_HERE_BYTES = 4 << 20  # Attachments in a file above it are read in a thread
FULL_RETRY_MS = 50
STOP_RETRY_MS = 100
CANCEL_LIMIT_S = 5.0
CROWD_LOGGED = 1000  # One line for so many connections that were closed for want of room
ANSWERS_LINGER_MS = 2000


@dataclass(frozen=True)
class Peer:
    """Who asks, as said in its hello; `client` is the id that all its connections have. `reads_files`: it can
    be answered with parts of the server's own files. `key` is the role that its key or password is of, empty
    where roles are not told apart."""

    role: str
    name: str
    client: int = 0
    reads_files: bool = False
    key: str = ""


Answer = Message | tuple[Message, Sequence[Buffer | FilePart]]
Handler = Callable[[Peer, Any, list[memoryview]], Awaitable[Answer]]


class WaitingRequest(NamedTuple):
    """A request that waits for its turn. `parts`: where its attachments lie, if they are in a file."""

    peer: Peer
    header: Header
    message: Request[Any]
    attachments: list[memoryview]
    parts: Sequence[FilePart | None] = ()


def by_type(service: str, handlers: Mapping[type[Request[Any]], Handler]) -> Handler:
    """Return the handler of a service that answers each type of request in `handlers` by its own function."""

    async def handle(peer: Peer, request: Request[Any], attachments: list[memoryview]) -> Answer:
        handler = handlers.get(type(request))
        if handler is None:
            raise FaultError("invalid", f"the {service} does not answer {type(request).__name__}")
        return await handler(peer, request, attachments)

    return handle


class Server:
    """A server of `handler` at `endpoint` (`ipc://PATH` or `tcp://HOST:PORT`; port 0 picks one, see
    `.endpoint`) for clients with the secret or keys of `access`. `identity` is the name of the server's key,
    by default its role's. With keys of roles, a peer may make only the requests of its role
    (`permissions.py`).

    `handler(peer, message, attachments)` returns a message, or a message and its attachments; a `FaultError`
    that it raises becomes the answer, and any other error is logged and answered `internal`. `lanes` must not
    be shared with another server. With `files`, clients of this host send large attachments in files, and get
    `FilePart`s back.
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
        files: ServerFiles | None = None,
        identity: str = "",
    ) -> None:
        self.endpoint = endpoint
        self.counters: Counter[str] = Counter()
        """Events since the start; `unknown` are requests before a hello, such as after a restart,
        `strangers` connections that were not let in, `crowd` those closed to make room for others,
        `forbidden` requests that are not the asker's."""
        self._service = service
        self._job = job
        self._limits = limits or ServerLimits()
        self._handler = handler
        self._access = access
        self._identity = identity
        self._book = ReplyBook(self._limits, MAX_SESSIONS)
        self.sessions: OrderedDict[bytes, Peer] = OrderedDict()  # At most `MAX_SESSIONS`
        self._identities: dict[int, bytes] = {}
        self._lanes = lanes if lanes is not None else Lanes({"all": Lane()})
        self._files = files
        self._starting: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: PolledSocket | None = None
        self._guards: list[endpoints.StrangerLimit | PolledSocket] = []
        self._stopping = False

    async def start(self) -> None:
        """Bind and serve. Raises `EndpointError` when the address cannot or must not be served."""
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
        """Let handlers finish for `grace_s`, answer the rest `unavailable`, hand the last answers to busy
        peers within `linger_ms`, and leave nothing behind."""
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
            parts = read_parts(attachments[0]) if header.flags & BY_FILE and attachments else []
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
            if header.flags & READS_FILES and not session.reads_files:
                session = self.sessions[identity] = replace(session, reads_files=True)
            self.sessions.move_to_end(identity)
            self._admit(identity, WaitingRequest(session, header, message, attachments, parts))

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
            size_bytes = sum(part.size_bytes for part in arrival.parts if part is not None)
            size_bytes += sum(map(len, arrival.attachments))
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
        """Answer a request that is not begun; a retry runs it."""
        header = arrival.header
        if self._book.finish(header.client, header.request, None):
            self._send(self._identities.get(header.client), self._frames(header, fault))

    def _start_soon(self) -> None:
        if self._starting is None:
            self._starting = asyncio.get_running_loop().call_soon(self._start_next)

    def _start_next(self) -> None:
        """Begin one request. Reading the socket and running requests take precedence, so that a new request
        may overtake waiting ones, and a finished
        request waits for at most one new start."""
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
        return Welcome(SCHEMA, self._service, self._files.here if self._files is not None else None)

    def _drop_session(self, identity: bytes) -> None:
        session = self.sessions.pop(identity, None)
        if session is not None and self._identities.get(session.client) == identity:
            del self._identities[session.client]

    # --- answers -------------------------------------------------------------------------------------

    async def _run(self, arrival: WaitingRequest) -> None:
        session, header, message, attachments, parts = arrival
        reply: Message
        reply_attachments: Sequence[Buffer | FilePart] = ()
        try:
            if parts:
                attachments = await self._read_files(parts, message.left_in_file)
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

    async def _read_files(self, parts: Sequence[FilePart | None], left: int) -> list[memoryview]:
        sizes = [part.size_bytes for part in parts if part is not None]
        size_bytes = sum(sizes)
        if self._files is None or size_bytes > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"{self._service} takes no attachments of {size_bytes} bytes in a file")
        if sum(sizes[: max(0, len(sizes) - left)]) > READ_HERE_BYTES:
            return await asyncio.to_thread(self._files.read, parts, left)
        return self._files.read(parts, left)

    def _frames(
        self, header: Header, reply: Message, attachments: Sequence[Buffer | FilePart] = ()
    ) -> list[Buffer]:
        if isinstance(reply, Fault):
            self.counters["faults"] += 1
        rest, flags = [each for each in attachments if not isinstance(each, FilePart)], 0
        if len(rest) < len(attachments):
            parts = [each if isinstance(each, FilePart) else None for each in attachments]
            rest, flags = [write_parts(parts), *rest], BY_FILE
        return write_frames(Kind.REPLY, header.client, header.request, 0, reply, rest, flags)

    def _send(self, identity: bytes | None, frames: Sequence[Buffer]) -> None:
        if identity is None or self._socket is None or not self._socket.send([identity, *frames]):
            self.counters["undelivered"] += 1
