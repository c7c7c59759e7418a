"""The messages between a pool and its worker processes: msgpack frames."""

from __future__ import annotations

import math
import os
import socket
import struct
from typing import Any

import msgspec

from areal_async.base.verdicts import Verdict

MAX_REPORT_BYTES = 32 << 20
"""Largest frame that a pool accepts from a worker. Only reports with rewards of units come close to this
limit."""


class LoadReward(msgspec.Struct, array_like=True, tag="load"):
    """Command to load a reward. A `WorkUnit` refers to the reward by its number."""

    reward: int
    name: str
    args: dict[str, Any]
    scope: str
    source: bytes | None  # content of a user's reward file; None for other rewards
    worker_class: str = ""
    """`module:Class` of a reward with state, or empty for a function.

    The class is instantiated once with the arguments. The instance is then called with lists of at most
    `batch` inputs, where `batch` is its attribute.
    """
    timeout_s: float = math.inf
    """Deadline of one call in seconds."""


class WorkUnit(msgspec.Struct, array_like=True, tag="run"):
    """One invocation of a reward: for one input, for several inputs (at once, or one after the other), or for
    the inputs of a group."""

    number: int
    reward: int
    inputs: list[msgspec.Raw]


WorkerOrder = LoadReward | WorkUnit


class FinishedUnit(msgspec.Struct, array_like=True, tag="finishes"):
    unit: int
    elapsed_ms: float
    verdicts: list[Verdict]
    raised: bool = False  # the invocation as a whole failed, so all verdicts are equal


class RewardLoaded(msgspec.Struct, array_like=True, tag="loaded"):
    """Report that the reward is loaded. `batch` is the number of inputs per invocation. 0 means one input, or
    the inputs of one group."""

    reward: int
    batch: int


class RewardNotLoaded(msgspec.Struct, array_like=True, tag="load_failed"):
    """Report that the reward cannot be loaded."""

    reward: int
    message: str


WorkerReport = RewardLoaded | RewardNotLoaded | FinishedUnit


# --- frames ------------------------------------------------------------------------------------------


LENGTH = struct.Struct("<I")


class FrameError(ValueError):
    """The other side has sent an invalid or unexpected frame."""


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


class FrameReader:
    """A reader that splits a stream of bytes into frames. Raises `FrameError` for a frame above `limit`
    bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completes."""
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
    """The blocking end of the link in the child process."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        self._incoming = self._socket.makefile("rb")

    def read(self) -> bytes | None:
        """Return the next payload, or None once the owner has closed its end."""
        head = self._incoming.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack(head)
        payload = self._incoming.read(size)
        return payload if len(payload) == size else None

    def send(self, payload: bytes) -> None:
        """Send a payload. Raises `OSError` if the owner has exited."""
        self._socket.sendall(framed(payload))
