"""Definition of rewards. A reward is a function, marked `@reward`, in a file of the user.

    from areal_async import RewardInput, reward

    @reward
    def concise(given: RewardInput) -> float:
        return 1.0 if given.ground_truth in given.response and len(given.response) < 200 else 0.0

The job file names this reward as `reward: {name: path.py:concise}`. The function may be `async`. It returns a
real number, a `Score` (value and named components) or an `Abstain`. Every other outcome (an exception,
another type, NaN, a hang, a crash) becomes a verdict that names this outcome, never a score of 0. Functions
with the signatures of verl and TRL need no mark (`signatures.py`).
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import msgspec

from areal_async.base.errors import ArealError
from areal_async.base.verdicts import Abstain, Parts, Score
from areal_async.config.user_file import run_user_file
from reward_service.inputs import RewardInput
from reward_service.signatures import adapted

if TYPE_CHECKING:
    from areal_async.config.base import Section
    from areal_async.config.reward_routing import RewardSpec

__all__ = ["BUILT_IN", "Abstain", "Parts", "RewardInput", "RewardLoadError", "Score", "load_reward", "reward"]

MARK_REWARD = (
    "Put `@reward` (from areal_async import reward) above it: it then takes one RewardInput, `given`, with "
    "given.response and given.ground_truth. Functions of verl, with a parameter `solution_str`, and of TRL, "
    "with one `completions`, need no mark"
)

_ends_s: ContextVar[float] = ContextVar("_ends_s", default=math.inf)

Result = float | Score | Abstain
RewardFunction = Callable[[RewardInput], Result | Awaitable[Result]]
Scope = Literal["episode", "group"]
F = TypeVar("F", bound=Callable[..., Any])

BUILT_IN = {
    "arithmetic": "reward_service.verifiers.arithmetic:arithmetic",
    "environment": "reward_service.verifiers.composed:environment",
    "math": "reward_service.verifiers.math:math",
    "gsm8k": "reward_service.verifiers.arithmetic:gsm8k",
    "choice": "reward_service.verifiers.text:choice",
    "exact_match": "reward_service.verifiers.text:exact_match",
    "regex": "reward_service.verifiers.text:regex",
    "format_tags": "reward_service.verifiers.text:format_tags",
    "iou": "reward_service.verifiers.boxes:iou",
    "map": "reward_service.verifiers.boxes:mean_average_precision",
    "overlong": "reward_service.verifiers.text:overlong",
    "weighted": "reward_service.verifiers.composed:weighted",
    "code_stdio": "reward_service.verifiers.code_rewards:code_stdio",
    "code_tests": "reward_service.verifiers.code_rewards:code_tests",
    "remote": "reward_service.backends.remote:RemoteReward",
    "judge": "reward_service.backends.judge:JudgeReward",
    "reward_model": "reward_service.backends.reward_model:RewardModelReward",
}
"""Built-in rewards: name → `module:attribute`.

