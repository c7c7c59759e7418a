"""Assembling the batch of a policy's step: the hard staleness check, overtaken groups, which groups it takes.

The order of `sampling` decides among groups never trained; what was trained before fills the places they
leave, unless a group under way would lose its own by that.
"""

from __future__ import annotations

from collections.abc import Iterable

from areal_async.rpc.messages import Batch, BatchEpisode, BatchGroup, NextBatch, Waiting
from areal_async.rpc.schema import Message
from replay_buffer.ledger.index import Index, has_place
from replay_buffer.ledger.records import (
    NO_VERSION,
    BatchPlan,
    EpisodeRecord,
    EpisodeState,
    GroupRecord,
    GroupState,
    OvertakenWait,
    Versions,
)
from replay_buffer.ledger.sampling import choose, overtaken_by_reuse
from replay_buffer.ledger.score import parts_of
from replay_buffer.ledger.training import is_on_lineage, masked_below, too_old
from replay_buffer.ledger.transaction import Decision, Transaction, fault
from replay_buffer.ledger.wait_reasons import starving

UNFINISHED = (GroupState.LEASED, GroupState.GENERATED)
NO_VERSIONS = Versions(NO_VERSION, NO_VERSION, 0)


def next_batch(index: Index, message: NextBatch, now_ms: int) -> Decision:
    """The batch of `step`, the same one however often it is asked for.

    A batch is `batch_groups` SCORED groups, never trained ones first. None has a version of the policy below
    `step − η`: what fell below is dropped here. A group that holds (or may come to hold) version `step − η`
    and is not finished would be too old for the next step; under `wait` the step does not start without it,
    until the limit."""
    policy, step = message.policy, message.step
    if (refusal := refused(index, policy, message.epoch)) is not None:
        return refusal
    if index.meta.failed:
        return fault("failed", index.meta.failed)
    plan = index.batches.get((policy, step))
    if plan is not None and plan.epoch == message.epoch:
        held = [index.groups[id_] for id_ in plan.group_ids if id_ in index.groups]
        if sum(has_place(group, policy) for group in held) == len(plan.group_ids):
            return Decision(_manifest(index, plan, held))
    if step != index.consumer(policy).v_train:
        done = index.consumer(policy).v_train
        return fault("invalid", f"step {step} is not next: {done} steps are committed")
    return _Assembly(Transaction(index, now_ms), policy, step).batch(plan, message.epoch)


def refused(index: Index, policy: str, epoch: int) -> Decision | None:
    """The answer to a message of trainer epoch `epoch` that does not come from the running trainer of a
    policy of the job; None when it does."""
    if policy not in index.consumers:
        return fault("invalid", f"this job trains {', '.join(index.consumers)}, and no policy {policy!r}")
    running = index.consumer(policy)
    # Where another policy's copy won, nobody speaks for this one before its trainer has come back.
    if epoch == running.epoch != 0 and running.trainer:
        return None
    return fault(
        "fenced",
        f"trainer epoch {epoch} is not the running one: the trainer of this job is "
        f"{running.trainer or 'not there yet'} (epoch {running.epoch})",
    )


def on_lineage(tx: Transaction, policy: str, group: GroupRecord) -> bool:
    """Whether every unit of `policy` in the group was sampled from weights that count."""
    lineage = tx.consumer(policy).lineage
    return all(is_on_lineage(lineage, episode, policy) for episode in group.episodes)


Chosen = list[tuple[GroupRecord, str]]
"""Groups to train, each with what there is to say about why it was taken."""


