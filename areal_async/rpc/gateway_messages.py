"""Requests between a rollout worker and its gateway, a process of its own. The worker alone has the engine
and the episodes; the gateway has the agents' connections, and the conversations as text."""

from __future__ import annotations

from typing import Literal

from areal_async.rpc.schema import Message, Ok, Record, Request
from areal_async.trajectory.layout import FinishReason, Sampling

# --- worker -> gateway -------------------------------------------------------------------------------


class OpenSession(Request[Ok], frozen=True):
    """Admit a client whose key has this digest. Opening an open session changes nothing."""

    key: bytes
    episode: int
    """Sessions of one episode share its conversations."""
    sampling: dict[str, Sampling]
    """The job's parameters for each policy."""
    forget: list[int] = []
    """Episodes that are gone."""


class ServeAgents(Request[Ok], frozen=True):
    """Listen: every session there is has been opened."""


class EndSession(Request[Ok], frozen=True):
    """End the calls of a session. When this is answered, everything that was sent to its agent is
    recorded."""

    key: bytes


# --- gateway -> worker -------------------------------------------------------------------------------


class SampledAnswer(Record, frozen=True):
    units: int
    finish_reason: FinishReason
    text: str


class Sampled(Message, frozen=True):
    """The answers of a call. One attachment has all their ids (i32), one all log-probs (f32)."""

    answers: list[SampledAnswer]


class SampleRefused(Message, frozen=True):
    """Why there is no answer, as the agent is told it: a status of HTTP, a sentence, OpenAI's code."""

    status: int
    message: str
    code: str | None = None


class Sample(Request[Sampled | SampleRefused], frozen=True):
    """Sample answers for a call. The attachment has the ids (i32) of the whole path up to them."""

    key: bytes
    call: int
    """Numbered by the gateway, over its restarts."""
    sampling: Sampling
    policy: str
    n: int = 1
    seed: int | None = None
    """The agent's own, which is mixed with the episode's."""
    parent: tuple[int, int] | None = None
    """The call, and the index of its answer, whose path is gone on with."""
    known: int = 0
    """Ids up to and including that answer."""
    kind: int = 0
    """`SegmentKind` of the ids after it."""
    root: Literal["", "new", "history", "template"] = ""
    """Why a path begins, where one does."""
    stream: bool = False
    """Keep sampled units for `TakePieces` while the call runs."""


class Pieces(Message, frozen=True):
    """Ids sampled since the last pieces: their answers and counts. The attachment has the ids."""

    answers: list[int] = []
    lengths: list[int] = []


class TakePieces(Request[Pieces], frozen=True):
    key: bytes
    call: int
    wait_ms: int


class RecordCall(Request[Ok], frozen=True):
    """Record that the agent has received all answers of a call, so that they become part of the episode.
    `prompt` is the text of the conversation, `responses` the texts of the answers."""

    key: bytes
    call: int
    prompt: str
    responses: list[str]


class DropCall(Request[Ok], frozen=True):
    """Nobody waits for a call any more."""

    key: bytes
    call: int


class CountCalls(Request[Ok], frozen=True):
    """Calls since the last count that were not recorded, by their outcome."""

    outcomes: dict[str, int]
