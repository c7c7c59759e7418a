"""What a pool and its worker processes say to each other: msgpack frames, and a marker.

The marker is 24 bytes of shared memory in which a worker notes which unit it runs since when. It survives the
worker, so the pool knows whose fault a death was; it costs a worker less than a microsecond a unit, where a
message would cost a system call.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any

import msgspec

from areal_async.rpc.verdicts import Verdict

WORD = struct.Struct("<Q")

MAX_REPORT_BYTES = 32 << 20
"""Largest frame a pool takes from a worker; only reports with rewards of units come near."""


class LoadReward(msgspec.Struct, array_like=True, tag="load"):
    """Load a reward, which units name by its number."""

    reward: int
    name: str
    args: dict[str, Any]
    scope: str
    source: bytes | None
    """What the file of a reward of one's own holds; None for any other."""
    worker_class: str = ""
    """`module:Class` of a reward that has a state: made once with the arguments, then called with lists of at
    most `batch` inputs, which is an attribute of it. Empty for a function."""


class ForgetReward(msgspec.Struct, array_like=True, tag="forget"):
    """No unit of this reward comes any more."""

    reward: int


class WorkUnit(msgspec.Struct, array_like=True):
    """One invocation of a reward: of one input, of several at once (`batch`), or of the inputs of a group."""

    number: int
    reward: int
    inputs: list[msgspec.Raw]
    """Encoded `RewardInput`s."""


class Assignment(msgspec.Struct, array_like=True, tag="run"):
    """Units for a worker, in order. Their numbers only ever rise."""

    units: list[WorkUnit]


WorkerOrder = LoadReward | ForgetReward | Assignment


class FinishedUnit(msgspec.Struct, array_like=True):
    unit: int
    elapsed_ms: float
    verdicts: list[Verdict]
    """One for each input."""
    raised: bool = False
    """The invocation as a whole failed, and so all verdicts are the same."""


class RewardLoaded(msgspec.Struct, array_like=True, tag="loaded"):
    """The reward is there. `batch`: inputs that it takes at a time; 0: one, or those of a group."""

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

    @classmethod
    def create(cls) -> Marker:
        fd = os.memfd_create("reward-marker", os.MFD_CLOEXEC)
        os.ftruncate(fd, cls.SIZE_BYTES)
        return cls(fd)

    def begin(self, unit: int, now_ns: int) -> None:
        WORD.pack_into(self._memory, 8, now_ns)
        WORD.pack_into(self._memory, 0, unit)

    def running(self) -> tuple[int, int]:
        """(unit, start in ns): the unit last begun, finished or not; (0, 0) before the first."""
        unit = WORD.unpack_from(self._memory, 0)[0]
        return unit, WORD.unpack_from(self._memory, 8)[0]

    def recall(self, through: int) -> None:
        WORD.pack_into(self._memory, 16, through)

    @property
    def recalled(self) -> int:
        return int(WORD.unpack_from(self._memory, 16)[0])

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)
