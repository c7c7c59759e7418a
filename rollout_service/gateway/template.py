"""Conversations as text, and how a recorded path goes on: the template-increment technique.

An answer ended at some ids. The next call shows the same conversation with the answer in it and something
after it. Rendered as a whole, R, and up to and including the answer, A, the text after the recorded ids is

    closing of the answer's turn (as far as the model has not sampled it)  +  R without its beginning A

provided that the template still renders what came before as it did: R begins with A, A begins with the
rendering P that the call had been given, and the turn in between is the header that the template opens an
answer with, followed by what the gateway had answered. White space, and the JSON of tool calls, may differ:
neither says anything else. A template that drops or moves text fails this, and the path ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from rollout_service.gateway.requests import ApiError, Conversation, Ids, Message
from rollout_service.gateway.toolcalls import MARKERS, Format, format_of, parse

_SENTINEL = "areal-turn-7f3a"  # Text that no template changes, to see what a template puts after an answer
_KNOWN_TEXTS, _KNOWN_CHARS = 256, 1 << 16  # Renderings whose ids are kept, and how long each may be


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation as the engine is given it."""

    text: str
    """The rendering with the assistant's turn opened."""
    before: str | None
    """The rendering without it; None when the template does not merely append its opening."""

    @property
    def header(self) -> str:
        """What opens the answer."""
        assert self.before is not None
        return self.text[len(self.before) :]


@dataclass(frozen=True, slots=True)
class SampledText:
    """An answer: as it was sampled, and as the agent was told it."""

    raw: str
    """Decoded with every special token."""
    content: str
    calls: tuple[tuple[str, str], ...]
    """Names and canonical arguments."""
    end: str
    """Text of the end token that was sampled, "" without one."""


