"""A question of one of the data sets of `reasoning_gym`, and that library's scorer for the answer. One turn.

Needs the extra `environments`. The question is drawn by the seed; a task with `extra_info.index` names entry
`index` of the data set that `extra_info.seed` makes. The reward `reasoning_gym`, here too, judges the answer,
and suits other workflows as well:

    reward: {name: examples/environments/of_reasoning_gym.py:reasoning_gym, args: {dataset: chain_sum}}

Many of the library's scorers give part of a point for something like an answer; the reward does not. Some
hand the answer to Python's `eval` or sympy's `parse_expr`, which runs what the model wrote: they are given
only a literal or a name, no Python at all, or plain maths; another answer scores 0 with the component
`refused`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from expressions import parsed  # beside this file
from pydantic import Field

from areal_async import (
    Abstain,
    EnvironmentFailure,
    RewardInput,
    RewardLoadError,
    Score,
    Section,
    Step,
    Task,
    TooCostly,
    answer_of,
    level_seed,
    reward,
    within,
)

SEEDS = 2**31


class ReasoningGym:
    """Calls run in a thread: how long they take is the library's business."""

    class Arguments(Section):
        """A data set of `reasoning_gym`: a question, and its scorer for the answer."""

        dataset: str
        """Name of the data set in the library, for example `chain_sum`."""
        dataset_args: dict[str, Any] = Field(default_factory=dict)
        """Settings of the data set (difficulty), without `seed` and `size`."""

    def __init__(self, **options: Any) -> None:
        self.options = self.Arguments(**options)
        try:
            self._library: Any = importlib.import_module("reasoning_gym")
        except ImportError:
            raise EnvironmentFailure(
                "the environment `reasoning_gym` needs that library: pip install areal-async[environments]"
            ) from None
        self._dataset = self._make(seed=0, size=1)
        self._entry: Any = None

    def reset(self, seed: int, task: Task) -> str:
        index = int(task.extra_info.get("index", 0))
        self._dataset = self._make(seed=level_seed(seed, task) % SEEDS, size=index + 1)
        self._entry = self._dataset[index]
        return f"{self._entry['question']}\n"

    def state(self) -> str:
        return str(self._entry["question"])

    def step(self, action: str) -> Step:
        # Not the library's scorer itself: some of them evaluate the answer as Python.
        given = RewardInput(response=action, extra_info={"entry": self._entry})
        judged = reasoning_gym(given, dataset=self.options.dataset, dataset_args=self.options.dataset_args)
        return Step("", judged.components["library"] if isinstance(judged, Score) else 0.0, True)

    def _make(self, *, seed: int, size: int) -> Any:
        name, arguments = self.options.dataset, self.options.dataset_args
        try:
            return self._library.create_dataset(name, seed=seed, size=size, **arguments)
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise EnvironmentFailure(
                f"reasoning_gym cannot make {name!r} with {arguments}: {error}"
            ) from error


# --- the reward ----------------------------------------------------------------------------------------


EVALUATES = re.compile(r"\beval\(|\bexec\(")
PARSES = re.compile(r"parse_expr\(|sympify\(")
MATHS = re.compile(r"[\w\s+\-*/^().,=]*")
NAME = re.compile(r"[^\W\d]\w*")
_NAMES = "sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log ln sqrt pi Abs"
NAMES = frozenset(_NAMES.split())
POWERFUL = re.compile(r"(?:\*\*|\^)\s*\(?\s*-?\d{4,}|(?:\*\*|\^)[^+\-/()]*(?:\*\*|\^)|\d{40,}")
LITERAL = (
    ast.Constant | ast.Name | ast.List | ast.Tuple | ast.Set | ast.Dict
    | ast.Load | ast.UnaryOp | ast.USub | ast.UAdd
)  # fmt: skip
LONGEST = 20_000
BUDGET_S = 2.0


def _prepare(dataset: str | None = None, dataset_args: Mapping[str, Any] | None = None, **_: Any) -> None:
    """Import the library, which takes seconds, and make the data set where one is named."""
    _library()
    if dataset is not None:
        _dataset(dataset, _text(dataset_args or {}))


