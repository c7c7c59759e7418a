"""Addresses: rules for binding, authentication of peers, and limits on peers before and after authentication.

Promises: no peer is accepted without a secret. The handshake asks for the secret, so messages of other peers
never reach a socket's queue. A socket that other hosts can reach needs keys. An address that another process
serves is never taken over (libzmq alone would silently delete the ipc file of a live server). Every refusal
is an `EndpointError` with advice.

A socket has at most `MOST_STRANGERS` unauthenticated connections, and at most a quarter of the process's
descriptors. Beyond the limit, the connection that was silent for the longest time is closed first
(`StrangerLimit`).

No part of a message may have more than `max_part_bytes`. libzmq does not limit the number of parts, so an
authenticated peer can still make the other end hold any amount of data.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq
from typing_extensions import Buffer

from areal_async.base.addresses import LOOPBACK, SOCKET_PATH_LIMIT, is_loopback
from areal_async.base.errors import EndpointError
from areal_async.base.own_files import private_files
from areal_async.rpc.frames import MAX_MESSAGE_BYTES
from areal_async.rpc.secret import Access, CurveKeys, Guard, Password
from areal_async.rpc.sockets import PolledSocket

HIGH_WATER_MESSAGES = 1024
HEARTBEAT_MS = 10_000
HEARTBEAT_TIMEOUT_MS = 60_000
HANDSHAKE_MS = 10_000  # a connection without authentication is closed after this time
BACKLOG = 512
MOST_STRANGERS = 256
LET_IN_BYTES = 270
"""Number of bytes sent to a peer that proves authentication.

