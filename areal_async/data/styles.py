"""What a row of a public data set means: its prompt, its answer, and the columns that a job reads.

| style | its columns | a row of |
|---|---|---|
| task | `prompt`, `reward_model` (verl's) | `rl` |
| question | a question and an answer, whatever they are called (GSM8K, MATH) | `rl`, `sft` |
| chat | `messages`, or `conversations` with `from` and `value`; the last reply is the answer | `rl`, `sft` |
| preference | `chosen`, `rejected`, perhaps `prompt` | `preference`, `reward_model` |

Each may have `tools`, schemas of what the model may call.

No column that belongs to the question is dropped: what can be joined to the question is, other columns that may
belong to it are refused by name, and `Converted.used` tells which columns a row was made of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from areal_async.data.sources import DataError
from areal_async.prompts import message_texts
from areal_async.tasks import (
    TaskFileError,
    chat_messages,
    check_text,
    check_values,
    is_learned,
    present,
    task_row,
)

DataKind = Literal["rl", "sft", "preference", "reward_model"]
Answer = Literal["auto", "whole", "hash", "boxed", "number"]
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
SYSTEMS = ("system", "system_prompt")
BARE_ANSWERS = ("ground_truth", "final_answer", "expected_answer", "target", "label")
"""Columns that hold an answer and no more."""
ANSWERS = (
    *BARE_ANSWERS[:3],
    "answer",
    "solution",
    "completion",
    "output",
    "response",
    *BARE_ANSWERS[3:],
)
CHATS = ("messages", "conversations", "conversation", "dialog")
SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant", "function_call": "assistant"}
TASK = ("prompt", "answer", "data_source", "ability", "messages", "tools", "chosen", "rejected")
NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(?:\.[0-9]+)?")
BARE = re.compile(r"\S*[^\s.]")
"""An answer without a word about how it was found."""
SENTENCES = re.compile(r"(?s)(?![\[{]).*[a-z)\d][.!?][\"')]*\s+\S")
"""More than one sentence, and no JSON."""


class BadRow(DataError):
    """One row that is none of what the job needs."""


NO_MARK = "has neither #### nor \\boxed{…}"
TAKE_WHOLE = "Take the row out, or take such texts whole (--answer whole)."


class Converted(NamedTuple):
    """A row of a job, and what it was made of."""

    row: dict[str, Any]
    used: frozenset[str]
    """Columns of the source."""
    whole: str
    """The text of the source that is the answer as a whole, with no mark in it, and is more than a word."""
    marked: bool
    """Whether the answer was marked by `####` or a box, in a text that holds more."""


class SourceRow(dict[str, Any]):
    """A row of a source, which records the columns that were read."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        super().__init__(row)
        self.used: set[str] = set()
        self.whole, self.marked = "", False

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default


class Choices(NamedTuple):
    """The choices of a question. `labels` are those of the source, and empty for a text that names them all."""

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


