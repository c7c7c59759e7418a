"""The part of an episode that is not arrays: who made it, how it was sampled, what belongs to it.

Small values (`Agent`, `Sampling`, `Call`, `Media`) travel as msgpack arrays in field order; later fields are
appended with defaults, so older bytes stay readable. `EpisodeHeader` travels as a map without its default
fields; a default therefore never changes within one schema.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

TRAJECTORY_SCHEMA = 1

FinishReason = Literal["stop", "length", "abort"]
LogprobsOf = Literal["sampled", "temperature", "raw"]


class Agent(msgspec.Struct, frozen=True, array_like=True):
    """An author of segments. `policy` indexes `EpisodeHeader.policies`."""

    name: str
    policy: int = 0


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Sampling parameters of one call, in the engines' common terms."""

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int = 0


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One generation call: it produced segment `segment` from the path of that segment's parent.

    `logprobs_of` names the distribution of the behaviour log-probs: `sampled` is the one the token was drawn
    from (temperature and truncation applied), `temperature` has the temperature but no top-p/top-k
    truncation, `raw` is the model's own at temperature 1.
    """

    segment: int
    policy: int = 0
    sampling: Sampling = Sampling()
    finish_reason: FinishReason = "stop"
    logprobs_of: LogprobsOf = "sampled"


class Media(msgspec.Struct, frozen=True, array_like=True):
    """A content-addressed attachment (image, audio …). Its bytes live outside the episode.

    `digest` is `<hash name>:<hex>`. The placeholder units are `n_units` units from `first_unit` (a row of the
    unit table) inside segment `segment`.
    """

    digest: str
    media_type: str
    size_bytes: int
    segment: int
    first_unit: int = 0
    n_units: int = 0


class EpisodeHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """Identity and provenance of one episode."""

    job: str
    task_id: str
    group_id: str
    sample: int
    """Index of the episode in its group."""
    attempt: int = 0
    schema: int = msgspec.field(default_factory=lambda: TRAJECTORY_SCHEMA)
    """Always written: a default from a factory is never omitted."""
    policies: list[str] = []
    """Names of the policies that sampled; versions count per policy."""
    agents: list[Agent] = []
    calls: list[Call] = []
    """One per sampled segment, in segment order."""
    media: list[Media] = []
    rewards: dict[str, float] = {}
    """Named rewards of the whole episode, known when it ended (an environment's). Verdicts are not here."""
    metadata: dict[str, Any] = {}
    """Anything msgpack can hold."""
    prompt_text: str = ""
    response_text: str = ""
    epochs: list[tuple[int, int]] = []
    """Runs (first unit, trainer epoch of the weights) over the units with mask 1; empty without any."""

    @property
    def episode_id(self) -> str:
        """`<group id>.<sample>`"""
        return f"{self.group_id}.{self.sample}"
