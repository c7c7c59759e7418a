"""Search for the answer in a response, the ground truths that a task accepts, and words that change an
answer.

All verifiers of answers share this module. It is pure, and its cost is linear in the length of the response.

Thoughts are not part of an answer (`areal_async/models/answers.py`). Callers should pass
`RewardInput.spoken`, the response without its thoughts, because `answer_of` cannot know whether the prompt
has opened a thought. docs/rewards.md#use-built-in-rewards lists the places (`where`) of an answer.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

from areal_async.models.answers import spoken

Where = Literal["whole", "boxed", "tag", "hash", "said", "last_line", "marked", "any"]
WHERES: tuple[Where, ...] = get_args(Where)

BOX = re.compile(r"\\(?:f?boxed|fbox)\s*(?=\S)")
SAID = re.compile(
    r"(?:\b(?:answer|(?:the|my|correct|right|best|final)\s(?:option|choice))\**\s*(?:is\b|are\b|[:：=])"
    r"|(?:答案|答え|正解|정답|\b(?:réponse|respuesta|antwort|resposta|risposta|ответ))\**\s*"
    r"(?:(?:es|est|ist|é|è)\b|[是为為选選はは는은:：]))\s*(?:\**\s*[:：])?\s*\**\s*",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"[.!?](?:\*\*)?(?:\s|\Z)|[\n。！？；]")
LISTED = re.compile(
    r"[\s$]*(?:[,;，；、]|[,，]?\s*(?:\b(?:and|or)\b|[和或及]))[\s$]*(?:[a-zA-Z](?:_\d)?\s*=\s*)?"
)
"""Pattern for the text between two boxes that are parts of one answer."""
LONGEST_BETWEEN = 40
NAMED = re.compile(r"(?<![a-zA-Z\\])([a-zA-Z](?:_\d)?\s*=)\s*\Z")


def answer_of(response: str, where: Where = "any") -> str | None:
    """Return the answer at the place `where`, without surrounding white space, or None if there is none."""
    text = spoken(response)
    if where not in PLACES:
        raise ValueError(f"there is no place {where!r} for an answer: use one of {', '.join(WHERES)}")
    return next((answer for find in PLACES[where] if (answer := find(text)) is not None), None)


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def boxes(text: str) -> list[str]:
    """Return the content of each box, in order. Boxes without an end are left out."""
    return [held for _, held, _ in _placed_boxes(text)]


def _placed_boxes(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield the start, the content and the end of each box."""
    position = 0
    while (match := BOX.search(text, position)) is not None:
        position = match.end()
        if text[position] != "{":
            yield match.start(), text[position], position + 1
            continue
        end = closing(text, position)
        if end is None:
            break
        position = end + 1
        yield match.start(), trimmed(text[match.end() + 1 : end]), position


def trimmed(text: str) -> str:
    """Return the text without surrounding white space. TeX also writes white space as a backslash and a
    blank."""
    text = text.strip()
    slashes = len(text) - len(text.rstrip("\\"))
    return text[:-1].rstrip() if slashes % 2 else text


def closing(text: str, start: int) -> int | None:
    """Return the index of the bracket that closes the `{` at `start`, or None. Escaped brackets do not
    count."""
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


def boxed(text: str) -> str | None:
    """Return the content of the last box, or of each box in a list such as `\\boxed{1}$ and $\\boxed{4}`."""
    names: list[str] = []
    held: list[str] = []
    last = 0
    for start, inside, end in _placed_boxes(text):
        between = text[last:start]
        if not (held and len(between) <= LONGEST_BETWEEN and LISTED.fullmatch(between)):
            names, held = [], []
        name = NAMED.search(text, max(last, start - LONGEST_BETWEEN), start)
        names.append(name[1] if name else "")
        held.append(inside)
        last = end
    if len({*held}) < 2:
        return held[-1] if held else None
    return ", ".join(map("".join, zip(names, held, strict=True)) if all(names) else held)


def _tag(text: str) -> str | None:
    before, closed, _ = text.rpartition("</answer>")
    _, opened, inside = before.rpartition("<answer>")
    return trimmed(inside) if closed and opened else None


def _hash(text: str) -> str | None:
    _, found, after = text.rpartition("####")
    return trimmed(after.lstrip(" \t").partition("\n")[0]) if found else None


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


MARKED: tuple[Callable[[str], str | None], ...] = (_tag, boxed, _hash, _said)
PLACES: dict[Where, tuple[Callable[[str], str | None], ...]] = {
    "whole": (str.strip,),
    "boxed": (boxed,),
    "tag": (_tag,),
    "hash": (_hash,),
    "said": (_said,),
    "last_line": (_last_line,),
    "marked": MARKED,
    "any": (*MARKED, _last_line),
}
"""Place → functions that search for the answer there. The result of the first function that finds one
counts."""
UNSEEN = "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\u2061\u2062\u2063\u2064\ufeff"
FOLDED = str.maketrans({"、": ",", "。": ".", "−": "-", "﹣": "-"} | dict.fromkeys(UNSEEN, ""))
STYLES = ("<wide>", "<narrow>", "<font>")


def folded(text: str) -> str:
    """Return the text with plain letters, digits and signs instead of full-width and styled ones.

    Invisible characters are removed.
    """
    if text.isascii():
        return text
    return "".join(
        unicodedata.normalize("NFKC", sign) if unicodedata.decomposition(sign).startswith(STYLES) else sign
        for sign in text.translate(FOLDED)
    )


# --- ground truths and hedges ------------------------------------------------------------------------


def accepted(truth: Any) -> list[str]:
    """Return the texts that the task accepts: the ground truth, or each text if it is a list. Numbers are
    converted to text as `str` does.

    Returns an empty list for a task without ground truth. Raises `ValueError` for any other type, because the
    task is wrong.
    """
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
"""Words next to an answer that change or cancel it, because they give a second answer, a denial or a
multiple."""


def hedged(words: str) -> bool:
    """Return whether the words next to a number are more than its unit, such as `or six` or `dozen`."""
    return any(word.replace("’", "'") in HEDGES for word in WORD.findall(words.lower()))
