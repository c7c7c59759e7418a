"""Rewards with the signatures of verl and TRL, recognised by their parameter names.

| signature | source |
|---|---|
| `f(data_source, solution_str, ground_truth, extra_info=None, …)` | verl's `compute_score` |
| `f(completions, …)`, with `prompts` and columns as parameters | TRL |

Values are passed to parameters by name. `reward.args` gives further values. A TRL reward gets lists with one
answer, or with all answers of a group if the scope is `group`. Its columns come from `extra_info`. A column
with a usual name for the correct answer is the ground truth. A completion is a text, or a list of one message
if the task's prompt is a list of messages. A function marked `@reward` is never treated this way, whatever
its parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from areal_async.base.verdicts import Abstain, Score
from reward_service.inputs import RewardInput

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
ANSWER_COLUMNS = ("ground_truth", "solution", "answer", "final_answer", "target", "label")
OWN_COLUMNS = ("data_source", "ability", "reward_style", "extra_info")


def adapted(function: Any) -> Callable[..., Any] | None:
    """Return the function as a reward that takes a `RewardInput`. Its other parameters become keyword
    arguments.

    Returns None if the function has neither signature.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    known = {name for name, each in parameters.items() if each.kind is not each.POSITIONAL_ONLY}
    needed = [
        name
        for name, each in parameters.items()
        if each.default is each.empty and each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    free = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    is_trl = "completions" in known and "solution_str" not in known
    if not is_trl and "solution_str" not in known:
        return None
    fill, filled = (_trl, {"completions", "prompts"}) if is_trl else (_verl, {*VERL})
    others = () if is_trl else needed  # any other parameter of a TRL reward may be a column
    called = f"the reward {getattr(function, '__name__', function)!r}"

    def reward(given: RewardInput | list[RewardInput], **arguments: Any) -> Any:
        values = fill(given if isinstance(given, list) else [given])
        taken = {name: each for name, each in values.items() if free or name in known} | arguments
        if missing := [name for name in needed if name not in taken]:
            why = f"{called} needs {missing[0]!r}, which is no column of the task's extra_info"
            raise ValueError(f"{why}. Put it there, or give it as reward.args.{missing[0]}.")
        result = function(**taken)

        def outcomes(result: Any) -> Any:
            if is_trl:
                found = _of_list(result, len(values["completions"]), called)
                return found if isinstance(given, list) else found[0]
            return _outcome(result[0] if isinstance(result, list | tuple) else result)  # as verl does

        return _awaited(result, outcomes) if isinstance(result, Awaitable) else outcomes(result)

    first = inspect.Parameter("given", inspect.Parameter.POSITIONAL_ONLY)
    rest = [
        each
        if each.kind is each.VAR_KEYWORD
        else each.replace(kind=each.KEYWORD_ONLY, default=each.default if name in others else None)
        for name, each in parameters.items()
        if name in known - filled and each.kind is not each.VAR_POSITIONAL
    ]
    reward.__signature__ = inspect.Signature([first, *rest])  # type: ignore[attr-defined]
    reward.scopes = ("episode", "group") if is_trl else ("episode",)  # type: ignore[attr-defined]
    return reward


def _verl(inputs: Sequence[RewardInput]) -> dict[str, Any]:
    (one,) = inputs
    return dict(zip(VERL, (one.data_source, one.response, one.ground_truth, one.extra_info), strict=True))


def _trl(inputs: Sequence[RewardInput]) -> dict[str, Any]:
    columns = {name: [one.ground_truth for one in inputs] for name in ANSWER_COLUMNS}
    columns |= {name: [getattr(one, name) for one in inputs] for name in OWN_COLUMNS}
    for name in {name for one in inputs for name in one.extra_info}:
        columns[name] = [one.extra_info.get(name) for one in inputs]
    columns["prompts"] = [_said("user", one.prompt, one) for one in inputs]
    columns["completions"] = [_said("assistant", one.response, one) for one in inputs]
    return columns


def _said(role: str, text: str, given: RewardInput) -> Any:
    return [{"role": role, "content": text}] if given.is_chat else text


async def _awaited(result: Awaitable[Any], outcomes: Callable[[Any], Any]) -> Any:
    return outcomes(await result)


def _of_list(results: Any, wanted: int, called: str) -> list[Any]:
    """Return the results of a TRL reward for the completions. Raises `ValueError` unless the reward returns a
    list with one result for each."""
    is_list = isinstance(results, list | tuple)
    if not is_list or len(results) != wanted:
        got = f"{len(results)} scores" if is_list else f"{results!r:.80}, which is no list"
        told = f"{called} returned {got} for {wanted} completion{'s' if wanted > 1 else ''}"
        mend = "A reward of `completions` returns a list with one number for each, as TRL wants it."
        raise ValueError(f"{told}. {mend}")
    return [_outcome(result) for result in results]


def _outcome(result: Any) -> Any:
    """Convert a result (a number, None, or verl's mapping with a `score`) to the result of a reward of this
    project."""
    if result is None:
        return Abstain("the reward returned None")
    if not isinstance(result, Mapping):
        return result
    if "score" not in result:
        raise ValueError(f"the reward returned a mapping without `score`: {list(result)!r:.80}")
    figures = {str(name): float(value) for name, value in result.items() if isinstance(value, int | float)}
    return Score(result["score"], {name: value for name, value in figures.items() if name != "score"})
