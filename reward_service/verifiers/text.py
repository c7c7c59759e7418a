"""Verifiers that compare texts: `exact_match`, `f1`, `regex` and `format_tags`.

`f1` is the score of SQuAD's evaluation (Rajpurkar et al., 2016): lower case, without punctuation and
articles; with `c` words in common (as often as both have them), precision p = c / words of the answer, recall
r = c / words of the truth, F1 = 2pr / (p + r). Where one of the two has no words, it is 1 if neither has,
else 0.

Where a pattern of `regex` goes back over a response again and again, looking ends after `BUDGET_S`: the
answer is wrong. The library `regex` is used for that limit; it reads the syntax of `re`.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter, deque
from collections.abc import Sequence
from typing import Annotated, Literal

import regex as patterns
from pydantic import Field, model_validator

from areal_async.config.base import Section
from reward_service.sdk import Abstain, RewardInput, Score
from reward_service.verifiers import verifier
from reward_service.verifiers.answers import Where, accepted, answer_of

ARTICLES = frozenset(("a", "an", "the"))
BUDGET_S = 2.0
"""CPU time of a pattern."""


class ExactMatchArguments(Section):
    where: Where | None = None
    """Where the answer stands; by default it is the whole response, thinking included."""
    case: bool = True
    """Whether upper and lower case differ."""
    punctuation: bool = True
    """Whether punctuation counts."""
    articles: bool = True
    """Whether `a`, `an` and `the` count."""
    any_of: bool = False
    """Whether a ground truth that is a list holds texts of which any is right."""


@verifier(ExactMatchArguments)
def exact_match(given: RewardInput, arguments: ExactMatchArguments) -> float | Abstain:
    """1 when answer and ground truth are the same text, else 0.

    Runs of white space count as one space, and none at either end. A ground truth that is no text is compared
    as Python writes it. No answer at `where` is wrong. A task without ground truth is not judged."""
    if given.ground_truth is None:
        return Abstain("the task has no ground truth")
    answer = given.response if arguments.where is None else answer_of(given.response, arguments.where)
    if answer is None:
        return 0.0
    wanted = accepted(given.ground_truth) if arguments.any_of else [str(given.ground_truth)]
    plain, *right = (
        normalise(text, case=arguments.case, punctuation=arguments.punctuation, articles=arguments.articles)
        for text in (answer, *wanted)
    )
    return float(plain in right)


def normalise(text: str, *, case: bool = True, punctuation: bool = True, articles: bool = True) -> str:
    if not case:
        text = text.casefold()
    if not punctuation:
        text = "".join(" " if unicodedata.category(c).startswith("P") else c for c in text)
    words = text.split()
    return " ".join(words if articles else [word for word in words if word.lower() not in ARTICLES])


class F1Arguments(Section):
    where: Where = "whole"
    """Where the answer stands."""


@verifier(F1Arguments)
def f1(given: RewardInput, arguments: F1Arguments) -> Score | Abstain:
    """F1 in [0, 1] of the words; with several ground truths the best. Components: `exact` (0 or 1),
    `precision` and `recall` of that one."""
    wanted = accepted(given.ground_truth)
    if not wanted:
        return Abstain("the task has no ground truth")
    answer = _words(answer_of(given.response, arguments.where) or "")
    best = max((_compare(answer, _words(text)) for text in wanted), key=lambda parts: parts[0])
    return Score(best[0], {"exact": best[3], "precision": best[1], "recall": best[2]})


def _compare(answer: list[str], truth: list[str]) -> tuple[float, float, float, float]:
    """(F1, precision, recall, exact)."""
    exact = float(answer == truth)
    common = (Counter(answer) & Counter(truth)).total()
    if not common:
        return exact if not answer and not truth else 0.0, exact, exact, exact
    precision, recall = common / len(answer), common / len(truth)
    return 2 * precision * recall / (precision + recall), precision, recall, exact


def _words(text: str) -> list[str]:
    return normalise(text, case=False, punctuation=False, articles=False).split()


class RegexArguments(Section):
    pattern: str | None = None
    """The pattern in the syntax of Python; by default the ground truth is the pattern."""
    match: Literal["search", "start", "whole"] = "search"
    """Where it must match."""
    case: bool = True
    """Whether upper and lower case differ."""
    multiline: bool = False
    """Whether `^` and `$` match at every line."""
    dot_all: bool = False
    """Whether `.` matches the end of a line too."""
    group: int | str | None = None
    """The group whose text must be the ground truth."""
    negate: bool = False
    """Whether it must not match."""
    where: Where | None = None
    """Where the answer stands; by default it is the whole response, thinking included."""

    @model_validator(mode="after")
    def _compiles(self) -> RegexArguments:
        if self.pattern is None:
            return self
        try:
            compiled = re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from None
        if isinstance(self.group, int) and not 0 <= self.group <= compiled.groups:
            raise ValueError(f"the pattern has {compiled.groups} groups, and no group {self.group}")
        if isinstance(self.group, str) and self.group not in compiled.groupindex:
            raise ValueError(f"the pattern has no group called {self.group!r}")
        return self


@verifier(RegexArguments)
def regex(given: RewardInput, arguments: RegexArguments) -> float | Score | Abstain:
    """1 when the pattern matches, else 0; with `negate` the other way round.

    With `group`, what the last match holds in that group must be the ground truth, up to white space. Where
    there is no answer at `where`, nothing matches. Component `too_costly`: 1, and there only when so, where
    it takes too long; the score is then 0, with `negate` too. Raises regex.error for a ground truth that is
    no pattern."""
    pattern, group = arguments.pattern, arguments.group
    if given.ground_truth is None and (pattern is None or group is not None):
        return Abstain("the task has no ground truth")
    text = given.response if arguments.where is None else answer_of(given.response, arguments.where)
    compiled = _compiled(
        str(given.ground_truth) if pattern is None else pattern,
        arguments.case,
        arguments.multiline,
        arguments.dot_all,
    )
    found = None
    if text is not None:
        try:
            if arguments.match == "search" and group is not None:
                found = next(iter(deque(compiled.finditer(text, timeout=BUDGET_S), maxlen=1)), None)
            else:
                how = {"search": compiled.search, "start": compiled.match, "whole": compiled.fullmatch}
                found = how[arguments.match](text, timeout=BUDGET_S)
        except TimeoutError:
            return Score(0.0, {"too_costly": 1.0})
    right = found is not None
    if found is not None and group is not None:
        right = normalise(found[group] or "") in [normalise(text) for text in accepted(given.ground_truth)]
    return float(right is not arguments.negate)


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str, case: bool, multiline: bool, dot_all: bool) -> patterns.Pattern[str]:
    flags = patterns.VERSION0
    for wanted, flag in (
        (not case, patterns.IGNORECASE),
        (multiline, patterns.MULTILINE),
        (dot_all, patterns.DOTALL),
    ):
        flags |= flag if wanted else patterns.VERSION0
    return patterns.compile(pattern, flags)


class FormatTagsArguments(Section):
    tags: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]*$")], ...] = Field(
        default=("think", "answer"), min_length=1
    )
    """Their names, in order."""
    outside: bool = False
    """Whether text may stand outside of them."""
    empty: bool = False
    """Whether a tag may hold nothing."""
    opened_by_prompt: bool = False
    """Whether the prompt ends with the first tag."""
    partial: bool = False
    """Whether the score is the share of the tags that are there."""


@verifier(FormatTagsArguments)
def format_tags(given: RewardInput, arguments: FormatTagsArguments) -> Score:
    """1 when the response is made of the tags, each once, in their order, else 0; with `partial` the share of
    the tags that are there once, opened and closed. Component `tags`: that share.

    By default the form is `<think>…</think> <answer>…</answer>`, as in DeepSeek-R1's format reward (2025).
    Tags may hold one another only if they are named so; none is looked for in what they hold."""
    tags = arguments.tags
    text = f"<{tags[0]}>{given.response}" if arguments.opened_by_prompt else given.response
    found = sum(_once(text, tag) for tag in tags) / len(tags)
    whole = found == 1 and _in_order(text, tags, outside=arguments.outside, empty=arguments.empty)
    return Score(found if arguments.partial else float(whole), {"tags": found})


def _once(text: str, tag: str) -> bool:
    opening, closing = f"<{tag}>", f"</{tag}>"
    once = text.count(opening) == 1 and text.count(closing) == 1
    return once and text.index(opening) < text.index(closing)


def _in_order(text: str, tags: Sequence[str], *, outside: bool, empty: bool) -> bool:
    """Whether each tag begins behind the one before it; every one is there once."""
    position = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        start, end = text.index(opening), text.index(closing)
        between, inside = text[position:start], text[start + len(opening) : end]
        if start < position or (between.strip() and not outside) or not (inside.strip() or empty):
            return False
        position = end + len(closing)
    return outside or not text[position:].strip()
