"""Credit assignment: the samples that an advantage compares, and the rewards of units.

A *sequence* is everything that one agent did in one episode, in the order of time. Its reward is the agent's
own reward if the verdict has one, and otherwise the episode's reward. Rewards of segments and units assign
parts of this reward to places in the sequence. The last unit of the sequence gets the remainder. The rewards
of units therefore always sum to the reward of their sequence.

`group_by` selects the samples and their groups:

    task             episodes of one task
    task_agent       sequences of one agent in the episodes of one task
    task_agent_turn  an agent's rewards from one turn on; its group: that turn in the other episodes
    task_turn        rewards of all agents of an episode from one turn on; groups as above; rewards of
                     single agents do not count
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from trainer_service.algorithms.table import InTime, SegmentTable, UnitTable, difference, keys
from trainer_service.transfer import moved


@dataclass(frozen=True)
class Samples:
    """N samples of a step. They are the same on every rank."""

    reward: Tensor
    """f64 [N]: reward of the sample, minus the KL penalty if the job applies it to rewards."""
    group: Tensor
    """i64 [N]: number of the sample's group. Samples of one group are compared."""
    length: Tensor
    """i64 [N]: number of trained units."""
    baseline: Tensor
    """bool [N]: True for greedy samples, which only serve as baselines."""
    components: Mapping[str, Tensor] = field(default_factory=dict)
    """f64 [N] by name: components of the episode's reward; NaN if the episode does not have the component."""
    sequence: Tensor | None = None
    """i64 [N]: number of the sequence that a turn belongs to; None unless samples are turns. Later turns have
    higher indices."""

    def __len__(self) -> int:
        return len(self.reward)

    def sum(self, values: Tensor) -> Tensor:
        """Return f64 [N]: for each sample the sum of values [N] over its group."""
        labels, member = self.group.unique(return_inverse=True)
        sums = torch.zeros(len(labels), dtype=torch.float64, device=values.device)
        return sums.index_add(0, member, values.double())[member]

    @property
    def size(self) -> Tensor:
        """f64 [N]: number of samples in each sample's group."""
        return self.sum(torch.ones_like(self.reward))

    def mean(self, values: Tensor) -> Tensor:
        """Return f64 [N]: for each sample the mean of values [N] over its group."""
        return self.sum(values) / self.size

    def centred(self, values: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return f64 [N]: values [N] minus their group's mean, weighted by `weight` [N] if given. The result
        is exactly 0 if all values of a group are equal."""
        if weight is None:
            return difference(values, self.mean(values))
        return difference(values, self.sum(values * weight) / self.sum(weight).clamp(min=1e-300))

    def over_std(self, values: Tensor, eps: float) -> Tensor:
        """Return f64 [N]: values [N] minus their group's mean, divided by its standard deviation plus
        `eps`."""
        return self.centred(values) / (self.std(values) + eps)

    def others_best(self, values: Tensor) -> Tensor:
        """Return f64 [N]: for each sample the largest of values [N] among the others of its group. A sample
        without others gets its own value."""
        labels, member = self.group.unique(return_inverse=True)
        best = torch.full((len(labels),), -torch.inf, dtype=torch.float64)
        second = best.scatter_reduce(0, member, values, "amax")
        is_best = values == second[member]
        several = torch.zeros(len(labels)).index_add(0, member, is_best.float()) > 1
        best.scatter_reduce_(0, member, values.masked_fill(is_best & ~several[member], -torch.inf), "amax")
        found = torch.where(is_best, best[member], second[member])
        return torch.where(found.isinf() & values.isfinite(), values, found)

    def only(self, keep: Tensor, values: Tensor) -> Samples:
        """Return the samples that `keep` bool [N] selects, with values [N] as their rewards."""
        return Samples(values[keep], self.group[keep], self.length[keep], self.baseline[keep])

    def whitened(self, values: Tensor, weight: Tensor, *, eps: float = 1e-8) -> Tensor:
        """Return f64 [N]: values [N] minus their mean, divided by their standard deviation (n - 1).

        Both are taken over all samples of the step, in which each sample counts `weight` [N] times."""
        count = weight.sum().clamp(min=1)
        centred = difference(values, (values * weight).sum() / count)
        variance = (centred.square() * weight).sum() / (count - 1).clamp(min=1)
        return centred / (variance.sqrt() + eps)

    def std(self, values: Tensor) -> Tensor:
        """Return f64 [N]: standard deviation (n - 1) of values [N] in each sample's group; 0 for a group of
        one."""
        return (self.sum(self.centred(values).square()) / (self.size - 1).clamp(min=1)).sqrt()


@dataclass(frozen=True)
class Credit:
    """The samples of a step and the mapping from units to samples."""

    samples: Samples
    owner: Tensor | None
    """i64 [G]: index of the sample that each segment belongs to; None if samples are episodes."""

    def of_units(self, values: Tensor, units: UnitTable) -> Tensor:
        """Return f32 [U]: values [N] of samples, for each unit."""
        index = units.episode
        if self.owner is not None:
            index = moved(self.owner, index.device)[units["segment"]]
        return moved(values, index.device)[index].float()


def samples_of(
    units: UnitTable, group_by: str, penalty: Tensor | None, *, turn_discount: float = 1.0
) -> Credit:
    """Return the samples to compare. `penalty` f32 [U] is subtracted from the rewards. All ranks call it."""
    if group_by != "task":
        return samples_of_segments(with_penalty(units, penalty), group_by, turn_discount=turn_discount)
    episodes = units.episodes
    ones = torch.ones_like(units.behaviour)
    count, taken = units.read_by_episode(ones, ones if penalty is None else penalty)
    reward = episodes.reward if penalty is None else episodes.reward - taken
    samples = Samples(reward, episodes.group, count.long(), episodes.baseline, episodes.components)
    return Credit(samples, None)


def samples_of_segments(segments: SegmentTable, group_by: str, *, turn_discount: float = 1.0) -> Credit:
    """Return samples that are parts of episodes, ordered by episode, agent and turn."""
    by = {"task_agent": ("agent",), "task_agent_turn": ("agent", "turn"), "task_turn": ("turn",)}[group_by]
    labels = [getattr(segments, name) for name in by]
    owner = keys(segments.episode, *labels)
    first = torch.from_numpy(np.unique(owner.numpy(), return_index=True)[1])
    episode, episodes = segments.episode[first], segments.episodes
    earned = _of_team(segments) if group_by == "task_turn" else segments.reward
    zeros = torch.zeros(len(first), dtype=torch.float64)
    reward = zeros.index_add(0, owner, earned)
    sequence = episode if group_by == "task_turn" else segments.sequence[first]
    if "turn" in by:
        reward = InTime.of(sequence, torch.arange(len(first))).to_go(reward, turn_discount)
    samples = Samples(
        reward,
        keys(segments.group[first], *(label[first] for label in labels)),
        zeros.long().index_add(0, owner, segments.length),
        episodes.baseline[episode],
        {name: values[episode] for name, values in episodes.components.items()},
        sequence,
    )
    return Credit(samples, owner)


def _of_team(segments: SegmentTable) -> Tensor:
    """Return f64 [G]: reward of each segment if all agents form one team. The last segment of the last turn
    also gets the part of the episode's reward that no segment has."""
    turns = InTime.of(segments.episode, keys(segments.turn, segments.index))
    left = segments.episodes.reward.index_add(0, segments.episode, segments.given, alpha=-1)
    last = turns.order[torch.cat((~turns.follows, torch.ones(len(segments), dtype=torch.bool)[:1]))]
    return segments.given.index_add(0, last, left[segments.episode[last]])


def with_penalty(units: UnitTable, penalty: Tensor | None) -> SegmentTable:
    """Return the table of segments with the `penalty` f32 [U] of their units subtracted from the rewards. All
    ranks call it."""
    segments = units.segments
    assert segments is not None, "rewards of segments need the table of segments"
    if penalty is None:
        return segments
    taken, of_episode = units.by_segment(penalty).cpu(), segments.episode
    episodes = segments.episodes
    left = episodes.reward.index_add(0, of_episode, taken, alpha=-1)
    return replace(
        segments,
        episodes=replace(episodes, reward=left),
        given=segments.given - taken,
        reward=segments.reward - taken,
    )


def unit_rewards(units: UnitTable, penalty: Tensor | None) -> Tensor:
    """Return f64 [U]: reward of each unit minus its penalty [U]. The last unit of a segment also gets the
    part of the segment's reward that no unit has. All ranks call it."""
    segments = units.segments
    assert segments is not None, "rewards of units need the table of segments"
    own, segment = units["own_reward"], units["segment"]
    rest = moved(segments.reward, own.device) - units.by_segment(own)
    place = torch.where(units.mask, units["unit"], -1)
    newest = torch.full((len(segments),), -1, dtype=torch.int64, device=own.device)
    newest.scatter_reduce_(0, segment, place, "amax")
    is_last = (place == newest[segment]) & units.mask
    earned = own + torch.where(is_last, rest[segment], torch.zeros_like(own))
    return earned if penalty is None else earned - penalty
