"""Rewards in this process, for an inline run.

Promises: all calls in the process run one at a time, on one thread. So a debugger has only one prompt, and a
reward need not be reentrant. A reward gets the same inputs as in a pool's worker, and `submit` raises the
errors of the reward. A call that passes its deadline is logged but continues, and its result counts, because
a function of this process cannot be ended. A reward that hangs therefore blocks the run.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import msgspec

from areal_async.base.log import get_logger
from areal_async.base.verdicts import Verdict
from areal_async.config.reward_routing import RewardSpec
from reward_service.backends import Call, OnVerdicts, inputs_of
from reward_service.pool.protocol import LoadReward
from reward_service.pool.queue import LatencyEstimate, PooledReward
from reward_service.pool.worker import LoadedReward, load
from reward_service.sdk import RewardLoadError

log = get_logger("pool")
SPAN_S = 0.02
"""Seconds of calls that go to the thread together, because a round trip costs more than a short call."""

T = TypeVar("T")
Work = tuple[Callable[[], Any], Future[Any]]


class InlinePool:
    """A replacement of `WorkerPool` that runs rewards in this process."""

    capacity = alive = 1

    def __init__(self, specs: Sequence[RewardSpec]) -> None:
        self.broken: asyncio.Future[RewardLoadError] = asyncio.get_running_loop().create_future()
        """Never done, because `submit` raises a reward's errors."""
        self.busy = self.queued = 0
        self._specs = specs
        self._rewards: dict[str, tuple[LoadedReward, LatencyEstimate]] = {}
        self._turn = asyncio.Lock()

    def call_seconds_of(self, spec: RewardSpec) -> float:
        """Return the recent mean duration of a call of one reward, in seconds."""
        return self._rewards[spec.key][1].call_s

    async def __aenter__(self) -> Self:
        for number, spec in enumerate(self._specs, 1):
            order = PooledReward(number, spec).load_order()
            loaded = await _on_the_thread(functools.partial(_load_once, spec.key, order))
            self._rewards[spec.key] = loaded, LatencyEstimate()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave without waiting for a running call."""
        for key in self._rewards:
            _loaded.pop(key, None)

    async def submit(self, calls: Sequence[Call], on_verdicts: OnVerdicts, *, spec: RewardSpec) -> None:
        """Run calls of `spec` in turn. Raises the reward's errors."""
        reward, latency = self._rewards[spec.key]
        size = reward.mark.batch or 1
        batches = [
            [msgspec.msgpack.encode(one) for call in calls[first : first + size] for one in inputs_of(call)]
            for first in range(0, len(calls), size)
        ]
        self.queued += len(calls)
        first = 0
        while first < len(calls):
            async with self._turn:
                self.busy = 1
                span_s = min(SPAN_S, spec.timeout_s / 2)
                work = functools.partial(_judge_for, span_s, reward, batches[first // size :])
                try:
                    judged = await self._watched(spec, work)
                finally:
                    self.busy = 0
            for verdicts, spent_s in judged:
                together = calls[first : first + size]
                self.queued -= len(together)
                share_s = spent_s / len(together)
                latency.note(share_s)
                for index, call in enumerate(together, first):
                    own = [verdicts.pop(0) for _ in inputs_of(call)]
                    on_verdicts(index, own, share_s * 1000)
                first += size

    async def _watched(self, spec: RewardSpec, work: Callable[[], T]) -> T:
        running = asyncio.ensure_future(_on_the_thread(work))
        if not (await asyncio.wait({running}, timeout=spec.timeout_s))[0]:
            about = {"reward": spec.label, "detail": f"{spec.label}, {spec.timeout_s:g} s"}
            log.warning("a reward is past its deadline; inline nothing ends it", **about)
        return await running


def _judge_for(
    span_s: float, reward: LoadedReward, batches: Sequence[list[bytes]]
) -> list[tuple[list[Verdict], float]]:
    """Judge batches in turn until `span_s` has passed, at least one. Return the verdicts of each and its
    seconds. Raises the reward's errors."""
    judged = []
    began_s = time.monotonic()
    for batch in batches:
        called_s = time.monotonic()
        judged.append((reward.verdicts(batch), time.monotonic() - called_s))
        if time.monotonic() - began_s >= span_s:
            break
    return judged


_loaded: dict[str, LoadedReward] = {}
"""Rewards of the run, by key. They are global, so that the run's reward service and its evaluator share the
module of a user's file.

The first pool that closes empties this table, so that the next run in this process loads the files again.
"""


def _load_once(key: str, order: LoadReward) -> LoadedReward:
    if key not in _loaded:
        _loaded[key] = load(order)
    return _loaded[key]


async def _on_the_thread(work: Callable[[], T]) -> T:
    """Run `work` on the one thread of this process that runs rewards, and return its result."""
    result: Future[T] = Future()
    _waiting().put((work, result))
    return await asyncio.wrap_future(result)


@functools.cache
def _waiting() -> queue.SimpleQueue[Work]:
    """Return the queue of the thread, and start the thread at first use. Each pool has at most one call in
    the queue."""
    waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()

    def run() -> None:
        while True:
            work, result = waiting.get()
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(work())
                except BaseException as error:
                    result.set_exception(error)

    # The thread is a daemon, so the process can exit while a reward hangs.
    threading.Thread(target=run, name="rewards", daemon=True).start()
    return waiting
