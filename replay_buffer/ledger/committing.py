"""The end of a step: commit it, export it into a checkpoint, mark it as covered by the checkpoint."""

from __future__ import annotations

from operator import attrgetter

import msgspec

from areal_async.rpc.messages import Checkpointed, Commit, ExportLedger, LedgerCopy
from areal_async.rpc.schema import Ok
from replay_buffer.ledger.abandoned import is_on_lineage, recounted
from replay_buffer.ledger.batching import (
    masked_below,
    newest_of,
    plans_from,
    refused,
    trained_in,
)
from replay_buffer.ledger.index import Index, has_place
from replay_buffer.ledger.records import (
    NO_VERSION,
    SCHEMA,
    EpisodeRecord,
    EpisodeState,
    GroupRecord,
    GroupState,
    LedgerMeta,
    continued,
    pruned,
    undecided,
)
from replay_buffer.ledger.transaction import Decision, Transaction, fault


class Copy(msgspec.Struct, frozen=True):
    """The ledger inside a checkpoint: the figures, and every group that a later step may train. Groups that
    are TRAINED and cannot be used again are left out, because the checkpoint's weights contain them. Episode
    bytes and all other records stay in Redis."""

    schema: int
    meta: LedgerMeta
    groups: list[GroupRecord]


def commit(index: Index, message: Commit, now_ms: int) -> Decision:
    """Commit `step`, which is trained and published. Its groups become TRAINED, or SCORED if they may be used
    again. A repeated commit changes nothing.

    If an earlier epoch published different weights as version `step + 1`, the units sampled from this or a
    later version of that epoch are abandoned."""
    policy, step = message.policy, message.step
    if (refusal := refused(index, policy, message.epoch)) is not None:
        return refusal
    consumer = index.consumer(policy)
    if step < consumer.v_train:
        return Decision(Ok())
    plan = index.batches.get((policy, step))
    if step > consumer.v_train or plan is None or plan.epoch != message.epoch:
        return fault("invalid", f"step {step} cannot be committed: its batch was not given to this trainer")
    tx = Transaction(index, now_ms)
    later = plans_from(index, policy, step + 1)
    staleness = consumer.max_staleness_seen
    trained = 0
    for group in tx.groups(plan.group_ids):
        if not has_place(group, policy):
            continue
        oldest = group.training[policy].min_version
        if oldest >= 0:
            staleness = max(staleness, step - max(oldest, masked_below(tx.rules, policy, step)))
        trained += group.count(EpisodeState.VERDICT)
        trained_in(tx, group, policy, step, later)
    lineage = continued(consumer.lineage, step, message.same_as)
    left_behind = any(
        old.last == step and new.last == step for old, new in zip(consumer.lineage, lineage, strict=True)
    )
    tx.set_consumer(policy, lineage=lineage, v_train=step + 1)
    if left_behind:
        _drop_abandoned(tx, policy, step + 1)
    tx.set_consumer(
        policy,
        episodes_trained=consumer.episodes_trained + trained,
        max_staleness_seen=staleness,
    )
    return tx.decide(Ok())


def _drop_abandoned(tx: Transaction, policy: str, version: int) -> None:
    """Handle every untrained group that has units from abandoned weights. Depending on the job file, drop the
    group or count the abandoned units as older. `version` is the newest version of the running epoch."""
    consumer = tx.consumer(policy)

    def may_stay(episode: EpisodeRecord) -> bool:
        if is_on_lineage(tx.rules, consumer, episode, policy):
            return True
        versions = episode.versions[policy]
        return undecided(consumer.lineage, version, versions.epoch, versions.newest)

    for group in list(tx.index.groups.values()):
        training = group.training.get(policy)
        leased = training.leased_version if training is not None else NO_VERSION
        if leased >= version or newest_of(group, policy) >= version:
            held = tx.group(group.group_id)
            if held is None or policy not in held.training or held.state_for(policy) > GroupState.BATCHED:
                continue
            if not all(map(may_stay, held.episodes)):
                tx.drop_for(group.group_id, policy, "abandoned")
            elif tx.rules.abandoned_trains:
                recounted(tx, policy, held, version - 1)


def export(index: Index, message: ExportLedger, now_ms: int) -> Decision:
    """Return the ledger as of the last committed step, for the checkpoint of that step."""
    if (refusal := refused(index, message.policy, message.epoch)) is not None:
        return refusal
    done = index.consumer(message.policy).v_train
    if message.step != done:
        return fault(
            "invalid", f"the ledger is at step {done}; it cannot be exported as of step {message.step}"
        )
    # While steps are redone, later steps have batches too. Their groups are not trained yet.
    groups = [group for group in index.groups.values() if group.least_state <= GroupState.BATCHED]
    copy = Copy(SCHEMA, index.meta, sorted(groups, key=attrgetter("seq")))
    return Decision(LedgerCopy(message.step), payload=msgspec.msgpack.encode(copy))


def checkpointed(index: Index, message: Checkpointed, now_ms: int) -> Decision:
    """Record that the checkpoint after `step` steps is on disk. Groups whose last training was before it
    become COMMITTED. Their bytes are freed, and their part of the redo log is deleted."""
    if (refusal := refused(index, message.policy, message.epoch)) is not None:
        return refusal
    done = index.consumer(message.policy).v_train
    if message.step > done:
        return fault(
            "invalid", f"a checkpoint of step {message.step} cannot exist: {done} steps are committed"
        )
    tx = Transaction(index, now_ms)
    commit_before(tx, message.policy, message.step)
    return tx.decide(Ok())


def commit_before(tx: Transaction, policy: str, step: int) -> None:
    """Move every group of `policy` trained before `step` to COMMITTED."""
    consumer = tx.consumer(policy)
    if step <= consumer.checkpoint:
        return
    for group in tx.groups(tx.index.groups):
        training = group.training.get(policy)
        if training is not None and training.state == GroupState.TRAINED and training.step < step:
            tx.train(group, policy, GroupState.COMMITTED)
    for number in tx.index.plans(policy):
        if number < step:
            tx.set_batch(policy, number, None)
    # No batch before `step` runs again, so no unit below its limit is checked again. A masked unit may be of
    # any age.
    oldest = 0 if tx.rules.overtaken_masks else tx.rules.consumers[policy].lowest_version(step)
    tx.set_consumer(policy, checkpoint=step, lineage=pruned(consumer.lineage, oldest))
