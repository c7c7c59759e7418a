"""Where in a response the answer stands, which ground truths a task accepts, and what makes an answer
another.

Shared by the verifiers; pure, and linear in the response's length.

What is thought is not answered (`areal_async/answers.py`). `RewardInput.spoken` is a response without its
thoughts, for which `answer_of` alone cannot know whether the prompt has opened one. docs/verifiers.md has the
places (`where`) that an answer may stand at.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any, Literal, NamedTuple, get_args

from areal_async.answers import spoken

Where = Literal["whole", "boxed", "tag", "hash", "said", "last_line", "marked", "any"]
WHERES: tuple[Where, ...] = get_args(Where)

BOX = re.compile(r"\\(?:f?boxed|fbox)\s*(?=\S)")
SAID = re.compile(r"\banswer\**\s*(?:is|are|:|=)\s*(?:\**\s*:)?\s*\**\s*", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.!?](?:\*\*)?(?:\s|\Z)|\n")


def answer_of(response: str, where: Where = "any") -> str | None:
    """The answer, without white space at either end; None when there is none at that place."""
    text = spoken(response)
    if where == "whole":
        return text.strip()
    if where == "marked":
        return _first(_tag(text), _boxed(text), _hash(text), _said(text))
    if where == "any":
        return _first(_tag(text), _boxed(text), _hash(text), _said(text), _last_line(text))
    finders = {"boxed": _boxed, "tag": _tag, "hash": _hash, "said": _said, "last_line": _last_line}
    if where not in finders:
        raise ValueError(f"there is no place {where!r} for an answer: use one of {', '.join(WHERES)}")
    return finders[where](text)


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


# --- programs: fenced blocks -------------------------------------------------------------------------

OPENING = re.compile(r"^[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([A-Za-z0-9_+#.-]*+)[^<`\n]*+$", re.MULTILINE)
"""Possessive throughout: what one part has taken no other tries again, so a line is read once."""
LONGEST = 200_000  # Characters of a response in which blocks are looked for, from its end


class Block(NamedTuple):
    """A fenced block of a response."""

    language: str
    """What the fence says, in small letters; empty where it says nothing."""
    text: str


def blocks(response: str) -> list[Block]:
    """The fenced blocks in their order. A block that is never closed goes to the end: a response cut at its
    length limit often ends so."""
    response = response[-LONGEST:].replace("\r\n", "\n")
    found = []
    at = 0
    while (opening := OPENING.search(response, at)) is not None:
        fence = opening.group(1)
        closing = re.compile(rf"^[ \t]*+{re.escape(fence[0])}{{{len(fence)},}}+[ \t]*+$", re.MULTILINE)
        end = closing.search(response, opening.end())
        text = response[opening.end() + 1 : end.start() if end else len(response)]
        found.append(Block(opening.group(2).lower(), text))
        at = end.end() if end else len(response)
    return found


def program_of(response: str, *, extract: str) -> Block | None:
    """The program: the last fenced block that is not empty, or with `extract` `whole` all of the response."""
    if extract == "whole":
        return Block("", response) if response.strip() else None
    return next((block for block in reversed(blocks(response)) if block.text.strip()), None)


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
