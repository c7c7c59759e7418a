"""A reward inside another one: what `weighted` and `cosine_length` are made of."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from typing import Any

from areal_async.rpc.verdicts import Abstain, Failure, Score, Timeout, Verdict
from reward_service.sdk import MARK, Mark, RewardInput, RewardLoadError, load_reward


class PartError(RuntimeError):
    """A part raised, or returned what is no verdict. The text names the part."""


def outcome(part: str, name: str, args: Mapping[str, Any], given: RewardInput) -> Any:
    """What the reward `name` says of `given`: a verdict, or an awaitable of one where it is async.

    `part` names it in messages. Raises PartError."""
    function = loaded(name, json.dumps(args, sort_keys=True))
    try:
        result = function(given)
    except Exception as error:
        raise PartError(f"{part}: {type(error).__name__}: {error}") from error
    return _later(part, result) if inspect.isawaitable(result) else _checked(part, result)


async def _later(part: str, awaitable: Awaitable[Any]) -> Verdict:
    try:
        result = await awaitable
    except Exception as error:
        raise PartError(f"{part}: {type(error).__name__}: {error}") from error
    return _checked(part, result)


@functools.lru_cache(maxsize=64)
def loaded(name: str, args_text: str) -> Callable[[RewardInput], Any]:
    """The reward with its arguments, ready to be called with one input. Raises RewardLoadError for one that
    wants lists: a part is given one episode."""
    function: Any = load_reward(name)
    mark = getattr(function, MARK, Mark())
    if mark.takes_list:
        raise RewardLoadError(f"the reward {name!r} takes a list of inputs; a part must take one")
    args = json.loads(args_text)
    try:
        inspect.signature(function).bind(None, **args)
    except TypeError as error:
        raise RewardLoadError(f"the arguments of {name!r} as a part: {error}") from None
    preload = getattr(inspect.getmodule(function), "preload", None)
    if name.isidentifier() and preload is not None:
        preload(**args)
    return functools.partial(function, **args)


def _checked(part: str, result: object) -> Verdict:
    match result:
        case Abstain():
            return Abstain(f"{part}: {result.reason}" if result.reason else part, result.sandbox)
        case Failure():
            return Failure(result.kind, f"{part}: {result.message}", result.sandbox)
        case Timeout():
            return result
    score = result if isinstance(result, Score) else None
    value = score.value if score else result
    if not isinstance(value, Real):
        kind = type(value).__name__
        raise PartError(f"{part}: the score is a {kind}: return a number, a Score or an Abstain")
    if not math.isfinite(value):
        raise PartError(f"{part}: the score is {value}")
    return score or Score(float(value))
