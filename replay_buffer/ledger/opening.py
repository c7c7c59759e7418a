"""Opening of a job by the trainer of a policy, at the start or from a checkpoint.

When a trainer resumes, there may be two ledgers. Redis has the ledger as of the crash. The checkpoint has a
copy as of its step `c`.

If the ledger in Redis is a continuation of that copy and still has every batch from `c` on, the redo log is
complete. The trainer then goes back to `c` and gets the same batches in the same order. Otherwise the copy
replaces the ledger: the cursor and the figures come from the checkpoint. Episodes of unfinished groups
survive if their bytes are still in Redis. Every other group ends, each with a reason.

If several policies are trained, a copy replaces only a ledger that no other trainer has opened. The copy has
the figures of all policies at the time of the checkpoint. Each other trainer must then resume at its step in
the copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from areal_async.rpc.messages import TrainerOpened
from replay_buffer.ledger.abandoned import recounted
from replay_buffer.ledger.batching import plans_from, rewound
from replay_buffer.ledger.committing import Copy, commit_before
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.pacing import anew
from replay_buffer.ledger.records import (
    MISSING,
    SCHEMA,
    Consumer,
    EpisodeRecord,
    EpisodeState,
    GroupRecord,
    GroupState,
    LedgerMeta,
    accepts,
    reopened,
)
from replay_buffer.ledger.transaction import Decision, Transaction, fault

KEPT = ("ids", "seq", "consumers", "draining", "failed", "generating", "scoring", "answering")
"""Figures that `_adopt` does not take unchanged from a copy."""


class OpenedWith(msgspec.Struct, frozen=True):
    """An `OpenTrainer` with its attachment: the checkpoint's copy of the ledger, or None at the start of a
    job."""

    policy: str
    trainer: str
    step: int
    copy: bytes | None = None
    after_epoch: int = 0
    memory_epoch: int = 0


def open_trainer(index: Index, command: OpenedWith, now_ms: int) -> Decision:
    """Start a new trainer epoch of the policy at `step`. Messages of every earlier epoch are refused from
    then on."""
    policy, step = command.policy, command.step
    if policy not in index.consumers:
        return fault("invalid", f"this job trains {', '.join(index.consumers)}, and no policy {policy!r}")
    copy: Copy | None = None
    if command.copy is not None:
        try:
            copy = msgspec.msgpack.decode(command.copy, type=Copy)
        except msgspec.DecodeError as error:
            return fault("invalid", f"the ledger copy of the checkpoint cannot be read: {error}")
        problem = _problem(index, command, copy)
        if problem:
            return fault("invalid", problem)
    tx = Transaction(index, now_ms)
    others = [other for other in index.consumers if other != policy and index.consumer(other).epoch]
    if _continues(index, policy, step, copy, command.memory_epoch):
        _rewind(tx, policy, step, on_disk=not command.memory_epoch)
    elif copy is not None and others:
        return fault(
            "invalid",
            f"the ledger copy of {policy}'s checkpoint is of another state than the ledger, which the "
            f"trainers of {', '.join(others)} go on with: stop the job, and resume all from one moment",
        )
    elif copy is not None:
        _adopt(tx, policy, copy)
    else:
        running = index.consumer(policy)
        return fault(
            "invalid",
            f"a trainer at step {step} cannot join a ledger at step {running.v_train} whose last "
            f"checkpoint is of step {running.checkpoint}: resume from a checkpoint with its ledger copy, "
            "or start a job of another name",
        )
    epoch = max(tx.consumer(policy).epoch, command.after_epoch) + 1
    lineage = reopened(tx.consumer(policy).lineage, epoch, step)
    tx.set_consumer(policy, epoch=epoch, trainer=command.trainer, lineage=lineage, overtaken=None)
    for group in tx.groups(index.groups) if tx.rules.abandoned_trains else ():
        if policy in group.training and group.state_for(policy) <= GroupState.BATCHED:
            recounted(tx, policy, group, group.training[policy].leased_version)
    if (pace := tx.consumer(policy).pace) is not None:
        tx.set_consumer(policy, pace=anew(pace))
    return tx.decide(TrainerOpened(epoch, step))


def _problem(index: Index, command: OpenedWith, copy: Copy) -> str:
    if copy.schema != SCHEMA:
        return f"the ledger copy has schema {copy.schema}; this buffer reads {SCHEMA}"
    step = copy.meta.consumer(command.policy).v_train
    if step != command.step:
        return f"the ledger copy is of step {step}, but the trainer is at step {command.step}"
    if copy.meta.dataset_hash != index.meta.dataset_hash:
        return (
            f"the checkpoint was made with the data set {copy.meta.dataset_hash}, but tasks.train is now "
            f"{index.meta.dataset_hash}: give back the old file, or start a new job"
        )
    return ""


def _continues(index: Index, policy: str, step: int, copy: Copy | None, memory_epoch: int) -> bool:
    """Return whether the ledger in Redis continues the copy, or the state that trainer epoch `memory_epoch`
    left in memory. It must also have every batch of `policy` from `step` on. Return False if Redis has lost
    the trainer epoch of that copy or state, because the steps in Redis may then belong to another lineage."""
    running = index.consumer(policy)
    # If another policy's copy won, no trainer has had the running epoch. It only fences.
    newest = running.epoch if running.trainer else running.epoch - 1
    of_epoch = memory_epoch if copy is None else copy.meta.consumer(policy).epoch
    known = not of_epoch or of_epoch <= newest
    return known and running.checkpoint <= step <= running.v_train and _same_ledger(index, copy)


def _same_ledger(index: Index, copy: Copy | None) -> bool:
    return copy is None or copy.meta.ledger_id == index.meta.ledger_id


def _rewind(tx: Transaction, policy: str, step: int, *, on_disk: bool) -> None:
    """Return to `step` with the redo log. Groups trained from `step` on become BATCHED again for the same
    steps. Groups trained before `step` become COMMITTED if the trainer's state at `step` is on disk."""
    plans = plans_from(tx.index, policy, step)
    groups = [group for group in tx.index.groups.values() if policy in group.training]
    undone = sum(rewound(tx, group, policy, step, plans.get(group.group_id)) for group in groups)
    if on_disk:
        commit_before(tx, policy, step)
    trained = tx.consumer(policy).episodes_trained - undone
    tx.set_consumer(policy, v_train=step, episodes_trained=trained)


