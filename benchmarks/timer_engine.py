"""An engine that computes nothing: it answers after a time, and holds answers while a measurement says so.

A job names it as `rollout.engine: …/timer_engine.py:engine`. The phase of the measurement lies in a file that
all processes map (`scale.Shared`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from scale import Shared

from areal_async.base.versions import VersionTag
from areal_async.config.base import Section
from areal_async.config.engines import EnginePart
from areal_async.config.job import JobConfig
from areal_async.service.context import ServiceContext
from rollout_service.engines.base import EngineStats, GenerateRequest, GenerateResult, Tell, Weights

RUNS, HELD, OVER = range(3)
STEP_S = "MANY_ENGINES_STEP_S"  # Environment variable: how long a step of the trainer takes
HELD_S = 0.25  # Between two looks at the phase


class TimerArguments(Section):
    """The mean time of an answer, its length, and the file with the phase of the measurement."""

    mean_s: float
    units: int
    phase: str


class TimerEngine:
    """Answers with `units` tokens after a time between half and one and a half of the mean."""

    def __init__(self, arguments: TimerArguments, slots: int) -> None:
        self.version = VersionTag("policy", 0, 0)
        self._given = arguments
        self._shared = Shared(Path(arguments.phase))
        self._rng = random.Random()
        self._slots = slots
        self._running = self._requests = self._tokens = 0
        self._ids = np.full(arguments.units, 5, np.int32)
        self._logprobs = np.full(arguments.units, -1.0, np.float32)

    def alive(self) -> bool:
        return True

    async def start(self, snapshot: Weights) -> None:
        self.version = snapshot.tag

    async def generate(self, request: GenerateRequest, tell: Tell | None = None) -> GenerateResult:
        self._running += 1
        try:
            await asyncio.sleep(self._given.mean_s * self._rng.uniform(0.5, 1.5))
            while self._shared.phase == HELD:  # noqa: ASYNC110 - another process says so, in shared memory
                await asyncio.sleep(HELD_S)
        finally:
            self._running -= 1
        self._requests += 1
        self._tokens += self._given.units
        versions = np.full(self._given.units, self.version.version, np.int32)
        epochs = np.full(self._given.units, self.version.epoch, np.int32)
        return GenerateResult(self._ids, self._logprobs, versions, epochs, "stop", "46")

    async def pause(self) -> None:
        """Nothing is being computed."""

    async def load(self, snapshot: Weights) -> None:
        self.version = snapshot.tag

    async def resume(self) -> None:
        """Nothing was held."""

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Callers cancel."""

    def stats(self) -> EngineStats:
        return EngineStats(self._running, 0, self._slots, 0.0, self._tokens, self._requests, 0.0)

    async def stop(self) -> None:
        """There is nothing to end."""


class TimerPart(EnginePart):
    Arguments = TimerArguments  # type: ignore[assignment]
    needs = "directory"

    def make(
        self, job: JobConfig, *, slots: int, activity: str, place: ServiceContext | None, replica: int
    ) -> TimerEngine:
        return TimerEngine(TimerArguments.model_validate(job.rollout.engine_args), slots)


engine = TimerPart()
