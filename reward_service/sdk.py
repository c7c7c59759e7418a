"""Writing a reward: one function, marked `@reward`, in a file of your own.

    from areal_async import RewardInput, reward

    @reward
    def concise(given: RewardInput) -> float:
        return 1.0 if given.ground_truth in given.response and len(given.response) < 200 else 0.0

The job file names it as `reward: {name: path.py:concise}`. The function may be `async`. It returns a real
number, a `Score` (value and named components) or an `Abstain`. Functions with the signatures of verl and TRL
need no mark (`signatures.py`). Whatever else it does (raise, return
something else, NaN, hang, die) becomes a verdict that says so, never a score of 0.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import msgspec

from areal_async.base.errors import ArealError
from areal_async.config.registry import MARK_REWARD, run_user_file
from areal_async.models.answers import opens_thought, spoken
from areal_async.trajectory.verdicts import Abstain, Parts, Score
from reward_service.signatures import adapted

if TYPE_CHECKING:
    from areal_async.config.base import Section
    from areal_async.rpc.schema import Task
    from areal_async.trajectory import Episode

__all__ = ["BUILT_IN", "Abstain", "Parts", "RewardInput", "RewardLoadError", "Score", "load_reward", "reward"]

_ends_s: ContextVar[float] = ContextVar("_ends_s", default=math.inf)

Result = float | Score | Abstain
RewardFunction = Callable[["RewardInput"], Result | Awaitable[Result]]
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
    "overlong": "reward_service.verifiers.text:overlong",
    "weighted": "reward_service.verifiers.composed:weighted",
    "code_stdio": "reward_service.verifiers.code_rewards:code_stdio",
    "code_tests": "reward_service.verifiers.code_rewards:code_tests",
    "remote": "reward_service.backends.remote:RemoteReward",
    "judge": "reward_service.backends.judge:JudgeReward",
    "reward_model": "reward_service.backends.reward_model:RewardModelReward",
}
"""Name of a built-in reward → `module:attribute`: a function marked `@reward`, or a `BackendReward`
(reward_service.backends) that is scored elsewhere than in the pool."""

MARK = "__areal_reward__"
OF_TASK = ("ground_truth", "data_source", "ability", "reward_style", "extra_info")
"""Fields of an input that are those of its task."""


class RewardLoadError(ArealError):
    """A reward cannot be loaded: the text says what is missing and what to do. `may_pass`: what it needs is
    away, and may come back without anybody's correcting the job."""

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class RewardInput(msgspec.Struct, kw_only=True, dict=True):
    """What a reward function is given about one episode."""

    prompt: str = ""
    """The prompt as the model saw it, as text."""
    is_chat: bool = False
    """True where the task's prompt is a list of messages."""
    response: str = ""
    """What the model answered, as text."""
    ground_truth: Any = None
    """`reward_model.ground_truth` of the task's row."""
    data_source: str = ""
    ability: str = ""
    reward_style: str = ""
    extra_info: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    """What the workflow noted about the episode."""
    response_tokens: int = 0
    """Tokens that the model sampled."""
    truncated: bool = False
    """Whether the last answer ended at its length limit."""
    fault: str = ""
    """Why the episode ended early, by the fault of its answers; always empty where a reward is asked."""
    blob: bytes = b""
    """The episode's codec blob; empty where a caller has only texts."""

    @classmethod
    def to(cls, task: Task, **given: Any) -> Self:
        """Return the input about an answer to `task`; `given` are its other fields."""
        shared = {name: getattr(task, name) for name in OF_TASK}
        return cls(is_chat=not isinstance(task.prompt, str), **shared, **given)

    @cached_property
    def spoken(self) -> str:
        """The response without what was thought in it: between `<think>` and `</think>`, before a `</think>`
        that opens nowhere, and after a `<think>` that never closes, which may stand at the prompt's end."""
        return spoken(self.response, opened=opens_thought(self.prompt))

    @cached_property
    def episode(self) -> Episode:
        """The whole trajectory: segments, tokens, log-probs, versions, metadata; decoded when first asked
        for. Raises ValueError when only texts were given, TrajectoryError for a damaged blob."""
        if not self.blob:
            raise ValueError("this input has no episode: only its texts were given")
        # Imported here: it brings numpy, which a reward of texts need not pay for.
        from areal_async.trajectory import unpack

        return unpack(self.blob)


