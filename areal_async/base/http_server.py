"""The HTTP server of every service: metrics, gateway, rewards, sandbox. It is uvicorn's protocol, bounded.

    server = HttpServer(app, listen(LOOPBACK, 0), HttpLimits(connections=64), name="metrics")
    server.start()
    ...
    await server.close()

Promises: clients together take at most what `HttpLimits` allows: connections, bytes of headers and of bodies,
and seconds to send a request, to take an answer, and to be idle. A full server closes the connection that has
been idle longest, so that a new one is accepted. If every connection has a request in flight, the new one
gets status 503. Half of the process's file descriptors stay free for other uses. Errors of clients are
counted, and each kind is logged once a minute. If an application fails, the answer has status 500.

Fairness between clients with requests in flight is not promised; that is the task of the application.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
import ssl
import time
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import h11
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from areal_async.base.addresses import LOOPBACK, is_loopback
from areal_async.base.errors import EndpointError
from areal_async.base.log import get_logger

CLOSE = {"connection": "close"}
FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
BACKLOG = 512
ACCEPTED_AT_ONCE = 32
LEAST_RATE = 64 << 10
"""Bytes a second. A client that sends a body, or takes an answer, more slowly is too slow."""
SWEEP_S = 0.5
LOGGED_EVERY_S = 60.0
LOGGED_CHARS = 300  # Most characters of what a client sent that are logged

Phase = Literal["headers", "body", "answer", "unread", "idle"]
"""Phase of a client: it sends headers or a body, waits for or takes its answer, still sends after the answer,
or is idle after it."""

log = get_logger("http")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one server, for all its clients together and for each of them."""

    connections: int = 256  # At most; never more than half of what the process may open
    header_bytes: int = 32 << 10  # Most bytes of the request line and all headers of one request
    held_bytes: int = 128 << 20  # Bodies of all requests under way; a request beyond it is told 503
    header_s: float = 10.0
    """Longest time from the first byte of a request, or the connection, to the end of the headers."""
    body_s: float = 20.0
    """Longest time in seconds to receive a body or to send an answer, in addition to their time at
    `LEAST_RATE`."""
    answer_s: float = 120.0  # Longest time from the end of the headers to the end of the answer
    idle_s: int = 5  # Between an answer and the next request
    unread_s: float = 5.0
    """The rest of a body that nobody wants is taken so long: to close at once could lose the answer."""
    rest_s: float = 0.5  # Before another try to accept, when the process is out of descriptors


class BodyTooLong(Exception):
    """A body is above the limit, found before more of it is read."""


class ServerFull(Exception):
    """The bodies under way are at `HttpLimits.held_bytes`: to be asked again later."""