@reward
def reasoning_gym(
    given: RewardInput,
    *,
    dataset: str | None = None,
    dataset_args: Mapping[str, Any] | None = None,
    where: str = "tag",
) -> Score | Abstain:
    """1 only if the library says 1, else 0. Component `library`: what it says, in [0, 1]. `dataset` is its
    name there, by default what the task says; `where` the answer stands is as in
    docs/rewards.md#use-built-in-rewards, and with `tag` a response without one is the answer as a whole. The
    entry of a question is the task's ground truth, or `extra_info.entry`, or is made of `extra_info.seed` and
    `index`.

    An answer that its scorer raises on is wrong, and so is one that it takes too long for (component
    `too_costly`: 1, and there only when so). Raises ValueError for a task that names no known data set or
    entry, or one that the scorer raises on with its own answer."""
    name, entry = _entry(given, dataset, dataset_args or {})
    if entry is None:
        return Abstain("the task has no entry (extra_info.entry, or extra_info.seed and index)")
    answer = answer_of(given.spoken, where)
    if answer is None and where == "tag":
        answer = answer_of(given.spoken, "whole")
    if not answer or len(answer) > LONGEST:
        return Score(0.0, {"library": 0.0})
    if not harmless(answer, name):
        return Score(0.0, {"library": 0.0, "refused": 1.0})
    score = _dataset(name, _text(dataset_args or {})).score_answer
    try:
        said = float(within(BUDGET_S, lambda: score(answer, entry)))
    except TooCostly:
        return Score(0.0, {"library": 0.0, "too_costly": 1.0})
    except Exception:
        _must_score(score, entry, name)
        said = 0.0
    return Score(float(said == 1.0), {"library": said})


def harmless(answer: str, name: str) -> bool:
    """Whether the scorer of the data set may be given the answer without running what a model wrote."""
    how = _evaluates(name)
    if how == "evaluates":
        try:
            tree = parsed(answer.strip())
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return True  # Python cannot run it either
        return all(isinstance(node, LITERAL) for node in ast.walk(tree))
    if how == "parses":
        if not MATHS.fullmatch(answer) or "__" in answer or re.search(r"\.\s*[^\W\d]", answer):
            return False
        known = all(name in NAMES or len(name) == 1 for name in NAME.findall(answer))
        return known and POWERFUL.search(answer) is None
    return True


@functools.cache
def _evaluates(name: str) -> str:
    source = inspect.getsource(type(_dataset(name, "{}")).score_answer)
    return "evaluates" if EVALUATES.search(source) else "parses" if PARSES.search(source) else ""


@functools.lru_cache(maxsize=128)
def _dataset(name: str, args_text: str, seed: int = 0, size: int = 1) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _library().create_dataset(name, seed=seed, size=size, **json.loads(args_text))
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise ValueError(f"reasoning_gym cannot make {name!r} with {args_text}: {error}") from error


@functools.cache
def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise RewardLoadError(
            "the reward `reasoning_gym` needs that library: pip install areal-async[environments]"
        ) from None
    return reasoning_gym


def _entry(
    given: RewardInput, dataset: str | None, dataset_args: Mapping[str, Any]
) -> tuple[str, dict[str, Any] | None]:
    """(name of the data set, the entry); no entry where the task tells none. Raises ValueError."""
    extra = given.extra_info
    entry = extra.get("entry", given.ground_truth)
    if isinstance(entry, str):
        try:
            entry = json.loads(entry)
        except ValueError:
            entry = None  # a plain answer as ground truth: the entry is made again
    if not isinstance(entry, dict) or "answer" not in entry:
        entry = None
    metadata = entry.get("metadata") if entry else None
    own = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    name = dataset or extra.get("dataset") or own
    if not isinstance(name, str):
        raise ValueError("no data set is named: set reward.args.dataset, or extra_info.dataset of the task")
    if entry is None and "index" in extra and "seed" in extra:
        index = int(extra["index"])
        entry = _dataset(name, _text(dataset_args), int(extra["seed"]), index + 1)[index]
    return name, entry


def _must_score(score: Callable[[str, Any], float], entry: Mapping[str, Any], name: str) -> None:
    """Raise ValueError when not even the entry's own answer can be scored: then the task is wrong."""
    try:
        score(str(entry["answer"]), entry)
    except Exception as error:
        raise ValueError(f"reasoning_gym's {name} cannot score this entry: {error!r:.200}") from error


def _text(args: Mapping[str, Any]) -> str:
    return json.dumps(args, sort_keys=True)


reasoning_gym.preload = _prepare  # type: ignore[attr-defined]
