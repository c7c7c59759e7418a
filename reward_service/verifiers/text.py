"""Verifiers of texts: `exact_match`, `regex`, `format_tags`, `choice`, and `overlong`, which penalizes long
answers.

If a pattern of `regex` backtracks too long, the search ends after `BUDGET_S` and the answer is wrong. The
library `regex` supports this limit and reads the syntax of `re`.

`overlong` is DAPO's soft overlong punishment (Yu et al., 2025, eq. 13). With length y, limit L and buffer C:
0 for y <= L - C; ((L - C) - y) / C for L - C < y <= L; -1 for y > L.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import regex as patterns
from pydantic import Field, model_validator

from areal_async.config.base import Section
from reward_service.sdk import Abstain, RewardInput, Score
from reward_service.verifiers import verifier
from reward_service.verifiers.answers import Where, accepted, answer_of, folded

ARTICLES = frozenset(("a", "an", "the"))
BUDGET_S = 2.0


class ExactMatchArguments(Section):
    where: Where | None = None
    """Place of the answer. The default is the whole response, including thoughts."""
    case: bool = True
    """Whether case matters."""
    punctuation: bool = True
    """Whether punctuation counts."""
    articles: bool = True
    """Whether `a`, `an` and `the` count."""
    any_of: bool = False
    """Whether any text of a ground truth that is a list is right."""


@verifier(ExactMatchArguments, needs_truth=True)
def exact_match(given: RewardInput, arguments: ExactMatchArguments) -> float:
    """Return 1 if answer and ground truth are the same text, else 0.

    Runs of white space count as one space, and surrounding white space is removed. A ground truth that is not
    a text is compared in Python's notation. A response without an answer at `where` is wrong. Raises
    `ValueError` for a list of texts without `any_of`, because a right answer would have brackets and quotes.
    """
    truth = given.ground_truth
    if isinstance(truth, list) and not arguments.any_of and any(isinstance(text, str) for text in truth):
        raise ValueError(f"the ground truth {truth!r:.80} is a list of texts: write one text, or set any_of")
    answer = given.response if arguments.where is None else answer_of(given.spoken, arguments.where)
    if answer is None:
        return 0.0
    wanted = accepted(truth) if arguments.any_of else [str(truth)]
    case, punctuation, articles = arguments.case, arguments.punctuation, arguments.articles
    plain, *right = (
        normalise(text, case=case, punctuation=punctuation, articles=articles) for text in (answer, *wanted)
    )
    return float(plain in right)


def normalise(text: str, *, case: bool = True, punctuation: bool = True, articles: bool = True) -> str:
    if not case:
        text = text.casefold()
    if not punctuation:
        text = "".join(" " if unicodedata.category(c).startswith("P") else c for c in text)
    words = text.split()
    return " ".join(words if articles else [word for word in words if word.lower() not in ARTICLES])


class RegexArguments(Section):
    pattern: str | None = None
    """Pattern in Python's syntax, with flags such as `(?im)`. The default is the ground truth."""
    match: Literal["search", "start", "whole"] = "search"
    """Place at which the pattern must match: anywhere, at the start, or the whole text."""
    group: int | str | None = None
    """Group of the pattern whose text must equal the ground truth."""
    negate: bool = False
    """Whether the pattern must not match."""
    where: Where | None = None
    """Place of the answer. The default is the whole response, including thoughts."""

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


@verifier(RegexArguments, reads_truth=True)
def regex(given: RewardInput, arguments: RegexArguments) -> float | Score | Abstain:
    """Return 1 if the pattern matches, else 0, or the reverse with `negate`.

    With `group`, that group of the last match must equal the ground truth, apart from white space. If there
    is no answer at `where`, the pattern does not match. If the search takes too long, the score is 0, also
    with `negate`, and the component `too_costly` is 1. Otherwise this component is absent. Raises
    `regex.error` for a ground truth that is not a pattern.
    """
    pattern, group = arguments.pattern, arguments.group
    if given.ground_truth is None and (pattern is None or group is not None):
        return Abstain("the task has no ground truth")
    text = given.response if arguments.where is None else answer_of(given.spoken, arguments.where)
    compiled = _compiled(str(given.ground_truth) if pattern is None else pattern)
    found = None
    try:
        if text is not None and arguments.match == "search" and group is not None:
            found = next(iter(deque(compiled.finditer(text, timeout=BUDGET_S), maxlen=1)), None)
        elif text is not None:
            how = {"search": compiled.search, "start": compiled.match, "whole": compiled.fullmatch}
            found = how[arguments.match](text, timeout=BUDGET_S)
    except TimeoutError:
        return Score(0.0, {"too_costly": 1.0})
    right = found is not None
    if found is not None and group is not None:
        right = normalise(found[group] or "") in [normalise(text) for text in accepted(given.ground_truth)]
    return float(right is not arguments.negate)


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> patterns.Pattern[str]:
    return patterns.compile(pattern, patterns.VERSION0)


