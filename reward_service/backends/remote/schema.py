"""The reward protocol: the messages between a client and a reward server.
docs/reward-service.md#serve-a-reward-over-http explains it.

A message is a JSON object, and the path of the URL names the request. Readers ignore unknown fields, so
fields may be added within one protocol version.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import msgspec

from areal_async.config.reward import Scope
from areal_async.trajectory import unpack
from reward_service.sdk import RewardInput

PROTOCOL = 1
"""Version of the protocol. Servers and requests of another version are refused."""

NOT_RUN = "not_run"  # kind of an error without a verdict that is not the input's fault

Extra = Literal["blob", "media"]
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
    """Largest number of requests of one client in flight."""


class RewardInfo(msgspec.Struct, frozen=True):
    """One reward that a server offers."""

    name: str
    version: str = ""
    """Text that changes whenever the reward changes."""
    scope: Scope = "episode"
    wants: tuple[Extra, ...] = ()
    """Additional data that its inputs must contain: `blob` is the encoded episode, `media` are its images."""
    description: str = ""


class Info(msgspec.Struct, frozen=True):
    """Answer to `info`, the handshake."""

    protocol: int
    rewards: tuple[RewardInfo, ...]
    server: str = ""
    limits: RequestLimits = RequestLimits()
    request_id: str = ""


class Health(msgspec.Struct, frozen=True):
    """Answer to `health`. The load counts inputs of all clients together. If load and capacity are both 0,
    the load is unknown."""

    status: Status = "ready"
    in_flight: int = 0
    capacity: int = 0
    request_id: str = ""


class Input(RewardInput, kw_only=True):
    """An input to score, with the episode's id for logs. `blob` and the data of `media` are base64 in JSON,
    and empty unless the reward wants them."""

    episode_id: str = ""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request `score`. It gets one verdict for each of `inputs`, in order."""

    protocol: int
    request_id: str
    reward: str
    timeout_ms: int
    """Longest time to score one input, from its start. An input that takes longer gets the verdict
    `timeout`."""
    deadline_ms: int
    """Time until the answer, from the arrival of the request. An input that has not begun by then gets an
    `error` of the kind `NOT_RUN`, and the client sends it again."""
    inputs: list[msgspec.Raw]
    """Encoded `Input`s. With the scope `group` they form one group, in the order of its samples."""
    scope: Scope = "episode"
    args: dict[str, Any] = {}


class RequestRefusal(msgspec.Struct, frozen=True):
    """Reason why a request was refused."""

    kind: RefusalKind
    message: str
    retry_after_ms: int = 0


class RefusedAnswer(msgspec.Struct, frozen=True):
    """Body of the answer to a refused request, next to an HTTP status with the same meaning."""

    error: RequestRefusal
    request_id: str = ""


class Verdicts(msgspec.Struct, frozen=True):
    """Answer to `score`, with verdicts of areal_async.base.verdicts."""

    verdicts: list[msgspec.Raw]
    request_id: str = ""


def to_wire(given: RewardInput, wants: Collection[Extra]) -> Input:
    """Return the input in the form for sending. It has its episode and its images only if the reward wants
    them. Raises `TrajectoryError` for a damaged episode."""
    values = {name: getattr(given, name) for name in RewardInput.__struct_fields__}
    if "blob" not in wants:
        values["blob"] = b""
    if "media" not in wants:
        values["media"] = []
    return Input(**values, episode_id=unpack(given.blob).episode_id if given.blob else "")
