"""`reasoning_gym`: an answer to a question of that library scores 1 only if the library says 1, else 0.

Needs the extra `environments`. Many of its scorers give part of a point for something like an answer; those
parts are not given here. docs/verifiers.md says where the entry of a question is read from.

Some scorers of the library hand the answer to Python's `eval` or sympy's `parse_expr`, which runs what the
model wrote. For these data sets an answer is passed on only if it is a literal or a name, no Python at all,
or plain maths; another one scores 0 with the component `refused`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from areal_async.config.base import Section
from areal_async.expressions import parsed
from reward_service.sdk import Abstain, RewardInput, RewardLoadError, Score
from reward_service.verifiers import TooCostly, verifier, within
from reward_service.verifiers.answers import Where, answer_of

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


class ReasoningGymArguments(Section):
    dataset: str | None = None
    """Its name there; by default what the task says."""
    dataset_args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the data set, without `seed` and `size`."""
    where: Where = "tag"
    """Where the answer stands; with `tag` a response without one is the answer as a whole."""


def _prepare(arguments: ReasoningGymArguments) -> None:
    """Import the library, which takes seconds, and make the data set where one is named."""
    _library()
    if arguments.dataset is not None:
        _dataset(arguments.dataset, _text(arguments.dataset_args))


@verifier(ReasoningGymArguments, prepare=_prepare)
def reasoning_gym(given: RewardInput, arguments: ReasoningGymArguments) -> Score | Abstain:
    """1 or 0. Component `library`: what the library says, in [0, 1].

    An answer that its scorer raises on is wrong, and so is one that it takes too long for (component
    `too_costly`: 1, and there only when so). Raises ValueError for a task that names no known data set or
    entry, or one that the scorer raises on with its own answer."""
    name, entry = _entry(given, arguments)
    if entry is None:
        return Abstain("the task has no entry (extra_info.entry, or extra_info.seed and index)")
    answer = answer_of(given.response, arguments.where)
    if answer is None and arguments.where == "tag":
        answer = answer_of(given.response, "whole")
    if not answer or len(answer) > LONGEST:
        return Score(0.0, {"library": 0.0})
    if not harmless(answer, name):
        return Score(0.0, {"library": 0.0, "refused": 1.0})
    score = _dataset(name, _text(arguments.dataset_args)).score_answer
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


def _entry(given: RewardInput, arguments: ReasoningGymArguments) -> tuple[str, dict[str, Any] | None]:
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
    name = arguments.dataset or extra.get("dataset") or own
    if not isinstance(name, str):
        raise ValueError("no data set is named: set reward.args.dataset, or extra_info.dataset of the task")
    if entry is None and "index" in extra and "seed" in extra:
        index = int(extra["index"])
        entry = _dataset(name, _text(arguments.dataset_args), int(extra["seed"]), index + 1)[index]
    return name, entry


def _must_score(score: Callable[[str, Any], float], entry: Mapping[str, Any], name: str) -> None:
    """Raise ValueError when not even the entry's own answer can be scored: then the task is wrong."""
    try:
        score(str(entry["answer"]), entry)
    except Exception as error:
        raise ValueError(f"reasoning_gym's {name} cannot score this entry: {error!r:.200}") from error


def _text(args: Mapping[str, Any]) -> str:
    return json.dumps(args, sort_keys=True)
