"""The use of a job's chat template in the gateway: rendering of conversations, and the text of answers.

A recorded path is continued by the same rule as in workflows (`workflows/turns.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from areal_async.base.records import ImageFile
from areal_async.data.images import ImageError
from areal_async.models.answers import Detokenizer, end_ids, turn_closing
from areal_async.models.prompts import broken, pieces
from rollout_service.gateway.requests import ApiError, Conversation, Ids, Message
from rollout_service.gateway.toolcalls import Format, format_of, parse
from rollout_service.workflows.turns import (
    Rendered,
    RenderedPrompt,
    Renderer,
    SampledText,
    Spelled,
    TurnError,
    tail,
)

if TYPE_CHECKING:
    from areal_async.models.vision import ImageProcessor

_KNOWN_TEXTS, _KNOWN_CHARS = 256, 1 << 16  # Cached renderings, and their longest text


T = TypeVar("T")
ToolFormat = Format | Literal["auto"]


class AskedPrompt(NamedTuple):
    """A conversation and its rendering, as sent to the engine."""

    asked: Conversation
    text: str


class ChatTemplate:
    """The chat template of a job's tokenizer. All methods are pure."""

    def __init__(
        self,
        tokenizer: Any,
        tool_format: ToolFormat = "auto",
        ends: Collection[int] | None = None,
        processor: Callable[[], ImageProcessor] | None = None,
    ) -> None:
        """`ends` are the ids that end an answer. The default is the tokenizer's. `processor` makes the image
        processor of a model that reads images."""
        template = tokenizer.chat_template
        source = template if isinstance(template, str) else json.dumps(template or "")
        self.format: Format = format_of(source) if tool_format == "auto" else tool_format
        self._ends = frozenset(end_ids(tokenizer) if ends is None else ends)
        self._answers = Detokenizer(tokenizer, self._ends)
        # The compiled part of a fast tokenizer, because its wrapper doubles the time.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._renderer = Renderer(tokenizer, self._ends, processor=processor)
        self.tokenizer = self._renderer.tokenizer
        self._known_ids = lru_cache(_KNOWN_TEXTS)(self._plain_ids)
        self._end_text = lru_cache(len(self._ends))(lambda token: self.raw([token]))

    # --- ids and text --------------------------------------------------------------------------------

    def ids(self, text: str, after: str = "") -> Ids:
        """Return the ids of `text`, without added special tokens. `after` is the end token directly before
        the text. `after` is needed because some tokenizers treat the start of a text differently from its
        middle."""
        if after:
            anchor, both = self._known_ids(after), self._plain_ids(after + text)
            if both[: len(anchor)] == anchor:
                return np.asarray(both[len(anchor) :], np.int32)
        return np.asarray(self._plain_ids(text), np.int32)

    def root_ids(self, text: str) -> Ids:
        """Return the ids of a whole rendering. The ids are cached, because the samples of a group begin with
        the same rendering."""
        return np.asarray(
            self._known_ids(text) if len(text) < _KNOWN_CHARS else self._plain_ids(text), np.int32
        )

    def expanded(self, text: str, images: Sequence[ImageFile]) -> Rendered:
        """Return a text with one placeholder for each image as ids. Raises `ApiError`."""
        try:
            return self._renderer.expanded(text, images)
        except (TurnError, ImageError) as error:
            raise ApiError(400, str(error), param="messages") from error

    async def aside(self, work: Callable[..., T], *given: Any) -> T:
        """Return `work(*given)`, which expands images, from a thread."""
        return await self._renderer.aside(work, *given)

    def _plain_ids(self, text: str) -> list[int]:
        parts = pieces(self.tokenizer, text)
        if self._backend is not None:
            # This method leaves out the offsets, which take a quarter of the time.
            found = self._backend.encode_batch_fast(parts, add_special_tokens=False)
            return [token for each in found for token in each.ids]
        return [
            token for part in parts for token in self.tokenizer(part, add_special_tokens=False)["input_ids"]
        ]

    def plain(self, text: str) -> str:
        """Return a rendering in the characters that the model reads."""
        return "".join(pieces(self.tokenizer, text))

    def raw(self, ids: Sequence[int] | Ids) -> str:
        """Return the text of `ids` with every special token."""
        return self._answers.text(np.asarray(ids).tolist(), whole=True)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer without its end token and padding."""
        return self._answers.text(ids)

    def end_of(self, ids: Ids) -> str:
        """Return the text of an answer's end token, or "" if it has none."""
        return self._end_text(int(ids[-1])) if len(ids) and int(ids[-1]) in self._ends else ""

    # --- rendering -----------------------------------------------------------------------------------

    def prompt(self, asked: Conversation) -> str:
        """Return the rendering. Raises `ApiError` if the template refuses the conversation."""
        if asked.tools and self.format == "none":
            raise ApiError(400, "the model's chat template has no tools", param="tools")
        return self._render(asked, asked.messages, opened=True)

    def continuation(
        self, asked: Conversation, shown: str, upto: int, given: AskedPrompt, said: SampledText
    ) -> str | None:
        """Return the text that follows the ids of an answer. The answer is message `upto - 1` of `asked`.
        `shown` is the rendering of `asked`, and the answer was sampled after `given`. Return None if the
        template now renders the history differently, so that the path cannot continue."""

        raw, content, calls = broken(self.tokenizer, (said.raw, said.content, said.calls))
        said = SampledText(raw, content, calls, said.end)
        how: Any = {"closing": self._closing, "spelled": self._spelled}
        how["past"] = lambda: self._unopened(asked, asked.messages[:upto])
        exact = tail(shown, RenderedPrompt(given.text, None), said, **how)
        if exact is not None:
            return exact
        before = self._unopened(given.asked, given.asked.messages)
        if before is None or not given.text.startswith(before):
            return None
        return tail(shown, RenderedPrompt(given.text, before), said, **how)

    def _spelled(self, turn: str) -> Spelled:
        shown = parse(turn, self.format)
        return Spelled(shown.text, tuple((call.name, canonical(call.arguments)) for call in shown.calls))

    @cached_property
    def _closing(self) -> str | None:
        """Text that the template puts after an answer."""
        return turn_closing(self.tokenizer)

    def _unopened(self, asked: Conversation, messages: Sequence[Message]) -> str | None:
        """Return the rendering without the header of the next reply, or None if the template refuses it."""
        try:
            return self._render(asked, messages, opened=False)
        except ApiError:
            return None

    def _render(self, asked: Conversation, messages: Sequence[Message], *, opened: bool) -> str:
        if not self.tokenizer.chat_template:
            raise ApiError(400, "the model has no chat template: give its tokenizer one", param="messages")
        how: Any = {"tokenize": False, "add_generation_prompt": opened}
        given, tools = broken(self.tokenizer, (list(messages), asked.tools or None))
        try:
            return str(self.tokenizer.apply_chat_template(given, tools=tools, **how, **asked.template))
        except Exception as error:  # any error in a template's code is about these messages
            refused = f"the model's chat template refuses these messages: {error}"
            raise ApiError(400, refused, param="messages") from error


def canonical(value: Any) -> str:
    """Return JSON of `value` in a canonical form: equal values give equal text."""
    return _canonical(value)


_canonical = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode
