"""Conversion of prompts to ids, and the continuation of a path of ids after an answer.

An answer consists of sampled ids, which must never be replaced by ids of a new tokenisation. Let P be the
rendering after which the answer was sampled. P ends with the header that the template puts before an answer.
Let R be the rendering of the next call: the same conversation with the answer and new messages after it. The
ids of the path are then continued with the text that R has after the answer (`tail`). This is possible only
if R still shows the earlier conversation, in one of two ways:

- R begins with P, followed by the answer exactly as sampled. This includes templates that open a thought in
  P.
- R shows the same answer in another spelling, which differs only in white space or in the JSON format of tool
  calls, because these do not change the meaning. To find the answer in R, the conversation up to and
  including the answer is rendered. If R begins with this rendering, the answer in R ends where the rendering
  ends. Otherwise it ends at the first closing of a turn.

The continuation begins with the closing of the answer's turn, without the part that the model has sampled
itself. If a template drops or moves earlier text, the path ends. The template of Qwen3, for example, drops
earlier thinking. Workflows and the gateway both use this rule.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from areal_async.base.errors import ArealError
from areal_async.base.records import ImageFile
from areal_async.data.images import ImageCache, decode_image
from areal_async.models.answers import Detokenizer, end_ids, turn_closing
from areal_async.models.prompts import (
    Tokenizer,
    broken,
    content_text,
    message_texts,
    prompt_ids,
    prompt_text,
    text_ids,
    with_plain_marks,
)
from areal_async.trajectory.layout import FinishReason, SegmentKind
from rollout_service.engines.base import RequestImage

if TYPE_CHECKING:
    from areal_async.models.vision import ImageProcessor

T = TypeVar("T")

REMEMBERED_BYTES = 256 << 20
"""Bytes of texts with images whose ids are kept. The samples of a group have the same prompt."""

Message = Mapping[str, Any]
Rewritten = Literal["root", "error"]
"""Action if a template would change earlier text of a path: begin a new root, or fail."""


class TurnError(ArealError):
    """A conversation cannot be continued with this template."""


class TemplateRewrites(TurnError):
    """The template renders earlier messages differently from the text that the model saw and sampled."""


# --- continuation after an answer
# ----------------------------------------------------------------------------

Calls = tuple[tuple[str, str], ...]
"""Names and canonical arguments of tool calls."""


@dataclass(frozen=True, slots=True)
class SampledText:
    """An answer, both as it was sampled and as a message in the conversation."""

    raw: str
    """Decoded text with every special token."""
    content: str
    calls: Calls = ()
    end: str = ""
    """Text of the sampled end token, or "" without one."""


class Spelled(NamedTuple):
    """Text and tool calls in a rendered turn."""

    text: str
    calls: Calls = ()


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation as sent to the engine."""

    text: str
    """Rendering that ends with the header of the assistant's turn."""
    before: str | None
    """Rendering without that header. The value is None if the template does more than append the header."""


def tail(
    rendered: str,
    prompt: RenderedPrompt,
    said: SampledText,
    *,
    closing: str | None,
    past: Callable[[], str | None],
    spelled: Callable[[str], Spelled] = Spelled,
) -> str | None:
    """Return the text that follows an answer in `rendered`, a later rendering of its conversation. The answer
    was sampled after `prompt`. Return None if `rendered` shows a different history.

    `closing` is the text that the template puts after an answer. `past()` returns the rendering of the
    conversation up to the answer, including `closing`. `spelled` reads text and tool calls from a rendered
    turn."""
    given, before = prompt.text, prompt.before
    exact = given + said.raw
    if rendered.startswith(exact):
        rest = rendered[len(exact) :]
        if said.end or not (closing or "").strip() or rest.lstrip().startswith((closing or "").strip()):
            return rest
    if before is None:
        return None
    upto = past()
    if upto is None or not (rendered.startswith(upto) and upto.startswith(before)):
        # Some templates render the last answer differently from earlier answers.
        end = rendered.find(closing, len(before)) if closing and rendered.startswith(before) else -1
        if end < 0 or not closing:
            return None
        upto = rendered[: end + len(closing)]
    turn, header = upto[len(before) :], given[len(before) :]
    if closing is None or not turn.endswith(closing):
        return None
    shown = spelled(turn[: len(turn) - len(closing)])
    if squashed(shown.text) != squashed(header + said.content) or shown.calls != said.calls:
        return None
    space, end_token, after = closing.partition(said.end) if said.end else ("", "", closing)
    # An end token of another kind than the template's leaves the turn open, like a truncated answer.
    return (after if end_token and not space.strip() else closing) + rendered[len(upto) :]


