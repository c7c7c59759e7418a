"""Messages between the sandbox's own processes: a JSON head and raw bytes, over a socket pair.

Both ends of such a socket pair belong to the sandbox, and a program has no access to them. The link between a
program and its tests uses other messages (`harness.plain.HarnessLink`). Separate code reads the messages of
that link and expects malicious data.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

HEAD = struct.Struct("<IQ")
MAX_HEAD_BYTES = 4 << 20
MAX_BODY_BYTES = 256 << 20


def send(link: socket.socket, head: dict[str, Any], body: bytes = b"") -> None:
    encoded = json.dumps(head).encode()
    link.sendall(HEAD.pack(len(encoded), len(body)) + encoded + body)


def receive(link: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """Return the next message, or None once the other side has closed the socket. Raises `ValueError` for
    invalid data."""
    opening = _exactly(link, HEAD.size)
    if opening is None:
        return None
    head_bytes, body_bytes = HEAD.unpack(opening)
    if head_bytes > MAX_HEAD_BYTES or body_bytes > MAX_BODY_BYTES:
        raise ValueError(f"a message of {head_bytes} + {body_bytes} bytes is above the limit")
    head, body = _exactly(link, head_bytes), _exactly(link, body_bytes)
    if head is None or body is None:
        return None
    return json.loads(head), body


def _exactly(link: socket.socket, size_bytes: int) -> bytes | None:
    parts: list[bytes] = []
    while size_bytes:
        data = link.recv(min(size_bytes, 1 << 20))
        if not data:
            return None
        parts.append(data)
        size_bytes -= len(data)
    return b"".join(parts)
