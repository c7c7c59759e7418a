"""Environments, worlds for a policy to act in: text in, text out.

    class World:
        def reset(self, seed, task): return "what the model sees first"
        def step(self, action): return Step("what it sees next", reward=0.0, done=False)

Promise of a good environment: what it says is a function of the seed, the task and the actions so far, and
an object of it knows nothing of any other. One object plays one episode at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from areal_async.base.errors import ArealError
from areal_async.base.records import Task
from areal_async.config.registry import ENVIRONMENTS, PartError

BUILT_IN: dict[str, str] = {}  # Name → class; found by `areal_async.config.registry.ENVIRONMENTS`


class EnvironmentFailure(ArealError):
    """An environment cannot be had, or cannot be used as asked: the text says what to do."""


class Step(NamedTuple):
    """The result of an action."""

    observation: str
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = MappingProxyType({})
    """Anything msgpack can hold; that of the last step goes into the episode's metadata."""


class Environment(Protocol):
    """One world, made for each episode as `kind(**environment_args)`. May also have `blocking = False` (its
    calls take microseconds, and run on the event loop; without it they run in a thread with a deadline),
    `state() -> str` (equal texts are equal states, for `ctx.anchor`) and `close()`."""

    def reset(self, seed: int, task: Task) -> str:
        """Begin. `seed` is that of the episode's group: its samples meet the same world and the same luck."""
        ...

    def step(self, action: str) -> Step: ...


def level_seed(seed: int, task: Task) -> int:
    """Return the seed of the level: `extra_info.seed` of the task, so that a file of tasks is a set of
    levels; a task without one gets another level in every group."""
    own = task.extra_info.get("seed")
    return own if isinstance(own, int) and not isinstance(own, bool) else seed


def group_seed(seed: int, task_id: str) -> int:
    """Return the seed that `reset` gets: 63 bits of the group's (in an evaluation the job's) and the task's
    row."""
    row = task_id.rpartition(":")[0] or task_id
    digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class EnvironmentFactory:
    """Makes one environment for each episode: `kind(**arguments)`."""

    name: str
    kind: Callable[..., Environment]
    arguments: Mapping[str, Any]

    @property
    def blocking(self) -> bool:
        """Whether making and calling one may take longer than microseconds."""
        return bool(getattr(self.kind, "blocking", True))

    def __call__(self) -> Environment:
        """Raises `EnvironmentFailure`."""
        try:
            return self.kind(**self.arguments)
        except EnvironmentFailure:
            raise
        except Exception as error:  # the class may be the user's: whatever it raises is a mistake of the job
            raise EnvironmentFailure(
                f"the environment {self.name!r} cannot be made with environment_args {dict(self.arguments)}: "
                f"{type(error).__name__}: {error}"
            ) from error


def load_environment(name: str, arguments: Mapping[str, Any]) -> EnvironmentFactory:
    """Find the environment called `name` (`areal_async.config.registry`). One is made at once, so that a
    mistake shows before any episode. Raises `EnvironmentFailure`."""
    try:
        factory = EnvironmentFactory(name, ENVIRONMENTS.find(name), arguments)
    except PartError as error:
        raise EnvironmentFailure(str(error)) from error
    first = factory()
    for method in ("reset", "step"):
        if not callable(getattr(first, method, None)):
            raise EnvironmentFailure(f"the environment {name!r} has no {method!r}: it needs reset and step")
    close = getattr(first, "close", None)
    if callable(close):
        close()
    return factory
