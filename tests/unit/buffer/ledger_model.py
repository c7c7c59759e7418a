"""What clients of the buffer were told, kept apart from the ledger: the model that it is compared with.

The model knows nothing of states. It holds what was acknowledged, scored, given out, trained and published,
on the trainer's present lineage, and what of that each checkpoint would bring back."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass, field

from areal_async.rpc.schema import VersionTag


@dataclass
class Trained:
    """What is in the weights: it comes back with a checkpoint."""

    uses: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Group → the steps that trained it."""
    lineage: set[VersionTag] = field(default_factory=lambda: {VersionTag("policy", 0, 0)})
    """The weights that units may be of."""
    given_up: set[str] = field(default_factory=set)
    """Tasks that ended without being trained, not to be tried again."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Group → how many of its episodes are trained."""

    def back_to(self, step: int) -> None:
        """A trainer starts from the weights of version `step`."""
        for group_id, steps in list(self.uses.items()):
            self.uses[group_id] = [used for used in steps if used < step]
            if not self.uses[group_id]:
                self.sizes.pop(group_id, None)  # scored anew, it may be masked otherwise
        self.lineage = {tag for tag in self.lineage if tag.version <= step}


@dataclass
class Held:
    """What Redis has: it can be lost with it."""

    blobs: dict[str, set[int]] = field(default_factory=dict)
    """Group → samples whose bytes are held."""
    tags: dict[str, set[VersionTag]] = field(default_factory=dict)
    """Episode → the weights its units are of."""
    scores: dict[str, float] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    """Group → "committed" or "dropped"."""
    masked: set[str] = field(default_factory=set)
    """Episodes whose last verdict was no score, by a policy that masks."""
    tries: dict[str, int] = field(default_factory=dict)
    """Episode → verdicts that were no score."""

    def forget_group(self, group_id: str) -> None:
        self.blobs.pop(group_id, None)
        self.masked = {id_ for id_ in self.masked if id_.rpartition(".")[0] != group_id}


