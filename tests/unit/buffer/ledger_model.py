"""What clients of the buffer were told, kept apart from the ledger: the model that it is compared with.

The model knows nothing of states. It holds what was acknowledged and scored, and for each policy what was
given out, trained and published on its trainer's present lineage, and what of that each checkpoint would
bring back."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass, field

from areal_async.base.versions import VersionTag
from replay_buffer.ledger.records import GroupState, Versions
from replay_buffer.ledger.rules import Rules


@dataclass
class Trained:
    """What is in the weights of a policy: it comes back with a checkpoint."""

    policy: str
    uses: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Group → the steps that trained it."""
    lineage: set[VersionTag] = field(default_factory=set)
    """The weights that units may be of."""
    given_up: set[str] = field(default_factory=set)
    """Tasks that ended without being trained, not to be tried again."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Group → how many of its episodes are trained."""

    def __post_init__(self) -> None:
        self.lineage.add(VersionTag(self.policy, 0, 0))

    def back_to(self, step: int) -> None:
        """A trainer starts from the weights of version `step`."""
        for group_id, steps in list(self.uses.items()):
            self.uses[group_id] = [used for used in steps if used < step]
            if not self.uses[group_id]:
                self.sizes.pop(group_id, None)  # scored anew, it may be masked otherwise
        self.lineage = {tag for tag in self.lineage if tag.version <= step}

    def groups(self) -> dict[str, list[int]]:
        return {group_id: steps for group_id, steps in self.uses.items() if steps}


@dataclass
class Held:
    """What Redis has: it can be lost with it."""

    blobs: dict[str, set[int]] = field(default_factory=dict)
    """Group → samples whose bytes are held."""
    tags: dict[str, set[VersionTag]] = field(default_factory=dict)
    """Episode → the weights its units are of."""
    scores: dict[str, float] = field(default_factory=dict)
    ended: dict[tuple[str, str], str] = field(default_factory=dict)
    """(group, policy) → "committed" or "dropped"."""
    masked: set[str] = field(default_factory=set)
    """Episodes whose last verdict was no score, by a policy that masks."""
    tries: dict[str, int] = field(default_factory=dict)
    """Episode → verdicts that were no score."""

    def forget_group(self, group_id: str) -> None:
        self.blobs.pop(group_id, None)
        self.masked = {id_ for id_ in self.masked if id_.rpartition(".")[0] != group_id}


@dataclass
class Saved:
    """What is in a checkpoint of one policy: the ledger's copy, and where every policy stood then."""

    ledger: bytes
    trained: dict[str, Trained]
    steps: dict[str, int]
    epochs: dict[str, int]
    dropped: set[tuple[str, str]]
    """(group, policy) that had ended untrained."""


