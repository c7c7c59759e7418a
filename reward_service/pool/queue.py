"""The calls that wait for workers: whose turn it is, how many a worker gets, and when it is killed. The
module does no I/O.

Rewards share the workers' time, not the number of calls. The reward that has used the least time is next. An
idle reward does not save up unused time.
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
MAX_ASSIGNED_BYTES = (
    4 << 20
)  # inputs sent to a worker ahead of its calls; a single larger input is sent alone
TARGET_BATCH_S = 0.02
"""Seconds of work per send: enough to make sending cheap, and little enough to move calls elsewhere."""
LARGEST_BATCH = 256
RECALL_AFTER_S = 0.05
"""Seconds after which a call is slow. The calls behind it then return to the shared queue."""
STUCK_GRACE_S = 2.0  # seconds beyond the deadline for a worker that has calls and begins none


class LatencyEstimate:
    """A running mean of call durations, and the batch size that follows from it."""

    def __init__(self) -> None:
        self.call_s = TARGET_BATCH_S
        self._noted = 0

    def note(self, elapsed_s: float) -> None:
        self._noted += 1
        self.call_s += max(0.05, 1 / self._noted) * (elapsed_s - self.call_s)

    @property
    def batch(self) -> int:
        """Return the number of calls that take a worker about `TARGET_BATCH_S`.

        The number is at least 1, and small at first.
        """
        by_time = int(TARGET_BATCH_S / max(self.call_s, 1e-9))
        return max(1, min(LARGEST_BATCH, by_time, 4 * self._noted))

    def share(self, queued: int, workers: int) -> int:
        """Return the number of calls to send now: a batch, or fewer to spread a short queue over all
        workers."""
        return min(self.batch, math.ceil(queued / workers))


class PooledReward:
    """One reward of a pool: its code, its waiting calls and its costs.

    The text of a user's file is kept. Every worker runs the same text, even if the file is changed, broken or
    deleted before the worker starts.
    """

    def __init__(self, number: int, spec: RewardSpec) -> None:
        """Create the reward. Workers know it by `number`. Raises `RewardLoadError` for a missing file."""
        self.number = number
        self.spec = spec
        file = own_file(spec.name)
        self._source = None if file is None else _read_source(spec.name, file)
        self.batch = 0
        """Inputs per invocation, known after loading. 0 means one input, or those of a group."""
        self.loaded_once = False
        self.waiting: deque[QueuedCall] = deque()
        self.used_s = 0.0
        """Workers' time that it has used, on a clock that stops while it is idle."""
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
    single: bool = False  # it failed together with others and now runs in an invocation of its own
    suspect: bool = False
    """Whether its worker died without a known cause. The call then runs alone on its worker."""
    size_bytes: int = 0

    def __post_init__(self) -> None:
        self.size_bytes = sum(map(len, self.payloads))


@dataclass(slots=True)
class Invocation:
    """A unit of a worker's work: a call, or several calls of a batched reward."""

    reward: PooledReward
    calls: list[QueuedCall]
    size_bytes: int
    charged_s: float  # time that its reward was charged in advance

    @property
    def timeout_s(self) -> float:
        return self.reward.spec.timeout_s

    @property
    def suspect(self) -> bool:
        return self.calls[0].suspect


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

    def take(
        self, reward: PooledReward, *, workers: int, busy: bool, assigned_bytes: int
    ) -> list[Invocation]:
        """Take calls of `reward`, whose turn it is, for one of `workers` workers that can accept work.

        The worker may be `busy` with `assigned_bytes` of inputs. Returns an empty list if the next call needs
        a free worker.
        """
        waiting, call_s = reward.waiting, reward.latency.call_s
        most_units = 1 if reward.batch else reward.latency.share(len(waiting), workers)
        most_calls = min(reward.batch, math.ceil(len(waiting) / workers)) if reward.batch else 1
        taken: list[Invocation] = []
        # Every call passes through here, so constant values stay outside the loop.
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
    """Return the action for a worker that has `waiting` calls, including the running one.

    `running_for_s` is the age of its running call, or None if the last begun call has been reported.
    `still_for_s` is the time since it last began or reported a call, or got a call while idle.

    - `kill_call`: the running call is past its deadline.
    - `kill_stuck`: the worker begins no call, so no call is to blame.
    - `recall`: take back the calls behind a slow call.
    """
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