@dataclass
class Model:
    eta: int
    n: int
    max_reuse: int
    masks: bool = False
    """Units that are too old are masked, instead of their group being dropped."""
    trained: Trained = field(default_factory=Trained)
    held: Held = field(default_factory=Held)
    batches: dict[int, list[str]] = field(default_factory=dict)
    """What was given out, from the trainer's checkpoint on: the redo log as the trainer knows it."""
    checkpoint: int = 0
    """Newest step whose checkpoint the buffer was told of, or that a trainer began from."""
    copies: dict[int, tuple[bytes, Trained]] = field(default_factory=dict)
    """Step → what is in the checkpoint of it."""
    epoch: int = 0
    """The newest that any trainer had."""
    published: set[VersionTag] = field(default_factory=set)
    """Every snapshot there ever was."""
    min_scored: int = 2
    may_mask: set[str] = field(default_factory=set)
    """Episodes of which a verdict is on its way that may mask them."""

    # --- bytes, from the writes alone ---

    def wrote(self, writes, *, opening: bool) -> None:
        """A decision reached Redis."""
        for group_id, samples in writes.freed.items():
            if samples is None:
                assert opening or self.may_be_freed(group_id), "bytes freed before the checkpoint"
                self.held.forget_group(group_id)
                continue
            self.held.blobs[group_id] -= set(samples)
            if not opening:
                gone = {f"{group_id}.{sample}" for sample in samples}
                assert gone <= self.may_mask, "an acknowledged episode vanishes from a group that lives on"
                self.held.masked |= gone
        for group_id, samples in writes.blobs.items():
            assert group_id not in writes.freed
            mine = self.held.blobs.setdefault(group_id, set())
            assert not mine & set(samples), "a sample is stored once"
            mine |= set(samples)

    def may_be_freed(self, group_id: str) -> bool:
        """Trained groups only after a checkpoint covers their last use; others when they are dropped."""
        return all(step < self.checkpoint for step in self.trained.uses[group_id])

    # --- groups ---

    def end(self, group_id: str, *, retried: bool) -> None:
        """A group's record is gone."""
        assert group_id not in self.held.ended, "a group ended twice"
        if self.trained.uses[group_id]:
            self.held.ended[group_id] = "committed"
            return
        self.held.ended[group_id] = "dropped"
        if any(group_id in ids for ids in self.batches.values()):
            assert not self.tags_of(group_id) <= self.trained.lineage, "a batched group was dropped"
        if not retried:
            self.trained.given_up.add(task_of(group_id))

    def acknowledge(self, episode_id: str, tags: set[VersionTag]) -> None:
        self.held.tags[episode_id] = tags
        self.held.scores.pop(episode_id, None)
        self.held.masked.discard(episode_id)
        self.held.tries.pop(episode_id, None)

    def batch(self, step: int, groups, lowest_version: int) -> None:
        """The trainer is given a batch: every promise that it can check."""
        assert lowest_version == (max(0, step - self.eta) if self.masks else 0)
        for group in groups:
            newest = max(tag.version for tag in self.tags_of(group.group_id))
            assert newest >= lowest_version, "nothing of the group is trained"
            whole = self.samples_of(group.group_id)
            assert [e.sample for e in group.episodes] == whole, "groups_are_whole"
            assert len(whole) >= (self.n if self.n == len(whole) else self.min_scored), "groups_are_whole"
            before = [used for used in self.trained.uses[group.group_id] if used < step]
            assert group.uses == len(before) < self.max_reuse, "trained_effectively_once"
            for episode in group.episodes:
                tags = self.held.tags[episode.episode_id]
                trained = [tag.version for tag in tags if tag.version >= lowest_version]
                assert all(0 <= step - version <= self.eta for version in trained), "staleness_is_bounded"
                assert tags <= self.trained.lineage, "a unit of abandoned weights is in a batch"
                assert episode.reward == self.held.scores[episode.episode_id]
                assert episode.sample in self.held.blobs[group.group_id], "bytes freed before the checkpoint"
        ids = [group.group_id for group in groups]
        assert len(ids) == len(set(ids)), "never twice in one step"
        planned = self.batches.setdefault(step, ids)
        if planned != ids:
            gone = set(planned) - set(ids)
            assert gone, "a batch is never only put into another order"
            assert all(
                group_id in self.held.ended or not self.tags_of(group_id) <= self.trained.lineage
                for group_id in gone
            ), "a batch is only ever changed because of abandoned weights"
            self.batches[step] = ids

    def tags_of(self, group_id: str) -> set[VersionTag]:
        return set().union(*(self.held.tags[f"{group_id}.{n}"] for n in self.samples_of(group_id)))

    def samples_of(self, group_id: str) -> list[int]:
        """Those that are not masked."""
        return [sample for sample in range(self.n) if f"{group_id}.{sample}" not in self.held.masked]

    def alike(self, version: int) -> list[int]:
        """The epochs that published `version` before."""
        return sorted(tag.epoch for tag in self.published if tag.version == version)

    def commit(self, step: int, epoch: int, same_as: list[int]) -> None:
        """A step is trained, and its snapshot published: the same weights as those of `same_as`."""
        for group_id in self.batches[step]:
            uses = self.trained.uses[group_id]
            assert step not in uses, "trained_effectively_once"
            uses.append(step)
            self.trained.sizes.setdefault(group_id, len(self.samples_of(group_id)))
            assert len(uses) <= self.max_reuse, "trained_effectively_once"
        still = [old for old in same_as if VersionTag("policy", old, step) in self.trained.lineage]
        self.trained.lineage |= {VersionTag("policy", old, step + 1) for old in (*still, epoch)}
        self.published.add(VersionTag("policy", epoch, step + 1))

    # --- checkpoints and deaths ---

    def save(self, step: int, ledger: bytes) -> None:
        self.copies[step] = (ledger, copy.deepcopy(self.trained))

    def redo_from(self, step: int, held_plans: set[int]) -> None:
        """A trainer comes back at `step`, and the ledger still has the batches since then."""
        self.trained.back_to(step)
        self.batches = {s: ids for s, ids in self.batches.items() if s >= step and s in held_plans}
        self._go_on_from(step)

    def copy_wins(self, step: int) -> None:
        """A trainer comes back at `step`, and everything since is forgotten."""
        self.trained = copy.deepcopy(self.copies[step][1])
        self.batches = {}
        self.held.ended = {g: how for g, how in self.held.ended.items() if self.trained.uses[g]}
        self._go_on_from(step)

    def _go_on_from(self, step: int) -> None:
        self.checkpoint = step
        self.copies = {s: saved for s, saved in self.copies.items() if s <= step}

    def opened(self, epoch: int, step: int) -> None:
        self.epoch = epoch
        self.trained.lineage.add(VersionTag("policy", epoch, step))
        self.published.add(VersionTag("policy", epoch, step))


def task_of(group_id: str) -> str:
    return group_id.rpartition("#")[0]
