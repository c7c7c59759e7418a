"""A `RewardInput` as the protocol carries it, and back."""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from areal_async.trajectory import summarise
from reward_service.backends.remote.schema import Extra, Input, Segment, Trajectory
from reward_service.sdk import RewardInput

KINDS = ("prompt", "sampled", "tool", "environment")


def to_wire(given: RewardInput, wants: Collection[Extra]) -> Input:
    """The texts of `given`, and what else is wanted of it where it has an episode. Raises TrajectoryError
    for a damaged one."""
    return Input(
        episode_id=summarise(given.blob).episode_id if given.blob else "",
        prompt=given.prompt,
        response=given.response,
        ground_truth=given.ground_truth,
        data_source=given.data_source,
        ability=given.ability,
        reward_style=given.reward_style,
        extra_info=given.extra_info,
        metadata=given.metadata,
        response_tokens=given.response_tokens,
        truncated=given.truncated,
        trajectory=trajectory_of(given) if "trajectory" in wants and given.blob else msgspec.UNSET,
        blob=given.blob if "blob" in wants and given.blob else msgspec.UNSET,
    )


def from_wire(given: Input) -> RewardInput:
    return RewardInput(
        prompt=given.prompt,
        response=given.response,
        ground_truth=given.ground_truth,
        data_source=given.data_source,
        ability=given.ability,
        reward_style=given.reward_style,
        extra_info=given.extra_info,
        metadata=given.metadata,
        response_tokens=given.response_tokens,
        truncated=given.truncated,
        blob=b"" if given.blob is msgspec.UNSET else given.blob,
    )


def trajectory_of(given: RewardInput) -> Trajectory:
    """The tokens of the episode behind `given`. Raises what `RewardInput.episode` does."""
    episode = given.episode
    table, units = episode.segments, episode.units
    return Trajectory(
        segments=[
            Segment(
                kind=KINDS[int(table.kind[at])],  # type: ignore[arg-type]
                agent=episode.header.agents[int(table.agent[at])].name,
                turn=int(table.turn[at]),
                parent=int(table.parent[at]),
                offset=int(table.offset[at]),
                length=int(table.length[at]),
                reward=None if math.isnan(table.reward[at]) else float(table.reward[at]),
            )
            for at in range(len(table))
        ],
        token_ids=units.token_id.tolist(),
        mask=units.mask.tolist(),
        logprobs=units.logprob.tolist(),
        versions=units.version.tolist(),
    )
