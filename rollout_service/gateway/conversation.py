"""The paths of one episode's calls, and the recorded answer that a new call continues.

Promise: the prompt of a call is either the exact ids of a recorded answer followed by the ids of the new
messages, or the ids of a completely new rendering. Sampled text is never tokenized again within its path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from areal_async.trajectory import SegmentKind
from rollout_service.gateway.requests import Conversation, Ids, Message, SampledChoice, load_json
from rollout_service.gateway.template import ChatTemplate, canonical
from rollout_service.workflows.turns import RenderedPrompt, SampledText

Key = bytes
Root = Literal["new", "history", "template"]
"""Reason of a new path: a conversation that continues none of our answers; messages that differ from our
answers; a template that now renders our answers in another way."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """A recorded answer."""

    answer: tuple[int, int]
    """Number of its call, and its index among that call's answers."""
    path: Ids
    """Ids up to and including the answer."""
    given: RenderedPrompt
    said: SampledText
    tool_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The ids that the engine is to continue for one call, and their place in the episode."""

    ids: Ids
    """All ids, from the root."""
    parent: RecordedAnswer | None
    kind: SegmentKind
    given: RenderedPrompt
    root: Root | None
    """Reason why this begins a path; None if it continues `parent`."""
    keys: tuple[Key, ...]
    """Keys of the conversation, message by message."""


@dataclass(slots=True)
class ConversationTree:
    """The recorded answers of one episode, over all its sessions."""

    template: ChatTemplate
    _turns: dict[Key, list[RecordedAnswer]] = field(default_factory=dict)

    # --- before the call -----------------------------------------------------------------------------

    def plan(self, asked: Conversation) -> CallPlan:
        """Return the plan of a call. Raises `ApiError` for messages that cannot be rendered."""
        rendered = self.template.prompt(asked)
        keys = chain(asked)
        root: Root = "new"
        answers = [k for k, message in enumerate(asked.messages, 1) if message["role"] == "assistant"]
        if answers and self._turns:
            root = "history"
            last = answers[-1]
            if known := self._turns.get(keys[last]):
                root = "template"
                turn = _best(known, asked.messages[last - 1])
                text = self.template.continuation(asked, rendered, last, turn.given, turn.said)
                if text is not None:
                    new = self.template.ids(text, after=turn.said.end)
                    tools = any(message["role"] == "tool" for message in asked.messages[last:])
                    kind = SegmentKind.TOOL if tools else SegmentKind.ENVIRONMENT
                    return CallPlan(np.concatenate((turn.path, new)), turn, kind, rendered, None, keys)
        return CallPlan(self.template.root_ids(rendered.text), None, SegmentKind.PROMPT, rendered, root, keys)

    # --- after the call ------------------------------------------------------------------------------

    def remember(self, plan: CallPlan, answer: tuple[int, int], choice: SampledChoice) -> None:
        """Note that an answer may be gone on from, once the agent has been told it."""
        path, tool_ids = (
            np.concatenate((plan.ids, choice.token_ids)),
            tuple(c["id"] for c in choice.tool_calls),
        )
        turn = RecordedAnswer(answer, path, plan.given, choice.said, tool_ids)
        # The answer as the message that the agent sends back.
        reply = {"role": "assistant", "content": choice.content, "tool_calls": choice.tool_calls}
        self._turns.setdefault(linked(plan.keys[-1], reply), []).append(turn)


def chain(asked: Conversation) -> tuple[Key, ...]:
    """Return keys of the conversation before its first message, after it, after the second …"""
    start = hashlib.blake2b(
        canonical([asked.tools, asked.template]).encode(errors="surrogatepass"), digest_size=16
    ).digest()
    keys = [start]
    for message in asked.messages:
        keys.append(linked(keys[-1], message))
    return tuple(keys)


def linked(before: Key, message: Message) -> Key:
    """Return the key after `message`. The white space around a text, the spelling of arguments and the ids of
    tool calls are ignored, because clients change them."""
    calls = [
        [call["function"]["name"], _arguments(call["function"]["arguments"])]
        for call in message.get("tool_calls", ())
    ]
    said = [message["role"], message["content"].strip(), calls, message.get("name")]
    return hashlib.blake2b(before + msgspec.msgpack.encode(said), digest_size=16).digest()


def _arguments(value: object) -> str:
    if isinstance(value, str):
        try:
            value = load_json(value)
        except ValueError:
            return str(value)
    return canonical(value)


def _best(known: Sequence[RecordedAnswer], message: Message) -> RecordedAnswer:
    """Return the answer whose tool calls have the ids in `message`; else the newest."""
    ids = tuple(call.get("id", "") for call in message.get("tool_calls", ()))
    same = [turn for turn in known if ids and turn.tool_ids == ids]
    return (same or known)[-1]