class _Assembly:
    """The batch of one step of one policy in the making."""

    def __init__(self, tx: Transaction, policy: str, step: int) -> None:
        self.tx = tx
        self.policy = policy
        self.step = step
        self.mine = tx.index.consumers[policy]
        self.rules = tx.rules.consumers[policy]

    def batch(self, plan: BatchPlan | None, epoch: int) -> Decision:
        """The decision; `plan` is the batch of this step that an earlier trainer was given."""
        tx, policy, step = self.tx, self.policy, self.step
        groups = self._still_on_lineage(plan)
        if len(groups) < self.rules.batch_groups:
            self._drop_stale()
            chosen = self._chosen(self.rules.batch_groups - len(groups))
            if len(groups) + len(chosen) < self.rules.batch_groups:
                return tx.decide(starving(tx.index, policy, step, len(groups) + len(chosen)))
            waiting = self._wait_for_overtaken([group for group, _ in chosen])
            if waiting is not None:
                return tx.decide(waiting)
            lowest = self.rules.lowest_version(step)
            if masked := sum(0 <= group.training[policy].min_version < lowest for group, _ in chosen):
                tx.count("masked", masked)
            groups += [
                tx.train(group, policy, GroupState.BATCHED, reason, step=step) for group, reason in chosen
            ]
            self._drop_left_behind()
        new_plan = BatchPlan(policy, step, epoch, tuple(group.group_id for group in groups))
        tx.set_batch(policy, step, new_plan)
        if tx.consumer(policy).overtaken is not None:
            tx.set_consumer(policy, overtaken=None)
        return tx.decide(_manifest(tx.index, new_plan, groups))

    def _still_on_lineage(self, plan: BatchPlan | None) -> list[GroupRecord]:
        """The groups of a batch that is run again, less those that abandoned weights had a part in."""
        good = []
        for group in self.tx.groups(plan.group_ids if plan is not None else ()):
            if not has_place(group, self.policy):
                continue
            if on_lineage(self.tx, self.policy, group):
                good.append(group)
            else:
                self._drop(group, "abandoned")
        return good

    def _drop(self, group: GroupRecord, reason: str) -> None:
        self.tx.drop_for(group.group_id, self.policy, reason)

    def _drop_stale(self) -> None:
        """Drop what is too old for the step. What is merely leased at such a version is judged by the
        versions it arrives with."""
        for group in self._aged(self.rules.lowest_version(self.step) - 1):
            if too_old(self.tx.rules, group, self.policy, self.step):
                self._drop(group, "stale")

    def _aged(self, version: int) -> list[GroupRecord]:
        """Unbatched groups that hold, or while leased may come to hold, `version` or an older one."""
        aged = []
        for group_id in self.mine.aging:
            if self.tx.index.groups[group_id].oldest_version(self.policy) > version:
                break
            aged.append(group_id)
        return [group for group in self.tx.groups(aged) if self._state(group) < GroupState.BATCHED]

    def _state(self, group: GroupRecord) -> int:
        return group.state_for(self.policy)

    def _chosen(self, most: int) -> Chosen:
        """Up to `most` scored groups in the order of training: new ones, then those to be used again."""
        new = self._new(most)
        return new + self._used_before(most - len(new))

    def _new(self, most: int) -> Chosen:
        if self.tx.rules.sampling == "fifo":
            # The oldest first is what age asks for too.
            return [(group, "") for group in self._scored(self.mine.ready, most)]
        groups = self._scored(self.mine.ready, len(self.mine.ready))
        choice = choose(
            [group.training[self.policy].min_version for group in groups],
            self._under_way(),
            step=self.step,
            room=most,
            eta=self.rules.max_staleness,
            batch_groups=self.rules.batch_groups,
        )
        return [(groups[place], "due" if place in choice.due else "") for place in choice.places]

    def _used_before(self, most: int) -> Chosen:
        """All that is missing or nothing: a step that has to wait anyway waits for new groups."""
        if most <= 0 or len(self.mine.reusable) < most:
            return []
        eta, size = self.rules.max_staleness, self.rules.batch_groups
        if overtaken_by_reuse(self._under_way(), step=self.step, eta=eta, batch_groups=size):
            return []
        return [(group, "reuse") for group in self._scored(self.mine.reusable, most)]

    def _under_way(self) -> list[int]:
        """The oldest versions that unfinished groups hold or may come to hold."""
        groups = map(self.tx.index.groups.__getitem__, self.mine.aging)
        return [group.oldest_version(self.policy) for group in groups if group.state in UNFINISHED]

    def _scored(self, order: Iterable[str], most: int) -> list[GroupRecord]:
        """The first `most` groups of `order` that still are SCORED, and on the lineage."""
        groups: list[GroupRecord] = []
        for group_id in order:
            if len(groups) >= most:
                break
            group = self.tx.group(group_id)
            if group is None or self._state(group) != GroupState.SCORED:
                continue
            if on_lineage(self.tx, self.policy, group):
                groups.append(group)
            else:
                self._drop(group, "abandoned")
        return groups

    def _wait_for_overtaken(self, chosen: list[GroupRecord]) -> Waiting | None:
        """Whether the step waits. Where all of `chosen` are new and as old as what is overtaken, there is no
        place for another, and waiting would be in vain."""
        tx, step = self.tx, self.step
        limit = self.rules.lowest_version(step)
        overtaken = [group for group in self._aged(limit) if group.state in UNFINISHED]
        trainings = [group.training[self.policy] for group in chosen]
        in_vain = all(0 <= each.min_version <= limit and not each.steps for each in trainings)
        if not overtaken or in_vain or not tx.rules.overtaken_waits:
            return None
        since = tx.consumer(self.policy).overtaken
        if since is None or since.step != step:
            since = OvertakenWait(step, tx.now_ms)
            tx.set_consumer(self.policy, overtaken=since)
        left_ms = since.since_ms + tx.rules.overtaken_ms - tx.now_ms
        if left_ms > 0:
            first = ", ".join(group.group_id for group in overtaken[:3])
            return Waiting(
                "overtaken groups",
                f"step {step} waits at most {left_ms / 1000:.1f} s more for {len(overtaken)} unfinished "
                f"groups of version {limit}, which would be too old for the step after it: {first}"
                + (" …" if len(overtaken) > 3 else ""),
            )
        for group in overtaken:
            self._drop(group, "overtaken")
        return None

    def _drop_left_behind(self) -> None:
        """With the batch of the step made, what is too old for the next can be trained no more."""
        for group in self._aged(self.rules.lowest_version(self.step)):
            if too_old(self.tx.rules, group, self.policy, self.step + 1):
                finished = group.state in (GroupState.SCORED, GroupState.QUEUED)
                self._drop(group, "stale" if finished else "overtaken")


