"""Conversion of one row of a public data set to a row of a job.

| style | columns | kinds of job |
|---|---|---|
| task | `prompt`, `reward_model` (verl's) | `rl` |
| question | a question and an answer, under usual names (GSM8K, MATH) | `rl`, `sft` |
| chat | `messages`, or `conversations` with `from` and `value`; the last reply is the answer | `rl`, `sft` |
| others | the columns of `areal_async/data/examples.py` | `sft`, `preference`, `reward_model` |

If a column may belong to the question, the row is refused unless `columns` names the parts of the prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from areal_async.data.examples import COLUMNS, FORMS, TEXTS, Kind, example_of, form_of, tools_of
from areal_async.data.sources import DataError
from areal_async.data.tasks import (
    MESSAGE_COLUMNS,
    Message,
    TaskFileError,
    chat_messages,
    check_text,
    check_values,
    is_learned,
    present,
    task_row,
)

Answer = Literal["auto", "whole", "hash", "boxed", "number"]
OURS = ("answer", "data_source", "ability", *COLUMNS)
QUESTIONS = ("prompt", "question", "problem", "query", "instruction")
INPUTS = ("input", "inputs")
CHATS = ("messages", "conversations")
UNPLACED = re.compile(
    r"(context|passage|article|document|paragraph|dialogue|choice|option|candidate)s?|story|background|"
    r"table|history|premise|hypothesis|starter_code|[A-J]|"
    r"(sentence|text|distractor|option|choice|candidate|ending|op)_?[a-j\d]"
)
"""Columns that a question may need to have an answer. The user must say if they belong to the prompt."""
BARE_ANSWERS = ("ground_truth", "final_answer", "expected_answer", "target", "label")
"""Columns that contain only an answer."""
WORKED_ANSWERS = ("answer", "solution", "completion", "output", "response")
ANSWERS = (*BARE_ANSWERS[:3], *WORKED_ANSWERS, *BARE_ANSWERS[3:])
SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
SYSTEMS = ("system", "system_prompt")
RESERVED = ("reward_model", "extra_info", "tools")
OPTIONAL = ("prompt", "margin", "tools")
PAIR = ("chosen", "rejected")
NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(?:\.[0-9]+)?")
BARE = re.compile(r"\S*[^\s.]|[\[{](.|\s)*")
"""An answer of one word, or JSON."""
SAID_LAST = re.compile(
    r"(?:\A|[\n.])[^\S\n]*[Tt]he (?:final )?answer is:?[^\S\n]+([^\s.](?:(?!\.\s)[^\n])*?)\.?\s*\Z"
)
"""The last sentence of a solution, in the form of MetaMathQA."""


class BadRow(DataError):
    """Error if a row cannot be converted."""


@dataclass(frozen=True)
class Style:
    """Rules for converting rows to rows of a job of `kind`."""

    kind: Kind = "rl"
    columns: Mapping[str, str] = field(default_factory=dict)
    """The source column for each of `OURS`. Several columns of a prompt are joined by `+`."""
    answer: Answer = "auto"
    as_messages: bool = False
    """Convert a text prompt to a message of the user."""
    instruction: str = ""


def convert(where: str, row: Mapping[str, Any], style: Style, source: str) -> Message:
    """Return the row of a job. Raises `BadRow`."""
    for ours, theirs in style.columns.items():
        if missing := [name for name in theirs.split("+") if name not in row]:
            there = ", ".join(row) or "none"
            raise BadRow(f"{where} has no column {missing[0]!r} for {ours} (--map). It has: {there}.")
    try:
        given = {name: _messages(where, name, value) for name, value in row.items()}
        made = _task(where, given, style, source) if style.kind == "rl" else _example(where, given, style)
        check_values(made, where)
    except TaskFileError as error:
        raise BadRow(str(error)) from None
    return made


def _task(where: str, row: Message, style: Style, source: str) -> Message:
    columns, reward, extra = style.columns, row.get("reward_model"), dict(row.get("extra_info") or {})
    reward_style, answer_column = "rule", ""
    if isinstance(reward, Mapping) and "ground_truth" in reward and not columns:
        asked, prompt, truth = ["prompt"], row.get("prompt"), reward["ground_truth"]
        reward_style = reward.get("style") or "rule"
        if style.answer != "auto":
            truth = _extracted(where, "reward_model.ground_truth", str(truth), style)
    else:
        said: Message = {}
        chat_column, chat = _find(row, columns, "messages", () if "prompt" in columns else CHATS)
        if chat_column:
            chat = chat_messages(chat, chat_column, where)
            said = chat[-1] if chat[-1]["role"] == "assistant" else {}
            asked, prompt = [chat_column], chat[:-1] if said else chat
        else:
            asked, prompt = _question(where, row, columns)
        if not prompt:
            raise BadRow(
                f"{where} has no prompt among its columns ({', '.join(row)}). Say which column it is: --map "
                "prompt=COLUMN,answer=COLUMN."
            )
        answer_column, given = _find(row, columns, "answer", [name for name in ANSWERS if name not in asked])
        if given is None and said:
            answer_column, given = chat_column, said["content"]
            if not is_learned(said):
                raise BadRow(f"{where}: its last reply has weight 0, so it is no answer.")
        truth = _truth(where, row, answer_column, given, style)
    if tools := tools_of(row | {"tools": _find(row, columns, "tools", ("tools",))[1]}, where):
        extra["tools"] = [*tools]
    names = {name: _find(row, columns, name, (name,)) for name in ("data_source", "ability")}
    used = {*asked, answer_column, *(name for name, _ in names.values()), *SYSTEMS, *TEXTS, *RESERVED}
    return task_row(
        where,
        {
            "data_source": str(names["data_source"][1] or source),
            "prompt": _shaped(row, prompt, style),
            "ability": str(names["ability"][1] or ""),
            "reward_model": {"style": reward_style, "ground_truth": truth},
            "extra_info": {name: row[name] for name in row if name not in used} | extra,
        },
    )


def _example(where: str, row: Message, style: Style) -> Message:
    """Return a row for a job of another kind than `rl`."""
    columns = {"completion" if ours == "answer" else ours: theirs for ours, theirs in style.columns.items()}
    usual = {"messages": CHATS, "completion": WORKED_ANSWERS[::-1]} if style.kind == "sft" else {}
    found = {name: _find(row, columns, name, usual.get(name, (name,)))[1] for name in COLUMNS}
    made = {name: value for name, value in found.items() if value is not None and name != "prompt"}
    for name in PAIR if made.keys() & PAIR else ():
        if not (made[name].strip() if isinstance(made.get(name), str) else made.get(name)):
            raise BadRow(f"{where} has no {name}. Say which column it is (--map {name}=COLUMN).")
    whole = [name for name in ("messages", *PAIR) if isinstance(made.get(name), list)]
    whole = [name for name in whole if name == "messages" or made[name][0]["role"] != "assistant"]
    made |= {name: _led(row, made[name]) for name in whole}
    if not whole and (prompt := _question(where, row, columns)[1]):
        answers = [name for name in ("completion", *PAIR) if name in made]
        made["prompt"] = _shaped(row, prompt, style, any(isinstance(made[name], list) for name in answers))
        if isinstance(made["prompt"], list):
            made |= {name: _said(made[name]) for name in answers}
    form = form_of(where, made, style.kind)
    example_of(where, made, form)
    made = {name: made[name] for name in made if name in (*FORMS[style.kind][form], *OPTIONAL)}
    if form == "completions" and isinstance(made["prompt"], list):
        made["messages"] = [*made.pop("prompt"), *made.pop("completion")]
    return made


def _find(row: Message, columns: Mapping[str, str], ours: str, usual: Sequence[str]) -> tuple[str, Any]:
    """Return the column that contains `ours`, and its value. Return ("", None) if there is none."""
    name = columns.get(ours) or next((name for name in usual if row.get(name) is not None), "")
    return name, row.get(name)


def _question(where: str, row: Message, columns: Mapping[str, str]) -> tuple[list[str], Any]:
    """Return the columns of the question, and the question. The question is "" if there is none."""
    names = columns["prompt"].split("+") if "prompt" in columns else _question_columns(where, row)
    names = [name for name in names if _holds(row, name)]
    if len(names) == 1 and not isinstance(row[names[0]], str):
        return names, chat_messages(row[names[0]], names[0], where)
    for name in names:
        check_text(row[name], name, where)
    return names, "\n\n".join(row[name].strip() for name in names)


def _question_columns(where: str, row: Message) -> list[str]:
    """Return the column of the question and the column of its input. If several columns may be the question,
    one must contain the others."""
    found = [name for name in QUESTIONS if _holds(row, name)]
    inputs = [name for name in INPUTS if _holds(row, name)]
    names = found or inputs[:1]
    texts = {name: row[name].strip() for name in names if isinstance(row[name], str)}
    whole = max(texts.values(), key=len, default="")
    for text in texts.values():  # A short text may occur in another by chance
        if not (text in whole if len(text) >= 8 else whole.startswith(text) or whole.endswith(text)):
            raise BadRow(
                f"{where} has the columns {' and '.join(map(repr, texts))}, and each may be the question. "
                f"Say which (--map prompt={found[0]}), or join them (--map prompt={'+'.join(found)})."
            )
    if unplaced := [name for name in row if UNPLACED.fullmatch(name) and _holds(row, name) and names]:
        raise BadRow(
            f"{where} has the column {unplaced[0]!r}, without which its question may have no answer. Join it "
            f"(--map prompt={unplaced[0]}+{names[0]}), or leave it out (--map prompt={names[0]}). If "
            "it is no text, write it into the question with a script first."
        )
    first = next((name for name in names if texts.get(name, whole) == whole), "")
    return [name for name in (first, *inputs[:1]) if name] if found else names


def _holds(row: Message, name: str) -> bool:
    value = row.get(name)
    return bool(value.strip() if isinstance(value, str) else value not in (None, [], {}))


def _truth(where: str, row: Message, column: str, given: Any, style: Style) -> Any:
    """Return the ground truth from the column of the answer."""
    if given is None or given == "":
        named = f"column {column!r} is empty" if column else f"none of {', '.join(row)} is its answer"
        raise BadRow(f"{where} has no answer: {named}. Say which it is (--map answer=COLUMN).")
    if not isinstance(given, str):
        return given
    truth = _extracted(where, column, given, style)
    is_bare = column in BARE_ANSWERS or BARE.fullmatch(truth) is not None
    if style.answer == "auto" and truth == given.strip() and not is_bare:
        raise BadRow(
            f"{where}: column {column!r} has neither #### nor \\boxed{{…}} in {given!r:.80}. Take the row "
            "out, or take such texts whole (--answer whole)."
        )
    return truth


def _extracted(where: str, column: str, text: str, style: Style) -> str:
    if truth := extract(text, style.answer):
        return truth
    what = {"hash": "#### and an answer", "boxed": "\\boxed{…}", "number": "number"}.get(
        style.answer, "answer"
    )
    raise BadRow(f"{where}: column {column!r} has no {what} in {text!r:.80}.")


def extract(text: str, how: Answer) -> str | None:
    """Return the answer in a solution, or None if there is none of that form. `auto` returns the text after
    `####` in the last line, else the last box, else the answer in the last sentence, else the whole text."""
    found, *more = text.rpartition("####")[2].strip().split("\n")
    if "####" in text and (how == "hash" or (how == "auto" and not more)):  # Otherwise #### is a heading
        return found.replace(",", "") if NUMBER.fullmatch(found) else found
    if how in ("auto", "boxed") and (box := last_box(text)) is not None:
        return box
    if how == "auto" and (said := SAID_LAST.search(text)):
        return said[1].replace(",", "") if NUMBER.fullmatch(said[1]) else said[1]
    if how == "number" and (numbers := NUMBER.findall(text)):
        return str(numbers[-1]).replace(",", "")
    return text.strip() if how in ("auto", "whole") else None


def last_box(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{…}` or `\fbox{…}`. Braces may be nested."""
    for begin in reversed([found.end() for found in re.finditer(r"\\f?boxed\s*\{|\\fbox\s*\{", text)]):
        depth = 1
        for at in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0) if text[at - 1] != "\\" else 0
            if depth == 0:
                return text[begin:at].strip()
    return None


