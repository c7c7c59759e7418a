"""Prompts become ids, and chats go on after a reply: what a template writes between turns.

A reply is ids that were sampled; they are never made from text again. So the next turn is what the template
appends after a reply: the conversation is rendered with a mark where the reply stands, and the text after the
mark is tokenised by itself and appended to the ids. Whether that is the whole truth is checked: if rendering
the conversation with its real texts does not begin with what the model has seen and said, the template
changes its past (Qwen3 drops earlier thinking, for example), and the path cannot go on as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.errors import ArealError
from areal_async.prompts import Tokenizer, message_texts, prompt_ids, prompt_text, text_ids
from areal_async.trajectory.layout import FinishReason

Message = Mapping[str, Any]
Rewritten = Literal["root", "error"]
"""Where a template would change the past of a path: begin a new root, or fail."""

MARK = "\ue000REPLY\ue001"  # Private-use characters: no conversation has them


class TurnError(ArealError):
    """A conversation cannot be continued with this template."""


class TemplateRewrites(TurnError):
    """The template renders what was said before otherwise than the model saw and said it."""


@dataclass(frozen=True)
class Chat:
    """A conversation so far, as messages; `tools` are the schemas that the template is given."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    def said(self, text: str) -> Chat:
        """The conversation with the model's reply; a reply in pieces is one message."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            last = {**self.messages[-1], "content": str(self.messages[-1]["content"]) + text}
            return replace(self, messages=(*self.messages[:-1], last))
        return self.then([{"role": "assistant", "content": text}])

    def then(self, messages: Sequence[Message]) -> Chat:
        return replace(self, messages=(*self.messages, *messages))

    def render(self, tokenizer: Tokenizer) -> str:
        """The template's text with the next reply opened."""
        return prompt_text(tokenizer, self.messages, self.tools)


def continuation(tokenizer: Tokenizer, chat: Chat, new: Sequence[Message]) -> tuple[str, bool]:
    """What follows the reply that ends `chat`, up to where the next reply begins, and whether the template
    would change what came before it.

    Without a chat template it is the contents of `new`, joined by newlines. Raises `TurnError` where `chat`
    does not end in a reply, or the template shows a reply not at all or more than once."""
    if not tokenizer.chat_template:
        return message_texts(new), False
    if not chat.messages or chat.messages[-1]["role"] != "assistant":
        raise TurnError("messages can only follow a reply: generate() first, and pass its segment as parent")
    *before, reply = chat.messages
    marked = replace(chat, messages=(*before, {**reply, "content": MARK}, *new)).render(tokenizer)
    head, found, text = marked.partition(MARK)
    if not found or MARK in text:
        raise TurnError(
            f"the chat template shows a reply {marked.count(MARK)} times once the conversation goes on, so "
            "what follows it cannot be told; use a template that shows each message once"
        )
    seen = replace(chat, messages=tuple(before)).render(tokenizer)
    real = chat.then(new).render(tokenizer)
    said = str(reply["content"]).strip()
    # White space around a reply is the template's to trim: the ids keep it.
    kept = real.startswith(seen) and real[len(seen) :].lstrip().startswith(said) and real.endswith(text)
    return text, head != seen or not kept


Prompt = str | Sequence[Message] | Sequence[int] | npt.NDArray[np.int32]
Ids = npt.NDArray[np.int32]


def is_chat(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    """Whether a prompt is chat messages, not text nor ids."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as ids, and as text."""

    ids: Ids
    text: str


class Renderer:
    """Prompts to ids. A group's samples ask for the same prompt: the last ones are remembered."""

    def __init__(self, tokenizer: Tokenizer, remember: int = 64) -> None:
        self.tokenizer = tokenizer
        self._remember = remember
        self._known: dict[tuple[str, str | bytes], Rendered] = {}

    def __call__(self, prompt: Prompt) -> Rendered:
        """What begins a path: special tokens that the tokenizer puts first are there."""
        if not isinstance(prompt, str) and not is_chat(prompt):
            return Rendered(np.asarray(prompt, np.int32), "")
        return self._remembered("root", prompt)

    def following(self, text: str) -> Ids:
        """Ids of text that goes on with a path: no special token is put before it."""
        return self._remembered("more", text).ids

    def _remembered(self, kind: str, prompt: Any) -> Rendered:
        key = kind, prompt if isinstance(prompt, str) else msgspec.msgpack.encode(prompt)
        if (known := self._known.get(key)) is None:
            if kind == "root":
                ids, text = prompt_ids(self.tokenizer, prompt), prompt_text(self.tokenizer, prompt)
            else:
                ids, text = text_ids(self.tokenizer, prompt, special=False), prompt
            if len(self._known) >= self._remember:
                del self._known[next(iter(self._known))]
            known = self._known[key] = Rendered(np.asarray(ids, np.int32), text)
            known.ids.setflags(write=False)  # it is given out again and again
        return known

    def special(self, token: int) -> bool:
        """Whether an id is one of the tokenizer's special tokens (an end of turn)."""
        return token in getattr(self.tokenizer, "all_special_ids", ())


@dataclass(frozen=True, slots=True)
class Reply:
    """What one call generated. `segment` is its place in the episode: the `parent` of what follows it."""

    segment: int
    token_ids: Ids
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish_reason: FinishReason
    text: str
    """Decoded, without special tokens and without the stop string."""
