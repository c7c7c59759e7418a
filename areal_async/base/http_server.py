"""The HTTP server of every service: metrics, gateway, rewards, sandbox. It is uvicorn's protocol on
httptools, with limits.

    server = HttpServer(app, listen(LOOPBACK, 0), HttpLimits(connections=64), name="metrics")
    server.start()
    ...
    await server.close()

Promises: clients together never exceed `HttpLimits`. The limits cover connections, bytes of headers and
bodies, and seconds to send a request, to receive an answer, and to be idle. A full server closes the
connection that was idle for the longest time, so that it can always accept a new one. If every connection has
a request in flight, a new connection gets status 503. Half of the process's descriptors stay free for other
uses. Faults of clients are logged. Repeated faults of one kind are counted, not logged again (`base/log.py`).
If the application raises an error, the request gets status 500.

The server does not share its capacity fairly between clients with requests in flight. That is the
application's task.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from areal_async.base.addresses import LOOPBACK, is_loopback
from areal_async.base.errors import EndpointError
from areal_async.base.log import get_logger

CLOSE = {"connection": "close"}
FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
BACKLOG = 512
ACCEPTED_AT_ONCE = 32
LEAST_RATE = 64 << 10
"""Least rate of a client, in bytes per second. A client that sends a body or receives an answer more slowly
counts as too slow."""
SWEEP_S = 0.5
MOST_AHEAD = 64  # requests of one connection that wait for the answer to an earlier one
LOGGED_CHARS = 300  # most logged characters of a client's input

Phase = Literal["headers", "body", "answer", "unread", "idle"]
"""Phase of a client.

The client sends headers or a body, waits for or receives its answer, still sends its body after the answer
(`unread`), or is idle.
"""

log = get_logger("http")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one server, for all its clients together and for each client."""

    connections: int = 256  # at most; never more than half of the descriptors that the process may open
    header_bytes: int = 32 << 10  # most bytes of the request line and all headers of one request
    held_bytes: int = 128 << 20  # bodies of all requests in flight; a request beyond it gets status 503
    header_s: float = 10.0
    """Longest time to receive the headers, from the request's first byte or, for a new connection, from its
    start."""
    body_s: float = 20.0
    """Longest time for a body to arrive or an answer to be received, beyond the time needed at
    `LEAST_RATE`."""
    answer_s: float = 120.0  # longest time from the end of the headers to the end of the answer
    idle_s: int = 5  # longest time between an answer and the next request
    unread_s: float = 5.0
    """Seconds in which the rest of an unwanted body is read before the connection closes, because closing at
    once could lose the answer."""
    rest_s: float = 0.5  # pause before accepting again if the process is out of descriptors


class BodyTooLong(Exception):
    """A body is above the limit. The rest of it is not read."""


class ServerFull(Exception):
    """The bodies in flight have reached `HttpLimits.held_bytes`. The client may retry later."""


