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

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from areal_async.data.questions import BadRow, Choices, SourceRow, json_or_text, question, with_choices
from areal_async.data.tasks import (
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
SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
TASK = ("prompt", "answer", "data_source", "ability", "messages", "tools", "chosen", "rejected")
NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(?:\.[0-9]+)?")
BARE = re.compile(r"\S*[^\s.]")
"""An answer without a word about how it was found."""
SENTENCES = re.compile(r"(?s)(?![\[{]).*[a-z)\d][.!?][\"')]*\s+\S")
"""More than one sentence, and no JSON."""

SAID_LAST = re.compile(
    r"(?:\A|[\n.])[^\S\n]*[Tt]he (?:final )?answer is:?[^\S\n]+([^\s.](?:(?!\.\s)[^\n])*?)\.?\s*\Z"
)
"""The last sentence of a solution, as MetaMathQA has it."""


NO_MARK = "has neither #### nor \\boxed{…}"
TAKE_WHOLE = "Take the row out, or take such texts whole (--answer whole)."


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

    def convert(self, where: str, row: Mapping[str, Any], source: str) -> tuple[dict[str, Any], SourceRow]:
        """Return the row of a job, and that of the source with what was read of it. Raises `BadRow`."""
        given = SourceRow(row, self.columns, self.keep)
        if missing := [name for name in given.named if name not in row]:
            ours = next((ours for ours, name in self.columns.items() if name == missing[0]), "prompt")
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
        return made, given

    def _named(self, row: SourceRow, name: str, usual: Sequence[str]) -> tuple[str, Any]:
        """The column that holds `name`, and what is in it."""
        if name in self.columns:
            return self.columns[name], row[self.columns[name]]
        found = next((each for each in usual if row.get(each) is not None), "")
        return found, row.get(found)

    def _chat(self, where: str, row: SourceRow) -> list[dict[str, Any]] | None:
        """The messages of a chat; None where the row has none."""
        name, chat = self._named(row, "messages", () if "prompt" in self.columns else CHATS)
        if not name:
            return None
        if isinstance(chat, str):
            chat = json_or_text(chat)
        if not isinstance(chat, list) or not chat or not all(isinstance(each, Mapping) for each in chat):
            raise BadRow(f"{where}: column {name!r} must be a list of messages; found {chat!r:.80}.")
        return [_message(where, name, each) for each in chat]

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
                truth = self._extracted(where, "reward_model.ground_truth", str(truth))
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
            prompt, choices = question(where, row)
            if not prompt:
                raise BadRow(
                    f"{where} has no prompt among its columns ({', '.join(row)}). Say which column it "
                    "is: --map prompt=COLUMN,answer=COLUMN."
                )
            if isinstance(prompt, list):
                prompt = [_message(where, "prompt", each) for each in prompt]
            column, given = self._named(row, "answer", [name for name in ANSWERS if name not in row.asked])
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
        truth = self._extracted(where, column, given) if isinstance(given, str) else given
        if self.answer == "auto" and isinstance(given, str) and BARE.fullmatch(given.strip()) is None:
            row.marked = truth != given.strip()
            row.whole = "" if row.marked else truth
            is_work = column == "solution" or (column not in BARE_ANSWERS and SENTENCES.match(given))
            if is_work and not row.marked:
                raise BadRow(f"{where}: column {column!r} {NO_MARK} in {given!r:.80}. {TAKE_WHOLE}")
        if choices is None or not choices.labels:
            return truth
        if letter := choices.letter(truth):
            return letter
        raise BadRow(
            f"{where}: its answer {truth!r:.40} is none of the choices in {choices.column}: neither a "
            "letter, nor a text of them, nor a number counted from 0."
        )

    def _extracted(self, where: str, column: str, text: str) -> str:
        if truth := extract(text, self.answer):
            return truth
        marks = {"hash": "#### and an answer", "boxed": "\\boxed{…}", "number": "number"}
        what = marks.get(self.answer, "answer")
        raise BadRow(f"{where}: column {column!r} has no {what} in {text!r:.80}.")

    def _system(self, row: SourceRow) -> str:
        return next((row[name] for name in row.free(SYSTEMS) if isinstance(row.look(name), str)), "")

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
        prompt, choices = question(where, row)
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
        blank = [name for name, text in made.items() if not (text.strip() if isinstance(text, str) else text)]
        if missing := blank:
            raise BadRow(f"{where} has no {missing[0]}. Say which column it is (--map {missing[0]}=COLUMN).")
        for name, text in made.items():
            if isinstance(text, list):
                made[name] = [_message(where, name, each) for each in text]
            else:
                check_text(text, name, where)
        whole = isinstance(made["chosen"], list) and made["chosen"][0]["role"] != "assistant"
        system = self._system(row)
        prompt = row.get("prompt") if whole else with_choices(*question(where, row))
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
        if self.kind == "reward_model" and row.get("margin") is not None:
            made["margin"] = row["margin"]
        if made["chosen"] == made["rejected"]:
            raise BadRow(f"{where}: `chosen` and `rejected` are the same, so neither is better.")
        return made

    def _tools(self, where: str, row: SourceRow) -> list[dict[str, Any]]:
        name, tools = self._named(row, "tools", ("tools", "functions"))
        if isinstance(tools, str):
            tools = json_or_text(tools) if tools.strip() else []
        if tools in (None, [], ()):
            return []
        if not isinstance(tools, list) or not all(isinstance(each, Mapping) for each in tools):
            raise BadRow(f"{where}: column {name!r} must be a list of tool schemas; found {tools!r:.80}.")
        return [dict(each) for each in tools]


def _led(chat: Any, system: str) -> Any:
    """The messages behind a system message, unless they have one."""
    if not system or not isinstance(chat, list) or chat[0]["role"] == "system":
        return chat
    return [{"role": "system", "content": system}, *chat]


def kind_of(row: Mapping[str, Any], columns: Mapping[str, str]) -> DataKind:
    """The kind of job whose rows these are, where none is named."""
    both = ("chosen", "rejected")
    return "preference" if all(columns.get(name, name) in row for name in both) else "rl"


def extract(text: str, how: Answer) -> str | None:
    """Return the answer in a solution; None where there is none of that form. `auto` takes what follows
    `####` in the last line, else the last box, else what the last sentence says that the answer is, else the
    whole text."""
    if how == "whole":
        return text.strip()
    found, *more = text.rpartition("####")[2].strip().split("\n")
    if "####" in text and (how == "hash" or (how == "auto" and not more)):  # else it is a heading
        return found.replace(",", "") if NUMBER.fullmatch(found) else found
    if how in ("auto", "boxed") and (box := last_box(text)) is not None:
        return box
    if how == "auto" and (said := SAID_LAST.search(text)):
        return said[1].replace(",", "") if NUMBER.fullmatch(said[1]) else said[1]
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