In the CURVE handshake, the greeting and the welcome have 234 bytes together, and an error adds 12. A READY
adds at least 54 and is sent only after the peer's proof. If this side has sent this many bytes over a
connection, the peer is therefore authenticated. Bytes that the peer itself sends prove nothing.
"""
_TAKEN = struct.Struct("=120xQ")  # `struct tcp_info` of Linux up to `tcpi_bytes_acked`
_EVENT = struct.Struct("=hi")
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_FRAMES_BEFORE = 6
"""Number of frames before the credentials: version, request, domain, address, identity, mechanism."""
ZAP_FRAMES = ZAP_FRAMES_BEFORE + 2
ANYBODY = "known"  # user of a peer if roles are not distinguished


def tune(sock: zmq.Socket[bytes], *, max_part_bytes: int = MAX_MESSAGE_BYTES) -> None:
    """Set the limits and liveness options that both sides share."""
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
    sock.setsockopt(zmq.MAXMSGSIZE, max_part_bytes)
    sock.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    sock.setsockopt(zmq.BACKLOG, BACKLOG)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)


def bind(sock: zmq.Socket[bytes], endpoint: str, guard: Guard) -> str:
    """Bind `sock` and return the real endpoint (port 0 replaced by the assigned port).

    `serve_zap` accepts connections. `serve_zap` must run in the socket's context. If the launcher reserved
    the port for this process, the launcher's listening socket is used.
    """
    check_bindable(endpoint, guard)
    if guard.keys is not None:
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, guard.keys.secret)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, guard.keys.public)
    else:
        sock.setsockopt(zmq.PLAIN_SERVER, 1)
    if (listening_fd := held_listening(endpoint)) is not None:
        sock.setsockopt(zmq.USE_FD, os.dup(listening_fd))
    try:
        with private_files():
            sock.bind(endpoint)
            if endpoint.startswith("ipc://"):
                os.chmod(endpoint.removeprefix("ipc://"), 0o600)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise _busy(endpoint) from error
        text = f"cannot serve {endpoint}: {error.strerror}. Check the directory and the host."
        raise EndpointError(text) from error
    return sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def connect(sock: zmq.Socket[bytes], endpoint: str, access: Access, server: str = "") -> None:
    """Connect `sock` to a peer with the key of `server`. The peer may start later."""
    _split(endpoint)
    match access.shown(endpoint, server):
        case CurveKeys() as keys:
            if len(keys.trusted) != 1:
                raise EndpointError("a client's CURVE keys must trust exactly one key: the server's")
            sock.setsockopt(zmq.CURVE_SERVERKEY, keys.trusted[0])
            sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        case Password() as password:
            sock.setsockopt(zmq.PLAIN_USERNAME, password.user)
            sock.setsockopt(zmq.PLAIN_PASSWORD, password.word)
    try:
        sock.connect(endpoint)
    except zmq.ZMQError as error:
        raise EndpointError(f"cannot connect to {endpoint}: {error.strerror}") from error


HELD_VARIABLE = "AREAL_ASYNC_LISTENING"
"""Environment variable with the ports that the launcher holds for this process, `tcp://HOST:PORT=FD` each."""


def held_listening(endpoint: str) -> int | None:
    """Return the descriptor of the listening socket that the launcher holds at `endpoint` for this
    process."""
    held = (entry.rpartition("=") for entry in os.environ.get(HELD_VARIABLE, "").split())
    return next((int(fd) for name, _, fd in held if name == endpoint), None)


def check_bindable(endpoint: str, guard: Guard) -> None:
    """Raise `EndpointError` if `endpoint` must not be bound."""
    scheme, address = _split(endpoint)
    if scheme == "ipc":
        if not (folder := Path(address).parent).is_dir():
            raise EndpointError(f"cannot serve {endpoint}: the directory {folder} does not exist")
        if _ipc_is_served(address):
            raise _busy(endpoint)
    elif not is_loopback(address.rpartition(":")[0]) and guard.keys is None:
        raise EndpointError(
            f"refusing to serve {endpoint}: it is reachable from other machines. "
            f"Use {LOOPBACK}, or configure CURVE keys."
        )


def remove_ipc_file(endpoint: str) -> None:
    """Remove the file of a closed ipc endpoint if libzmq has left it."""
    if endpoint.startswith("ipc://"):
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


def _split(endpoint: str) -> tuple[str, str]:
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc" and address:
        size = len(os.fsencode(address))
        if size > SOCKET_PATH_LIMIT:
            raise EndpointError(
                f"the socket path {address} has {size} bytes; the system's limit is {SOCKET_PATH_LIMIT}. "
                "Use a shorter socket directory."
            )
        return scheme, address
    if scheme == "tcp" and address.rpartition(":")[0] and address.rpartition(":")[2].isdigit():
        return scheme, address
    raise EndpointError(f"{endpoint!r} is not an endpoint: write ipc://PATH or tcp://HOST:PORT")


def _ipc_is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            pass  # full backlog, timeout or no permission: another process is there, or the path is not ours
        return True


def _busy(endpoint: str) -> EndpointError:
    return EndpointError(
        f"cannot serve {endpoint}: another process already serves it. "
        "End that process or choose another endpoint."
    )


# --- who is let in ---


def serve_zap(
    context: zmq.Context[zmq.Socket[bytes]], guard: Guard, on_refused: Callable[[], None] = lambda: None
) -> PolledSocket:
    """Accept only peers that prove their keys or password, on all sockets of `context`, until the returned
    socket is closed.

    Messages of a peer carry its role as `User-Id`. libzmq asks this socket about every new connection (RFC
    27, ZAP). Without this socket, libzmq would accept every client that knows the server's public key, and
    refuse every client with a password.
    """

    def on_frames(copied: list[bytes], rest: list[Buffer]) -> None:
        asked = copied if not rest else []
        mechanism, *shown = asked[ZAP_FRAMES_BEFORE - 1 :] or [b""]
        role = guard.role_of(mechanism, shown)
        if role is None:
            on_refused()
        user = b"" if role is None else (role or ANYBODY).encode()
        status = (b"400", b"unknown") if role is None else (b"200", b"OK")
        version, number = asked[:2] if len(asked) > 1 else (b"1.0", b"")
        polled.send([version, number, *status, user, b""])

    sock = context.socket(zmq.REP)
    sock.bind(ZAP_ENDPOINT)
    polled = PolledSocket(sock, ZAP_FRAMES, on_frames)
    return polled


class StrangerLimit:
    """A limit on unauthenticated connections of `sock`: it closes the excess ones. It must use the `context`
    of `sock`.

    libzmq accepts every connection and closes it only after `HANDSHAKE_MS` without authentication. Without a
    limit, connecting clients could use up all descriptors of the process. libzmq reports which descriptors it
    opens and closes, and the kernel reports how many bytes were sent over each (`LET_IN_BYTES`). The limit
    must start before `sock` is bound. An ipc path needs no limit, because only its owner can connect.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        sock: zmq.Socket[bytes],
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_closed = on_closed
        self._most = min(MOST_STRANGERS, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._sock = sock
        self._strangers: dict[int, None] = {}  # descriptors, oldest first
        address = f"inproc://strangers-{id(sock)}"
        sock.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        events = context.socket(zmq.PAIR)
        events.setsockopt(zmq.RCVHWM, 0)  # a limit would block libzmq's own thread
        events.connect(address)
        self._events = PolledSocket(events, 2, self._on_event)

    def close(self) -> None:
        self._sock.monitor(None, 0)
        self._events.close(linger_ms=0)

    def _on_event(self, copied: list[bytes], rest: list[Buffer]) -> None:
        event, fd = _EVENT.unpack(copied[0])
        self._strangers.pop(fd, None)
        if event == zmq.EVENT_ACCEPTED:
            self._strangers[fd] = None
            if len(self._strangers) > self._most:
                self._make_room()

    def _make_room(self) -> None:
        port = self._sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2]
        for fd in list(self._strangers):
            with suppress(OSError):  # closed in the meantime, or now another file
                connection = socket.socket(fileno=fd)
                try:
                    (taken,) = _TAKEN.unpack_from(
                        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TAKEN.size)
                    )
                    if taken < LET_IN_BYTES and str(connection.getsockname()[1]) == port:
                        if len(self._strangers) <= self._most:
                            continue
                        connection.shutdown(socket.SHUT_RDWR)
                        self._on_closed()
                finally:
                    connection.detach()  # libzmq owns and closes the descriptor
            del self._strangers[fd]
