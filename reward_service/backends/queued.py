"""The base of backends that ask servers: a queue of calls, and asyncio tasks, each of which scores one call
after another.

Promises: every submitted call gets its verdicts exactly once, also when the backend closes. At most
`MAX_QUEUED` calls wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from areal_async.base.log import get_logger
from areal_async.base.verdicts import Failure, Verdict
from reward_service.backends import Call, OnVerdicts, inputs_of
from reward_service.pool.queue import MAX_QUEUED
from reward_service.sdk import RewardLoadError

log = get_logger("reward")


class QueuedBackend:
    """A `ScoringBackend` without its start. Subclasses call `begin` at their start and `end` at their end."""

    def __init__(self, name: str, *, call_s: float) -> None:
        """Create the backend. `call_s` is the expected duration of a call until the first one has ended."""
        self.broken: asyncio.Future[RewardLoadError] = asyncio.get_running_loop().create_future()
        """Future that is never done, because an unavailable server may come back."""
        self.call_seconds = call_s
        self._name = name
        self._waiting: asyncio.Queue[tuple[int, Call, OnVerdicts, float]] = asyncio.Queue(MAX_QUEUED)
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def verdicts_of(self, call: Call, queued_s: float) -> tuple[list[Verdict], float]:
        """Return the verdicts of a call that was queued at the time `queued_s`, and the seconds that scoring
        took."""
        raise NotImplementedError

    def begin(self, most: int) -> None:
        """Start scoring up to `most` calls at once."""
        self._tasks = [asyncio.create_task(self._run(), name=self._name) for _ in range(most)]

    async def end(self) -> None:
        """Stop scoring, and give every remaining call its verdict. It is harmless to call this again."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._refuse_waiting()

    async def submit(self, calls: Sequence[Call], on_verdicts: OnVerdicts) -> None:
        """Queue calls. Waits while the queue is full. `on_verdicts` must not raise."""
        for index, call in enumerate(calls):
            await self._waiting.put((index, call, on_verdicts, time.monotonic()))
            if self._closed:
                self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        """Give all waiting calls their verdict. A `submit` that still waits for room in the queue when the
        backend ends calls this too."""
        while not self._waiting.empty():
            index, call, on_verdicts, _ = self._waiting.get_nowait()
            on_verdicts(index, self._refused(call), 0.0)

    def _refused(self, call: Call) -> list[Verdict]:
        return [Failure("pool", f"the {self._name} was closed")] * len(inputs_of(call))

    async def _run(self) -> None:
        while True:
            index, call, on_verdicts, queued_s = await self._waiting.get()
            try:
                verdicts, elapsed_s = await self.verdicts_of(call, queued_s)
            except asyncio.CancelledError:
                on_verdicts(index, self._refused(call), 0.0)
                raise
            except Exception as error:  # a bug of ours must not leave a call without a verdict
                log.exception("a backend failed", backend=self._name)
                failure = Failure(self._name, f"{type(error).__name__}: {error}")
                verdicts, elapsed_s = [failure] * len(inputs_of(call)), 0.0
            if not isinstance(verdicts[0], Failure):  # a call without an answer shows no duration
                self.call_seconds += 0.1 * (elapsed_s - self.call_seconds)
            on_verdicts(index, verdicts, elapsed_s * 1000)
