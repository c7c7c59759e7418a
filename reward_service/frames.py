"""Frames of length-prefixed bytes over a socket pair: how a scoring process and its owner speak. It must stay
light, since every scoring process imports it."""

from __future__ import annotations

import os
import socket
import struct

LENGTH = struct.Struct("<I")


class FrameError(ValueError):
    """The other side does not speak our frames, or not what is expected in them."""


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a stream of bytes into frames. Raises `FrameError` for a frame above `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads completed by `data`."""
        self._buffer += data
        frames, at = [], 0
        while len(self._buffer) - at >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer, at)
            if size > self._limit:
                raise FrameError(f"a frame of {size} bytes, above the limit of {self._limit}")
            end = at + LENGTH.size + size
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[at + LENGTH.size : end]))
            at = end
        if at:
            del self._buffer[:at]
        return frames


class FrameLink:
    """The end of the link in the child process: blocking."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._incoming = self._socket.makefile("rb")

    def read(self) -> bytes | None:
        """The next payload; None once the owner has closed its end."""
        head = self._incoming.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack(head)
        payload = self._incoming.read(size)
        return payload if len(payload) == size else None

    def send(self, payload: bytes) -> None:
        """Raises OSError where the owner has gone."""
        self._socket.sendall(framed(payload))
