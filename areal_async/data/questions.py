"""The question of a row with all that belongs to it: instruction, context, input and choices.

No column that belongs to the question is dropped. What can be joined to the question is; a column that may
belong to it and has no place is refused by name. `SourceRow.used` tells which columns a row was made of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from areal_async.data.sources import DataError
from areal_async.models.prompts import message_texts

ALONE = ("instruction", "input", "inputs")
QUESTIONS = ("prompt", "question", "problem", "query")
BEFORE = (
    "instruction",
    "context",
    "passage",
    "article",
    "document",
    "paragraph",
    "story",
    "background",
    "table",
)
BEHIND = ("input", "inputs")
"""Columns that stand before or behind a question; without a question the first of them is one."""
CHOICES = ("choices", "options", "candidates")
LETTERS = "ABCDEFGHIJ"  # The reward `choice` knows no more
ONE_CHOICE = re.compile(r"(?:((?:option|choice|candidate|ending|opt|op|ans|sol)_?)([a-jA-J]|\d)|([A-J]))")
"""A column that holds one of several choices."""
OF_QUESTIONS = re.compile(
    r"history|premise|hypothesis|dialogue|documents|passages|contexts|starter_code|(sentence|text|distractor)_?[a-d\d]"
)
"""Columns without which the question of a row may have no answer, and which nobody can place for the user."""


class BadRow(DataError):
    """One row that is none of what the job needs."""


class SourceRow(dict[str, Any]):
    """A row of a source, which records the columns that were read. `columns` says what ours are called in it:
    of a prompt also several, joined by `+`. Columns in `keep` go elsewhere."""

    def __init__(self, row: Mapping[str, Any], columns: Mapping[str, str], keep: Sequence[str]) -> None:
        super().__init__(row)
        theirs = columns.get("prompt", "")
        self.asked = theirs.split("+") if theirs and theirs not in row else [theirs] * bool(theirs)
        self.named = [*self.asked, *(name for ours, name in columns.items() if ours != "prompt")]
        self.used: set[str] = set()
        self._taken = {*self.named, *keep}
        self.marked = False
        """True where the answer was marked by `####` or a box, in a text that holds more."""
        self.whole = ""
        """The answer, if it is a whole text without a mark, and more than a word."""

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self.keys() else default

    def look(self, name: str) -> Any:
        """Return the value of a column, which does not count as a use."""
        return super().get(name)

    def holds(self, name: str) -> bool:
        value = self.look(name)
        return bool(value.strip() if isinstance(value, str) else value not in (None, [], {}))

    def free(self, names: Iterable[str]) -> list[str]:
        """Return the columns of `names` that hold something, and that no option gives another place."""
        return [name for name in names if name not in self._taken and self.holds(name)]


class Choices(NamedTuple):
    """The choices of a question. `labels` are those of the source; a text that names all has none."""

    column: str
    labels: list[str]
    texts: list[str]

    def letter(self, given: Any) -> str:
        """Return the letter of the choice that an answer names by its label, its text or its number from 0;
        empty where it names none, or two."""
        found = set()
        if isinstance(given, int) and not isinstance(given, bool):
            found = {given} & {*range(len(self.labels))}
        elif isinstance(given, str):
            text = given.strip()
            found = {i for i, label in enumerate(self.labels) if label.upper() == text.strip("().: ").upper()}
            found |= {i for i, choice in enumerate(self.texts[: len(self.labels)]) if choice.strip() == text}
        return LETTERS[found.pop()] if len(found) == 1 else ""


def question(where: str, row: SourceRow) -> tuple[Any, Choices | None]:
    """Return the question with all that belongs to it, and its choices; an empty text if the row has none.
    Raises `BadRow` for a column that belongs to it and cannot be joined."""
    before, behind = row.free(BEFORE), row.free(BEHIND)
    names = [name for name in row.asked if row.holds(name)]
    if not row.asked:
        alone = [name for name in (*before[:1], *behind[:1]) if name in ALONE]
        names = _question_columns(where, row) or alone[:1]
    if not names:
        return "", None
    if unplaced := [name for name in row.free(row) if OF_QUESTIONS.fullmatch(name)]:
        raise BadRow(
            f"{where} has the column {unplaced[0]!r}, without which its question may have no answer. "
            f"Join it (--map prompt={unplaced[0]}+{names[0]}), or {_keep(unplaced[0])}"
        )
    around = [name for name in (*before, *behind) if name not in names]
    if len(names) == 1 and not isinstance(asked := row[names[0]], str):
        if around:
            raise BadRow(
                f"{where}: {names[0]!r} is no text, so the column {around[0]!r} cannot be joined to it. Join "
                f"them in the file, or {_keep(around[0])}"
            )
        return asked, _choices(where, row)
    main = "\n\n".join(_text(where, name, row[name]) for name in names)
    texts = {name: _text(where, name, row[name]) for name in around}
    parts = {name: text for name, text in texts.items() if f"\n{text}\n" not in f"\n{main}\n"}
    ordered = [parts[name] for name in before if name in parts]
    ordered += [main, *(parts[name] for name in behind if name in parts)]
    return "\n\n".join(ordered), _choices(where, row)


def _question_columns(where: str, row: SourceRow) -> list[str]:
    """The column that holds the question; of several the one in which the others are."""
    names = row.free(QUESTIONS)
    texts = {name: text for name in names if (text := _words(row[name]))}
    longest = max(texts, key=lambda name: len(texts[name]), default="")
    if not all(_is_in(text, texts[longest]) for text in texts.values()):
        raise BadRow(
            f"{where} has the columns {' and '.join(map(repr, texts))}, and each may be the question. Say "
            f"which (--map prompt={names[0]}), or join them (--map prompt={'+'.join(names)})."
        )
    return [longest] if longest else names


def _is_in(text: str, longer: str) -> bool:
    """Return whether a prompt has the question in it, and not only a few letters of it somewhere."""
    return text in longer if len(text) >= 8 else longer.startswith(text) or longer.endswith(text)


def _keep(name: str) -> str:
    return f"leave it out of the prompt (--keep {name})."


def _choices(where: str, row: SourceRow) -> Choices | None:
    """The choices of a question, from one column or from one for each."""
    for name in row.free(CHOICES):
        return _choices_in(where, name, row[name])
    stems: dict[str, dict[str, str]] = {}
    for name in row.free(row):
        if (found := ONE_CHOICE.fullmatch(name)) and isinstance(row.look(name), str | int | float):
            stems.setdefault(found[1] or "", {})[found[2] or found[3]] = name
    several = [names for names in stems.values() if len(names) > 1]
    if len(several) != 1:
        return None
    names = dict(sorted(several[0].items()))
    return Choices(", ".join(names.values()), [*names], [str(row[name]) for name in names.values()])


def _words(value: Any) -> str:
    is_chat = isinstance(value, list) and all(
        isinstance(each, Mapping) and "content" in each for each in value
    )
    return message_texts(value) if is_chat or isinstance(value, str) else ""


def _text(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadRow(
            f"{where}: column {name!r} belongs to the question, and is no text ({value!r:.60}). Make it one, "
            f"or {_keep(name)}"
        )
    return value.strip()


def _choices_in(where: str, name: str, value: Any) -> Choices:
    """The choices in one column: a list, a mapping from labels, lists of texts and labels, or a text."""
    value = json_or_text(value) if isinstance(value, str) else value
    if isinstance(value, str):
        return Choices(name, [], [value.strip()])
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):
        labels, texts = value.get("label"), value["text"]
    elif isinstance(value, Mapping):
        labels, texts = [*value], [*value.values()]
    elif isinstance(value, list) and all(isinstance(each, Mapping) and "text" in each for each in value):
        labels, texts = [each.get("label") for each in value], [each["text"] for each in value]
    else:
        labels, texts = None, value
    if isinstance(labels, list) and None not in labels:
        labels = [str(label) for label in labels]
    else:
        labels = list(LETTERS[: len(texts) if isinstance(texts, list) else 0])
    plain = isinstance(texts, list) and all(isinstance(each, str | int | float) for each in texts)
    if not plain or not len(texts) == len(labels) == len({*labels}) <= len(LETTERS):
        raise BadRow(
            f"{where}: column {name!r} belongs to the question, and is no list of at most {len(LETTERS)} "
            f"choices ({value!r:.60}). Make it one, or {_keep(name)}"
        )
    texts = [str(each).strip() for each in texts]
    own = [re.match(rf"\(?{letter}[).:]\s*", text) for letter, text in zip(LETTERS, texts, strict=False)]
    if all(own):  # such as "A) wood"
        texts = [text[mark.end() :] for mark, text in zip(own, texts, strict=True) if mark]
    return Choices(name, labels, texts)


def json_or_text(text: str) -> Any:
    """Return what a JSON text stands for, or another text as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def with_choices(prompt: Any, choices: Choices | None) -> Any:
    """Return the prompt with a line for each choice, unless it has them already."""
    if choices is None or not isinstance(prompt, str | list):
        return prompt
    if isinstance(prompt, list):
        last = prompt[-1]
        return [*prompt[:-1], {**last, "content": with_choices(last["content"], choices)}]
    letters = LETTERS if choices.labels else " "
    pairs = list(zip(letters, choices.texts, strict=False))
    if all(re.search(rf"{mark}[).:\s]\s*{re.escape(text)}", f" {prompt}") for mark, text in pairs):
        return prompt
    return "\n".join([prompt, *(f"{letter}. {text}".lstrip(". ") for letter, text in pairs)])