class ChatTemplate:
    """The chat template of a job's tokenizer. Everything here is pure."""

    def __init__(self, tokenizer: Any, tool_format: Format | Literal["auto"] = "auto") -> None:
        self.tokenizer = tokenizer
        template = tokenizer.chat_template
        source = template if isinstance(template, str) else json.dumps(template or "")
        self.format: Format = format_of(source) if tool_format == "auto" else tool_format
        specials = dict(
            zip(
                getattr(tokenizer, "all_special_ids", ()),
                getattr(tokenizer, "all_special_tokens", ()),
                strict=True,
            )
        )
        self._special_ids = frozenset(specials)
        self._marker_ids = frozenset(i for i, text in specials.items() if text in MARKERS[self.format])
        self._closing: str | None = None
        # The compiled part of a fast tokenizer: the wrapper around it takes as long again.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._known_ids = lru_cache(_KNOWN_TEXTS)(self._plain_ids)

    # --- ids and text --------------------------------------------------------------------------------

    def ids(self, text: str, after: str = "") -> Ids:
        """Ids of `text`, with no special tokens added. `after` is the end token that stands right before it:
        some tokenizers treat the start of a text in their own way."""
        if after:
            anchor, both = self._known_ids(after), self._plain_ids(after + text)
            if both[: len(anchor)] == anchor:
                return np.asarray(both[len(anchor) :], np.int32)
        return np.asarray(self._plain_ids(text), np.int32)

    def root_ids(self, text: str) -> Ids:
        """`ids` of a whole rendering. The samples of a group begin with the same one: it is kept for them."""
        return np.asarray(
            self._known_ids(text) if len(text) < _KNOWN_CHARS else self._plain_ids(text), np.int32
        )

    def _plain_ids(self, text: str) -> list[int]:
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int] | Ids, *, special: bool = True) -> str:
        """Text of `ids`, with the special tokens or without."""
        given = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if self._backend is not None:
            return str(self._backend.decode(given, skip_special_tokens=not special))
        text = self.tokenizer.decode(
            given, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return str(text)

    def marker_at(self, ids: Sequence[int] | Ids) -> int:
        """Where the first special token stands that begins a tool call; the length when none does. In some
        tokenizers the marker is a special token, which plain decoding leaves out."""
        if self._marker_ids:
            for at, token in enumerate(ids):
                if int(token) in self._marker_ids:
                    return at
        return len(ids)

    def body(self, ids: Ids) -> str:
        """What the model wrote: without special tokens, but with those that make tool calls."""
        at = self.marker_at(ids)
        said = self.decode(ids[:at], special=False)
        return said + self.decode(ids[at:]) if at < len(ids) else said

    def end_of(self, ids: Ids, finish_reason: str) -> str:
        """Text of the end token that an answer ended with, "" when it ended otherwise."""
        if finish_reason == "stop" and len(ids) and int(ids[-1]) in self._special_ids:
            return self.decode(ids[-1:])
        return ""

    # --- rendering -----------------------------------------------------------------------------------

    def prompt(self, asked: Conversation) -> RenderedPrompt:
        """Raises `ApiError` for a conversation that the template refuses."""
        if asked.tools and self.format == "none":
            raise ApiError(400, "the model's chat template has no tools", param="tools")
        text = self._render(asked, asked.messages, opened=True)
        try:
            before = self._render(asked, asked.messages, opened=False)
        except ApiError:
            return RenderedPrompt(text, None)
        return RenderedPrompt(text, before if text.startswith(before) else None)

    def continuation(
        self,
        asked: Conversation,
        rendered: RenderedPrompt,
        upto: int,
        given: RenderedPrompt,
        said: SampledText,
    ) -> str | None:
        """The text after the ids of an answer that is message `upto - 1` of `asked`, which `rendered` is of;
        `given` is what that answer was sampled from. None when the template does not render the history as
        it was, so that the path cannot go on."""
        if given.before is None:
            return None
        try:
            past = self._render(asked, asked.messages[:upto], opened=False)
        except ApiError:
            return None
        if not (rendered.text.startswith(past) and past.startswith(given.before)):
            return None
        tail = self._tail(past[len(given.before) :], given.header, said)
        return None if tail is None else tail + rendered.text[len(past) :]

    def _tail(self, turn: str, header: str, said: SampledText) -> str | None:
        """What of a rendered turn comes after the sampled ids."""
        if turn.startswith(header + said.raw):
            return turn[len(header) + len(said.raw) :]
        closing = self._closing_text()
        if closing is None or not turn.endswith(closing):
            return None
        shown = parse(turn[: len(turn) - len(closing)], self.format)
        calls = tuple((call.name, canonical(call.arguments)) for call in shown.calls)
        if squashed(shown.text) != squashed(header + said.content) or calls != said.calls:
            return None
        before, end, after = closing.partition(said.end) if said.end else ("", "", closing)
        # An end token that is not the template's own leaves the turn open, like one that was cut short.
        return after if end and not before.strip() else closing

    def _closing_text(self) -> str | None:
        """What the template puts after an answer's text."""
        if self._closing is None:
            probe = [{"role": "user", "content": "."}, {"role": "assistant", "content": _SENTINEL}]
            try:
                shown = self._render(Conversation(probe), probe, opened=False)
            except ApiError:
                return None
            _, found, self._closing = shown.rpartition(_SENTINEL)
            if not found:
                self._closing = None
        return self._closing

    def _render(self, asked: Conversation, messages: Sequence[Message], *, opened: bool) -> str:
        if not self.tokenizer.chat_template:
            raise ApiError(400, "the model has no chat template: give its tokenizer one", param="messages")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=asked.tools or None,
                tokenize=False,
                add_generation_prompt=opened,
                **asked.template,
            )
        except Exception as error:  # whatever a template's own code raises is about these messages
            raise ApiError(
                400, f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return str(text)


def squashed(text: str) -> str:
    """`text` without white space."""
    return "".join(text.split())


def canonical(value: Any) -> str:
    """JSON of `value`, the same for equal values."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


_HALF = "\N{REPLACEMENT CHARACTER}"


class StreamedText:
    """An answer's text as it grows: only what can no longer turn out to be something else is let out.

    Held back are half a character, what may be the beginning of a stop text or of a tool call, and everything
    from a tool call on. What was let out is a beginning of the finished answer's content."""

    def __init__(self, template: ChatTemplate, stop: Sequence[str], markers: Sequence[str]) -> None:
        self._template = template
        self._ends = (*stop, *markers)
        self._ids: list[int] = []
        self._settled = 0  # Ids whose text is in `_text`
        self._context = 0
        """Where decoding starts, so that a tokenizer's treatment of a text's beginning falls on known ids."""
        self._text = ""
        self._given = ""
        self._over = False

    def grow(self, ids: Sequence[int] | Ids) -> str:
        """Take further ids; returns the content that is certain now and was not before."""
        if self._over:
            return ""
        marker = self._template.marker_at(ids)
        self._ids += [int(i) for i in ids[:marker]]
        known = self._template.decode(self._ids[self._context : self._settled], special=False)
        now = self._template.decode(self._ids[self._context :], special=False)
        if now.endswith(_HALF) or len(now) <= len(known):
            self._over = marker < len(ids)
            return ""
        self._text += now[len(known) :]
        self._context, self._settled = self._settled, len(self._ids)
        certain = self._text[: self._certain()]
        self._over = self._over or marker < len(ids)
        # White space alone may be what stands before a tool call, which then has no content.
        if not certain.strip() or not certain.startswith(self._given):
            return ""
        new, self._given = certain[len(self._given) :], certain
        return new

    def rest(self, content: str) -> str:
        """What is left to be said of the finished answer's content."""
        self._over = True
        return content[len(self._given) :] if content.startswith(self._given) else ""

    def _certain(self) -> int:
        """How much of the text cannot belong to a stop text or a tool call."""
        starts = [at for end in self._ends if (at := self._text.find(end)) >= 0]
        if starts:
            self._over = True
            return min(starts)
        return len(self._text) - self._doubtful()

    def _doubtful(self) -> int:
        longest = max((len(end) for end in self._ends), default=1) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            tail = self._text[-size:]
            if any(end.startswith(tail) for end in self._ends):
                return size
        return 0
