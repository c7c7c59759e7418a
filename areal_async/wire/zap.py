"""Letting in only known CURVE keys: the small server libzmq asks about every new connection (RFC 27, ZAP).

Without it libzmq accepts any client that knows the server's public key.
"""

from __future__ import annotations

from collections.abc import Collection

import zmq
import zmq.utils.z85 as z85
from typing_extensions import Buffer

from areal_async.wire.polled import PolledSocket

ENDPOINT = "inproc://zeromq.zap.01"
N_FRAMES = 7  # version, request, domain, address, identity, mechanism, the client's key


def serve(context: zmq.Context[zmq.Socket[bytes]], trusted: Collection[bytes]) -> PolledSocket:
    """Answer for all sockets of `context` until the returned one is closed. `trusted` are Z85 public keys."""
    known = {z85.decode(key) for key in trusted}
    sock = context.socket(zmq.REP)
    sock.bind(ENDPOINT)

    def on_frames(copied: list[bytes], rest: list[Buffer]) -> None:
        welcome = len(copied) == N_FRAMES and copied[5] == b"CURVE" and copied[6] in known and not rest
        status = (b"200", b"OK", b"known") if welcome else (b"400", b"unknown key", b"")
        polled.send([copied[0] if copied else b"1.0", copied[1] if len(copied) > 1 else b"", *status, b""])

    polled = PolledSocket(sock, N_FRAMES, on_frames)
    return polled