@dataclass(eq=False)
class Trainer:
    """What the trainer of one policy knows."""

    policy: str
    eta: int
    batch_groups: int
    trained: Trained
    step: int = 0
    """The next to train."""
    batches: dict[int, list[str]] = field(default_factory=dict)
    """What was given out, from the trainer's checkpoint on: the redo log as the trainer knows it."""
    checkpoint: int = 0
    """Newest step whose checkpoint the buffer was told of, or that a trainer began from."""
    copies: dict[int, Saved] = field(default_factory=dict)
    """Step → what is in the checkpoint of it."""
    epoch: int = 0
    """The newest that any trainer of the policy had."""
    published: set[VersionTag] = field(default_factory=set)
    """Every snapshot there ever was."""
    announced: list[int] | None = None
    """Of the weights that `step` makes, published and not committed: the earlier epochs that had them too."""
    begun: dict[int, set[VersionTag]] = field(default_factory=dict)
    """Step → what trainers that began from its checkpoint served: all are the weights of the checkpoint."""

    def has_begun(self, group_id: str) -> bool:
        """Whether a batch has taken the group."""
        return bool(self.trained.uses[group_id]) or any(group_id in ids for ids in self.batches.values())

    def alike(self, version: int) -> list[int]:
        """The epochs that published `version` before."""
        return sorted(tag.epoch for tag in self.published if tag.version == version)

    def redo_from(self, step: int, held_plans: set[int]) -> None:
        """The trainer comes back at `step`, and the ledger still has the batches since then."""
        self.trained.back_to(step)
        self.batches = {s: ids for s, ids in self.batches.items() if s >= step and s in held_plans}
        self.go_on_from(step)

    def go_on_from(self, step: int) -> None:
        self.step = self.checkpoint = step
        self.announced = None
        self.copies = {s: saved for s, saved in self.copies.items() if s <= step}
        self.begun = {s: tags for s, tags in self.begun.items() if s <= step}

    @property
    def newest(self) -> VersionTag:
        """What it has published last."""
        return VersionTag(self.policy, self.epoch, self.step + (self.announced is not None))

    def publish(self, same_as: list[int]) -> None:
        """The weights that `step` makes are announced; its commit is still to come."""
        self.announced = same_as
        self.trained.lineage.add(self.newest)
        self.published.add(self.newest)

    def may_yet_count(self, tag: VersionTag) -> bool:
        """Whether the commits to come will tell: it is of an epoch that this one has equalled so far."""
        so_far = VersionTag(self.policy, tag.epoch, self.step)
        return tag.epoch != self.epoch and tag.version > self.step and so_far in self.trained.lineage

    def opened(self, epoch: int, step: int) -> None:
        self.epoch = epoch
        self.begun.setdefault(step, set()).add(VersionTag(self.policy, epoch, step))
        self.trained.lineage |= self.begun[step]
        self.published.add(VersionTag(self.policy, epoch, step))