def _adopt(tx: Transaction, policy: str, copy: Copy) -> None:
    """Replace the ledger by the copy. Epochs and ids continue from the larger value of the two, so none is
    issued twice."""
    index, now = tx.index, tx.index.meta
    tx.set_meta(
        **{name: getattr(copy.meta, name) for name in LedgerMeta.__struct_fields__ if name not in KEPT},
        ids=max(now.ids, copy.meta.ids),
        seq=max(now.seq, copy.meta.seq),
        consumers={each: _adopted(tx, policy, each, copy) for each in index.consumers},
    )
    for id_ in index.leases:
        tx.set_lease(id_, None)
    for id_ in index.claims:
        tx.set_claim(id_, None)
    for batch in index.batches:
        tx.set_batch(*batch, None)
    # Groups of another ledger may have the same ids, but their episodes are from other weights.
    held = index.groups if _same_ledger(index, copy) else {}
    known = {group.group_id for group in copy.groups if group.group_id in held}
    for group in index.groups.values():
        if group.group_id in known:
            continue
        # A group that this ledger batched for a step before the checkpoint is part of the checkpoint's
        # weights.
        covered = held and any(
            training.state in (GroupState.BATCHED, GroupState.TRAINED, GroupState.COMMITTED)
            and training.step < copy.meta.consumer(each).v_train
            for each, training in group.training.items()
        )
        tx.count("committed" if covered else "dropped:not_in_checkpoint")
        tx.forget(group)
    for group in copy.groups:
        _adopt_group(tx, group, held.get(group.group_id))


