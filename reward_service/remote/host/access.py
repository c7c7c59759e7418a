"""Who may reach a reward server: what may be bound, and what a request must show."""

from __future__ import annotations

import hmac
import os
import socket

import zmq

from areal_async.errors import EndpointError
from areal_async.wire.endpoints import check_bindable, is_loopback
from areal_async.wire.http import listen


class Gate:
    """Lets a request pass that shows `token`; any, where there is none."""

    def __init__(self, token: str = "") -> None:
        self._token = token.encode()

    def passes(self, shown: str) -> bool:
        """Takes the same time whatever is shown."""
        return not self._token or hmac.compare_digest(self._token, shown.encode(errors="replace"))

    @property
    def guarded(self) -> bool:
        return bool(self._token)


def http_socket(address: str, gate: Gate) -> socket.socket:
    """A listening socket at `host:port`; port 0 picks one. Raises `EndpointError`, also for one that other
    machines would reach without a token."""
    host, port = split(address)
    if not is_loopback(host) and not gate.guarded:
        raise EndpointError(
            f"refusing to serve {address} without a token: other machines reach it. Give --token-file, or "
            "serve 127.0.0.1."
        )
    try:
        return listen(host, port, guarded=gate.guarded)
    except OSError as error:
        raise EndpointError(
            f"cannot serve {address}: {error.strerror or error}. Choose another address or port."
        ) from error


def bind_zmq(sock: zmq.Socket[bytes], address: str, gate: Gate, secret: bytes) -> str:
    """Bind a ROUTER to `host:port` or `ipc://path`, with CURVE where `secret` is given; the real address.

    Over ZMQ a token travels as it is, so other machines may come only where the connection is encrypted.
    Raises `EndpointError`."""
    if address.startswith("ipc://"):
        endpoint = address
        check_bindable(endpoint, None)  # libzmq would take over the file of one that is served
    else:
        host, port = split(address.removeprefix("tcp://"))
        if not is_loopback(host) and not (gate.guarded and secret):
            raise EndpointError(
                f"refusing to serve {address} over ZMQ without a token and a key: other machines reach it. "
                "Give --token-file and --curve-key, or serve 127.0.0.1."
            )
        host = f"[{host}]" if ":" in host else host
        endpoint = f"tcp://{host}:{port}"
    if secret:
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.curve_secretkey = secret
        sock.curve_publickey = zmq.curve_public(secret)
    try:
        sock.bind(endpoint)
    except zmq.ZMQError as error:
        raise EndpointError(
            f"cannot serve {endpoint}: {error.strerror}. Choose another address or port."
        ) from error
    if endpoint.startswith("ipc://"):
        os.chmod(endpoint.removeprefix("ipc://"), 0o600)
    return sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[host]:port`. Raises `EndpointError`."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise EndpointError(f"{address!r} is no address: write HOST:PORT, for example 127.0.0.1:8700")
    return host, int(port)
