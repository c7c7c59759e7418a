"""Who may reach a reward server: what may be bound, and what a request must show."""

from __future__ import annotations

import hmac
import socket

import zmq

from areal_async.errors import EndpointError
from areal_async.rpc.endpoints import is_loopback
from areal_async.rpc.secret import CurveKeys, Password
from areal_async.runtime.http_server import listen
from reward_service.backends.remote.transport import client_keys, password_of


class Gate:
    """Lets a request pass that shows `token`; any, where there is none."""

    def __init__(self, token: str = "") -> None:
        self.token = token
        self._token = token.encode()

    def passes(self, shown: str) -> bool:
        """Takes the same time whatever is shown."""
        return not self._token or hmac.compare_digest(self._token, shown.encode(errors="replace"))

    @property
    def password(self) -> Password:
        """What a client shows over ZMQ."""
        return password_of(self.token)

    @property
    def guarded(self) -> bool:
        return bool(self._token)


def http_socket(address: str, gate: Gate) -> socket.socket:
    """A listening socket of HTTP: see `tcp_socket`. Raises `EndpointError`, also for one that other machines
    would reach without a token."""
    host, _ = split(address)
    if not is_loopback(host) and not gate.guarded:
        raise EndpointError(
            f"refusing to serve {address} without a token: other machines reach it. Give --token-file, or "
            "serve 127.0.0.1."
        )
    return tcp_socket(address, gate)


def tcp_socket(address: str, gate: Gate) -> socket.socket:
    """A listening socket at `host:port`; port 0 picks one. Raises `EndpointError`."""
    host, port = split(address)
    try:
        return listen(host, port, guarded=gate.guarded)
    except OSError as error:
        raise EndpointError(
            f"cannot serve {address}: {error.strerror or error}. Choose another address or port."
        ) from error


def zmq_endpoint(address: str, gate: Gate, secret: bytes) -> tuple[str, CurveKeys | Password]:
    """Where a ROUTER is bound for `host:port` or `ipc://path`, and what its clients must show before they are
    heard: the token, and over a connection with CURVE, where `secret` is given, keys made of it.

    Without CURVE a token travels as it is, so other machines may come only with it. Raises `EndpointError`,
    also where there is no token: libzmq holds what a client sends before we could refuse it."""
    ipc = address.startswith("ipc://")
    host, port = ("", 0) if ipc else split(address.removeprefix("tcp://"))
    if not (ipc or is_loopback(host)) and not (gate.guarded and secret):
        raise EndpointError(
            f"refusing to serve {address} over ZMQ without a token and a key: other machines reach it. "
            "Give --token-file and --curve-key, or serve 127.0.0.1."
        )
    if not gate.guarded:
        raise EndpointError(
            f"refusing to serve {address} over ZMQ without a token: whoever reaches it can make the server "
            "hold what it sends. Give --token-file (made if missing), or serve HTTP alone."
        )
    endpoint = address if ipc else f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
    if not secret:
        return endpoint, gate.password
    return endpoint, CurveKeys(zmq.curve_public(secret), secret, (client_keys(gate.token).public,))


def split(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[host]:port`. Raises `EndpointError`."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise EndpointError(f"{address!r} is no address: write HOST:PORT, for example 127.0.0.1:8700")
    return host, int(port)