def listen(host: str, port: int, *, guarded: bool = False) -> socket.socket:
    """Return a listening socket. Port 0 picks a free port.

    Raises `EndpointError` for an address that other machines reach, unless a token guards the server
    (`guarded`). Raises `OSError` if the address cannot be bound.
    """
    host = host.strip("[]")
    if not guarded and not is_loopback(host):
        raise EndpointError(
            f"refusing to serve {host} without a token: other machines reach it. Give one, or use {LOOPBACK}."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    sock.setblocking(False)
    # Connections inherit this option. asyncio sets it only on sockets that name their protocol, and these do
    # not. Without it, an answer of two writes waits 40 ms for the first acknowledgement.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def connection_of(request: Request) -> Connection:
    """Return the connection of a request."""
    connection: Connection = request.scope["state"]["connection"]
    return connection


def header_of(request: Request, name: bytes) -> str:
    """Return a header, or an empty text. Much faster than `request.headers`. `name` is in lower case."""
    return next((value.decode("latin-1") for key, value in request.scope["headers"] if key == name), "")


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Return the body of a request. Its size counts against the server's limit until the request is answered.

    Raises `BodyTooLong`, if possible from the declared length, and `ServerFull`.
    """
    declared = header_of(request, b"content-length")
    if declared.isdecimal() and int(declared) > most_bytes:
        raise BodyTooLong
    connection, body = connection_of(request), bytearray()
    async for part in request.stream():
        if len(body) + len(part) > most_bytes:
            raise BodyTooLong
        connection.hold(len(part))
        body += part
    return bytes(body)


class HttpServer:
    """A server of an ASGI application on a listening socket, which it owns. `name` is for the log."""

    def __init__(
        self,
        app: ASGIApp,
        listening: socket.socket,
        limits: HttpLimits,
        *,
        name: str,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.limits = limits
        self.name = name
        self.held_bytes = 0
        self._app = app
        self._listening = listening
        self._tls = tls
        self.most_connections = min(
            limits.connections, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        )
        self.connections: dict[Connection, None] = {}  # oldest first
        self._arriving: dict[asyncio.Task[None], None] = {}
        """Accepted sockets that are not yet connections, because their handshake is in progress."""
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._sweeping: asyncio.TimerHandle | None = None
        self.state = ServerState()
        self.config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            log_config=None,
            lifespan="off",
            http="httptools",
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=limits.idle_s,
        )
        self.config.load()
        host, port = listening.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if tls else 'http'}://{host}:{port}"

    def start(self) -> None:
        """Start to accept connections, in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listening, self._accept)

    async def close(self, grace_s: float = 1.0) -> None:
        """Stop accepting, give requests in flight `grace_s` to end, then close all connections."""
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening)
        self._listening.close()
        for task in self._arriving:
            task.cancel()
        for connection in list(self.connections):
            connection.shutdown()
        if tasks := set(self.state.tasks):
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for request in late:
                request.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for connection in list(self.connections):
            connection.transport.abort()
        await self._quiet.wait()
        if self._sweeping is not None:
            self._sweeping.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if self._arriving and not self._tls and self._is_full():
                return  # they soon become connections, and one of these can then make room
            try:
                sock = self._listening.accept()[0]
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                # asyncio's own server would retry as often as its backlog is long, with tracebacks.
                self.fault("cannot accept connections", error.strerror)
                self._make_room(more=True)
                self._loop.remove_reader(self._listening)
                self._loop.call_later(self.limits.rest_s, self._go_on)
                self._sweep_later()
                return
            sock.setblocking(False)
            if not self._make_room():
                self.fault("connection refused, all have requests under way")
                with contextlib.suppress(OSError), sock:
                    sock.send(FULL)
                continue
            self._quiet.clear()
            task = self._loop.create_task(self._adopt(sock))
            self._arriving[task] = None
            task.add_done_callback(partial(self._arrived, sock))

    def _arrived(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            sock.close()  # a task that never began has no transport that closes the socket
        self._arriving.pop(task, None)
        self._check_quiet()

    def _go_on(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening, self._accept)

    async def _adopt(self, sock: socket.socket) -> None:
        limit_s = self.limits.header_s if self._tls else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: Connection(self), sock, ssl=self._tls, ssl_handshake_timeout=limit_s
            )
        except OSError:  # includes errors of TLS
            self.fault("connection lost before its first request")

    def fault(self, kind: str, example: object = "", *, cause: Exception | None = None) -> None:
        """Log a fault of a client. Repeated faults of one kind are counted. With `cause`, log an error of
        this process instead."""
        fields = {"server": self.name, "example": str(example)[:LOGGED_CHARS]}
        if cause is not None:
            log.error(kind, raised="".join(traceback.format_exception(cause)), **fields)
        else:
            log.info(kind, **fields)

    def opened(self, connection: Connection) -> None:
        self.connections[connection] = None
        self._sweep_later()

    def closed(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        self._check_quiet()

    def _check_quiet(self) -> None:
        if not self.connections and not self._arriving:
            self._quiet.set()

    def _is_full(self) -> bool:
        return len(self.connections) + len(self._arriving) >= self.most_connections

    def _make_room(self, *, more: bool = False) -> bool:
        """Return whether there is room for a connection, closing another if necessary.

        With `more`, always close one.
        """
        if not more and not self._is_full():
            return True
        found = min(
            (one for one in self.connections if one.worth is not None),
            key=lambda one: (one.worth, one.since_s),
            default=None,
        )
        if self._tls and self._arriving and (found is None or found.worth):
            handshake = next(iter(self._arriving))
            self._arriving.pop(handshake)
            handshake.cancel()
            return True
        if found is None:
            return False
        self.fault("connection closed for a new one")
        self.closed(found)
        found.transport.abort()
        return True

    def _sweep_later(self) -> None:
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        now_s = time.monotonic()
        for connection in list(self.connections):
            if fault := connection.too_slow(now_s):
                self.fault(fault)
                connection.transport.abort()
        if self.connections:
            self._sweep_later()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"]["connection"]
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                connection.trusted = connection.trusted or message["status"] < 400
            await send(message)

        encodings = [value for name, value in scope["headers"] if name == b"transfer-encoding"]
        try:
            if encodings and [one.lower() for one in encodings] != [b"chunked"]:
                self.fault("request with an unknown transfer encoding")
                text = "the only Transfer-Encoding served is chunked"
                await PlainTextResponse(text, 501, CLOSE)(scope, receive, watched)
            else:
                await self._app(scope, receive, watched)
        except ClientDisconnect:
            self.fault("client left while it sent a request")
        except Exception as error:
            self.fault(f"request failed with {type(error).__name__}", str(error), cause=error)
            if not started:
                text = "the server failed; its log has the reason"
                await PlainTextResponse(text, 500, CLOSE)(scope, receive, watched)
        finally:
            self.held_bytes -= connection.held_bytes
            connection.held_bytes = 0


class Connection(HttpToolsProtocol):
    """One client's connection, with the start time of its phase.

    The parser reads ahead: `cycle` is the newest request, and `_answered` is the one that is being answered.
    """

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server.config, server.state, {"connection": self})
        self._server = server
        self.access_log = False
        self.logger = _FaultLogger(server)  # type: ignore[assignment]
        self.phase: Phase = "headers"
        self.since_s = time.monotonic()
        self.trusted = False  # whether it has got an answer other than a refusal
        self.on_lost: Callable[[], object] | None = None
        """Function to call when the connection is lost."""
        self.held_bytes = 0
        self._answered: RequestResponseCycle | None = None
        self._arriving: Literal["", "headers", "body"] = ""  # part of the newest request
        self._header_bytes = 0  # of the newest request, with its trailers
        self._heard = False  # whether the parser got further with the latest data
        self._refused = ""  # why no more is read
        self._received_bytes = 0
        self._stuck_s: float | None = None  # since when the client receives less than the server sends
        self._stuck_bytes = 0

    def hold(self, size_bytes: int) -> None:
        """Count `size_bytes` against the limit for bodies until the request is answered. Raises
        `ServerFull`."""
        if self._server.held_bytes + size_bytes > self._server.limits.held_bytes:
            self._server.fault("request refused, too much under way")
            raise ServerFull
        self._server.held_bytes += size_bytes
        self.held_bytes += size_bytes

    def fault(self, kind: str, example: str) -> None:
        """Log a client's fault. `kind` must have few values, because faults are counted by it."""
        self._server.fault(kind, example)

    async def delivered(self) -> bool:
        """Return whether everything sent so far has left this process while the client was connected.

        Waits until that is known. Call it before the last, empty part of an answer.
        """
        await self.flow.drain()
        return not self.transport.is_closing()

    @property
    def worth(self) -> int | None:
        """Return the connection's worth, or None if it must never be closed.

        If the server needs room, it closes the connection with the least worth first.
        """
        if self.phase == "answer":
            return None
        return 2 if self.phase == "body" or self._stuck_s is not None else int(self.trusted)

    def too_slow(self, now_s: float) -> str:
        """Return the fault of a client that is too slow, or an empty text."""
        limits, age_s = self._server.limits, now_s - self.since_s
        if self._stuck_s is not None:
            taken = max(0, self._stuck_bytes - self.transport.get_write_buffer_size())
            if now_s - self._stuck_s > limits.body_s + taken / LEAST_RATE:
                return "answer taken too slowly"
            if self.phase != "answer":
                return ""
        match self.phase:
            case "headers" if age_s > limits.header_s:
                return "headers sent too slowly"
            case "body" if age_s > min(limits.body_s + self._received_bytes / LEAST_RATE, limits.answer_s):
                return "body sent too slowly"
            case "unread" if age_s > limits.unread_s:
                return "body sent that nobody wants"
            case "answer" if age_s > limits.answer_s:
                return "no end of an answer"
        return ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Written data is either sent or awaited, so `delivered` knows. With a high mark of 0, TLS would
        # stall.
        transport.set_write_buffer_limits(high=1, low=0)
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._give_up()
        self._server.closed(self)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self.phase == "idle":
            self._enter("headers")
        self._received_bytes += len(data)
        self._heard = False
        super().data_received(data)
        if not self._heard and not self._refused:  # the parser keeps what it cannot hand on yet
            try:
                self._count(len(data))
            except ValueError as error:
                self.send_400_response(str(error))
        self._settle()

    def on_message_begin(self) -> None:
        self._arriving, self._header_bytes = "headers", 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(": \r\n"))
        if self._arriving == "headers":  # trailers are not served
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._arriving = "body"
        if len(self.pipeline) >= MOST_AHEAD:
            raise ValueError("too many requests before an answer")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            raise ValueError("a request names one host")  # RFC 9112, 3.2
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._heard = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._arriving, self._heard = "", True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        assert self._answered is not None
        self._answered.body.clear()  # no caller reads the rest of the body
        super().on_response_complete()
        if self._refused and self._answered.response_complete:
            super().send_400_response(self._refused)
        self._settle()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _count(self, size_bytes: int) -> None:
        """Count bytes of the request line, of headers and of trailers. Raises ValueError beyond the limit."""
        self._heard = True
        self._header_bytes += size_bytes
        if self._header_bytes > self._server.limits.header_bytes:
            raise ValueError("the headers are too long")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck_s, self._stuck_bytes = time.monotonic(), self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stuck_s = None

    def send_400_response(self, msg: str) -> None:
        """Refuse the newest request, and read no more. Earlier requests are answered first."""
        self._refused = msg
        if self.pipeline and self._arriving == "body":
            self.pipeline.popleft()
        one = self._answered
        if one is None or (one.response_complete and not (one is self.cycle and self._arriving == "body")):
            super().send_400_response(msg)
        elif one is self.cycle and self._arriving == "body":
            begun = one.response_started
            self._give_up()
            if begun:
                self.transport.abort()
            else:
                super().send_400_response(msg)

    def _give_up(self) -> None:
        """Let the running application know that nobody waits for its answer."""
        self.pipeline.clear()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _unsupported_upgrade_warning(self) -> None:
        """Serve the request without the upgrade, as the last one of the connection."""
        self.cycle.keep_alive = False

    def _settle(self) -> None:
        """Determine the phase of the client."""
        if self._answered is None or self._answered.response_complete:
            if self._arriving == "body":
                self._enter("unread")
            elif self.phase != "headers":
                self._enter("idle")
        else:
            self._enter("body" if self._answered.more_body else "answer")

    def _enter(self, phase: Phase) -> None:
        if phase == self.phase:
            return
        # A body is part of the answered request, so both phases count from the end of the headers.
        if (self.phase, phase) != ("body", "answer"):
            self.since_s = time.monotonic()
        if phase == "body":
            self._received_bytes = 0
        self.phase = phase


class _FaultLogger:
    """A logger for uvicorn that logs its messages about clients as faults of these clients."""

    level = logging.WARNING

    def __init__(self, server: HttpServer) -> None:
        self._server = server

    def warning(self, message: str, *_: Any, **__: Any) -> None:
        self._server.fault(message.strip())

    error = warning
