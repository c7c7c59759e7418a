"""Turns on a device that the trainer and the engines share in time (`placement.share: time`).

Two files in the run's folder of sockets carry the turns as locks of the operating system:

- `turn` is held shared by each process whose engine is awake, and exclusively by the trainer while its state
  is on the device.
- `wish` is held by the trainer from the moment at which it wants the device until it has left it.

A lock ends with its process, whatever kills it, so no message can be lost and no turn outlives its owner. A
started engine server inherits the lock of its worker. A killed worker thus keeps the device until every
process of its server has ended. Only processes on one host can share a device in this way.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from areal_async.base.own_files import is_locked, open_own, release_lock, take_lock

LOOK_S = 0.02  # Seconds between two attempts to take a lock
SWITCH_SHARE = 0.05
"""Largest share of all time that should be spent in switches."""
LINK_BYTES_PER_S = 25e9
"""Assumed bandwidth between the device and pinned host memory, until a switch has been measured."""
EVALUATION_LIMIT_S = 1800.0
"""Longest time in seconds for which an evaluation keeps its version on the engine of the rollout."""


@dataclass(frozen=True)
class DeviceTurns:
    """Open lock files of one process. `turn_fd` may be inherited by the engine servers of the process."""

    turn_fd: int
    wish_fd: int

    @classmethod
    def open(cls, folder: Path) -> DeviceTurns:
        """Open the files in the run's folder of sockets. Raises OSError and `NotOurs`."""
        flags = os.O_RDWR | os.O_CREAT
        return cls(open_own(folder / "device.turn", flags), open_own(folder / "device.wish", flags))

    # --- the engines' side ---------------------------------------------------------------------------

    @property
    def wished(self) -> bool:
        """Whether the trainer wants or has the device."""
        return is_locked(self.wish_fd)

    def try_wake(self) -> bool:
        """Take the turn for an engine, unless the trainer wants or has the device. Return whether it was
        taken."""
        return not self.wished and take_lock(self.turn_fd, shared=True)

    def slept(self) -> None:
        """Give the turn away, after the engine has released its memory."""
        release_lock(self.turn_fd)

    # --- the trainer's side --------------------------------------------------------------------------

    def try_train(self) -> bool:
        """Wish for the device and try to take it for the trainer. Return whether it was taken. The wish
        remains if not."""
        return take_lock(self.wish_fd) and take_lock(self.turn_fd)

    def trained(self) -> None:
        """Give the turn away, after the trainer's state has left the device."""
        release_lock(self.turn_fd)
        release_lock(self.wish_fd)


def planned_switch_s(moved_bytes: int, bytes_per_s: float = LINK_BYTES_PER_S) -> float:
    """Return the seconds of the two switches of a turn: all of `moved_bytes` leave the device and come
    back."""
    return 2 * moved_bytes / bytes_per_s


def turn_steps(max_staleness: int, switch_s: float, step_s: float) -> int:
    """Return the length of a turn in training steps: the smallest number with which switches take at most
    `SWITCH_SHARE` of all time, but at most `max_staleness` + 1.

    `switch_s` are the seconds of both switches of a turn. `step_s` are the seconds in which a batch is
    generated and trained. More than `max_staleness` + 1 batches are never ready at once, because admission
    keeps no more groups outstanding."""
    most = max_staleness + 1
    for steps in range(1, most):
        if switch_s <= SWITCH_SHARE * (switch_s + steps * step_s):
            return steps
    return most
