"""Where in a response the answer stands, which ground truths a task accepts, and what makes an answer
another.

Shared by the verifiers; pure, and linear in the response's length.

What is thought is not answered: of a response with `</think>` only what follows the last one counts, and one
that opens `<think>` and never closes it answers nothing. docs/verifiers.md has the places
(`where`) that an answer may stand at.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any, Literal, get_args

Where = Literal["whole", "boxed", "tag", "hash", "said", "last_line", "marked", "any"]
WHERES: tuple[Where, ...] = get_args(Where)

BOX = re.compile(r"\\(?:f?boxed|fbox)\s*(?=\S)")
SAID = re.compile(r"\banswer\**\s*(?:is|are|:|=)\s*(?:\**\s*:)?\s*\**\s*", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.!?](?:\*\*)?(?:\s|\Z)|\n")


def answer_of(response: str, where: Where = "any") -> str | None:
    """The answer, without white space at either end; None when there is none at that place."""
    spoken = after_thinking(response)
    if where == "whole":
        return spoken.strip()
    if where == "marked":
        return _first(_tag(spoken), _boxed(spoken), _hash(spoken), _said(spoken))
    if where == "any":
        return _first(_tag(spoken), _boxed(spoken), _hash(spoken), _said(spoken), _last_line(spoken))
    finders = {"boxed": _boxed, "tag": _tag, "hash": _hash, "said": _said, "last_line": _last_line}
    if where not in finders:
        raise ValueError(f"there is no place {where!r} for an answer: use one of {', '.join(WHERES)}")
    return finders[where](spoken)


def after_thinking(response: str) -> str:
    """What follows the last thought; a thought that is not closed is none of it."""
    return response.rpartition("</think>")[2].partition("<think>")[0]


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def boxes(text: str) -> list[str]:
    """What each box holds, in order. A box that is never closed holds nothing and is left out."""
    found: list[str] = []
    position = 0
    while (match := BOX.search(text, position)) is not None:
        position = match.end()
        if text[position] != "{":
            found.append(text[position])
            continue
        end = closing(text, position)
        if end is None:
            break
        found.append(text[position + 1 : end].strip())
        position = end + 1
    return found


def closing(text: str, start: int) -> int | None:
    """Index of the bracket that closes the `{` at `start`; None when none does. Escaped ones do not count."""
    depth, index = 0, start
    while index < len(text):
        match text[index]:
            case "\\":
                index += 1
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if depth == 0:
                    return index
        index += 1
    return None


def _first(*found: str | None) -> str | None:
    return next((answer for answer in found if answer is not None), None)


def _boxed(text: str) -> str | None:
    found = boxes(text)
    return found[-1] if found else None


def _tag(text: str) -> str | None:
    before, closed, _ = text.rpartition("</answer>")
    _, opened, inside = before.rpartition("<answer>")
    return inside.strip() if closed and opened else None


def _hash(text: str) -> str | None:
    _, found, after = text.rpartition("####")
    return after.lstrip(" \t").partition("\n")[0].strip() if found else None


def _said(text: str) -> str | None:
    last = last_match(SAID, text)
    if last is None:
        return None
    after = text[last.end() :]
    end = SENTENCE_END.search(after)
    said = (after if end is None else after[: end.start()]).strip()
    return said.rstrip("*").rstrip() or None


def _last_line(text: str) -> str | None:
    lines = text.rstrip().rpartition("\n")
    return lines[2].strip() or None


# --- ground truths and hedges ------------------------------------------------------------------------


def accepted(truth: Any) -> list[str]:
    """The texts that are right: the ground truth, or each text of a list; none where the task has no ground
    truth. Numbers are written as Python does.

    Raises ValueError for what is neither text, number nor a list of these: the task is wrong."""
    if truth is None:
        return []
    texts = truth if isinstance(truth, list) else [truth]
    if not all(isinstance(text, str | int | float) for text in texts):
        raise ValueError(f"the ground truth {truth!r:.80} is neither a text nor a list of texts")
    return [str(text) for text in texts]


WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
SECOND = "or nor and either neither maybe perhaps possibly probably alternatively versus vs to until between"
DENIED = "not no never isn't wrong incorrect false except unless but if than minus plus"
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety half "
    "halves quarter quarters third thirds dozen dozens hundred hundreds thousand thousands million "
    "millions billion billions trillion trillions"
)
HEDGES = frozenset(f"{SECOND} {DENIED} {NUMBERS}".split())
"""Words beside an answer that make it another answer, or none: a second one, a denial, a multiple."""


def hedged(words: str) -> bool:
    """Whether words that stand beside a number are more than its unit, as `or six` or `dozen` are."""
    return any(word.replace("’", "'") in HEDGES for word in WORD.findall(words.lower()))