def _adopted(tx: Transaction, policy: str, each: str, copy: Copy) -> Consumer:
    """Return the figures of a consumer from the copy. The trainer of `policy` is opening now. The epoch of
    every other trainer is increased by one, which excludes its running process. Each must resume at the step
    of the copy."""
    now, then = tx.index.consumer(each), copy.meta.consumer(each)
    epoch = max(now.epoch, then.epoch)
    if each != policy:
        epoch += 1
        # Nobody publishes under the epoch that fences. If it published before it was lost, those versions are
        # abandoned.
        lineage = reopened(then.lineage, epoch, then.v_train)[:-1]
        then = replace(then, lineage=lineage, trainer="")
    else:
        then = replace(then, trainer=now.trainer)
    return replace(then, epoch=epoch, checkpoint=then.v_train, overtaken=None)


def _adopt_group(tx: Transaction, group: GroupRecord, held: GroupRecord | None) -> None:
    open_for = [policy for policy, each in group.training.items() if not each.has_ended]
    episodes = tuple(
        _survivor(tx, held.episodes[sample], open_for) if held is not None else MISSING
        for sample in range(len(group.episodes))
    )
    lost = tuple(
        sample
        for sample, episode in enumerate(held.episodes if held is not None else ())
        if episode.state != EpisodeState.MISSING and episodes[sample] is MISSING
    )
    unclaimed = sum(e.state == EpisodeState.CLAIMED for e in held.episodes) if held is not None else 0
    if unclaimed:
        tx.count("claim_ended:adopted", unclaimed)
    if held is None and (gone := sum(episode.is_held for episode in group.episodes)):
        tx.count("episode_dropped:not_held", gone)
    if lost:
        tx.free(group.group_id, lost)
        tx.count("episode_dropped:abandoned", len(lost))
    state = GroupState.GENERATED
    if any(episode.state == EpisodeState.MISSING for episode in episodes):
        state = GroupState.QUEUED
        # Its deadline starts again, and every sample can be generated.
        episodes = tuple(MISSING if e.state == EpisodeState.ABSENT else e for e in episodes)
    elif all(episode.state >= EpisodeState.VERDICT for episode in episodes):
        state = GroupState.SCORED
    if any(training.steps for training in group.training.values()) and state != GroupState.SCORED:
        # Its bytes are missing or from other weights. It is not used again, but it stays part of the
        # checkpoint's weights.
        tx.count("committed:adopted")
        if held is not None:
            tx.forget(held)
        if untrained := tuple(policy for policy in open_for if not group.training[policy].steps):
            tx.new_group(group.row, group.pass_index, group.attempt + 1, untrained)
        return
    if state != GroupState.SCORED:
        # Policies for which the group has ended do not take part when it is generated or scored again.
        group = replace(group, training={policy: group.training[policy] for policy in open_for})
    last = held if held is not None else group
    tx.set_group(
        group,
        state=int(state),
        leases=last.leases,
        handed_over=last.handed_over,
        begun_ms=tx.now_ms if last.leases else 0,
        since_ms=tx.now_ms,
        **_refreshed(tx.figures(group, episodes)),
    )
    tx.count(f"{state.name.lower()}:adopted")


def _refreshed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with trained groups COMMITTED, because the checkpoint covers them, and batched groups
    SCORED again."""
    training = {}
    for policy, each in fields["training"].items():
        if each.state == GroupState.TRAINED:
            each = replace(each, state=int(GroupState.COMMITTED))
        elif not each.has_ended:
            each = replace(each, state=int(GroupState.SCORED), step=-1)
        training[policy] = each
    return {**fields, "training": training}


def _survivor(tx: Transaction, episode: EpisodeRecord, policies: Iterable[str]) -> EpisodeRecord:
    """Return the episode from Redis with its claim ended. Return MISSING if it contains abandoned weights of
    one of `policies`."""
    for policy in policies:
        consumer = tx.consumer(policy)
        lineage = reopened(consumer.lineage, consumer.epoch + 1, consumer.v_train)
        held = episode.versions.get(policy)
        if held is not None and not accepts(lineage, held.epoch, held.oldest, held.newest):
            return MISSING  # even if abandoned units are trained: new samples must fit under η
    if episode.state == EpisodeState.CLAIMED:
        return replace(episode, state=int(EpisodeState.STORED), claim_id="")
    return episode