def time_left_s() -> float:
    """Seconds until the deadline of the call that runs a reward; infinite where nothing ends the call."""
    return _ends_s.get() - time.monotonic()


@contextmanager
def deadline_in(timeout_s: float) -> Iterator[None]:
    """Run a call whose deadline is in `timeout_s`."""
    token = _ends_s.set(time.monotonic() + timeout_s)
    try:
        yield
    finally:
        _ends_s.reset(token)


class Mark(msgspec.Struct, frozen=True):
    """What `@reward` notes on a function."""

    batch: int = 0
    """Most inputs of one call; 0: one input, not a list."""
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
    """Mark a function, sync or async, as a reward. The function stays as it is.

    `@reward`: of one `RewardInput`, returns one result. `@reward(batch=n)`: of a list of at most `n` inputs
    that have nothing to do with each other, returns a list with the result of each. `@reward(scope="group")`:
    of the list of all episodes of one group in the order of their samples, returns a list likewise. Keyword
    arguments are filled from `reward.args`; `arguments` is the `Section` that those of a job file are checked
    by, where the function's own parameters do not say enough.

    Raises TypeError for what cannot be called with one positional argument, ValueError for a batch below 0 or
    one together with the scope of a group."""
    if batch < 0 or (batch and scope == "group"):
        raise ValueError(
            f"@reward(batch={batch}, scope={scope!r}): give a batch above 0, or the scope of a group"
        )

    def mark(marked: F) -> F:
        return _marked(marked, Mark(batch, scope), arguments)

    return mark(function) if function is not None else mark


def _marked(function: F, mark: Mark, arguments: type[Section] | None) -> F:
    if not callable(function):
        raise TypeError(f"@reward marks a function, not {type(function).__name__}")
    try:
        signature = inspect.signature(function)
        rest = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        signature.replace(parameters=rest).bind(None)
    except TypeError:
        raise TypeError(
            f"the reward {getattr(function, '__name__', function)!r} must take one argument, the RewardInput"
        ) from None
    setattr(function, MARK, mark)
    # What the checks of a job file read of a part (areal_async.config.registry).
    function.scopes = (mark.scope,)  # type: ignore[attr-defined]
    if arguments is not None:
        function.Arguments = arguments  # type: ignore[attr-defined]
    return function


def load_reward(name: str, *, source: bytes | None = None) -> RewardFunction:
    """The reward called `name`: a built-in one, `path.py:function`, or one of an installed package. Runs the
    file's own code; with `source` that text in place of what the file holds now.

    The file's folder is put on the import path, so it may import its neighbours. Raises `RewardLoadError`.
    """
    path_text, _, attribute = name.rpartition(":")
    if not path_text.endswith(".py") or not attribute:
        # Imported here: a scoring process of a reward of one's own need not pay for it.
        from areal_async.config.registry import REWARDS, PartError

        try:
            part = REWARDS.find(name)
        except PartError as error:
            raise RewardLoadError(str(error)) from error
        if isinstance(part, type):
            raise RewardLoadError(f"the reward {name!r} is no function: it is not computed in the pool.")
        function: RewardFunction = part
        return function
    module = run_user_file(Path(path_text), kind="reward", name=name, error=RewardLoadError, source=source)
    found = getattr(module, attribute, None)
    marked = sorted(
        key for key, value in vars(module).items() if isinstance(getattr(value, MARK, None), Mark)
    )
    choice = f"It has: {', '.join(marked)}." if marked else "It has no function marked @reward."
    if found is None:
        raise RewardLoadError(f"the reward {name!r}: {path_text} defines no {attribute!r}. {choice}")
    if not isinstance(getattr(found, MARK, None), Mark) and (found := adapted(found)) is None:
        raise RewardLoadError(
            f"the reward {name!r}: {attribute!r} in {path_text} is not marked. {MARK_REWARD}. {choice}"
        )
    loaded: RewardFunction = found
    return loaded