def listen(host: str, port: int, *, guarded: bool = False) -> socket.socket:
    """Return a listening socket; port 0 picks one. Raises `EndpointError` for an address that other machines
    reach, unless the server is `guarded` by a token, and OSError where it cannot be bound."""
    host = host.strip("[]")
    if not guarded and not is_loopback(host):
        raise EndpointError(
            f"refusing to serve {host} without a token: other machines reach it. Give one, or use {LOOPBACK}."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    sock.setblocking(False)
    # Connections inherit it. asyncio sets it only on sockets that name their protocol, which these do not;
    # without it an answer of two writes waits 40 ms for the acknowledgement of the first.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def connection_of(request: Request) -> Connection:
    """Return the connection that a request came over."""
    connection: Connection = request.state.connection
    return connection


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Return the body of a request, which counts against the server's limit until the request is answered.
    Raises `BodyTooLong`, from the declared length where there is one, and `ServerFull`."""
    declared = request.headers.get("content-length", "")
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
    """Serves an ASGI application on a listening socket, which it owns. `name` is for the log."""

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
        self.faults = Faults(name)
        self.held_bytes = 0
        self._app = app
        self._listening = listening
        self._tls = tls
        self.most_connections = min(
            limits.connections, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        )
        self.connections: dict[Connection, None] = {}  # Oldest first
        self._arriving: dict[asyncio.Task[None], None] = {}
        """Accepted sockets that are not yet connections: they shake hands."""
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._sweeping: asyncio.TimerHandle | None = None
        self.state = ServerState()
        self.config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            log_config=None,
            lifespan="off",
            http="h11",
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=limits.idle_s,
            h11_max_incomplete_event_size=limits.header_bytes,
        )
        self.config.load()
        host, port = listening.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if tls else 'http'}://{host}:{port}"

    def start(self) -> None:
        """Accept connections, in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listening, self._accept)

    async def close(self, grace_s: float = 1.0) -> None:
        """Accept nothing more, give requests under way `grace_s` to end, then end all."""
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
        self.faults.report_due(math.inf)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if self._arriving and not self._tls and self._is_full():
                return  # They are connections in a moment, and then one of them can make room
            try:
                sock = self._listening.accept()[0]
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                # asyncio's own server would try again as often as its backlog is long, with tracebacks.
                self.faults.count("cannot accept connections", error=error.strerror)
                self._make_room(more=True)
                self._loop.remove_reader(self._listening)
                self._loop.call_later(self.limits.rest_s, self._go_on)
                self._sweep_later()
                return
            sock.setblocking(False)
            if not self._make_room():
                self.faults.count("connection refused, all have requests under way")
                with contextlib.suppress(OSError), sock:
                    sock.send(FULL)
                continue
            self._quiet.clear()
            task = self._loop.create_task(self._adopt(sock))
            self._arriving[task] = None
            task.add_done_callback(partial(self._arrived, sock))

    def _arrived(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            sock.close()  # a task that never began had no transport that would
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
        except OSError:  # of TLS among them
            self.faults.count("connection lost before its first request")

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
        """Return whether there is a place for a connection, closing another if need be; with `more`, always
        close one."""
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
        self.faults.count("connection closed for a new one")
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
                self.faults.count(fault)
                connection.transport.abort()
        self.faults.report_due(now_s)
        if self.connections or self.faults.unreported:
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

        names = [name for name, _ in scope["headers"]]
        try:
            if b"transfer-encoding" in names and b"content-length" in names:
                # Two answers to where the body ends are how requests are smuggled past a proxy.
                self.faults.count("request with two lengths")
                text = "a request has a Content-Length or a Transfer-Encoding, not both"
                await PlainTextResponse(text, 400, CLOSE)(scope, receive, watched)
            else:
                await self._app(scope, receive, watched)
        except ClientDisconnect:
            self.faults.count("client left while it sent a request")
        except Exception as error:
            self.faults.count(f"request failed with {type(error).__name__}", error=str(error), cause=error)
            if not started:
                text = "the server failed; its log has the reason"
                await PlainTextResponse(text, 500, CLOSE)(scope, receive, watched)
        finally:
            self.held_bytes -= connection.held_bytes
            connection.held_bytes = 0


class _BoundedParser(h11.Connection):
    """A parser with limits. h11 limits only headers that arrive in pieces; headers that arrive at once are
    counted here."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(h11.SERVER, most_bytes)
        self._most_bytes = most_bytes

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request | h11.EndOfMessage):
            size = sum(len(name) + len(value) + len(": \r\n") for name, value in event.headers.raw_items())
            if isinstance(event, h11.Request):
                size += len(event.method) + len(event.target) + len("  HTTP/1.1\r\n")
            if size > self._most_bytes:
                raise h11.RemoteProtocolError("the headers are too long", error_status_hint=431)
        return event


class Connection(H11Protocol):
    """One client's connection, with the time at which its phase began."""

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server.config, server.state, {"connection": self})
        self._server = server
        self.conn = _BoundedParser(server.limits.header_bytes)
        self.access_log = False
        self.logger = _Counting(server.faults)  # type: ignore[assignment]
        self.phase: Phase = "headers"
        self.since_s = time.monotonic()
        self.trusted = False  # It was answered something other than a refusal
        self.held_bytes = 0
        self._received_bytes = 0
        self._stuck_s: float | None = None  # Since when the client takes less than it is sent
        self._stuck_bytes = 0

    def hold(self, size_bytes: int) -> None:
        """Take so much of the room for bodies until the request is answered. Raises `ServerFull`."""
        if self._server.held_bytes + size_bytes > self._server.limits.held_bytes:
            self._server.faults.count("request refused, too much under way")
            raise ServerFull
        self._server.held_bytes += size_bytes
        self.held_bytes += size_bytes

    def fault(self, kind: str, **fields: Any) -> None:
        """Count, for the log, something that the client did wrong; there are few kinds."""
        self._server.faults.count(kind, **fields)

    async def delivered(self) -> bool:
        """Return whether all that was sent so far has left this process while the client was there. Waits
        until that is known; to be asked before the last, empty part of an answer."""
        await self.flow.drain()
        return not self.cycle.disconnected and not self.transport.is_closing()

    @property
    def worth(self) -> int | None:
        """Return the worth of a connection. When places are short, the connection of the least worth is
        closed first; one with None is never closed."""
        if self.phase == "answer":
            return None
        return 2 if self.phase == "body" or self._stuck_s is not None else int(self.trusted)

    def too_slow(self, now_s: float) -> str:
        """Return the fault of a client that is too slow, "" for none."""
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
        # What is written is gone or waited for, so that `delivered` can tell. With 0, TLS stands still.
        transport.set_write_buffer_limits(high=1, low=0)
        self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._server.closed(self)

    def data_received(self, data: bytes) -> None:
        if self.phase == "idle":
            self._enter("headers")
        self._received_bytes += len(data)
        super().data_received(data)
        self._settle()

    def on_response_complete(self) -> None:
        self.cycle.body.clear()  # nobody will ask for what has come of it
        super().on_response_complete()
        self._settle()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck_s, self._stuck_bytes = time.monotonic(), self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stuck_s = None

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def shutdown(self) -> None:
        if self.conn.our_state is not h11.ERROR:
            super().shutdown()

    def _unsupported_upgrade_warning(self) -> None:
        """Serve the request as it is, and leave the upgrade unanswered."""

    def _settle(self) -> None:
        """Find out the phase."""
        if self.cycle is None or self.conn.their_state is h11.IDLE:
            if self.phase != "headers":
                self._enter("idle")
        elif self.cycle.response_complete:
            self._enter("unread")
        else:
            self._enter("body" if self.conn.their_state is h11.SEND_BODY else "answer")

    def _enter(self, phase: Phase) -> None:
        if phase == self.phase:
            return
        # A body is part of the request that is answered: both count from the end of the headers.
        if (self.phase, phase) != ("body", "answer"):
            self.since_s = time.monotonic()
        if phase == "body":
            self._received_bytes = 0
        self.phase = phase


