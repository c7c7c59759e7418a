"""The promises of safety in a simulated job, checked against what its processes know and against every write.

The judge shares no state with the ledger: weights are compared by what made them, so a unit is on a trainer's
lineage exactly if its weights are a prefix of the trainer's.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from areal_async.base.verdicts import Score
from areal_async.rpc.messages import Batch, EpisodeVerdict, PutAck
from replay_buffer.ledger.index import WriteSet
from replay_buffer.ledger.leasing import StoreEpisodes
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import EpisodeState, GroupState

if TYPE_CHECKING:
    from tests.chaos.simulated import Setting, World
    from tests.chaos.simulated_buffer import Stored
    from tests.chaos.simulated_processes import Sampled, Trainer, Weights


class Broken(AssertionError):
    """A promise of safety was broken."""


class Judge:
    """Everything that the processes of one simulated job were told."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        rules = setting.made()
        self.max_reuse = rules.max_reuse
        self.masks = rules.overtaken_masks
        self.trains_abandoned = rules.abandoned_trains
        self.units: dict[tuple[str, int], tuple[Sampled, ...]] = {}
        """(lease, sample) → the weights that its units are of."""
        self.sampled: dict[str, tuple[Sampled, ...]] = {}
        """Episode that is stored → the weights that its units are of."""
        self.acked: set[str] = set()
        self.scores: dict[str, float] = {}
        """Episode → the score that the buffer has taken."""
        self.trained_scores: dict[str, float] = {}
        self.ended: dict[str, str] = {}
        """Group → "committed" or "dropped"."""
        self.given: dict[tuple[str, int], tuple[str, ...]] = {}
        """(policy, step) → the groups that its trainer was given last."""
        self._scores = 0

    def copy(self) -> Judge:
        new = copy.copy(self)
        for name, value in vars(self).items():
            if type(value) in (dict, set):
                setattr(new, name, value.copy())
        return new

    def fails(self, what: str) -> NoReturn:
        raise Broken(what)

    def next_score(self) -> int:
        self._scores += 1
        return self._scores

    # --- workers and the reward service ---

    def produced(self, lease_id: str, sample: int, sampled: tuple[Sampled, ...]) -> None:
        self.units[lease_id, sample] = sampled

    def acknowledged(self, group_id: str, stored: Sequence[int]) -> None:
        for sample in stored:
            self.acked.add(episode_id := f"{group_id}.{sample}")
            if episode_id not in self.sampled:
                self.fails(f"{episode_id} was acknowledged and is not stored")

    def judged(self, verdicts: Sequence[EpisodeVerdict], refused: Collection[str]) -> None:
        for item in verdicts:
            if item.episode_id not in refused and isinstance(item.verdict, Score):
                held = self.scores.setdefault(item.episode_id, item.verdict.value)
                if held != item.verdict.value:
                    self.fails(f"verdicts_are_final: {item.episode_id} was scored twice")

    # --- the buffer ---

    def writes(self, stored: Stored, command: Any, writes: WriteSet, reply: Any) -> None:
        """Look at what a decision writes, before it is written."""
        if isinstance(command, StoreEpisodes):
            self._stores(stored, command, writes, reply)
        gone = [id_ for id_, group in writes.groups.items() if group is None and id_ in stored.records.groups]
        if gone:
            self._end(stored, writes, gone, adopts=isinstance(command, OpenedWith))

    def _stores(self, stored: Stored, command: StoreEpisodes, writes: WriteSet, ack: PutAck) -> None:
        for put in command.groups:
            for sample in writes.blobs.get(put.group_id, ()):
                if put.lease_id not in stored.records.leases:
                    self.fails(f"{put.group_id}.{sample} is of a lease that is not live")
                self.sampled[f"{put.group_id}.{sample}"] = self.units[put.lease_id, sample]

    def _end(self, stored: Stored, writes: WriteSet, gone: Sequence[str], *, adopts: bool) -> None:
        before, after = stored.records.meta.counts, writes.meta.counts
        ends = {name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)}
        dropped = sum(
            n for name, n in ends.items() if name.startswith("dropped:") and not name.endswith("_for_one")
        )
        if dropped + ends.get("committed", 0) != len(gone):
            self.fails(f"{gone} ended, and the reasons counted are {ends}")
        for group_id in gone:
            if group_id in self.ended:
                self.fails(f"{group_id} ended twice")
            trainings = stored.records.groups[group_id].training.values()
            self.ended[group_id] = "committed" if any(each.steps for each in trainings) else "dropped"

    # --- the trainer ---

    def batch(self, world: World, trainer: Trainer, batch: Batch) -> None:
        """Check a batch that a trainer was given."""
        policy, step = trainer.policy, batch.step
        ids = tuple(group.group_id for group in batch.groups)
        uses = Counter(id_ for earlier in trainer.trained for id_ in earlier)
        tasks = {id_.partition("#")[0]: id_ for id_ in uses}
        blobs = world.processes["buffer"].stored.blobs  # type: ignore[attr-defined]
        if step != len(trainer.weights) - 1 or len(set(ids)) != self.setting.batch_groups:
            self.fails(f"step {step} of a trainer with {len(trainer.weights) - 1} steps has the groups {ids}")
        for group in batch.groups:
            if uses[group.group_id] >= self.max_reuse:
                self.fails(f"trained_effectively_once: step {step} trains {group.group_id} again")
            if tasks.get(task := group.group_id.partition("#")[0], group.group_id) != group.group_id:
                self.fails(f"trained_effectively_once: {task} is trained as two groups")
            if len(group.episodes) != self.setting.group_size:
                self.fails(f"groups_are_whole: {group.group_id} has {len(group.episodes)} episodes")
            for episode in group.episodes:
                self._episode(trainer, step, batch.lowest_version, episode)
                if episode.sample not in blobs.get(group.group_id, ()):
                    self.fails(f"the bytes of {episode.episode_id} are freed before a checkpoint covers it")
        world.redone += (policy, step) in self.given
        before = self.given.get((policy, step), ids)
        lost = [id_ for id_ in before if id_ not in ids]
        if not lost and before != ids:
            self.fails(f"step {step} has its batch in another order: {before} → {ids}")
        if self.setting.same_again and self.max_reuse == 1 and any(id_ not in self.ended for id_ in lost):
            self.fails(f"step {step} had the groups {before}, and has {ids} when it is done again")
        self.given[policy, step] = ids

    def _episode(self, trainer: Trainer, step: int, lowest: int, episode: Any) -> None:
        id_, policy = episode.episode_id, trainer.policy
        for each in self.sampled[id_]:
            if each.tag.policy != policy or (self.masks and each.tag.version < lowest):
                continue
            common = in_common(each.weights, trainer.weights)
            if common < each.tag.version and not self.trains_abandoned:
                self.fails(f"{id_} has units of abandoned weights {each.tag} in step {step}")
            if not 0 <= step - min(common, each.tag.version) <= self.setting.eta:
                self.fails(f"staleness_is_bounded: {id_} of {each.tag} is trained in step {step}")
        if self.trained_scores.setdefault(id_, episode.reward) != episode.reward:
            self.fails(f"verdicts_are_final: {id_} is trained with another score")
        if self.scores.get(id_, episode.reward) != episode.reward:
            self.fails(f"verdicts_are_final: {id_} is trained with a score that was not acknowledged")

    # --- the end ---

    def end(self, world: World) -> None:
        """Check a job that is done: every episode has one fate."""
        held = world.processes["buffer"].stored.records.groups  # type: ignore[attr-defined]
        for episode_id in self.acked:
            group_id, _, sample = episode_id.rpartition(".")
            if group_id in self.ended:
                continue
            group = held.get(group_id)
            if group is None or group.episodes[int(sample)].state == EpisodeState.MISSING:
                self.fails(f"{episode_id} was acknowledged, and is neither held nor ended")
        trained: set[str] = set()
        for policy in self.setting.policies:
            saved = world.disk[policy]
            mine = {id_ for ids in saved.trained for id_ in ids}
            trained |= mine
            if saved.step != self.setting.steps or sum(map(len, saved.trained)) != saved.step * (
                self.setting.batch_groups
            ):
                self.fails(f"{policy} ends with the checkpoint of step {saved.step}")
            for group_id in mine:
                state = self._state(held, group_id, policy)
                may_be_used = (
                    self.max_reuse > 1 and group_id in held and held[group_id].training[policy].steps
                )
                if state != GroupState.COMMITTED and not may_be_used:
                    self.fails(f"{group_id} is in the last checkpoint of {policy}, and {state.name}")
        if wrong := {id_ for id_, how in self.ended.items() if (id_ in trained) != (how == "committed")}:
            self.fails(f"{wrong} did not end as the checkpoints say")

    def _state(self, held: Any, group_id: str, policy: str) -> GroupState:
        if group_id in held:
            return GroupState(held[group_id].training[policy].state)
        return GroupState.COMMITTED if self.ended.get(group_id) == "committed" else GroupState.DROPPED


def in_common(weights: Weights, others: Weights) -> int:
    """The last version that two lineages share."""
    version = 0
    for version, (mine, other) in enumerate(zip(weights, others, strict=False)):
        if mine != other:
            return version - 1
    return version
