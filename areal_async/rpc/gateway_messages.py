"""Requests between a rollout worker and its gateway, a separate process.

Only the worker has the engine and the episodes. The gateway has the agents' connections and the conversations
as text.
"""

from __future__ import annotations

from typing import Literal

from areal_async.rpc.schema import Message, Ok, Record, Request
from areal_async.trajectory.layout import FinishReason, Sampling

# --- worker -> gateway -------------------------------------------------------------------------------


class OpenSession(Request[Ok], frozen=True):
    """Accept agents that present the key with this digest. If the session is already open, nothing
    changes."""

    key: bytes
    episode: int
    """The sessions of one episode share its conversations."""
    sampling: dict[str, Sampling]
    """The job's sampling parameters by policy."""
    forget: list[int] = []
    """Episodes that have ended."""


class ServeAgents(Request[Ok], frozen=True):
    """Start listening. The worker sends this after it has opened all existing sessions."""


class EndSession(Request[Ok], frozen=True):
    """End the calls of a session. The gateway replies after everything that was sent to the session's agent
    has been recorded."""

    key: bytes


# --- gateway -> worker -------------------------------------------------------------------------------


class SampledAnswer(Record, frozen=True):
    units: int
    finish_reason: FinishReason
    text: str


class Sampled(Message, frozen=True):
    """The answers of a call. One attachment has all ids (i32) and one has all log-probs (f32)."""

    answers: list[SampledAnswer]


class SampleRefused(Message, frozen=True):
    """The reason for an error, as the agent sees it: an HTTP status, a sentence and OpenAI's error code."""

    status: int
    message: str
    code: str | None = None


class PlacedImage(Record, frozen=True):
    """An image whose placeholder tokens are tokens [first, first + count) of the path."""

    digest: str
    first: int
    count: int


class Sample(Request[Sampled | SampleRefused], frozen=True):
    """Sample answers for a call. The first attachment has the ids (i32) of the whole path before the answers.
    The others are the images of `media`."""

    key: bytes
    call: int
    """Number of the call, which the gateway assigns. The numbers continue across restarts of the gateway."""
    sampling: Sampling
    policy: str
    n: int = 1
    seed: int | None = None
    """The agent's seed, which is mixed with the episode's seed."""
    parent: tuple[int, int] | None = None
    """The call and the index of the answer that this call continues, or None for a new path."""
    known: int = 0
    """Number of ids up to and including that answer."""
    kind: int = 0
    """`SegmentKind` of the ids after that answer."""
    root: Literal["", "new", "history", "template"] = ""
    """Reason why a new path begins, or empty."""
    media: list[PlacedImage] = []
    """Images after the parent's answer."""


class RecordedCall(Record, frozen=True):
    """A call to record in its episode, with all its answers. The agent has received them.

    `prompt` is the text of the conversation, and `responses` are the texts of the answers.
    """

    key: bytes
    call: int
    prompt: str
    responses: list[str]


class Unrecorded(Message, frozen=True):
    """The reasons why calls could not be recorded, by their position in the request."""

    reasons: dict[int, str] = {}


class RecordCalls(Request[Unrecorded], frozen=True):
    """Record calls of any sessions. The gateway sends those that end in one turn of its event loop
    together."""

    calls: list[RecordedCall]


class DropCall(Request[Ok], frozen=True):
    """Report that the client of a call has disconnected."""

    key: bytes
    call: int
