"""The calls that wait for workers, and the choice of the reward whose turn is next. The module does no I/O.

Rewards get equal parts of the workers' time, not equal numbers of calls. The reward that has used the least
time is next. A reward that was idle gets no larger part of the time afterwards.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from areal_async.config.reward_routing import RewardSpec
from areal_async.config.rewardcheck import part_of
from reward_service.backends import OnVerdicts
from reward_service.pool.protocol import LoadReward
from reward_service.sdk import RewardLoadError, own_file

MAX_QUEUED = 8192
MOST_BYTES = 4 << 20  # inputs of one invocation of a batched reward; a single larger input is sent alone
QUICK_S = 0.005
"""Time of the calls of a quick reward that share an invocation, because a message costs more than such a
call."""
MOST_TOGETHER = 64
FIRST_CALL_S = 0.02  # assumed duration of a reward's first call


class LatencyEstimate:
    """A running mean of call durations."""

    def __init__(self) -> None:
        self.call_s = FIRST_CALL_S
        self._noted = 0

    def note(self, elapsed_s: float) -> None:
        self._noted += 1
        self.call_s += max(0.05, 1 / self._noted) * (elapsed_s - self.call_s)


class PooledReward:
    """One reward of a pool: its code, its waiting calls and its costs.

    The text of a user's file is kept in memory. So every worker runs the same text, even if the file is
    changed or deleted before the worker starts.
    """

    def __init__(self, number: int, spec: RewardSpec) -> None:
        """Create the reward. Messages to workers identify it by `number`. Raises `RewardLoadError` for a
        missing file."""
        self.number = number
        self.spec = spec
        file = own_file(spec.name)
        self._source = None if file is None else _read_source(spec.name, file)
        self.batch = 0
        """Number of inputs per invocation, known after loading. 0 means one input, or the inputs of one
        group."""
        self.loaded_once = False
        self.waiting: deque[QueuedCall] = deque()
        self.used_s = 0.0
        """Seconds of workers' time that the reward has used. When the reward becomes active after being idle,
        its value is raised to at least the value of the reward served last."""
        self.latency = LatencyEstimate()

    @property
    def together(self) -> int:
        """Number of calls that one invocation may have: the batch of a batched reward, or as many calls of
        another reward as take `QUICK_S`. If their process dies, each of them runs again by itself."""
        if self.batch or self.spec.scope == "group":
            return self.batch
        return min(MOST_TOGETHER, int(QUICK_S / max(self.latency.call_s, 1e-9)))

    def load_order(self) -> LoadReward:
        spec, worker_class = self.spec, getattr(part_of(self.spec.name), "worker_class", "")
        source, timeout_s = self._source, spec.timeout_s
        return LoadReward(self.number, spec.name, spec.args, spec.scope, source, worker_class, timeout_s)


@dataclass(slots=True, eq=False)
class QueuedCall:
    """One call on its way to its verdicts."""

    reward: PooledReward
    index: int
    payloads: list[bytes]
    on_verdicts: OnVerdicts
    single: bool = False  # it failed together with others and now runs in an invocation of its own
    size_bytes: int = 0

    def __post_init__(self) -> None:
        self.size_bytes = sum(map(len, self.payloads))


@dataclass(slots=True)
class Invocation:
    """The work that a worker gets at a time: one call, or several of a batched or quick reward."""

    number: int
    reward: PooledReward
    calls: list[QueuedCall]
    charged_s: float  # time that its reward was charged in advance
    began_s: float = field(default_factory=time.monotonic)


class FairQueue:
    """The calls that wait for workers, by reward."""

    def __init__(self, rewards: Mapping[int, PooledReward]) -> None:
        self._rewards = rewards
        self._clock_s = 0.0
        self.length = 0
        self.room = asyncio.Event()

    @property
    def full(self) -> bool:
        return self.length >= MAX_QUEUED

    def push(self, call: QueuedCall, *, front: bool = False) -> None:
        reward = call.reward
        if not reward.waiting:
            reward.used_s = max(reward.used_s, self._clock_s)
        if front:
            reward.waiting.appendleft(call)
        else:
            reward.waiting.append(call)
        self.length += 1

    def next(self) -> PooledReward | None:
        """Return the reward whose turn it is, or None if no call waits."""
        waiting = [reward for reward in self._rewards.values() if reward.waiting]
        if not waiting:
            return None
        chosen = min(waiting, key=lambda reward: reward.used_s)
        self._clock_s = max(self._clock_s, chosen.used_s)
        return chosen

    def pop(self, reward: PooledReward) -> QueuedCall:
        self.length -= 1
        if not self.full:
            self.room.set()
        return reward.waiting.popleft()

    def drain(self) -> list[QueuedCall]:
        """Remove and return all calls, and wake the callers that wait for room."""
        taken = [self.pop(reward) for reward in self._rewards.values() for _ in range(len(reward.waiting))]
        self.room.set()
        return taken

    def take(self, number: int, workers: int) -> Invocation | None:
        """Remove the next calls from the queue and return them as invocation `number`. `workers` is the
        number of free workers, one of which gets it. Return None if no call waits."""
        if (reward := self.next()) is None:
            return None
        waiting, first = reward.waiting, self.pop(reward)
        calls, size_bytes = [first], first.size_bytes
        most = min(reward.together, math.ceil((len(waiting) + 1) / workers))
        while waiting and len(calls) < most and not (first.single or waiting[0].single):
            size_bytes += waiting[0].size_bytes
            if size_bytes > MOST_BYTES:
                break
            calls.append(self.pop(reward))
        charged_s = reward.latency.call_s * len(calls)
        reward.used_s += charged_s
        return Invocation(number, reward, calls, charged_s)


def _read_source(name: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        problem = "there is no file" if isinstance(error, FileNotFoundError) else f"{error.strerror}:"
        raise RewardLoadError(f"the reward {name!r}: {problem} {file}. Check it in the job file.") from None
