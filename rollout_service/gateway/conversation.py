"""Choice of the recorded answer that a new call of an episode continues.

Promise: the engine continues one of two sequences of ids: the exact ids up to a recorded answer, followed by
the ids of the new messages, or the ids of a completely new rendering. Sampled text on a path is never
tokenised again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from areal_async.trajectory import SegmentKind
from rollout_service.engines.base import RequestImage
from rollout_service.gateway.requests import Conversation, Ids, Message, SampledChoice, load_json
from rollout_service.gateway.template import AskedPrompt, ChatTemplate, canonical
from rollout_service.workflows.turns import SampledText

Key = bytes
Root = Literal["new", "history", "template"]
"""Reason why a path begins. `new`: the conversation has no assistant message, or no answer is recorded yet.
`history`: the conversation up to its last assistant message is not a recorded one. `template`: the template
now renders recorded answers differently."""


class RecordedAnswer(NamedTuple):
    """A recorded answer."""

    answer: tuple[int, int]
    """Number of its call, and its index among the call's answers."""
    path: Ids
    """Ids of the path up to and including the answer."""
    given: AskedPrompt
    said: SampledText
    tool_ids: tuple[str, ...] = ()
    media: tuple[RequestImage, ...] = ()
    """Images of the path."""


class CallPlan(NamedTuple):
    """Ids that the engine must continue in one call, and their place in the episode."""

    ids: Ids
    """All ids, from the root."""
    parent: RecordedAnswer | None
    kind: SegmentKind
    given: AskedPrompt
    root: Root | None
    """Reason why the call begins a path, or None if it continues `parent`."""
    keys: tuple[Key, ...]
    """Keys of the conversation, one per message."""
    media: tuple[RequestImage, ...] = ()
    """Images of `ids`."""

    @property
    def new_media(self) -> tuple[RequestImage, ...]:
        """Images after the parent."""
        return self.media if self.parent is None else self.media[len(self.parent.media) :]


@dataclass(slots=True)
class ConversationTree:
    """Recorded answers of one episode, of all its sessions."""

    template: ChatTemplate
    _turns: dict[Key, list[RecordedAnswer]] = field(default_factory=dict)

    # --- before the call -----------------------------------------------------------------------------

    def plan(self, asked: Conversation) -> CallPlan:
        """Return the plan of a call. Raises `ApiError` if the messages cannot be rendered."""
        text = self.template.prompt(asked)
        given, keys = AskedPrompt(asked, text), chain(asked)
        root: Root = "new"
        answers = [k for k, message in enumerate(asked.messages, 1) if message["role"] == "assistant"]
        if answers and self._turns:
            root = "history"
            last = answers[-1]
            if known := self._turns.get(keys[last]):
                root = "template"
                turn = _best(known, asked.messages[last - 1])
                more = self.template.continuation(asked, text, last, turn.given, turn.said)
                if more is not None:
                    images = asked.images.of(asked.messages[last:])
                    begin, media = len(turn.path), turn.media
                    if images:
                        shown = self.template.expanded(more, images)
                        new = shown.ids
                        media += tuple(each._replace(first=begin + each.first) for each in shown.media)
                    else:
                        new = self.template.ids(more, after=turn.said.end)
                    tools = any(message["role"] == "tool" for message in asked.messages[last:])
                    kind = SegmentKind.TOOL if tools else SegmentKind.ENVIRONMENT
                    return CallPlan(np.concatenate((turn.path, new)), turn, kind, given, None, keys, media)
        if images := asked.images.of(asked.messages):
            shown = self.template.expanded(text, images)
            return CallPlan(shown.ids, None, SegmentKind.PROMPT, given, root, keys, shown.media)
        return CallPlan(self.template.root_ids(text), None, SegmentKind.PROMPT, given, root, keys)

    # --- after the call ------------------------------------------------------------------------------

    def remember(self, plan: CallPlan, answer: tuple[int, int], choice: SampledChoice) -> None:
        """Make an answer available for continuation, after the agent has received it."""
        path, tool_ids = (
            np.concatenate((plan.ids, choice.token_ids)),
            tuple(c["id"] for c in choice.tool_calls),
        )
        turn = RecordedAnswer(answer, path, plan.given, choice.said, tool_ids, plan.media)
        # The answer in the form in which the agent sends it back.
        reply = {"role": "assistant", "content": choice.content, "tool_calls": choice.tool_calls}
        self._turns.setdefault(linked(plan.keys[-1], reply), []).append(turn)


def chain(asked: Conversation) -> tuple[Key, ...]:
    """Return the key of each prefix of the conversation: before the first message, after the first message,
    and so on."""
    start = b""
    if asked.tools or asked.template:
        start = canonical([asked.tools, asked.template]).encode(errors="surrogatepass")
    return tuple(accumulate(asked.messages, linked, initial=start))


def linked(before: Key, message: Message) -> Key:
    """Return the key of a prefix after it is extended by `message`. `before` is its key until then. White
    space around a text, the spelling of arguments and the ids of tool calls do not affect the key, because
    clients change them."""
    calls = message.get("tool_calls") or ()
    if calls:
        calls = [[one["function"]["name"], _arguments(one["function"]["arguments"])] for one in calls]
    content = message["content"]
    content = content.strip() if isinstance(content, str) else content
    said = (message["role"], content, calls, message.get("name"))
    return hashlib.blake2b(before + _encode(said), digest_size=16).digest()


_encode = msgspec.msgpack.Encoder().encode


def _arguments(value: object) -> str:
    if isinstance(value, str):
        try:
            value = load_json(value)
        except ValueError:
            return str(value)
    return canonical(value)


def _best(known: Sequence[RecordedAnswer], message: Message) -> RecordedAnswer:
    """Return the answer whose tool calls have the same ids as those in `message`. If no answer has them,
    return the newest answer."""
    ids = tuple(call.get("id", "") for call in message.get("tool_calls", ()))
    same = [turn for turn in known if ids and turn.tool_ids == ids]
    return (same or known)[-1]
