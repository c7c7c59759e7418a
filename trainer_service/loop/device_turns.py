"""The trainer's part of sharing a device in time with the engines (`areal_async/base/device_turns.py`).

Promises: while an engine is awake, the trainer's state is in host memory. The trainer wishes for the device
only when a batch is in its hands, and never waits for a batch with the device. It first collects as many
batches as a turn should train (`turn_steps`), as long as the engines can still finish more. A turn ends as
soon as no further batch is ready.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from areal_async.base.device_turns import LOOK_S, DeviceTurns, planned_switch_s, turn_steps
from areal_async.base.events import failpoint, record
from areal_async.base.log import get_logger
from areal_async.rpc.board import board
from areal_async.rpc.messages import BufferStats
from trainer_service.backends.base import SleepingBackend

log = get_logger("turns")

COLLECT_LOOK_S = 0.1  # Seconds between two questions for the number of ready batches
COLLECT_LIMIT_S = 60.0  # Longest time without a newly scored group while batches are collected
SMOOTH = 0.3  # Weight of a new measurement in a running mean


class TrainerTurns:
    """The turns of a trainer with one rank. The device is taken first and the model loaded onto it after
    that, with `backend` set."""

    def __init__(self, turns: DeviceTurns, stopping: threading.Event, max_staleness: int) -> None:
        self._turns, self._stopping, self._max_staleness = turns, stopping, max_staleness
        self.backend: SleepingBackend | None = None
        self.has_device = False
        self.length = 1
        """Steps that the next turn should train."""
        self._trained = 0
        self._switch_s = self._step_s = self._taking_s = self._switches_s = 0.0
        self._begun_s, self._given_s = time.monotonic(), 0.0

    def take(self) -> bool:
        """Wait until the engines sleep, and bring the state back to the device. Returns False if the trainer
        is asked to stop first."""
        if self.has_device:
            return True
        begun_s = time.monotonic()
        with board.waiting("turn", "its turn on the device"):
            while not self._turns.try_train():
                failpoint("turn.trainer_wished")
                if self._stopping.wait(LOOK_S):
                    return False
        failpoint("turn.trainer_took")
        if self.backend is not None:
            self.backend.wake()
        failpoint("turn.trainer_back")
        self.has_device, self._taking_s = True, time.monotonic() - begun_s
        return True

    def give(self) -> None:
        """Move the state to host memory and end the turn."""
        if not self.has_device:
            return
        assert self.backend is not None
        failpoint("turn.trainer_leaves")
        begun_s = time.monotonic()
        moved_bytes = self.backend.sleep()
        failpoint("turn.trainer_left")
        self.has_device = False
        self._turns.trained()
        failpoint("turn.trainer_gave")
        now_s, last_s = time.monotonic(), self._given_s
        switch_s, self._given_s = self._taking_s + now_s - begun_s, now_s
        if not last_s:  # the first turn loads the model, so its time says nothing about later turns
            self._begun_s, self._switch_s = now_s, planned_switch_s(moved_bytes)
        elif self._trained:
            self._switches_s += switch_s
            self._switch_s = _mean(self._switch_s, switch_s)
            self._step_s = _mean(self._step_s, (now_s - last_s - switch_s) / self._trained)
            self.length = turn_steps(self._max_staleness, self._switch_s, self._step_s)
        record("trainer_turn", steps=self._trained, moved_bytes=moved_bytes, switch_s=round(switch_s, 4))
        log.debug("the trainer has left the device", steps=self._trained, moved_bytes=moved_bytes)
        self._trained = 0

    def collect(self, stats: Callable[[], BufferStats], batch_groups: int, steps_left: int) -> None:
        """Wait until enough batches for a turn are ready, one of which the caller has, or until no more can
        become ready. Does nothing within a turn."""
        length, patience = min(self.length, steps_left), CollectLimit(time.monotonic())
        if self.has_device or length == 1:
            return
        with board.waiting("turn", f"{length} batches for a turn on the device"):
            while not patience.is_over(found := stats(), time.monotonic()):
                if is_enough(found, batch_groups, length) or self._stopping.wait(COLLECT_LOOK_S):
                    return

    def stepped(self, next_is_ready: Callable[[], bool]) -> None:
        """Report a step, and end the turn unless the batch of the next step is ready. A turn trains at most
        as many batches as can be ready at once."""
        self._trained += 1
        if self._trained > self._max_staleness or not next_is_ready():
            self.give()

    def told(self) -> str:
        """Return a text about the turns."""
        share = self._switches_s / max(1e-9, time.monotonic() - self._begun_s)
        where = "on the device" if self.has_device else "off the device"
        steps = f"{self.length} step{'s' * (self.length > 1)}"
        return f"{where}, turns of {steps}, {share:.1%} of the time in switches"


@dataclass
class CollectLimit:
    """Limit of the time in which batches are collected and no group becomes ready."""

    since_s: float
    _scored: int = -1

    def is_over(self, stats: BufferStats, now_s: float) -> bool:
        """Return whether no group has been scored for `COLLECT_LIMIT_S`. Call it with each reading."""
        scored = stats.groups.get("SCORED", 0)
        if scored != self._scored:
            self._scored, self.since_s = scored, now_s
        return now_s - self.since_s > COLLECT_LIMIT_S


def is_enough(stats: BufferStats, batch_groups: int, length: int) -> bool:
    """Return whether `length` batches are ready, one of which is in the trainer's hands, or whether the
    groups in progress can complete no further batch."""
    scored, *coming = (stats.groups.get(state, 0) for state in ("SCORED", "GENERATED", "LEASED"))
    ready = 1 + scored // batch_groups
    possible = 1 + (scored + sum(coming)) // batch_groups
    return ready >= length or (bool(stats.lease_wait) and possible <= ready)


def _mean(before: float, value: float) -> float:
    return value if not before else before + SMOOTH * (value - before)