The attribute is a function marked `@reward`, or a `BackendReward` (`reward_service.backends`) that is scored
outside the pool.
"""

TEXTS_ONLY = BUILT_IN.keys() - {"remote", "judge"}
"""Rewards that see no images themselves. A part of `weighted` may see them."""

MARK = "__areal_reward__"


class RewardLoadError(ArealError):
    """A reward cannot be loaded. The text says what is missing and what to do.

    `may_pass` means that the cause is a resource that is unavailable now, but may come back without a change
    to the job.
    """

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


def sees_images(spec: RewardSpec) -> bool:
    """Return whether a reward, or a reward that it contains, gets the bytes of images."""
    from areal_async.config.rewardcheck import with_those_inside  # no scoring process needs it

    inside = with_those_inside("", spec.name, spec.args)
    return any(
        inner not in TEXTS_ONLY and not (inner == "judge" and given.get("max_images") == 0)
        for _, inner, given in inside
    )


def time_left_s() -> float:
    """Return the seconds until the deadline of the current reward call, or infinity without a deadline."""
    return _ends_s.get() - time.monotonic()


@contextmanager
def deadline_in(timeout_s: float) -> Iterator[None]:
    """Set the deadline of the reward call that runs inside this context to `timeout_s` from now."""
    token = _ends_s.set(time.monotonic() + timeout_s)
    try:
        yield
    finally:
        _ends_s.reset(token)


class Mark(msgspec.Struct, frozen=True):
    """The mark that `@reward` puts on a function."""

    batch: int = 0
    """Largest number of inputs of one call. 0 means that the function takes a single input instead of a
    list."""
    scope: Scope = "episode"

    @property
    def takes_list(self) -> bool:
        return self.batch > 0 or self.scope == "group"


@overload
def reward(function: F, /) -> F: ...


@overload
def reward(
    *, batch: int = 0, scope: Scope = "episode", arguments: type[Section] | None = None
) -> Callable[[F], F]: ...


def reward(
    function: F | None = None,
    /,
    *,
    batch: int = 0,
    scope: Scope = "episode",
    arguments: type[Section] | None = None,
) -> F | Callable[[F], F]:
    """Mark a function, sync or async, as a reward. The function itself does not change.

    - `@reward` takes one `RewardInput` and returns one result.
    - `@reward(batch=n)` takes a list of at most `n` unrelated inputs and returns a list with one result for
      each.
    - `@reward(scope="group")` takes a list of the inputs of one whole group, in sample order, and returns a
      list with one result for each.

    Keyword arguments come from `reward.args`. If the function's own parameters are not precise enough to
    check these arguments in a job file, pass `arguments`, a `Section` that checks them. Raises `TypeError`
    for an object that cannot be called with one positional argument. Raises `ValueError` for a batch below 0,
    and for a batch together with the group scope.
    """
    if batch < 0 or (batch and scope == "group"):
        asked = f"@reward(batch={batch}, scope={scope!r})"
        raise ValueError(f"{asked}: give a batch above 0, or the scope of a group")

    def mark(marked: F) -> F:
        if not callable(marked):
            raise TypeError(f"@reward marks a function, not {type(marked).__name__}")
        try:
            signature = inspect.signature(marked)
            rest = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
            signature.replace(parameters=rest).bind(None)
        except TypeError:
            name = getattr(marked, "__name__", marked)
            raise TypeError(f"the reward {name!r} must take one argument, the RewardInput") from None
        setattr(marked, MARK, Mark(batch, scope))
        # Read by the checks of a job file (areal_async.config.registry).
        marked.scopes = (scope,)  # type: ignore[attr-defined]
        if arguments is not None:
            marked.Arguments = arguments  # type: ignore[attr-defined]
        return marked

    return mark(function) if function is not None else mark


def own_file(name: str) -> Path | None:
    """Return the file of a reward from a user's file, or None for other rewards."""
    path_text, _, attribute = name.rpartition(":")
    return Path(path_text) if attribute and path_text.endswith(".py") else None


def load_reward(name: str, *, source: bytes | None = None) -> RewardFunction:
    """Return the reward `name`: a built-in one, `path.py:function`, or one of an installed package.

    Executes the code of the user's file, or `source` instead of the present text of the file. The folder of
    the file is added to the import path, so that the file may import its neighbours. Raises
    `RewardLoadError`.
    """
    if (path := own_file(name)) is None:
        # Imported here, because a scoring process of a user's reward does not need it.
        from areal_async.config.registry import REWARDS, PartError

        try:
            part = REWARDS.find(name)
        except PartError as error:
            raise RewardLoadError(str(error)) from error
        if isinstance(part, type):
            raise RewardLoadError(f"the reward {name!r} is no function: it is not computed in the pool.")
        function: RewardFunction = part
        return function
    module = run_user_file(path, kind="reward", name=name, error=RewardLoadError, source=source)
    attribute = name.rpartition(":")[2]
    found = getattr(module, attribute, None)
    marked = sorted(key for key, one in vars(module).items() if isinstance(getattr(one, MARK, None), Mark))
    choice = f"It has: {', '.join(marked)}." if marked else "It has no function marked @reward."
    if found is None:
        raise RewardLoadError(f"the reward {name!r}: {path} defines no {attribute!r}. {choice}")
    if not isinstance(getattr(found, MARK, None), Mark) and (found := adapted(found)) is None:
        told = f"the reward {name!r}: {attribute!r} in {path} is not marked"
        raise RewardLoadError(f"{told}. {MARK_REWARD}. {choice}")
    loaded: RewardFunction = found
    return loaded
