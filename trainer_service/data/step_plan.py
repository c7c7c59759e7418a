"""What a step's manifest says: checks, group ids, figures, and who trains what. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_async.rpc.messages import Batch, BatchEpisode
from trainer_service.algorithms.table import EpisodeTable
from trainer_service.data.flops import RowCost
from trainer_service.data.microbatch import Share, deal_episodes, deal_groups, deal_rows
from trainer_service.errors import BatchError, StalenessViolation


@dataclass(frozen=True)
class StepPlan:
    """A step as every rank sees it. E episodes, in manifest order."""

    episodes: list[BatchEpisode]
    groups: NDArray[np.int64]
    """i64 [E]: index of the episode's group."""
    table: EpisodeTable
    """What is known of the episodes."""
    shares: list[list[Share]]
    """[minibatch][data rank] -> the rows that are trained there, each row in one of them. An episode whose
    rows are in several is fetched by several ranks."""

    def share_of(self, data_rank: int) -> Share:
        """What one data rank trains in the step: its episodes, in the order of training, and their rows."""
        return {index: rows for shares in self.shares for index, rows in shares[data_rank].items()}


@dataclass(frozen=True)
class BatchFigures:
    """A step in numbers. Staleness of an episode: step - its smallest version that is trained."""

    episodes: int
    tokens: int
    """Sampled tokens."""
    units: int
    """Prompt and response tokens."""
    reward_mean: float
    reward_std: float
    staleness_mean: float
    staleness_max: int
    share_stale: float
    """Episodes with staleness 1 or more."""
    share_multi_version: float
    """Episodes that more than one version sampled."""
    share_reused: float
    """Episodes that were in a step before."""
    response_length_mean: float
    response_length_max: int
    """Sampled tokens of an episode."""
    prompt_length_mean: float
    """Tokens of an episode that were not sampled: its prompt, and what tools and environments added."""
    rewards: dict[str, float]
    """Mean of each component of the rewards, over the episodes that have it."""
    sampled_quantiles: list[float]
    """Sampled tokens of an episode: the least, the tenths between, and the most."""


def plan_step(
    batch: Batch,
    *,
    step: int,
    max_staleness: int,
    minibatches: int,
    ranks: int,
    cost: RowCost,
    whole_episodes: bool = False,
    greedy_sample: int | None = None,
) -> StepPlan:
    """Check the manifest of `step` and deal its rows out by their `cost`: to keep `whole_episodes`, all rows
    of an episode to one rank. `greedy_sample` is the number of the sample in each group that is greedy.

    Groups may differ in size: a partial group has the samples that came by its deadline. Deterministic:
    every rank comes to the same plan. Raises `BatchError` for a manifest that is not one of
    this step or names a group or an episode twice or an empty group, and `StalenessViolation`.
    """
    if batch.step != step:
        raise BatchError(f"asked for the batch of step {step}, got that of step {batch.step}")
    group_ids = [group.group_id for group in batch.groups]
    episodes = [episode for group in batch.groups for episode in group.episodes]
    ids = [episode.episode_id for episode in episodes]
    for what, names in (("group", group_ids), ("episode", ids)):
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise BatchError(f"the batch of step {step} names {what} {twice} twice")
    if not episodes:
        raise BatchError(f"the batch of step {step} has no episodes")
    empty = [group.group_id for group in batch.groups if not group.episodes]
    if empty:
        raise BatchError(f"group {empty[0]} of step {step} has no episodes")
    for episode in episodes:
        oldest = max(episode.min_version, batch.lowest_version)
        if episode.n_sampled and not 0 <= step - oldest <= max_staleness:
            raise StalenessViolation(
                f"episode {episode.episode_id} of step {step} has min version {oldest}: "
                f"staleness {step - oldest} is outside 0 … {max_staleness}"
            )
        units = episode.parts.units if episode.parts is not None else []
        if units and len(units) != episode.n_units:
            raise BatchError(
                f"episode {episode.episode_id} of step {step} has {episode.n_units} units, and rewards of "
                f"{len(units)}"
            )
    sizes = [len(group.episodes) for group in batch.groups]
    groups = np.repeat(np.arange(len(batch.groups), dtype=np.int64), sizes)
    return StepPlan(
        episodes=episodes,
        groups=groups,
        table=EpisodeTable.of(episodes, groups, greedy_sample=greedy_sample),
        shares=[
            _deal(members, episodes, groups, ranks, cost, whole=whole_episodes)
            for members in deal_groups(len(batch.groups), minibatches)
        ],
    )


def _deal(
    members: list[int],
    episodes: list[BatchEpisode],
    groups: NDArray[np.int64],
    ranks: int,
    cost: RowCost,
    *,
    whole: bool,
) -> list[Share]:
    """The rows of some groups, dealt to ranks."""
    indices = np.flatnonzero(np.isin(groups, members)).tolist()
    costs = [[cost.of(*size) for size in episodes[index].rows] for index in indices]
    shares = (deal_episodes if whole else deal_rows)(costs, ranks, groups[indices].tolist())
    return [{indices[place]: rows for place, rows in share.items()} for share in shares]


def figures_of(batch: Batch) -> BatchFigures:
    episodes = [episode for group in batch.groups for episode in group.episodes]
    rewards = np.array([episode.reward for episode in episodes])
    sampled = [episode for episode in episodes if episode.n_sampled]
    lowest = batch.lowest_version
    trained = [max(episode.min_version, lowest) for episode in sampled if episode.max_version >= lowest]
    staleness = np.array([batch.step - version for version in trained] or [0])
    lengths = np.array([episode.n_sampled for episode in episodes])
    multi = [episode.min_version != episode.max_version for episode in sampled] or [False]
    return BatchFigures(
        episodes=len(episodes),
        tokens=int(lengths.sum()),
        units=sum(episode.n_units for episode in episodes),
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        staleness_mean=float(staleness.mean()),
        staleness_max=int(staleness.max()),
        share_stale=float((staleness > 0).mean()),
        share_multi_version=float(np.mean(multi)),
        share_reused=sum(len(group.episodes) for group in batch.groups if group.uses) / len(episodes),
        response_length_mean=float(lengths.mean()),
        response_length_max=int(lengths.max()),
        prompt_length_mean=float(np.mean([episode.n_units for episode in episodes]) - lengths.mean()),
        rewards=_components(episodes),
        sampled_quantiles=np.quantile(lengths, np.linspace(0, 1, 11)).tolist(),
    )


def _components(episodes: list[BatchEpisode]) -> dict[str, float]:
    given: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.components.items():
            given.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in given.items()}
