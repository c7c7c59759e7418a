"""The messages of a pool and its worker processes: msgpack frames, and a marker.

The marker is 24 bytes of shared memory in which a worker notes which unit it runs since when. It survives the
worker, so the pool knows whose fault a death was; it costs a worker less than a microsecond a unit, where a
message would cost a system call.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
import struct
from typing import Any

import msgspec

from areal_async.base.own_files import reserve
from areal_async.base.verdicts import Verdict

MAX_REPORT_BYTES = 32 << 20
"""Largest frame a pool takes from a worker; only reports with rewards of units come near."""


class LoadReward(msgspec.Struct, array_like=True, tag="load"):
    """Load a reward, which units name by its number."""

    reward: int
    name: str
    args: dict[str, Any]
    scope: str
    source: bytes | None  # What the file of a reward of one's own holds; None for any other
    worker_class: str = ""
    """`module:Class` of a reward that has a state: made once with the arguments, then called with lists of at
    most `batch` inputs, which is an attribute of it. Empty for a function."""
    timeout_s: float = math.inf
    """Deadline of one call."""


class WorkUnit(msgspec.Struct, array_like=True):
    """One invocation of a reward: of one input, of several at once (`batch`), or of the inputs of a group."""

    number: int
    reward: int
    inputs: list[msgspec.Raw]


class Assignment(msgspec.Struct, array_like=True, tag="run"):
    """Units for a worker, in order. Their numbers only ever rise."""

    units: list[WorkUnit]


WorkerOrder = LoadReward | Assignment


class FinishedUnit(msgspec.Struct, array_like=True):
    unit: int
    elapsed_ms: float
    verdicts: list[Verdict]
    raised: bool = False  # The invocation as a whole failed, and so all verdicts are the same


class RewardLoaded(msgspec.Struct, array_like=True, tag="loaded"):
    """The reward is loaded. `batch` is the number of inputs per call; 0 means one input, or all inputs of a
    group."""

    reward: int
    batch: int


class RewardNotLoaded(msgspec.Struct, array_like=True, tag="load_failed"):
    """The reward cannot be loaded."""

    reward: int
    message: str


class UnitsFinished(msgspec.Struct, array_like=True, tag="finishes"):
    units: list[FinishedUnit]


WorkerReport = RewardLoaded | RewardNotLoaded | UnitsFinished


class Marker:
    """Shared words: the running unit, its start (`time.monotonic_ns`), and the recall limit.

    The worker writes the first two, the pool the third: a worker does not start a unit whose number is at
    most `recalled`. A read while the other side writes may pair an old unit with a new start, never the
    reverse, so a unit is never thought to have run for longer than it has."""

    SIZE_BYTES = 24

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, self.SIZE_BYTES)
        self._words = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls) -> Marker:
        fd = os.memfd_create("reward-marker", os.MFD_CLOEXEC)
        reserve(fd, cls.SIZE_BYTES)
        return cls(fd)

    def begin(self, unit: int, now_ns: int) -> None:
        self._words[1] = now_ns
        self._words[0] = unit

    def running(self) -> tuple[int, int]:
        """(unit, start in ns): the unit last begun, finished or not; (0, 0) before the first."""
        unit = self._words[0]
        return unit, self._words[1]

    def recall(self, through: int) -> None:
        self._words[2] = through

    @property
    def recalled(self) -> int:
        return self._words[2]

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        os.close(self.fd)


# --- frames ------------------------------------------------------------------------------------------


LENGTH = struct.Struct("<I")


class FrameError(ValueError):
    """The other side sent an invalid or unexpected frame."""


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a stream of bytes into frames. Raises `FrameError` for a frame above `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads completed by `data`."""
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
        """Return the next payload; None once the owner has closed its end."""
        head = self._incoming.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack(head)
        payload = self._incoming.read(size)
        return payload if len(payload) == size else None

    def send(self, payload: bytes) -> None:
        """Raises OSError where the owner has gone."""
        self._socket.sendall(framed(payload))