@dataclass(frozen=True)
class Style:
    """How rows become rows of a job of `kind`. `columns` says what ours are called there."""

    kind: DataKind = "rl"
    columns: Mapping[str, str] = field(default_factory=dict)
    answer: Answer = "auto"
    as_messages: bool | None = None
    """Whether a text prompt becomes a message of the user; None: as it is."""
    system: str = ""
    instruction: str = ""
    keep: tuple[str, ...] = ()
    data_source: str = ""
    ability: str = ""

    def convert(self, where: str, row: Mapping[str, Any], source: str) -> Converted:
        """Return the row of a job. Raises `BadRow`."""
        given = SourceRow(row)
        for ours, theirs in self.columns.items():
            if missing := [name for name in _parts(row, theirs) if name not in row]:
                there = ", ".join(row) or "none"
                raise BadRow(f"{where} has no column {missing[0]!r} for {ours} (--map). It has: {there}.")
        try:
            if self.kind in ("preference", "reward_model"):
                made = self._pair(where, given)
            else:
                made = self._example(where, given) if self.kind == "sft" else self._task(where, given, source)
            check_values(made, where)
        except BadRow:
            raise
        except TaskFileError as error:
            raise BadRow(str(error)) from None
        return Converted(made, frozenset(given.used), given.whole, given.marked)

    def _named(self, row: SourceRow, name: str, usual: Sequence[str]) -> tuple[str, Any]:
        """The column that holds `name`, and what is in it."""
        if name in self.columns:
            return self.columns[name], row[self.columns[name]]
        found = next((each for each in usual if row.get(each) is not None), "")
        return found, row.get(found)

    def _free(self, row: SourceRow, names: Sequence[str]) -> list[str]:
        """Columns of `names` that hold something, and that no option gives another place."""
        taken = {part for theirs in self.columns.values() for part in _parts(row, theirs)} | {*self.keep}
        return [name for name in names if name not in taken and _holds(row, name)]

    def _chat(self, where: str, row: SourceRow) -> list[dict[str, Any]] | None:
        """The messages of a chat; None where the row has none."""
        name, chat = self._named(row, "messages", () if "prompt" in self.columns else CHATS)
        if not name:
            return None
        if isinstance(chat, str):
            chat = _json(chat)
        if not isinstance(chat, list) or not chat or not all(isinstance(each, Mapping) for each in chat):
            raise BadRow(f"{where}: column {name!r} must be a list of messages; found {chat!r:.80}.")
        return [_message(where, name, each) for each in chat]

    def _asked(self, where: str, row: SourceRow) -> tuple[Any, Choices | None]:
        """The question with all that belongs to it, and its choices; an empty text where the row has none.
        Raises `BadRow` for a column that belongs to it and cannot be joined."""
        if "prompt" in self.columns:
            names = [name for name in _parts(row, self.columns["prompt"]) if _holds(row, name)]
        else:
            names = self._free(row, QUESTIONS)
            texts = {name: text for name in names if (text := _words(row[name]))}
            longest = max(texts, key=lambda name: len(texts[name]), default="")
            if any(text not in texts[longest] for text in texts.values()):
                raise BadRow(
                    f"{where} has the columns {' and '.join(map(repr, texts))}, and each may be the question. "
                    f"Say which (--map prompt={names[0]}), or join them (--map prompt={'+'.join(names)})."
                )
            names = [longest] if longest else names
        before, behind = self._free(row, BEFORE), self._free(row, BEHIND)
        if not names and (alone := [*before[:1], *behind[:1]]) and alone[0] in ("instruction", *BEHIND):
            names = alone[:1]
        if not names:
            return "", None
        if unplaced := [name for name in self._free(row, [*row]) if OF_QUESTIONS.fullmatch(name)]:
            raise BadRow(
                f"{where} has the column {unplaced[0]!r}, without which its question may have no answer. Join "
                f"it (--map prompt={unplaced[0]}+{names[0]}), or leave it out of prompts (--keep {unplaced[0]})."
            )
        around = [name for name in (*before, *behind) if name not in names]
        if len(names) == 1 and not isinstance(row[names[0]], str):
            if isinstance(prompt := row[names[0]], list) and (missing := around):
                raise BadRow(
                    f"{where}: {names[0]!r} is a list of messages, and {missing[0]!r} may belong to them. Put it "
                    f"there, or leave it out of prompts (--keep {missing[0]})."
                )
            return prompt, self._choices(where, row)
        main = "\n\n".join(_text(where, name, row[name]) for name in names)
        parts = {name: text for name in around if (text := _text(where, name, row[name])) not in main}
        prompt = "\n\n".join(
            [
                *(parts[each] for each in before if each in parts),
                main,
                *(parts[each] for each in behind if each in parts),
            ]
        )
        return prompt, self._choices(where, row)

    def _choices(self, where: str, row: SourceRow) -> Choices | None:
        """The choices of a question, from one column or from one for each."""
        for name in self._free(row, CHOICES):
            return _choices_in(where, name, row[name])
        stems: dict[str, dict[str, str]] = {}
        for name in self._free(row, [*row]):
            if (found := ONE_CHOICE.fullmatch(name)) and isinstance(dict.get(row, name), str | int | float):
                stems.setdefault(found[1] or "", {})[found[2] or found[3]] = name
        several = [names for names in stems.values() if len(names) > 1]
        if len(several) != 1:
            return None
        names = dict(sorted(several[0].items()))
        return Choices(", ".join(names.values()), [*names], [str(row[name]) for name in names.values()])

    def _task(self, where: str, row: SourceRow, source: str) -> dict[str, Any]:
        reward, chat = row.get("reward_model"), self._chat(where, row)
        extra = dict(row["extra_info"]) if isinstance(row.get("extra_info"), Mapping) else {}
        style, system = "rule", ""
        if isinstance(reward, Mapping) and "ground_truth" in reward and not self.columns:
            prompt, truth = row["prompt"], reward["ground_truth"]
            prompt = (
                [_message(where, "prompt", one) for one in prompt] if isinstance(prompt, list) else prompt
            )
            style = reward.get("style") or "rule"
            if self.answer != "auto":
                truth = extract(str(truth), self.answer)
        elif chat is not None:
            said, prompt = (chat[-1], chat[:-1]) if chat[-1]["role"] == "assistant" else ({}, chat)
            column, given = self._named(row, "answer", ANSWERS)
            if given is None:
                column, given = "messages", said.get("content")
                if not is_learned(said):
                    raise BadRow(f"{where}: its last reply has weight 0, so it is no answer.")
            if not prompt:
                raise BadRow(f"{where}: its chat begins with the reply, so it asks nothing.")
            truth, system = self._truth(where, row, column, given, None), self._system(row)
        else:
            prompt, choices = self._asked(where, row)
            asked = _parts(row, self.columns.get("prompt", ""))
            if not prompt:
                raise BadRow(
                    f"{where} has no prompt among its columns ({', '.join(row)}). Say which column it "
                    "is: --map prompt=COLUMN,answer=COLUMN."
                )
            if isinstance(prompt, list):
                prompt = [_message(where, "prompt", each) for each in prompt]
            column, given = self._named(row, "answer", [name for name in ANSWERS if name not in asked])
            truth, system = self._truth(where, row, column, given, choices), self._system(row)
            prompt = with_choices(prompt, choices)
            extra |= {"choices": choices.texts} if choices is not None else {}
        if tools := self._tools(where, row):
            extra["tools"] = tools
        extra |= {name: row[name] for name in self.keep if name in row}
        _, data_source = self._named(row, "data_source", ("data_source",))
        _, ability = self._named(row, "ability", ("ability",))
        made = {
            "data_source": self.data_source or str(data_source or source),
            "prompt": self._shaped(prompt, system),
            "ability": self.ability or str(ability or ""),
            "reward_model": {"style": style, "ground_truth": truth},
            "extra_info": extra,
        }
        return task_row(where, made)

    def _truth(self, where: str, row: SourceRow, column: str, given: Any, choices: Choices | None) -> Any:
        """The ground truth in what the column of the answer holds. Raises `BadRow` where it holds none."""
        if given is None or given == "":
            named = f"column {column!r} is empty" if column else f"none of {', '.join(row)} is its answer"
            raise BadRow(f"{where} has no answer: {named}. Say which it is (--map answer=COLUMN).")
        if choices is not None and (letter := choices.letter(given)):
            return letter
        if not isinstance(given, str):
            truth = given
        elif (truth := extract(given, self.answer)) is None:
            what = {"hash": "#### and an answer", "boxed": "\\boxed{…}", "number": "number"}[self.answer]
            raise BadRow(f"{where}: column {column!r} has no {what} in {given!r:.80}.")
        elif self.answer == "auto":
            row.marked = is_marked(given) and BARE.fullmatch(given.strip()) is None
            is_work = column == "solution" or (column not in BARE_ANSWERS and SENTENCES.match(given))
            if not is_marked(given) and BARE.fullmatch(truth) is None:
                row.whole = truth
                if is_work:
                    raise BadRow(f"{where}: column {column!r} {NO_MARK} in {given!r:.80}. {TAKE_WHOLE}")
        if choices is not None and choices.labels and not (letter := choices.letter(truth)):
            raise BadRow(
                f"{where}: its answer {truth!r:.40} is none of the choices in {choices.column}: neither a "
                "letter, nor a text of them, nor a number counted from 0."
            )
        return letter if choices is not None and choices.labels else truth

    def _system(self, row: SourceRow) -> str:
        return next(
            (row[name] for name in self._free(row, SYSTEMS) if isinstance(dict.get(row, name), str)), ""
        )

    def _shaped(self, prompt: Any, system: str = "") -> Any:
        """The prompt with a line and a system message, its own before that of all."""
        system = system or self.system
        if isinstance(prompt, str):
            if self.instruction:
                prompt = f"{prompt}\n{self.instruction}"
            if self.as_messages or system:
                prompt = [{"role": "user", "content": prompt}]
        elif self.instruction and isinstance(prompt[-1].get("content"), str):
            last = prompt[-1]
            prompt = [*prompt[:-1], {**last, "content": f"{last['content']}\n{self.instruction}"}]
        return _led(prompt, system)

    def _example(self, where: str, row: SourceRow) -> dict[str, Any]:
        """A row of supervised training: the chat as it is, or prompt and completion."""
        tools = {"tools": tools} if (tools := self._tools(where, row)) else {}
        if (chat := self._chat(where, row)) is not None:
            return {"messages": chat_messages(_led(chat, self._system(row)), "messages", where), **tools}
        prompt, choices = self._asked(where, row)
        usual = ("completion", "response", "output", "solution", "answer")
        column, answer = self._named(row, "answer", usual)
        if choices is not None and not isinstance(answer, str):
            answer = choices.letter(answer)
        if not prompt or not isinstance(answer, str) or not answer:
            named = "prompt" if not prompt else f"answer in column {column!r}" if column else "answer"
            raise BadRow(f"{where} has no {named}. Say which columns they are: --map prompt=…,answer=….")
        shaped: Any = self._shaped(with_choices(prompt, choices), self._system(row))
        check_text(answer, column, where)
        if not isinstance(shaped, str):
            return {"messages": [*shaped, {"role": "assistant", "content": answer}], **tools}
        return {"prompt": shaped, "completion": answer, **tools}

    def _pair(self, where: str, row: SourceRow) -> dict[str, Any]:
        made = {}
        for name in ("chosen", "rejected"):
            _, made[name] = self._named(row, name, (name,))
        prompt, choices = self._asked(where, row)
        prompt, system = with_choices(prompt, choices), self._system(row)
        if missing := [name for name, text in made.items() if not text]:
            raise BadRow(f"{where} has no {missing[0]}. Say which column it is (--map {missing[0]}=COLUMN).")
        for name, text in made.items():
            if isinstance(text, list):
                made[name] = [_message(where, name, each) for each in text]
            else:
                check_text(text, name, where)
        whole = isinstance(made["chosen"], list) and made["chosen"][0]["role"] != "assistant"
        if whole:  # they begin with the prompt
            made = {name: _led(answer, system) for name, answer in made.items()}
        elif prompt:
            if isinstance(prompt, str) and (system or isinstance(made["chosen"], list)):
                prompt = [{"role": "user", "content": prompt}]
            if isinstance(prompt, list):
                said = {name: [{"role": "assistant", "content": text}] for name, text in made.items()}
                made = {name: said[name] if isinstance(made[name], str) else made[name] for name in made}
                prompt = _led(prompt, system)
            made = {"prompt": prompt, **made}
        if tools := self._tools(where, row):
            made["tools"] = tools
        if made["chosen"] == made["rejected"]:
            raise BadRow(f"{where}: `chosen` and `rejected` are the same, so neither is better.")
        return made

    def _tools(self, where: str, row: SourceRow) -> list[dict[str, Any]]:
        name, tools = self._named(row, "tools", ("tools", "functions"))
        if isinstance(tools, str):
            tools = _json(tools) if tools.strip() else []
        if tools in (None, [], ()):
            return []
        if not isinstance(tools, list) or not all(isinstance(each, Mapping) for each in tools):
            raise BadRow(f"{where}: column {name!r} must be a list of tool schemas; found {tools!r:.80}.")
        return [dict(each) for each in tools]


