"""Instructions on the form of a response, as IFEval (Zhou et al., 2023) names them: those a rule can check.

    reward: {name: examples/rewards/instructions.py:instructions, args: {partial: true}}

A task names its instructions in its ground truth or in `extra_info`, as IFEval's data does:
`{instruction_id_list: ["punctuation:no_comma"], kwargs: [{}]}`. `language:response_language` needs a
language detector and is not there. Words and sentences are counted without NLTK, so counts may differ.
Besides `at least` and `less than`, relations may be `at most` and `exactly`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from json_schema import strict_json  # beside this file

from areal_async import Abstain, RewardInput, Score, reward

LONGEST_RESPONSE = 200_000
"""Characters; a longer response follows nothing."""


@reward
def instructions(
    given: RewardInput, *, rules: Sequence[Mapping[str, Any]] = (), partial: bool = False
) -> Score | Abstain:
    """1 when every instruction is followed, else 0; with `partial` the share of those followed. Component
    `followed`: that share. Thinking is left out of the response. `rules`: instructions for every task, each
    `{id: length_constraints:number_words, num_words: 3}`; the task's own come on top.

    Raises ValueError for instructions that are not known."""
    if not all(isinstance(rule.get("id"), str) for rule in rules):
        raise ValueError("each rule needs an `id`, for example `length_constraints:number_words`")
    asked = [(rule["id"], {k: v for k, v in rule.items() if k != "id"}) for rule in rules] + _of_task(given)
    if not asked:
        return Abstain("the task has no instructions, and reward.args.rules gives none")
    text = given.spoken.strip()
    if len(text) > LONGEST_RESPONSE:
        text = ""
    share = sum(follows(text, name, values) for name, values in asked) / len(asked)
    return Score(share if partial else float(share == 1), {"followed": share})


def _of_task(given: RewardInput) -> list[tuple[str, dict[str, Any]]]:
    truth = given.ground_truth
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        truth = json.loads(truth)
    for source in (truth, given.extra_info):
        if not isinstance(source, Mapping):
            continue
        names = source.get("instruction_id_list", source.get("instruction_id"))
        if names is None:
            continue
        arguments = source.get("kwargs") or [{}] * len(names)
        if not isinstance(names, list) or len(names) != len(arguments):
            raise ValueError("instruction_id_list and kwargs must be lists of the same length")
        return [(str(name), dict(given or {})) for name, given in zip(names, arguments, strict=True)]
    return []


Check = Callable[..., bool]
"""Says whether a response follows, given the instruction's arguments by name."""

WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
SENTENCE_END = re.compile(r"[.!?]+")
# What begins a line is looked for on that line: a pattern that may start on any of many blank lines before it
# would go through them again from each.
BULLET = re.compile(r"^[^\S\n]*(?:\*(?!\*)|-)[^\S\n]+[^\s]", re.MULTILINE)
HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*|(?<!\*)\*([^\n*]+)\*(?!\*)")
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def compared(count: int, relation: str | None, number: int) -> bool:
    """`at least` (as when left out) or `less than`. Raises ValueError for another relation."""
    match relation:
        case "at least" | None:
            return count >= number
        case "less than":
            return count < number
        case "at most":
            return count <= number
        case "exactly":
            return count == number
    raise ValueError(f"the relation {relation!r} is none of: at least, at most, less than, exactly")


def contains(text: str, word: str) -> bool:
    return count_of(text, word) > 0


def count_of(text: str, word: str) -> int:
    """How often a word or phrase stands in the text by itself, without case."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _existence(text: str, keywords: Sequence[str]) -> bool:
    return all(contains(text, word) for word in keywords)


def _forbidden(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(contains(text, word) for word in forbidden_words)


def _frequency(text: str, keyword: str, frequency: int, relation: str | None = None) -> bool:
    return compared(count_of(text, keyword), relation, frequency)


def _letters(text: str, letter: str, let_frequency: int, let_relation: str | None = None) -> bool:
    return compared(text.lower().count(letter.lower()), let_relation, let_frequency)


def _words(text: str, num_words: int, relation: str | None = None) -> bool:
    return compared(len(WORD.findall(text)), relation, num_words)


def _sentences(text: str, num_sentences: int, relation: str | None = None) -> bool:
    return compared(sum(map(bool, map(WORD.search, SENTENCE_END.split(text)))), relation, num_sentences)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    """Parted by `***` on a line, as the instruction says."""
    return len([part for part in re.split(r"\s?\*\*\*\s?", text) if part.strip()]) == num_paragraphs


def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are parted by blank lines; the n-th, counted from 1, begins with the word."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    first = WORD.search(parts[nth_paragraph - 1])
    return first is not None and first[0].lower() == first_word.lower()


def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]+\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str = "P.S.") -> bool:
    marker = re.escape(postscript_marker).replace(r"\.", r"\.\s?")
    return re.search(rf"^[^\S\n]*{marker}", text, re.IGNORECASE | re.MULTILINE) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    return len(BULLET.findall(text)) == num_bullets


def _constrained(text: str) -> bool:
    return any(answer in text for answer in ANSWERS)


def _highlights(text: str, num_highlights: int) -> bool:
    return sum(bool("".join(found).strip()) for found in HIGHLIGHT.findall(text)) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    marks = re.findall(rf"^[^\w\n]*{re.escape(section_spliter)}\s+\w", text, re.IGNORECASE | re.MULTILINE)
    return len(marks) >= num_sections


def _json(text: str) -> bool:
    inner = text.strip()
    if inner.startswith("```"):
        inner = inner[3:]
        inner = inner[4:] if inner[:4].lower() == "json" else inner
    try:
        strict_json(inner.removesuffix("```").strip())
    except ValueError:
        return False
    return True


def _title(text: str) -> bool:
    return any(inner.strip("<> ") for inner in re.findall(r"<<[^\n<>]+>>", text))


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == '"' and text[-1] == '"'


def _capital_words(text: str, capital_frequency: int, capital_relation: str | None = None) -> bool:
    capitals = [word for word in WORD.findall(text) if word.isupper()]
    return compared(len(capitals), capital_relation, capital_frequency)


CHECKS: dict[str, Check] = {
    "keywords:existence": _existence,
    "keywords:forbidden_words": _forbidden,
    "keywords:frequency": _frequency,
    "keywords:letter_frequency": _letters,
    "length_constraints:number_words": _words,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _ends_with,
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "punctuation:no_comma": lambda text: "," not in text,
}


def follows(text: str, instruction: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a response follows an instruction. An empty one follows none.

    Raises ValueError for an instruction or arguments that are not known: the task is wrong."""
    if instruction not in CHECKS:
        raise ValueError(f"the instruction {instruction!r} is not known; there are {', '.join(CHECKS)}")
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return bool(text.strip()) and CHECKS[instruction](text, **given)
    except TypeError as error:
        raise ValueError(f"the instruction {instruction!r} cannot take {given}: {error}") from None
