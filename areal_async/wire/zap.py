"""Letting in only who has the secret: the small server libzmq asks about every new connection (RFC 27, ZAP).

Without it libzmq lets in any client that knows the server's public key, and nobody by a password.
"""

from __future__ import annotations

import hmac

import zmq
import zmq.utils.z85 as z85
from typing_extensions import Buffer

from areal_async.wire.endpoints import USERNAME, Access
from areal_async.wire.polled import PolledSocket
from areal_async.wire.secret import CurveKeys, RunSecret

ENDPOINT = "inproc://zeromq.zap.01"
N_BEFORE = 6
"""Frames before what the client shows: version, request, domain, address, identity, mechanism."""
N_FRAMES = N_BEFORE + 2


def serve(context: zmq.Context[zmq.Socket[bytes]], access: Access) -> PolledSocket:
    """Answer for all sockets of `context` until the returned one is closed."""

    def on_frames(copied: list[bytes], rest: list[Buffer]) -> None:
        polled.send(_verdict(copied if not rest else [], access))

    polled = PolledSocket(bind(context), N_FRAMES, on_frames)
    return polled


def bind(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """The socket on which libzmq asks, for a thread without an event loop; see `answer`."""
    sock = context.socket(zmq.REP)
    sock.bind(ENDPOINT)
    return sock


def answer(sock: zmq.Socket[bytes], access: Access) -> None:
    """Answer the question that waits on `sock`."""
    sock.send_multipart(_verdict(sock.recv_multipart(), access))


def _verdict(asked: list[bytes], access: Access) -> list[bytes]:
    mechanism, shown = asked[N_BEFORE - 1 : N_BEFORE], asked[N_BEFORE:]
    if mechanism == [b"CURVE"]:
        keys = access if isinstance(access, CurveKeys) else access.keys
        welcome = len(shown) == 1 and shown[0] in {z85.decode(key) for key in keys.trusted}
    else:
        # A password that travels as it is: only where both ends are in one folder of their user's.
        welcome = (
            mechanism == [b"PLAIN"]
            and len(shown) == 2
            and isinstance(access, RunSecret)
            and hmac.compare_digest(shown[0], USERNAME)
            and access.shows("wire", shown[1])
        )
    status = (b"200", b"OK", b"known") if welcome else (b"400", b"unknown", b"")
    return [asked[0] if asked else b"1.0", asked[1] if len(asked) > 1 else b"", *status, b""]