def squashed(text: str) -> str:
    """Return `text` without white space."""
    return "".join(text.split())


@dataclass(frozen=True)
class Chat:
    """A conversation so far, as messages. `tools` are the schemas for the template."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    end: str = ""
    """Text of the end token after the last message, if the last message is a sampled reply."""

    def said(self, text: str, end: str = "") -> Chat:
        """Return the conversation with a reply of the model appended. Consecutive replies form one
        message."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            last = {**self.messages[-1], "content": content_text(self.messages[-1]) + text}
            return replace(self, messages=(*self.messages[:-1], last), end=end)
        return replace(self.then([{"role": "assistant", "content": text}]), end=end)

    def then(self, messages: Sequence[Message]) -> Chat:
        return replace(self, messages=(*self.messages, *messages), end="")

    def render(self, tokenizer: Tokenizer, *, opened: bool = True) -> str:
        """Return the conversation as rendered by the template. `opened` adds the header of the next reply."""
        return prompt_text(tokenizer, self.messages, self.tools, opened=opened)


def continuation(tokenizer: Tokenizer, chat: Chat, new: Sequence[Message]) -> tuple[str, bool]:
    """Return the text between the reply that ends `chat` and the next reply. Also return whether the template
    changes earlier text, so that the path cannot continue.

    Without a chat template, the text is the contents of the messages `new`, joined by newlines. Raises
    `TurnError` if `chat` does not end in a reply."""
    if not tokenizer.chat_template:
        return broken(tokenizer, message_texts(new)), False
    if not chat.messages or chat.messages[-1]["role"] != "assistant":
        raise TurnError("messages can only follow a reply: generate() first, and pass its segment as parent")
    *earlier, reply = chat.messages
    asked = replace(chat, messages=tuple(earlier))
    given, before = asked.render(tokenizer), _unopened(tokenizer, asked)
    content = broken(tokenizer, str(reply["content"]))
    text = tail(
        chat.then(new).render(tokenizer),
        RenderedPrompt(given, before if before is not None and given.startswith(before) else None),
        SampledText(content + chat.end, content, end=chat.end),
        closing=turn_closing(tokenizer),
        past=lambda: _unopened(tokenizer, chat),
    )
    return text or "", text is None


def _unopened(tokenizer: Tokenizer, chat: Chat) -> str | None:
    """Return the rendering of a chat without the header of the next reply, or None if the template refuses
    it."""
    try:
        return chat.render(tokenizer, opened=False)
    except Exception:  # a template may raise anything
        return None


# --- prompts -----------------------------------------------------------------------------------------

Prompt = str | Sequence[Message] | Sequence[int] | npt.NDArray[np.int32]
Ids = npt.NDArray[np.int32]