class Faults:
    """Faults of clients, counted by kind: the first of a kind is logged at once, then their number once a
    minute."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._logged_s: dict[str, float] = {}
        self.unreported: dict[str, dict[str, Any]] = {}  # The fields of the newest of a kind, with the number

    def count(self, kind: str, *, cause: Exception | None = None, **fields: Any) -> None:
        """`cause` makes it an error of ours, whose traceback is logged with the first."""
        number = self.unreported.get(kind, {}).get("number", 0) + 1
        shown = {name: str(value)[:LOGGED_CHARS] for name, value in fields.items()}
        self.unreported[kind] = {"number": number, **shown}
        if kind not in self._logged_s:
            self._report(kind, raised="".join(traceback.format_exception(cause)) if cause else "")

    def report_due(self, now_s: float) -> None:
        for kind in [kind for kind in self.unreported if now_s - self._logged_s[kind] >= LOGGED_EVERY_S]:
            self._report(kind)

    def _report(self, kind: str, raised: str = "") -> None:
        self._logged_s[kind] = time.monotonic()
        fields = {"server": self._server, **self.unreported.pop(kind)}
        if raised:
            log.error(kind, raised=raised, **fields)
        else:
            log.info(kind, **fields)


class _Counting:
    """A logger for uvicorn that counts log lines per client instead of writing them."""

    level = logging.WARNING

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def warning(self, message: str, *_: Any, **__: Any) -> None:
        self._faults.count(message.strip())

    error = warning
