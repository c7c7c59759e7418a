"""What a call asks for and what it gives, free of either API's wording."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from areal_async.trajectory.header import FinishReason

Ids = npt.NDArray[np.int32]
Message = dict[str, Any]
"""As a chat template takes it: role, content (text), and tool_calls with `arguments` as an object."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """Sampling parameters that the caller named; None leaves the job's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and what else the chat template is given."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the template (`enable_thinking` …)."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One call. `prompt` is a conversation, or plain text or ids of `/v1/completions`."""

    prompt: Conversation | str | tuple[int, ...]
    wishes: Wishes = Wishes()
    n: int = 1
    model: str = ""
    parse_tools: bool = True
    """False: what looks like a tool call is text."""
    tool_id_prefix: str = "call_"
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    """Of the answer, without the prefix that an API gives it."""
    created_s: int = field(default_factory=lambda: int(time.time()))
    """Unix time."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer: what the agent is told, and the units it stands for."""

    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    stop_sequence: str | None
    """The stop text that ended the answer, None when an end token or the length did."""
    token_ids: Ids
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Answer:
    id: str
    created_s: int
    prompt_tokens: int
    choices: tuple[Choice, ...]

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)


Root = Literal["new", "history", "template"]
"""Why a path begins: a conversation that goes on with nothing we said; messages that we did not say so;
the template renders what we said in another way now."""