def is_chat(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    """Return whether a prompt is a list of chat messages."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as ids, and as text. In the text, each image is one placeholder, and marks that are no images
    are broken (`models/prompts.py`)."""

    ids: Ids
    text: str
    media: tuple[RequestImage, ...] = ()


def _size_bytes(shown: Rendered) -> int:
    return shown.ids.nbytes + len(shown.text) + sum(len(image.data) for image in shown.media)


class NewSegment(NamedTuple):
    """A segment to add to an episode. If it has images, its ids are those of `text` around the images."""

    kind: SegmentKind
    parent: int | None
    agent: int
    turn: int
    policy: str
    chat: Chat | None = None
    """The conversation up to the segment, if the path is a chat."""
    ids: Ids | None = None
    text: str = ""
    images: Sequence[ImageFile] = ()


class Renderer:
    """Renderer of prompts as ids. It caches the last prompts, because all samples of a group have the same
    one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        ends: Collection[int] | None = None,
        *,
        remember: int = 64,
        processor: Callable[[], ImageProcessor] | None = None,
    ) -> None:
        """`ends` are the ids that end an answer. The default is the tokenizer's. `processor` makes the image
        processor of a model that reads images; it is called for the first image."""
        self.tokenizer = tokenizer if processor is None else with_plain_marks(tokenizer)
        self.ends = frozenset(end_ids(tokenizer) if ends is None else ends)
        self.answers = Detokenizer(tokenizer, self.ends)
        self._remembered = lru_cache(remember)(self._rendered)
        self._make_processor = processor
        self._processor: ImageProcessor | None = None
        self._remembered_images: ImageCache[Rendered] = ImageCache(REMEMBERED_BYTES, _size_bytes)
        self._thread, self._one_at_a_time = ThreadPoolExecutor(1, "images"), threading.Lock()

    def __call__(self, prompt: Prompt) -> Rendered:
        """Return the beginning of a path, with the tokenizer's special tokens at its start."""
        if not isinstance(prompt, str) and not is_chat(prompt):
            return Rendered(np.asarray(prompt, np.int32), "")
        return self._remembered("root", prompt if isinstance(prompt, str) else msgspec.msgpack.encode(prompt))

    def following(self, text: str) -> Ids:
        """Return the ids of text that continues a path, without special tokens before it."""
        return self._remembered("more", text).ids

    def expanded(self, text: str, images: Sequence[ImageFile]) -> Rendered:
        """Return a text with one placeholder for each image, without special tokens before it. Raises
        `TurnError` if the model reads no images or the text has another number of placeholders, and
        `ImageError`. Decoding large images takes seconds."""
        with self._one_at_a_time:  # processors are not safe for several threads
            key = text, *(image.facts.digest for image in images)
            known = self._remembered_images.get(key)
            return known or self._remembered_images.keep(key, self._expanded(text, images))

    def shown(self, new: NewSegment) -> Rendered:
        """Return a segment as ids, with its images expanded."""
        return self.expanded(new.text, new.images) if new.ids is None else Rendered(new.ids, new.text)

    async def shown_aside(self, new: NewSegment) -> Rendered:
        """Return a segment as `shown` does. Images are decoded in a thread."""
        return await self.aside(self.shown, new) if new.ids is None else self.shown(new)

    async def aside(self, work: Callable[..., T], *given: Any) -> T:
        """Return `work(*given)`. Run it in a thread for images, so that it does not block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    def _expanded(self, text: str, images: Sequence[ImageFile]) -> Rendered:
        if self._processor is None:
            if self._make_processor is None:
                raise TurnError("a message has images, but the model reads none: set `model` to another")
            self._processor = self._make_processor()
        processor = self._processor
        if (count := text.count(processor.placeholder)) != len(images):
            raise TurnError(
                f"messages with {len(images)} images are rendered with {count} placeholders "
                f"({processor.placeholder}): the chat template does not show each image once"
            )
        ids, spans = processor.expand(text, [decode_image(image.data) for image in images])
        array = np.asarray(ids, np.int32)
        array.setflags(write=False)
        placed = zip(images, spans, strict=True)
        media = tuple(RequestImage(image.facts.digest, image.data, *span) for image, span in placed)
        return Rendered(array, text, media)

    def _rendered(self, kind: str, key: str | bytes) -> Rendered:
        prompt: Any = key if isinstance(key, str) else msgspec.msgpack.decode(key)
        text = prompt if kind == "more" else prompt_text(self.tokenizer, prompt)
        if kind == "more":
            plain = broken(self.tokenizer, prompt)
            ids = np.asarray(text_ids(self.tokenizer, plain, special=False), np.int32)
        else:
            ids = np.asarray(prompt_ids(self.tokenizer, prompt), np.int32)
        ids.setflags(write=False)  # it is shared by many callers
        return Rendered(ids, text)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of one call. `segment` is its index in the episode, to be used as `parent` of a
    continuation."""

    segment: int
    token_ids: Ids
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    finish_reason: FinishReason
    text: str
    """Decoded text without the end token and the stop string. Other special tokens stay."""
