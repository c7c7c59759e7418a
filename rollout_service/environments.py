"""Environments in which a policy acts. Actions are texts, and observations are texts or images.

    class World:
        def reset(self, seed, task): return "what the model sees first"
        def step(self, action): return Step("what it sees next", reward=0.0, done=False)

The output of a good environment depends only on the seed, the task and the actions so far. The objects of its
class share no state, and each object runs one episode at a time.
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

BUILT_IN: dict[str, str] = {}  # Name → class. `areal_async.config.registry.ENVIRONMENTS` reads it.


class EnvironmentFailure(ArealError):
    """An environment cannot be loaded, or cannot be used as requested. The text says what to do."""


class Step(NamedTuple):
    """Result of an action."""

    observation: Any
    """A text, an image, or a list of parts with images (`rollout_service/workflows/images.py`)."""
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = MappingProxyType({})
    """Any values that msgpack can encode. The values of the last step become metadata of the episode."""


class Environment(Protocol):
    """An environment, created for each episode as `kind(**environment_args)`. It may also have `blocking =
    False`, `state() -> str` and `close()`. `blocking = False` declares that the environment's calls take only
    microseconds, so they run on the event loop. Otherwise each call runs in a thread with a deadline.
    `state()` returns a text for `ctx.anchor`. Equal texts mean equal states."""

    def reset(self, seed: int, task: Task) -> Any:
        """Start an episode and return the first observation, as in `Step`. `seed` is the group's seed, so all
        samples of a group get the same environment and the same random numbers."""
        ...

    def step(self, action: str) -> Step: ...


def level_seed(seed: int, task: Task) -> int:
    """Return the seed from which an environment generates its level. The seed is the task's `extra_info.seed`
    if it has one, so that a task file can define a set of levels. A task without that field gets a different
    level in each group."""
    own = task.extra_info.get("seed")
    return own if isinstance(own, int) and not isinstance(own, bool) else seed


def group_seed(seed: int, task_id: str) -> int:
    """Return the 63-bit seed for `reset`, derived from the group's seed and the task's row. In an evaluation,
    the job's seed takes the place of the group's."""
    row = task_id.rpartition(":")[0] or task_id
    digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class EnvironmentFactory:
    """Factory of one environment per episode: `kind(**arguments)`."""

    name: str
    kind: Callable[..., Environment]
    arguments: Mapping[str, Any]

    @property
    def blocking(self) -> bool:
        """Whether a call may take longer than microseconds."""
        return bool(getattr(self.kind, "blocking", True))

    def __call__(self) -> Environment:
        """Create an environment. Raises `EnvironmentFailure`."""
        try:
            return self.kind(**self.arguments)
        except EnvironmentFailure:
            raise
        except Exception as error:  # the class may be the user's, so any error is a mistake in the job
            raise EnvironmentFailure(
                f"the environment {self.name!r} cannot be made with environment_args {dict(self.arguments)}: "
                f"{type(error).__name__}: {error}"
            ) from error


def load_environment(name: str, arguments: Mapping[str, Any]) -> EnvironmentFactory:
    """Load the environment called `name` (`areal_async.config.registry`). One object is created immediately,
    so that a mistake shows before the first episode. Raises `EnvironmentFailure`."""
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