class FormatTagsArguments(Section):
    tags: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.-]*$")], ...] = Field(
        default=("think", "answer"), min_length=1
    )
    """Names of the tags, in order."""
    outside: bool = False
    """Whether text outside the tags is allowed."""
    empty: bool = False
    """Whether a tag may be empty."""
    opened_by_prompt: bool = False
    """Whether the prompt ends with the first tag. This field need not be set if the input has the prompt,
    because then the prompt itself is checked."""
    partial: bool = False
    """Whether the score is the share of the tags that are present."""


@verifier(FormatTagsArguments)
def format_tags(given: RewardInput, arguments: FormatTagsArguments) -> Score:
    """Return 1 if the response consists of the tags, each once and in order, else 0.

    With `partial`, return the share of the tags that occur exactly once, opened and closed. The component
    `tags` is that share. The default form is `<think>…</think> <answer>…</answer>`, as in the format reward
    of DeepSeek-R1 (2025). Tags must not be nested.
    """
    tags = arguments.tags
    opened = arguments.opened_by_prompt or given.prompt.rstrip().endswith(f"<{tags[0]}>")
    text = f"<{tags[0]}>{given.response}" if opened else given.response
    found = sum(_once(text, tag) for tag in tags) / len(tags)
    whole = found == 1 and _in_order(text, tags, outside=arguments.outside, empty=arguments.empty)
    return Score(found if arguments.partial else float(whole), {"tags": found})


def _once(text: str, tag: str) -> bool:
    opening, closing = f"<{tag}>", f"</{tag}>"
    once = text.count(opening) == 1 and text.count(closing) == 1
    return once and text.index(opening) < text.index(closing)


def _in_order(text: str, tags: Sequence[str], *, outside: bool, empty: bool) -> bool:
    """Return whether each tag begins after the end of the previous one. Every tag must occur exactly once."""
    position = 0
    for tag in tags:
        start, end = text.index(f"<{tag}>"), text.index(f"</{tag}>")
        between, inside = text[position:start], text[start + len(tag) + 2 : end]
        if start < position or (between.strip() and not outside) or not (inside.strip() or empty):
            return False
        position = end + len(tag) + 3
    return outside or not text[position:].strip()


# --- the option that was chosen ----------------------------------------------------------------------


LETTERS = "ABCDEFGHIJ"
DECORATION = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}")
DENIED = re.compile(r"(?:is|was)?\s*(?:n't|not|wrong|incorrect|false)\b|不|错|錯|非|誤|では", re.I)
IN_WORD = "(?:[^\\W\u3040-\u9fff\uac00-\ud7af]|')"
"""Pattern for a character that makes a letter next to it part of a word, so that the letter names no option.
Chinese, Japanese and Korean characters are excluded, because these languages have no blanks between words."""
IN_A_SENTENCE = r"(?<=[AI])\s(?!(?:is|was|are|or|and|nor|has|can|may|might|could|would)\b)[a-z]"
"""Pattern for the text after `A` or `I` if the letter is a word of a sentence and names no option: `A cat`,
`I think`."""
REASON = re.compile(
    r"[,;]?\s*+(?:\b(?:because|since)\b|因为|因為|由于).*"
    r"|[,;]?\s*+\b(?:(?:and )?not|rather than|instead of) (?:option )?\(?[A-Z]\)?[.!]?\Z",
    re.DOTALL | re.I,
)
"""Pattern for the reason after a choice. The reason is cut off, because it may mention other options or a
rejected option."""
CHOOSES = r"(?:I(?:['’]ll|['’]d| will| would)? (?:choose|pick|select|go with) )?"
LONGEST = 2_000