@dataclass
class Model:
    n: int
    max_reuse: int
    masks: bool
    """Units that are too old are masked, instead of their group being dropped."""
    min_scored: int
    trainers: dict[str, Trainer]
    held: Held = field(default_factory=Held)
    trains_abandoned: bool = False
    may_mask: set[str] = field(default_factory=set)
    """Episodes of which a verdict is on its way that may mask them."""

    @classmethod
    def of(cls, n: int, rules: Rules, trainers: dict[str, Trainer]) -> Model:
        """The model of a job under these rules."""
        promised = (rules.max_reuse, rules.overtaken_masks, rules.min_scored)
        return cls(n, *promised, trainers, trains_abandoned=rules.abandoned_trains)

    # --- who trains what ---

    def policies_of(self, task_id: str) -> tuple[str, ...]:
        """Of several policies, tasks use in turn all of them and each alone."""
        names = tuple(self.trainers)
        turn = int(task_id.split(":")[1]) % (len(names) + 1)
        return names if len(names) == 1 or turn == 0 else (names[turn - 1],)

    def sampling(self, episode_id: str) -> tuple[str, ...]:
        """The policies that sample in an episode; in the last one of every other task, only the first."""
        names = self.policies_of(task_of(episode_id))
        row = int(episode_id.split(":")[1])
        return names[:1] if row % 2 and episode_id.endswith(f".{self.n - 1}") else names

    def trainers_of(self, group_id: str) -> list[Trainer]:
        """Those that still train the group: an attempt for one policy bears its name."""
        _, _, names = group_id.rpartition("#")[2].partition(":")
        policies = names.split("+") if names else self.policies_of(task_of(group_id))
        return [self.trainers[name] for name in policies if (group_id, name) not in self.held.ended]

    # --- bytes, from the writes alone ---

    def wrote(self, writes, *, opening: bool) -> None:
        """A decision reached Redis."""
        for group_id, samples in writes.freed.items():
            if samples is None:
                assert opening or self.may_be_freed(group_id), "bytes are held until the checkpoint"
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
        """Trained groups only after a checkpoint of each policy covers its last use; others when dropped."""
        trainers = self.trainers.values()
        return all(step < mine.checkpoint for mine in trainers for step in mine.trained.uses[group_id])

    # --- groups ---

    def end(self, group_id: str, policy: str, *, retried: bool) -> str:
        """A group has ended for a policy; returns how it must have."""
        assert (group_id, policy) not in self.held.ended, "a group ended twice"
        mine = self.trainers[policy]
        how = "committed" if mine.trained.uses[group_id] else "dropped"
        self.held.ended[group_id, policy] = how
        if how == "committed":
            covered = all(step < mine.checkpoint for step in mine.trained.uses[group_id])
            assert covered, "committed before the checkpoint of its policy"
            return how
        if any(group_id in ids for ids in mine.batches.values()):
            lost = not self.tags_of(group_id, policy) <= mine.trained.lineage
            assert lost, "a batched group was dropped"
        if not retried:
            mine.trained.given_up.add(task_of(group_id))
        return how

    def settled(self, standing: dict[tuple[str, str], int]) -> None:
        """After an opening: what of the groups that live has ended, by the states of their trainings."""
        for (group_id, policy), state in standing.items():
            self.held.ended.pop((group_id, policy), None)
            if state < GroupState.COMMITTED:
                continue
            used = bool(self.trainers[policy].trained.uses[group_id])
            assert used == (state == GroupState.COMMITTED)
            self.held.ended[group_id, policy] = "committed" if used else "dropped"

    def acknowledge(self, episode_id: str, tags: set[VersionTag]) -> None:
        self.held.tags[episode_id] = tags
        self.held.scores.pop(episode_id, None)
        self.held.masked.discard(episode_id)
        self.held.tries.pop(episode_id, None)

    def batch(self, policy: str, step: int, groups, lowest_version: int) -> None:
        """A trainer is given a batch: every promise that it can check."""
        mine = self.trainers[policy]
        uses, lineage = mine.trained.uses, mine.trained.lineage
        assert len(groups) == mine.batch_groups
        assert lowest_version == (max(0, step - mine.eta) if self.masks else 0)
        for group in groups:
            assert mine in self.trainers_of(group.group_id), "a group of another policy"
            tags = self.tags_of(group.group_id, policy)
            newest = max((tag.version for tag in tags), default=lowest_version)
            assert newest >= lowest_version, "nothing of the group is trained"
            whole = self.samples_of(group.group_id)
            assert [e.sample for e in group.episodes] == whole, "groups_are_whole"
            assert len(whole) >= (self.n if self.n == len(whole) else self.min_scored), "groups_are_whole"
            before = [used for used in uses[group.group_id] if used < step]
            assert group.uses == len(before) < self.max_reuse, "trained_effectively_once"
            for episode in group.episodes:
                tags = {tag for tag in self.held.tags[episode.episode_id] if tag.policy == policy}
                trained = [tag.version for tag in tags if tag.version >= lowest_version]
                assert all(0 <= step - version <= mine.eta for version in trained), "staleness_is_bounded"
                oldest = min((tag.version for tag in tags), default=-1)
                assert episode.min_version == oldest, "versions_are_true"
                assert self.trains_abandoned or tags <= lineage, "a unit of abandoned weights is in a batch"
                assert not self.too_old(tags - lineage, mine, step), "staleness_is_bounded"
                assert episode.reward == self.held.scores[episode.episode_id]
                held = self.held.blobs.get(group.group_id, ())
                assert episode.sample in held, "bytes are held until the checkpoint"
        ids = [group.group_id for group in groups]
        assert len(ids) == len(set(ids)), "never twice in one step"
        under_way = set(mine.batches[mine.step]) if step > mine.step else set()
        assert not under_way & set(ids), "trained_effectively_once: what is not committed is given again"
        planned = mine.batches.setdefault(step, ids)
        if planned != ids:
            gone = set(planned) - set(ids)
            assert gone, "a batch is never only put into another order"
            assert all(
                (group_id, policy) in self.held.ended
                or (not self.trains_abandoned and not self.tags_of(group_id, policy) <= lineage)
                or (uses[group_id] and self.too_old(self.tags_of(group_id, policy) - lineage, mine, step))
                for group_id in gone
            ), "a batch is only ever changed because of abandoned weights"
            mine.batches[step] = ids

    def too_old(self, abandoned: set[VersionTag], mine: Trainer, step: int) -> bool:
        """Whether one of these counts as older than `step` may train: as the last version before it that its
        epoch has in common with the lineage."""
        common = (
            [t.version for t in mine.trained.lineage if t.epoch == tag.epoch and t.version < tag.version]
            for tag in abandoned
        )
        return any(step - max(versions, default=step) > mine.eta for versions in common)

    def tags_of(self, group_id: str, policy: str) -> set[VersionTag]:
        """What its episodes have of the weights of `policy`."""
        tags = set().union(*(self.held.tags[f"{group_id}.{n}"] for n in self.samples_of(group_id)))
        return {tag for tag in tags if tag.policy == policy}

    def samples_of(self, group_id: str) -> list[int]:
        """Those that are not masked."""
        return [sample for sample in range(self.n) if f"{group_id}.{sample}" not in self.held.masked]

    def commit(self, policy: str, step: int, epoch: int, same_as: list[int]) -> None:
        """A step is trained, and its snapshot published: the same weights as those of `same_as`."""
        mine = self.trainers[policy]
        for group_id in mine.batches[step]:
            uses = mine.trained.uses[group_id]
            assert step not in uses, "trained_effectively_once"
            uses.append(step)
            mine.trained.sizes.setdefault(group_id, len(self.samples_of(group_id)))
            assert len(uses) <= self.max_reuse, "trained_effectively_once"
        lineage = mine.trained.lineage
        still = [old for old in same_as if VersionTag(policy, old, step) in lineage]
        lineage |= {VersionTag(policy, old, step + 1) for old in (*still, epoch)}
        mine.published.add(VersionTag(policy, epoch, step + 1))
        mine.step, mine.announced = step + 1, None

    # --- checkpoints and deaths ---

    def save(self, policy: str, ledger: bytes) -> None:
        steps = {name: each.step for name, each in self.trainers.items()}
        trained = {name: copy.deepcopy(each.trained) for name, each in self.trainers.items()}
        dropped = {pair for pair, how in self.held.ended.items() if how == "dropped"}
        epochs = {name: each.epoch for name, each in self.trainers.items()}
        self.trainers[policy].copies[steps[policy]] = Saved(ledger, trained, steps, epochs, dropped)

    def may_join(self, policy: str, step: int, saved: Saved) -> bool:
        """Whether the trainer of `policy`, back at `step`, can go on where another policy's copy won: it
        must be in the copy as it is in its own checkpoint."""
        mine = self.trainers[policy].copies.get(step)
        if step != saved.steps[policy]:
            return False
        return step == 0 if mine is None else mine.epochs[policy] <= saved.epochs[policy]

    def copy_wins(self, saved: Saved) -> None:
        """A trainer comes back with a copy, and everything since is forgotten."""
        for name, mine in self.trainers.items():
            mine.trained = copy.deepcopy(saved.trained[name])
            mine.trained.back_to(saved.steps[name])
            mine.batches = {}
            mine.go_on_from(saved.steps[name])
        self.held.ended = {
            (group_id, policy): how
            for (group_id, policy), how in self.held.ended.items()
            if self.trainers[policy].trained.uses[group_id]
        } | dict.fromkeys(saved.dropped, "dropped")


def task_of(id_: str) -> str:
    """The task of a group or an episode."""
    return id_.rpartition("#")[0]


def versions_of(tags):
    """The versions of an episode by policy, as they are read from its bytes."""
    versions = {}
    for policy in {tag.policy for tag in tags}:
        mine = [tag for tag in tags if tag.policy == policy]
        numbers = [tag.version for tag in mine]
        versions[policy] = Versions(min(numbers), max(numbers), min(tag.epoch for tag in mine))
    return versions
