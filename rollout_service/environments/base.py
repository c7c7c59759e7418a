"""Environments: text in, text out.

    class World:
        def reset(self, seed, task): return "what the model sees first"
        def step(self, action): return Step("what it sees next", reward=0.0, done=False)

Promise of a good environment: what it says is a function of the seed, the task and the actions so far, and
an object of it knows nothing of any other. One object plays one episode at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from areal_async.errors import ArealError
from areal_async.rpc.messages import Task


class EnvironmentFailure(ArealError):
    """An environment cannot be had, or cannot be used as asked: the text says what to do."""


class Step(NamedTuple):
    """What an action led to."""

    observation: str
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = MappingProxyType({})
    """Anything msgpack can hold; that of the last step goes into the episode's metadata."""


class Environment(Protocol):
    """One world. May also have `blocking = False` (its calls take microseconds, and run on the event loop;
    without it they run in a thread with a deadline), `state() -> str` (equal texts are equal states, for
    `ctx.anchor`) and `close()`."""

    def reset(self, seed: int, task: Task) -> str:
        """Begin. `seed` is that of the episode's group: its samples meet the same world and the same luck."""
        ...

    def step(self, action: str) -> Step: ...


def level_seed(seed: int, task: Task) -> int:
    """What decides the level: `extra_info.seed` of the task, so that a file of tasks is a set of levels; a
    task without one gets another level in every group."""
    own = task.extra_info.get("seed")
    return own if isinstance(own, int) and not isinstance(own, bool) else seed


def group_seed(seed: int, task_id: str) -> int:
    """The seed that `reset` gets: 63 bits of the group's (in an evaluation the job's) and the task's row."""
    row = task_id.rpartition(":")[0] or task_id
    digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
