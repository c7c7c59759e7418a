"""Reader of the parquet or jsonl files for trainings other than RL. The columns of a file determine its form.

| kind | form | columns |
|---|---|---|
| `sft` | chats | `messages` |
| `sft` | completions | `prompt`, `completion` |
| `sft` | tasks | `prompt`, `reward_model` with `ground_truth` (see `areal_async/data/tasks.py`) |
| `preference`, `reward_model` | pairs | `chosen`, `rejected`, and `prompt` unless they begin with it |
| `preference` | labelled | `prompt`, `completion`, `label` (true if it is desirable) |
| `reward_model` | scored | `prompt`, `completion`, `score` |

A prompt, a completion, a chosen or rejected answer is a text or a list of chat messages. Each form may have
the column `tools` with schemas for the chat template, as a list or as JSON. Pairs of a reward model may have
the column `margin`, the least difference between the two scores. Other columns are ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from areal_async.data.tasks import Message, TaskFileError, chat_messages, check_values, task_row, task_rows

Kind = Literal["rl", "sft", "preference", "reward_model"]
Form = Literal["chats", "completions", "tasks", "pairs", "labelled", "scored"]
Text = str | list[Message]

FORMS: Mapping[str, Mapping[Form, tuple[str, ...]]] = {
    "sft": {
        "chats": ("messages",),
        "completions": ("prompt", "completion"),
        "tasks": ("prompt", "reward_model"),
    },
    "preference": {"pairs": ("chosen", "rejected"), "labelled": ("prompt", "completion", "label")},
    "reward_model": {"pairs": ("chosen", "rejected"), "scored": ("prompt", "completion", "score")},
}
"""Forms of each kind of job, with their required columns. A row has the first form that fits."""
TEXTS = ("prompt", "completion", "messages", "chosen", "rejected")
COLUMNS = (*TEXTS, "reward_model", "label", "score", "margin", "tools")


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt and its continuation, both as texts or both as messages. There are two exceptions: the ground
    truth of a task is a text even if the prompt is messages; a whole chat is an answer with an empty
    prompt."""

    prompt: Text
    answer: Text
    tools: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """One row: one answer, or a pair (chosen, rejected)."""

    answers: tuple[Continuation, ...]
    value: float = 0.0
    """The margin of a pair; 1 for a desirable and 0 for an undesirable answer; or a score."""
    where: str = field(default="", compare=False)
    """Name of the row in errors: its file and its line or row."""


def read_examples(path: Path, kind: Kind) -> tuple[Form, Iterator[Example]]:
    """Return the form of a file for a job of `kind`, and its examples. The first row determines the form.
    Raises `TaskFileError`, also during iteration, for a row of another form."""
    rows = task_rows(path, COLUMNS)
    first = next(rows, None)
    if first is None:
        raise TaskFileError(f"task file {path} has no rows: it needs at least one example.")
    form = form_of(*first, kind)
    return form, (replace(example_of(*row, form), where=row[0]) for row in chain([first], rows))


def form_of(where: str, row: Mapping[str, Any], kind: Kind) -> Form:
    """Return the first form of `kind` for which the row has all columns. Raises `TaskFileError`."""
    forms = FORMS[kind]
    for form, needed in forms.items():
        if all(row.get(column) is not None for column in needed):
            return form
    told = "; or ".join(", ".join(f"`{column}`" for column in needed) for needed in forms.values())
    found = ", ".join(name for name in row if row[name] is not None) or "none that count"
    raise TaskFileError(
        f"{where} has no columns that a job of kind {kind} learns from (found: {found}). Give a file with "
        f"the columns {told}."
    )


def example_of(where: str, row: Mapping[str, Any], form: Form) -> Example:
    """Return the example in a row of a file with this form. Raises `TaskFileError`."""
    if form == "tasks":
        row = task_row(where, row)
        truth = row["reward_model"]["ground_truth"]
        if truth is None:
            raise TaskFileError(f"{where}: its ground truth is null. Give it an answer, or take the row out.")
        return Example((Continuation(row["prompt"], str(truth)),))
    check_values(row, where)
    tools = tools_of(row, where)
    text = {name: _text(row.get(name), name, where) for name in TEXTS}
    if form == "chats":
        if isinstance(chat := _there(text, "messages", where), str):
            raise TaskFileError(f"{where}: column `messages` holds a text. Give a list of messages.")
        return Example((Continuation([], chat, tools),))
    if form == "pairs":
        chosen, rejected = (_there(text, name, where) for name in ("chosen", "rejected"))
        prompt = text["prompt"]
        if prompt is None:
            prompt, chosen, rejected = split_prompt(chosen, rejected)
        answers = tuple(_answer(prompt, answer, tools, where) for answer in (chosen, rejected))
        if chosen == rejected:
            raise TaskFileError(f"{where}: `chosen` and `rejected` are the same, so neither is better.")
        return Example(answers, _number(row.get("margin", 0.0), "margin", where))
    prompt, completion = (_there(text, name, where) for name in ("prompt", "completion"))
    value = 0.0
    if form == "labelled":
        if not isinstance(label := row.get("label"), bool | int) or label not in (0, 1):
            raise TaskFileError(f"{where}: column `label` must be true or false; found {label!r:.40}.")
        value = float(label)
    if form == "scored":
        value = _number(row.get("score"), "score", where)
    return Example((_answer(prompt, completion, tools, where),), value)


def split_prompt(chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    """Return (prompt, chosen, rejected) for two answers that begin with their prompt. The prompt is their
    common start. A space directly before the first difference belongs to the answers, as in TRL's
    `extract_prompt`."""
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    if same and chosen[same - 1] == " ":
        same -= 1
    return chosen[:same], chosen[same:], rejected[same:]


def _there(text: Mapping[str, Text | None], name: str, where: str) -> Text:
    if (found := text[name]) is None:
        raise TaskFileError(f"{where}: column `{name}` is empty, and the rows before have it. Fill it in.")
    return found


def _answer(prompt: Text, answer: Text, tools: tuple[Message, ...], where: str) -> Continuation:
    if isinstance(prompt, str) is not isinstance(answer, str):
        raise TaskFileError(
            f"{where}: of prompt and answer one is a text and the other a list of messages. Make them alike."
        )
    if not answer:
        raise TaskFileError(f"{where}: an answer is empty. Fill it in, or take the row out.")
    if not prompt and isinstance(prompt, str):
        raise TaskFileError(f"{where}: the prompt is empty. Add the column `prompt`.")
    return Continuation(prompt, answer, tools)


def _number(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise TaskFileError(f"{where}: column `{name}` must be a finite number; found {value!r:.40}.")
    return float(value)


def _text(value: Any, name: str, where: str) -> Text | None:
    return value if value is None or isinstance(value, str) else chat_messages(value, name, where)


def tools_of(row: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    """Return the tool schemas of a row from its column `tools`, or from a task's `extra_info`. The column has
    a list, or a list as JSON. Raises `TaskFileError`."""
    extra = row.get("extra_info")
    value = row.get("tools") or (extra.get("tools") if isinstance(extra, Mapping) else None)
    if isinstance(value, str):
        try:
            value = json.loads(value or "[]")
        except ValueError as error:
            raise TaskFileError(f"{where}: `tools` is not JSON: {error}") from error
    tools: Sequence[Any] = value or ()
    if not (isinstance(tools, list | tuple) and all(isinstance(tool, dict) for tool in tools)):
        raise TaskFileError(f"{where}: `tools` must be a list of schemas; found {value!r:.80}.")
    return tuple(tools)
