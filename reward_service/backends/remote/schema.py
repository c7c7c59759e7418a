"""The reward protocol between a client and a reward server. See
docs/reward-service.md#serve-a-reward-over-http.

A message is a JSON object, and the path names the request. Readers ignore unknown fields, so fields may be
added within one protocol version.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import msgspec

from areal_async.config.reward import Scope
from areal_async.trajectory import unpack
from reward_service.sdk import RewardInput

PROTOCOL = 1
"""Version of the protocol. A server of another one is not used, a request of another one is refused."""

NOT_RUN = "not_run"  # Kind of the error that says: no verdict yet, through no fault of the input

Extra = Literal["blob"]
Status = Literal["ready", "starting", "draining"]
RefusalKind = Literal[
    "protocol", "unauthorized", "unknown_reward", "invalid", "too_large", "busy", "unavailable", "internal"
]

STATUS_OF: dict[RefusalKind, int] = {
    "protocol": 400,
    "invalid": 400,
    "unauthorized": 401,
    "unknown_reward": 404,
    "too_large": 413,
    "busy": 429,
    "internal": 500,
    "unavailable": 503,
}


class RequestLimits(msgspec.Struct, frozen=True):
    """Limits of a server."""

    max_inputs: int = 64
    max_body_bytes: int = 32 << 20
    max_in_flight: int = 8
    """Requests of one client that are unanswered at a time."""


class RewardInfo(msgspec.Struct, frozen=True):
    """One reward that a server offers."""

    name: str
    version: str = ""
    """Text that changes when the reward does."""
    scope: Scope = "episode"
    wants: tuple[Extra, ...] = ()
    """Things that its inputs carry beside texts: `blob`, the episode."""
    description: str = ""


class Info(msgspec.Struct, frozen=True):
    """Answer to `info`: the handshake."""

    protocol: int
    rewards: tuple[RewardInfo, ...]
    server: str = ""
    limits: RequestLimits = RequestLimits()
    request_id: str = ""


class Health(msgspec.Struct, frozen=True):
    """Answer to `health`. Load is in inputs, of all clients together; 0 of 0 where it is not known."""

    status: Status = "ready"
    in_flight: int = 0
    capacity: int = 0
    request_id: str = ""


class Input(RewardInput, kw_only=True):
    """An input to score, with the id of the episode for logs. `blob` is base64 in JSON, and empty unless
    wanted."""

    episode_id: str = ""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`score`: one verdict for each of `inputs`, in their order."""

    protocol: int
    request_id: str
    reward: str
    timeout_ms: int
    """Time for scoring one input, once it has begun: past it the input is a `timeout`."""
    deadline_ms: int
    """Time for the answer, from the arrival on: an input that the server has not got to by then is an `error`
    of the kind `NOT_RUN`, and is sent again."""
    inputs: list[msgspec.Raw]
    """Encoded `Input`s. With the scope `group` they are the inputs of one group, in the order of its
    samples."""
    scope: Scope = "episode"
    args: dict[str, Any] = {}


class RequestRefusal(msgspec.Struct, frozen=True):
    """Why a request was not carried out."""

    kind: RefusalKind
    message: str
    retry_after_ms: int = 0


class RefusedAnswer(msgspec.Struct, frozen=True):
    """The answer to a request that was not carried out; its status says the same."""

    error: RequestRefusal
    request_id: str = ""


class Verdicts(msgspec.Struct, frozen=True):
    """Answer to `score`, with verdicts of areal_async.base.verdicts."""

    verdicts: list[msgspec.Raw]
    request_id: str = ""


def to_wire(given: RewardInput, wants: Collection[Extra]) -> Input:
    """`given`, with its episode only where that is wanted. Raises TrajectoryError for a damaged one."""
    values = {name: getattr(given, name) for name in RewardInput.__struct_fields__}
    if "blob" not in wants:
        values["blob"] = b""
    return Input(**values, episode_id=unpack(given.blob).episode_id if given.blob else "")
