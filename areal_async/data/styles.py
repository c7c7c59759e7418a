"""What a row of a public data set means: its prompt, its answer, and the columns that a job reads.

| style | its columns | a row of |
|---|---|---|
| task | `prompt`, `reward_model` (verl's) | `rl` |
| question | a question and an answer, whatever they are called (GSM8K, MATH) | `rl`, `sft` |
| chat | `messages`, or `conversations` with `from` and `value`; the last reply is the answer | `rl`, `sft` |
| preference | `chosen`, `rejected`, perhaps `prompt` | `preference`, `reward_model` |

Each may have `tools`, schemas of what the model may call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from areal_async.data.sources import DataError
from areal_async.tasks import TaskFileError, check_row, check_text

DataKind = Literal["rl", "sft", "preference", "reward_model"]
Answer = Literal["auto", "whole", "hash", "boxed", "number"]
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input")
ANSWERS = (
    "ground_truth",
    "final_answer",
    "expected_answer",
    "answer",
    "solution",
    "completion",
    "output",
    "response",
    "target",
    "label",
)
CHATS = ("messages", "conversations", "conversation", "dialog")
SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant", "function_call": "assistant"}
TASK = ("prompt", "answer", "data_source", "ability", "messages", "tools", "chosen", "rejected")
NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(?:\.[0-9]+)?")


class BadRow(DataError):
    """One row that is none of what the job needs."""


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

    def convert(self, where: str, row: dict[str, Any], source: str) -> dict[str, Any]:
        """The row of a job. Raises `BadRow`."""
        for ours, theirs in self.columns.items():
            if theirs not in row:
                there = ", ".join(row) or "none"
                raise BadRow(f"{where} has no column {theirs!r} for {ours} (--map). It has: {there}.")
        try:
            if self.kind in ("preference", "reward_model"):
                return self._pair(where, row)
            return self._example(where, row) if self.kind == "sft" else self._task(where, row, source)
        except BadRow:
            raise
        except TaskFileError as error:
            raise BadRow(str(error)) from None

    def _named(self, row: Mapping[str, Any], name: str, usual: tuple[str, ...]) -> tuple[str, Any]:
        """The column that holds `name`, and what is in it."""
        if name in self.columns:
            return self.columns[name], row[self.columns[name]]
        found = next((each for each in usual if row.get(each) is not None), "")
        return found, row.get(found)

    def _chat(self, where: str, row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The messages of a chat; None where the row has none."""
        name, chat = self._named(row, "messages", () if "prompt" in self.columns else CHATS)
        if not name:
            return None
        if isinstance(chat, str):
            chat = _json(chat)
        if not isinstance(chat, list) or not chat or not all(isinstance(each, Mapping) for each in chat):
            raise BadRow(f"{where}: column {name!r} must be a list of messages; found {chat!r:.80}.")
        return [_message(where, name, each) for each in chat]

    def _task(self, where: str, row: dict[str, Any], source: str) -> dict[str, Any]:
        reward, chat = row.get("reward_model"), self._chat(where, row)
        extra = dict(row["extra_info"]) if isinstance(row.get("extra_info"), Mapping) else {}
        if isinstance(reward, Mapping) and "ground_truth" in reward and not self.columns:
            prompt, truth = row["prompt"], reward["ground_truth"]
            prompt = (
                [_message(where, "prompt", one) for one in prompt] if isinstance(prompt, list) else prompt
            )
            style = reward.get("style") or "rule"
            if self.answer != "auto":
                truth = extract(str(truth), self.answer)
        else:
            style = "rule"
            if chat is not None:
                if chat[-1]["role"] == "assistant":
                    prompt, said = chat[:-1], chat[-1].get("content")
                else:
                    prompt, said = chat, None
                column, given = self._named(row, "answer", ANSWERS)
                column, given = (column, given) if given is not None else ("messages", said)
            else:
                column, prompt = self._named(row, "prompt", PROMPTS)
                if not column:
                    raise BadRow(
                        f"{where} has no prompt among its columns ({', '.join(row)}). Say which column it "
                        "is: --map prompt=COLUMN,answer=COLUMN."
                    )
                if isinstance(prompt, list):
                    prompt = [_message(where, column, each) for each in prompt]
                column, given = self._named(row, "answer", tuple(each for each in ANSWERS if each != column))
            if given is None or given == "":
                named = f"column {column!r} is empty" if column else f"none of {', '.join(row)} is its answer"
                raise BadRow(f"{where} has no answer: {named}. Say which it is (--map answer=COLUMN).")
            truth = extract(given, self.answer) if isinstance(given, str) else given
            if truth is None:
                what = {"hash": "#### and an answer", "boxed": "\\boxed{…}", "number": "number"}[self.answer]
                raise BadRow(f"{where}: column {column!r} has no {what} in {given!r:.80}.")
        if tools := self._tools(where, row):
            extra["tools"] = tools
        extra |= {name: row[name] for name in self.keep if name in row}
        _, data_source = self._named(row, "data_source", ("data_source",))
        _, ability = self._named(row, "ability", ("ability",))
        made = {
            "data_source": self.data_source or str(data_source or source),
            "prompt": self._shaped(prompt),
            "ability": self.ability or str(ability or ""),
            "reward_model": {"style": style, "ground_truth": truth},
            "extra_info": extra,
        }
        check_row(where, made)
        return made

    def _shaped(self, prompt: Any) -> Any:
        if isinstance(prompt, str):
            if self.instruction:
                prompt = f"{prompt}\n{self.instruction}"
            if self.as_messages or self.system:
                prompt = [{"role": "user", "content": prompt}]
        elif self.instruction and isinstance(prompt[-1].get("content"), str):
            last = prompt[-1]
            prompt = [*prompt[:-1], {**last, "content": f"{last['content']}\n{self.instruction}"}]
        if self.system and prompt[0]["role"] != "system":
            prompt = [{"role": "system", "content": self.system}, *prompt]
        return prompt

    def _example(self, where: str, row: dict[str, Any]) -> dict[str, Any]:
        """A row of supervised training: the chat as it is, or prompt and completion."""
        tools = {"tools": tools} if (tools := self._tools(where, row)) else {}
        if (chat := self._chat(where, row)) is not None:
            return {"messages": chat, **tools}
        _, prompt = self._named(row, "prompt", PROMPTS)
        column, answer = self._named(
            row, "answer", ("completion", "response", "output", "solution", "answer")
        )
        if not prompt or not isinstance(answer, str) or not answer:
            named = "prompt" if not prompt else f"answer in column {column!r}" if column else "answer"
            raise BadRow(f"{where} has no {named}. Say which columns they are: --map prompt=…,answer=….")
        shaped: Any = self._shaped(prompt)
        check_text(answer, column, where)
        if not isinstance(shaped, str):
            return {"messages": [*shaped, {"role": "assistant", "content": answer}], **tools}
        return {"prompt": shaped, "completion": answer, **tools}

    def _pair(self, where: str, row: dict[str, Any]) -> dict[str, Any]:
        made = {}
        for name in ("chosen", "rejected"):
            _, made[name] = self._named(row, name, (name,))
        _, prompt = self._named(row, "prompt", PROMPTS)
        if missing := [name for name, text in made.items() if not text]:
            raise BadRow(f"{where} has no {missing[0]}. Say which column it is (--map {missing[0]}=COLUMN).")
        for name, text in made.items():
            if isinstance(text, list):
                made[name] = [_message(where, name, each) for each in text]
            else:
                check_text(text, name, where)
        whole = isinstance(made["chosen"], list) and made["chosen"][0]["role"] != "assistant"
        if prompt and not whole:  # else the answers begin with it
            if isinstance(made["chosen"], list) and isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            made = {"prompt": prompt, **made}
        if tools := self._tools(where, row):
            made["tools"] = tools
        if made["chosen"] == made["rejected"]:
            raise BadRow(f"{where}: `chosen` and `rejected` are the same, so neither is better.")
        return made

    def _tools(self, where: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        name, tools = self._named(row, "tools", ("tools", "functions"))
        if isinstance(tools, str):
            tools = _json(tools) if tools.strip() else []
        if tools in (None, [], ()):
            return []
        if not isinstance(tools, list) or not all(isinstance(each, Mapping) for each in tools):
            raise BadRow(f"{where}: column {name!r} must be a list of tool schemas; found {tools!r:.80}.")
        return [without_nulls(each) for each in tools]


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


def without_nulls(value: Any) -> Any:
    """A value without what is null in it: columnar files give every row the fields that any has."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _message(where: str, column: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with `role` and `content`, by whatever names it had them."""
    made = without_nulls(message)
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
