"""Letting in only who has the secret: the small server libzmq asks about every new connection (RFC 27, ZAP).

Without it libzmq lets in any client that knows the server's public key, and nobody by a password.
"""

from __future__ import annotations

import zmq
import zmq.utils.z85 as z85
from typing_extensions import Buffer

from areal_async.rpc.polled import PolledSocket
from areal_async.rpc.secret import CurveKeys, Password

ENDPOINT = "inproc://zeromq.zap.01"
N_BEFORE = 6
"""Frames before what the client shows: version, request, domain, address, identity, mechanism."""
N_FRAMES = N_BEFORE + 2


def serve(context: zmq.Context[zmq.Socket[bytes]], asked_for: CurveKeys | Password) -> PolledSocket:
    """Answer for all sockets of `context` until the returned one is closed."""

    def on_frames(copied: list[bytes], rest: list[Buffer]) -> None:
        polled.send(_verdict(copied if not rest else [], asked_for))

    polled = PolledSocket(bind(context), N_FRAMES, on_frames)
    return polled


def bind(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """The socket on which libzmq asks, for a thread without an event loop; see `answer`."""
    sock = context.socket(zmq.REP)
    sock.bind(ENDPOINT)
    return sock


def answer(sock: zmq.Socket[bytes], asked_for: CurveKeys | Password) -> None:
    """Answer the question that waits on `sock`."""
    sock.send_multipart(_verdict(sock.recv_multipart(), asked_for))


def _verdict(asked: list[bytes], asked_for: CurveKeys | Password) -> list[bytes]:
    match asked_for, asked[N_BEFORE - 1 :]:
        case CurveKeys(trusted=trusted), [b"CURVE", key]:
            welcome = key in {z85.decode(known) for known in trusted}
        case Password(), [b"PLAIN", user, word]:
            welcome = asked_for.is_shown(user, word)
        case _:
            welcome = False
    status = (b"200", b"OK", b"known") if welcome else (b"400", b"unknown", b"")
    return [asked[0] if asked else b"1.0", asked[1] if len(asked) > 1 else b"", *status, b""]