def _manifest(index: Index, plan: BatchPlan, groups: list[GroupRecord]) -> Message:
    return Batch(
        policy=plan.policy,
        epoch=plan.epoch,
        step=plan.step,
        max_staleness=index.rules.consumers[plan.policy].max_staleness,
        lowest_version=masked_below(index.rules, plan.policy, plan.step),
        groups=[_batch_group(index, group, plan) for group in groups],
    )


def _batch_group(index: Index, group: GroupRecord, plan: BatchPlan) -> BatchGroup:
    task = index.tasks.task(group.row, group.pass_index)
    if not group.judged or not group.count(EpisodeState.VERDICT):
        raise AssertionError(f"{group.group_id} is in a batch without all its verdicts")
    return BatchGroup(
        group_id=group.group_id,
        task_id=task.task_id,
        data_source=task.data_source,
        episodes=[
            _batch_episode(f"{group.group_id}.{sample}", sample, episode, plan.policy)
            for sample, episode in enumerate(group.episodes)
            if episode.state == EpisodeState.VERDICT
        ],
        uses=sum(number < plan.step for number in group.training[plan.policy].steps),
    )


def _batch_episode(episode_id: str, sample: int, episode: EpisodeRecord, policy: str) -> BatchEpisode:
    versions = episode.versions.get(policy, NO_VERSIONS)
    return BatchEpisode(
        episode_id=episode_id,
        sample=sample,
        n_units=episode.n_units,
        n_sampled=episode.n_sampled,
        min_version=versions.oldest,
        max_version=versions.newest,
        reward=episode.reward,
        components=episode.components or {},
        parts=parts_of(episode),
    )