class ChoiceArguments(Section):
    letters: str = Field(default=LETTERS, pattern=r"^[A-Z]{2,26}$")
    """The letters of the options."""


@verifier(ChoiceArguments, needs_truth=True)
def choice(given: RewardInput, arguments: ChoiceArguments) -> float:
    """Return 1 if the right option was chosen, else 0.

    Raises `ValueError` for a ground truth that is not an option, because then the task is wrong, not the
    model.
    """
    letters = arguments.letters
    options = _options(given.extra_info.get("choices"), letters)
    wanted = _wanted(given.ground_truth, options, letters)
    stated = answer_of(given.spoken[-20_000:], "any")
    return float(stated is not None and chosen(stated, options, letters) == wanted)


def chosen(stated: str, options: dict[str, str], letters: str = LETTERS) -> str | None:
    """Return the letter that a stated answer chooses, or None if it chooses none or several."""
    plain = DECORATION.sub(r"\1", folded(stated[:LONGEST])).strip().strip("*$ ").strip()
    for letter, text in options.items():
        if _plain(plain) == _plain(text) != "":
            return letter
    named = re.compile(
        rf"{CHOOSES}(?:option|choice)?\s*[*\"'(\[]*([{re.escape(letters)}])(?!{IN_WORD})[*\"')\].:,]*(.*)",
        re.DOTALL | re.I,
    )
    match = named.fullmatch(plain)
    if match is None:
        return None
    letter, rest = match[1].upper(), REASON.sub("", match[2]).strip()
    is_its_text = _plain(rest) == _plain(options.get(letter, ""))
    if not rest:
        return letter
    is_a_word = match[1].islower()  # "a cat" is an article
    if match[1] in "AI" and not is_its_text:  # "A cat", "I think"
        is_a_word = not re.match(r"[A-I]\s*[.):\]]|\(?[A-I]\)", plain)
    if is_a_word or is_its_text:
        return None if is_a_word else letter
    if DENIED.match(rest) or re.fullmatch(rf"[^\w]*[{re.escape(letters.lower())}][^\w]*", rest):
        return None
    others = re.findall(
        rf"(?<!{IN_WORD})\(?([{re.escape(letters)}])\)?(?!{IN_WORD})(?!{IN_A_SENTENCE})", rest
    )
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
    if (letter := text.strip("(). ").upper()) in set(letters):
        return letter
    found = [one for one, option in options.items() if _plain(option) == _plain(text)]
    if len(found) != 1:
        wrong = f"neither a letter of {letters} nor one of the choices"
        raise ValueError(f"the ground truth {truth!r:.80} is {wrong}")
    return found[0]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(". ")


# --- a reward that shapes length -----------------------------------------------------------------------


LengthIn = Literal["tokens", "words", "characters"]


class OverlongArguments(Section):
    limit: int = Field(ge=1)
    """Length above which the penalty is -1."""
    buffer: int = Field(ge=1)
    """Range of lengths below the limit in which the penalty grows."""
    unit: LengthIn = "tokens"
    """Unit of length."""

    @model_validator(mode="after")
    def _fits(self) -> OverlongArguments:
        if self.buffer > self.limit:
            raise ValueError(f"buffer = {self.buffer} is above limit = {self.limit}")
        return self


@verifier(OverlongArguments)
def overlong(given: RewardInput, arguments: OverlongArguments) -> float:
    """Return a number from -1 to 0. An answer that was cut off at its length limit counts as longer than
    `limit`."""
    if given.truncated:
        return -1.0
    beyond = arguments.limit - arguments.buffer - length_of(given, arguments.unit)
    return min(0.0, max(-1.0, beyond / arguments.buffer))


def length_of(given: RewardInput, unit: LengthIn) -> int:
    """Return the length of an answer: the number of sampled tokens, of words, or of characters.

    Raises `ValueError` for a number of tokens if the input has only texts.
    """
    if unit == "characters":
        return len(given.response)
    if unit == "words":
        return len(given.response.split())
    if given.response and not given.response_tokens:
        raise ValueError("the number of tokens is not known of texts: set unit to words or characters")
    return given.response_tokens