def _parts(row: Mapping[str, Any], theirs: str) -> list[str]:
    """The columns in `--map OURS=A+B`."""
    return [theirs] if theirs in row or "+" not in theirs else theirs.split("+")


def _holds(row: SourceRow, name: str) -> bool:
    value = dict.get(row, name)  # a look, which does not count as a use
    return bool(value.strip() if isinstance(value, str) else value not in (None, [], {}))


def _words(value: Any) -> str:
    is_chat = isinstance(value, list) and all(
        isinstance(each, Mapping) and "content" in each for each in value
    )
    return message_texts(value) if is_chat or isinstance(value, str) else ""


def _text(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadRow(
            f"{where}: column {name!r} belongs to the question, and is no text ({value!r:.60}). Make it one, or "
            f"leave it out of prompts (--keep {name})."
        )
    return value.strip()


def _choices_in(where: str, name: str, value: Any) -> Choices:
    """The choices in one column: a list, a mapping from labels, lists of texts and labels, or a text."""
    value = _json(value) if isinstance(value, str) else value
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
    known = isinstance(labels, list) and None not in labels
    labels = (
        list(map(str, labels)) if known else list(LETTERS[: len(texts) if isinstance(texts, list) else 0])
    )
    plain = isinstance(texts, list) and all(isinstance(each, str | int | float) for each in texts)
    if not plain or not len(texts) == len(labels) == len({*labels}):
        raise BadRow(
            f"{where}: column {name!r} belongs to the question, and is no list of two to {len(LETTERS)} choices "
            f"({value!r:.60}). Make it one, or leave it out of prompts (--keep {name})."
        )
    texts = [str(each).strip() for each in texts]
    own = [re.match(rf"\(?{letter}[).:]\s*", text) for letter, text in zip(LETTERS, texts, strict=False)]
    return Choices(
        name, labels, [text[each.end() :] if all(own) and each else text for each, text in zip(own, texts)]
    )


def with_choices(prompt: Any, choices: Choices | None) -> Any:
    """Return the prompt with a line for each choice, unless it has them already."""
    if choices is None:
        return prompt
    if isinstance(prompt, list):
        last = prompt[-1]
        return [*prompt[:-1], {**last, "content": with_choices(last["content"], choices)}]
    asked = message_texts(prompt)
    marks = LETTERS if choices.labels else " "
    if all(
        re.search(rf"{mark}[).:\s]\s*{re.escape(text)}", f" {asked}")
        for mark, text in zip(marks, choices.texts)
    ):
        return prompt
    lines = (
        [f"{letter}. {text}" for letter, text in zip(LETTERS, choices.texts)]
        if choices.labels
        else choices.texts
    )
    return "\n".join([asked, *lines])


def _led(chat: Any, system: str) -> Any:
    """The messages behind a system message, unless they have one."""
    if not system or not isinstance(chat, list) or chat[0]["role"] == "system":
        return chat
    return [{"role": "system", "content": system}, *chat]


def is_marked(text: str) -> bool:
    return "####" in text or last_box(text) is not None


def kind_of(row: Mapping[str, Any], columns: Mapping[str, str]) -> DataKind:
    """The kind of job whose rows these are, where none is named."""
    both = ("chosen", "rejected")
    return "preference" if all(columns.get(name, name) in row for name in both) else "rl"


def extract(text: str, how: Answer) -> str | None:
    """The answer in a solution; None where there is none of that form. `auto` takes what follows the last
    `####`, else the last box, else the whole text."""
    if how == "whole":
        return text.strip()
    if how in ("auto", "hash") and "####" in text:
        found = text.rpartition("####")[2].strip().split("\n")[0].strip()
        return found.replace(",", "") if NUMBER.fullmatch(found) else found
    if how in ("auto", "boxed") and (box := last_box(text)) is not None:
        return box
    if how == "number" and (numbers := NUMBER.findall(text)):
        return str(numbers[-1]).replace(",", "")
    return text.strip() if how == "auto" else None


def last_box(text: str) -> str | None:
    r"""What the last whole `\boxed{…}` or `\fbox{…}` holds, braces inside it matched."""
    for begin in reversed([found.end() for found in re.finditer(r"\\f?boxed\s*\{|\\fbox\s*\{", text)]):
        depth = 1
        for at in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0) if text[at - 1] != "\\" else 0
            if depth == 0:
                return text[begin:at].strip()
    return None


def _message(where: str, column: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with `role` and `content`, by whatever names it had them."""
    made = present(message)
    if "role" not in made and "from" in made:
        speaker = str(made.pop("from"))
        made["role"] = SPEAKERS.get(speaker, speaker)
    if "content" not in made and "value" in made:
        made["content"] = made.pop("value")
    if "role" not in made or ("content" not in made and "tool_calls" not in made):
        raise BadRow(f"{where}: column {column!r} has a message without role and content: {made!r:.80}.")
    made.setdefault("content", "")
    check_text(made["content"], column, where)
    return made


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
