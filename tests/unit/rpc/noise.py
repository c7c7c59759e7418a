"""Malformed messages: what a peer that means ill, or an older release, might put on a ZeroMQ socket."""

import random
import struct
from collections.abc import Callable

import msgspec
import zmq

from areal_async.rpc import endpoints
from areal_async.rpc.frames import HEADER, WIRE_VERSION, Kind, write_frames
from areal_async.rpc.messages import Commit
from areal_async.rpc.schema import SCHEMA, Hello
from areal_async.rpc.secret import Access

SEND_LIMIT_MS = 60_000
LINGER_MS = 2_000
"""A closed socket of libzmq does not connect again: where the server closed the connection at what it was
sent last, the rest can never be handed over, and is waited for in vain."""


def shapes(rng: random.Random) -> list[bytes]:
    """One message: any frames at all, and near misses of the right ones."""
    head = HEADER.pack(
        b"AA", WIRE_VERSION, rng.choice([0, 1, 2, 3, 4, 9, 255]), rng.choice([0, 0, 1, 3, 2**32 - 1]), 5, 7, 0
    )
    bodies: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: rng.randbytes(rng.randrange(200)),
        lambda: msgspec.msgpack.encode(
            {"type": rng.choice(["Nothing", "Stats", "Commit", "PutEpisodes", ""])}
        ),
        lambda: msgspec.msgpack.encode(
            {"type": "Commit", "epoch": rng.choice([None, "x", -1, 2**63, [], 1.5])}
        ),
        lambda: msgspec.msgpack.encode(Commit("policy", 1, 1))[: rng.randrange(12)],
        lambda: b"\x91" * rng.randrange(1, 3000) + b"\xc0",
        lambda: b"\x81\xa1k" * rng.randrange(1, 2000) + b"\xc0",
        lambda: b"\xdd\xff\xff\xff\xff",
        lambda: b"\xdf\xff\xff\xff\xff",
        lambda: b"\xc6\xff\xff\xff\xff" + b"x" * 20,
    ]
    rest: list[Callable[[], list[bytes]]] = [
        lambda: [],
        lambda: [b""] * rng.randrange(1, 40),
        lambda: [struct.pack("<Q", rng.choice([0, 1, 2**40, 2**64 - 1])), b"packed"],
        lambda: [rng.randbytes(rng.randrange(64)) for _ in range(rng.randrange(1, 8))],
    ]
    first = rng.choice([b"", b"AA", rng.randbytes(rng.randrange(40)), head + rng.choice(bodies)()])
    return [first, *rng.choice(rest)()]


def flood(
    endpoint: str,
    access: Access | None,
    messages: int,
    *,
    greeted: bool = False,
    job: str = "j",
    seed: int = 0,
    shape: Callable[[random.Random], list[bytes]] = shapes,
) -> int:
    """Send so many messages; a stranger, who has no `access`, sends until their queue is full. How many the
    queue took."""
    rng, sent = random.Random(seed), 0
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.SNDTIMEO, SEND_LIMIT_MS if access is not None else 0)
    if access is None:
        sock.connect(endpoint)
    else:
        endpoints.connect(sock, endpoint, access)
    try:
        if greeted:
            sock.send_multipart(write_frames(Kind.REQUEST, 5, 1, 0, Hello(SCHEMA, job, "r", "n"), ()))
        for _ in range(messages):
            sock.send_multipart(shape(rng))
            sent += 1
            while sock.poll(0):
                sock.recv_multipart()
    except zmq.Again:  # nobody takes it
        if access is not None:
            raise
    finally:
        context.destroy(linger=0 if access is None else LINGER_MS)
    return sent
