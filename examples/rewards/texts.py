"""Rewards of texts: `f1`, the words in common, and `repetition`, a penalty for saying things again.

    reward: {name: examples/rewards/texts.py:f1, args: {where: said}}

`f1` is the score of SQuAD's evaluation (Rajpurkar et al., 2016): lower case, without punctuation and
articles; with `c` words in common (as often as both have them), precision p = c / words of the answer, recall
r = c / words of the truth, F1 = 2pr / (p + r). Where one of the two has no words, it is 1 if neither has,
else 0. `repetition`: with n-grams of words (or of characters) penalty * (1 - different / all), the form used
by open-r1.
"""

from __future__ import annotations

import unicodedata
from collections import Counter

from areal_async import Abstain, RewardInput, Score, answer_of, reward

MOST_WORDS = 200_000  # Words looked at, from the start of the response: bounded work for one of any length


@reward
def f1(given: RewardInput, *, where: str = "whole") -> Score | Abstain:
    """F1 in [0, 1] of the words; with several ground truths the best. `where` the answer stands is as in
    docs/rewards.md#use-built-in-rewards. Components: `exact` (0 or 1), `precision` and `recall` of that
    one."""
    truth = given.ground_truth
    wanted = truth if isinstance(truth, list) else [] if truth is None else [truth]
    if not wanted:
        return Abstain("the task has no ground truth")
    if not all(isinstance(text, str | int | float) for text in wanted):
        raise ValueError(f"the ground truth {truth!r:.80} is neither a text nor a list of texts")
    answer = _words(answer_of(given.spoken, where) or "")
    best = max((_compare(answer, _words(str(text))) for text in wanted), key=lambda parts: parts[0])
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
    text = "".join(" " if unicodedata.category(c).startswith("P") else c for c in text.casefold())
    return [word for word in text.split() if word not in ("a", "an", "the")]


@reward
def repetition(given: RewardInput, *, n: int = 4, penalty: float = -1.0, unit: str = "words") -> Score:
    """A number from `penalty`, that of a response which only repeats itself, to 0. `unit`: what an n-gram is
    made of, `words` or `characters`. Component `repeated`: the share of n-grams that were there before. A
    response shorter than n repeats nothing."""
    if n < 1 or penalty > 0 or unit not in ("words", "characters"):
        raise ValueError("n is at least 1, penalty at most 0, and unit is words or characters")
    items = given.response.lower().split() if unit == "words" else list(given.response)
    items = items[:MOST_WORDS]
    total = len(items) - n + 1
    if total < 1:
        return Score(0.0, {"repeated": 0.0})
    different = len({tuple(items[i : i + n]) for i in range(total)})
    repeated = 1 - different / total
    return Score(penalty * repeated, {"repeated": repeated})
