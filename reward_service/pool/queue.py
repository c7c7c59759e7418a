"""The queues of calls for workers: the order of rewards, the size of an invocation, the time of a kill. No
I/O.

Rewards share the time of the workers, not their number of calls: the turn goes to the reward that has used
the least. A reward that was idle gets no credit for its unused time.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from areal_async.config.reward_routing import RewardSpec
from areal_async.config.rewardcheck import part_of
from reward_service.backends import OnVerdicts
from reward_service.pool.protocol import LoadReward
from reward_service.sdk import RewardLoadError, own_file

MAX_QUEUED = 8192
MAX_ASSIGNED_BYTES = 4 << 20  # Inputs sent to a worker ahead of its calls; a single larger one goes alone
TARGET_BATCH_S = 0.02
"""Work sent to a worker at a time: enough to make sending cheap, little enough to stay movable."""
LARGEST_BATCH = 256
RECALL_AFTER_S = 0.05
"""A call that has run so long is slow: what waits behind it waits with all others instead."""
STUCK_GRACE_S = 2.0  # Beyond the deadline, for a worker that has calls and begins none


class LatencyEstimate:
    """A running mean of how long calls take, and the batch size that follows from it."""

    def __init__(self) -> None:
        self.call_s = TARGET_BATCH_S
        self._noted = 0

    def note(self, elapsed_s: float) -> None:
        self._noted += 1
        self.call_s += max(0.05, 1 / self._noted) * (elapsed_s - self.call_s)

    @property
    def batch(self) -> int:
        """Calls that take a worker about `TARGET_BATCH_S`; at least 1, and few while little is known."""
        by_time = int(TARGET_BATCH_S / max(self.call_s, 1e-9))
        return max(1, min(LARGEST_BATCH, by_time, 4 * self._noted))

    def share(self, queued: int, workers: int) -> int:
        """Calls to send now: a batch, or less so that a short queue is spread over all workers."""
        return min(self.batch, math.ceil(queued / workers))


class PooledReward:
    """One reward of a pool: how its workers load it, its waiting calls, and its costs.

    The source text of a user's reward is kept, so that every worker runs the same code, even if it starts
    after the file was changed, broken or deleted.
    """

    def __init__(self, number: int, spec: RewardSpec) -> None:
        """`number` is what workers know it by. Raises `RewardLoadError` for a file that is not there."""
        self.number = number
        self.spec = spec
        file = own_file(spec.name)
        self._source = None if file is None else _read_source(spec.name, file)
        self.batch = 0
        """Inputs per invocation; 0 means one input, or all inputs of a group. Known once the reward is
        loaded."""
        self.loaded_once = False
        self.waiting: deque[QueuedCall] = deque()
        self.used_s = 0.0
        """Time of workers that it has used, on a clock that stands still while it has nothing to do."""
        self.latency = LatencyEstimate()

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
    single: bool = False  # It failed together with others: it runs in an invocation of its own
    suspect: bool = False
    """It lost a worker whose death nobody could be blamed for: it runs alone on its worker."""
    size_bytes: int = 0

    def __post_init__(self) -> None:
        self.size_bytes = sum(map(len, self.payloads))


@dataclass(slots=True)
class Invocation:
    """A unit of a worker's work: a call, or several of a reward that takes many at a time."""

    reward: PooledReward
    calls: list[QueuedCall]
    size_bytes: int
    charged_s: float  # What its reward was charged for it beforehand

    @property
    def timeout_s(self) -> float:
        return self.reward.spec.timeout_s

    @property
    def suspect(self) -> bool:
        return self.calls[0].suspect


class FairQueue:
    """The calls that wait for the workers, by reward."""

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
        """Return the next reward to serve; None if no call waits."""
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
        """Take out all calls, and wake the tasks that wait for room."""
        taken = [self.pop(reward) for reward in self._rewards.values() for _ in range(len(reward.waiting))]
        self.room.set()
        return taken

    def take(
        self, reward: PooledReward, *, workers: int, busy: bool, assigned_bytes: int
    ) -> list[Invocation]:
        """Take calls of `reward`, whose turn it is, for one of `workers` that could be given work. It may be
        `busy` with `assigned_bytes` of inputs. Empty when the next call must wait for a free worker."""
        waiting, call_s = reward.waiting, reward.latency.call_s
        most_units = 1 if reward.batch else reward.latency.share(len(waiting), workers)
        most_calls = min(reward.batch, math.ceil(len(waiting) / workers)) if reward.batch else 1
        taken: list[Invocation] = []
        # Each call comes through here: what does not change stays outside the loop.
        while waiting and len(taken) < most_units:
            if busy:
                alone = waiting[0].suspect or (taken and taken[0].suspect)
                if alone or assigned_bytes + waiting[0].size_bytes > MAX_ASSIGNED_BYTES:
                    break
            calls, size_bytes = self._together(reward, most_calls)
            charged_s = call_s * len(calls)
            reward.used_s += charged_s
            assigned_bytes += size_bytes
            busy = True
            taken.append(Invocation(reward, calls, size_bytes, charged_s))
        return taken

    def _together(self, reward: PooledReward, most: int) -> tuple[list[QueuedCall], int]:
        """Return the calls of one invocation, and their bytes."""
        waiting, first = reward.waiting, self.pop(reward)
        calls, size_bytes = [first], first.size_bytes
        while waiting and len(calls) < most and not (first.single or waiting[0].single):
            if size_bytes + waiting[0].size_bytes > MAX_ASSIGNED_BYTES:
                break
            size_bytes += waiting[0].size_bytes
            calls.append(self.pop(reward))
        return calls, size_bytes


def next_action(
    limit_s: float, *, running_for_s: float | None, still_for_s: float, waiting: int
) -> Literal["kill_call", "kill_stuck", "recall", "nothing"]:
    """Return what to do about a worker that has `waiting` calls, the running one included. `running_for_s`:
    age of the call it runs, None when the one it began last has been reported. `still_for_s`: time since it
    last began or reported a call, or was given one while idle.

    `kill_call`: the running call is past its deadline. `kill_stuck`: the worker begins no call, so none can
    be blamed. `recall`: take back what waits behind a slow call."""
    if running_for_s is not None:
        if running_for_s > limit_s:
            return "kill_call"
        if waiting > 1 and running_for_s > RECALL_AFTER_S:
            return "recall"
    elif waiting and still_for_s > limit_s + STUCK_GRACE_S:
        return "kill_stuck"
    return "nothing"


def _read_source(name: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        problem = "there is no file" if isinstance(error, FileNotFoundError) else f"{error.strerror}:"
        raise RewardLoadError(f"the reward {name!r}: {problem} {file}. Check it in the job file.") from None