def _messages(where: str, column: str, value: Any) -> Any:
    """Convert messages with `from` and `value` to messages with `role` and `content`. Return other values
    unchanged."""
    if column in CHATS and value is not None and not isinstance(value, list):
        raise BadRow(f"{where}: column {column!r} must be a list of messages; found {value!r:.80}.")
    if column not in MESSAGE_COLUMNS or not isinstance(value, list):
        return value
    made = []
    for each in value:
        message = present(each) if isinstance(each, Mapping) else {}
        if "role" not in message and "from" in message:
            speaker = str(message.pop("from"))
            message["role"] = SPEAKERS.get(speaker, speaker)
        if "content" not in message and "value" in message:
            message["content"] = message.pop("value")
        made.append(message)
    return made


def _said(answer: Any) -> Any:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _shaped(row: Message, prompt: Any, style: Style, as_messages: bool = False) -> Any:
    """Return the prompt with the instruction and the row's system message."""
    line = f"\n{style.instruction}" if style.instruction else ""
    if isinstance(prompt, str):
        as_messages = as_messages or style.as_messages or bool(_system(row))
        return _led(row, [{"role": "user", "content": prompt + line}]) if as_messages else prompt + line
    if line and isinstance(prompt[-1].get("content"), str):
        prompt = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + line}]
    return _led(row, prompt)


def _led(row: Message, chat: list[Message]) -> list[Message]:
    """Return the messages with the row's system message before them, unless they already begin with a system
    message."""
    system = _system(row)
    return (
        chat if not system or chat[0]["role"] == "system" else [{"role": "system", "content": system}, *chat]
    )


def _system(row: Message) -> str:
    return next((row[name] for name in SYSTEMS if _holds(row, name) and isinstance(row[name], str)), "")
