"""`choice`: the option that was chosen is the right one.

The ground truth is a letter (`B`, `(B)`), or the text of an option where `extra_info.choices` lists these
(as a list in the order of the letters, or by letter); a whole number counts from 0 in that list. The
response chooses in the last `<answer>`, box, `####`, or "answer is …"; else in its last line, if that is a
letter alone or one with its option (`B`, `**(B)**`, `B. Paris`). Two different letters there choose nothing.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from areal_async.config.base import Section
from reward_service.sdk import Abstain, RewardInput
from reward_service.verifiers import verifier
from reward_service.verifiers.answers import answer_of

LETTERS = "ABCDEFGHIJ"
DECORATION = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}")
DENIED = re.compile(r"(?:is|was)?\s*(?:n't|not|wrong|incorrect|false)\b", re.I)
IN_A_SENTENCE = r"(?<=[AI])\s(?!(?:is|was|are|or|and|nor|has|can|may|might|could|would)\b)[a-z]"
"""Matches behind `A` or `I` as a word of a sentence, which names no option: `A cat`, `I think`."""
LONGEST = 2_000


class ChoiceArguments(Section):
    letters: str = Field(default=LETTERS, pattern=r"^[A-Z]{2,26}$")
    """Those of the options."""


@verifier(ChoiceArguments)
def choice(given: RewardInput, arguments: ChoiceArguments) -> float | Abstain:
    """1 when the right option was chosen, else 0. Raises ValueError for a ground truth that is no option: the
    task is wrong."""
    if given.ground_truth is None:
        return Abstain("the task has no ground truth")
    letters = arguments.letters
    options = _options(given.extra_info.get("choices"), letters)
    wanted = _wanted(given.ground_truth, options, letters)
    stated = answer_of(given.response[-20_000:], "any")
    return float(stated is not None and chosen(stated, options, letters) == wanted)


def chosen(stated: str, options: dict[str, str], letters: str = LETTERS) -> str | None:
    """The letter that a stated answer chooses; None for none, or for more than one."""
    plain = DECORATION.sub(r"\1", stated[:LONGEST]).strip().strip("*$ ").strip()
    for letter, text in options.items():
        if _plain(plain) == _plain(text) != "":
            return letter
    named = re.compile(
        rf"(?:option|choice)?\s*[*\"'(\[]*([{re.escape(letters)}])(?![\w'])[*\"')\].:,]*(.*)",
        re.DOTALL | re.I,
    )
    match = named.fullmatch(plain)
    if match is None:
        return None
    letter, rest = match[1].upper(), match[2].strip()
    if match[1].islower() and rest:
        return None  # "a cat" is an article
    if (
        match[1] in "AI"
        and rest
        and not re.match(r"[A-I]\s*[.):\]]|\(?[A-I]\)", plain)
        and _plain(rest) != _plain(options.get(letter, ""))
    ):
        return None  # "A cat", "I think"
    if _plain(rest) == _plain(options.get(letter, "")) or not rest:
        return letter
    if DENIED.match(rest) or re.fullmatch(rf"[^\w]*[{re.escape(letters.lower())}][^\w]*", rest):
        return None
    others = re.findall(rf"(?<![\w'])\(?([{re.escape(letters)}])\)?(?![\w'])(?!{IN_A_SENTENCE})", rest)
    return None if set(others) - {letter} or re.match(r"(?:or|and)\b|/", rest) else letter


def _options(choices: Any, letters: str) -> dict[str, str]:
    if isinstance(choices, dict):
        if isinstance(choices.get("text"), list) and isinstance(choices.get("label"), list):
            return dict(zip(map(str, choices["label"]), map(str, choices["text"]), strict=False))
        return {str(letter): str(text) for letter, text in choices.items()}
    return dict(zip(letters, map(str, choices or ()), strict=False))


def _wanted(truth: object, options: dict[str, str], letters: str) -> str:
    if isinstance(truth, int) and not isinstance(truth, bool) and 0 <= truth < len(options):
        return list(options)[truth]
    text = str(truth).strip()
    if text.strip("(). ").upper() in set(letters):
        return text.strip("(). ").upper()
    found = [letter for letter, option in options.items() if _plain(option) == _plain(text)]
    if len(found) != 1:
        raise ValueError(
            f"the ground truth {truth!r:.80} is neither a letter of {letters} nor one of the choices"
        )
    return found[0]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(". ")
