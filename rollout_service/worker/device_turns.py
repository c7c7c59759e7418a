"""The engines' part of sharing a device in time with the trainer (`areal_async/base/device_turns.py`).

Promise: while the trainer has the device, no engine of this process uses it. When the trainer wishes for the
device, the engines stop between two steps and release their memory. Requests in flight keep their units, and
continue after the trainer's turn, with their KV computed again under the newest weights.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from dataclasses import dataclass

from areal_async.base.device_turns import LOOK_S, DeviceTurns
from areal_async.base.events import failpoint, record
from areal_async.base.log import get_logger
from areal_async.base.metrics import busy
from areal_async.rpc.board import board
from rollout_service import metrics
from rollout_service.replicas import ReplicaSet

log = get_logger("turns")

MEASURED_TURNS = 10
"""The memory of sleeping engines is measured once in so many turns, because the trainer waits meanwhile."""


@dataclass(eq=False)
class EngineTurns:
    """The turns of a worker's engines."""

    turns: DeviceTurns
    engine: ReplicaSet

    async def take(self, limit_s: float = math.inf) -> bool:
        """Wait until the trainer does not need the device, and take it for the engines. Return False if this
        took longer than `limit_s`."""
        deadline_s = time.monotonic() + limit_s
        with board.waiting("turn", "its turn on the device"):
            while not self.turns.try_wake():
                if time.monotonic() > deadline_s:
                    return False
                await asyncio.sleep(LOOK_S)
        failpoint("turn.engine_took")
        return True

    async def run(self) -> None:
        """Give the device away whenever the trainer wishes for it, until cancelled. The engines must be awake
        and have the device."""
        asleep: int | None = None
        for turn in itertools.count():
            while not self.turns.wished:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            failpoint("turn.engine_saw_wish")
            begun_s = time.monotonic()
            await self.engine.sleep()
            if turn % MEASURED_TURNS == 0:
                asleep = await self.engine.device_bytes()
            failpoint("turn.engine_asleep")
            slept_s = time.monotonic()
            self.turns.slept()
            failpoint("turn.engine_gave")
            busy.begin("asleep")
            try:
                await self.take()
            finally:
                busy.end("asleep")
            woken_s = time.monotonic()
            await self.engine.wake()
            failpoint("turn.engine_awake")
            awake = await self.engine.device_bytes()
            switches_s = slept_s - begun_s + time.monotonic() - woken_s
            for state, size in (("asleep", asleep), ("awake", awake)):
                if size is not None:
                    metrics.ENGINE_MEMORY.labels(state).set(size)
            metrics.SWITCH_SECONDS.inc(switches_s)
            figures = {"asleep_bytes": asleep, "awake_bytes": awake, "switches_s": round(switches_s, 3)}
            record("engine_turn", **figures, version=self.engine.version.version)
            log.debug("the engines are awake again", **figures)
