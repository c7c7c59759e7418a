"""The end of a step: committed, exported into a checkpoint, covered by it."""

from __future__ import annotations

from operator import attrgetter

import msgspec

from areal_async.rpc.messages import Checkpointed, Commit, ExportLedger, LedgerCopy, Ok
from replay_buffer.ledger.age import masked_below
from replay_buffer.ledger.batching import fenced, is_fenced
from replay_buffer.ledger.draft import Decision, Draft, fault
from replay_buffer.ledger.index import UNBATCHED, Index
from replay_buffer.ledger.lineage import accepts, continued, pruned, undecided
from replay_buffer.ledger.records import SCHEMA, EpisodeState, Group, GroupState, Meta
from replay_buffer.ledger.reuse import plans_from, trained_in


class Copy(msgspec.Struct, frozen=True):
    """The ledger inside a checkpoint: the figures, and every group that a step to come may train. What is
    TRAINED for good is in the checkpoint's weights; its bytes and the rest stay in Redis."""

    schema: int
    meta: Meta
    groups: list[Group]


def commit(index: Index, message: Commit, now_ms: int) -> Decision:
    """Step `step` is trained and published: its groups are TRAINED, those that may be used again SCORED.
    Committing it again changes nothing.

    Where an earlier epoch had published another version `step + 1`, what came of its later weights ends."""
    meta, step = index.meta, message.step
    if is_fenced(index, message.epoch):
        return fenced(index, message.epoch)
    if step < meta.v_train:
        return Decision(Ok())
    plan = index.batches.get(step)
    if step > meta.v_train or plan is None or plan.epoch != message.epoch:
        return fault("invalid", f"step {step} cannot be committed: its batch was not given to this trainer")
    draft = Draft(index, now_ms)
    later = plans_from(index, step + 1)
    staleness = meta.max_staleness_seen
    trained = 0
    for group in draft.groups(plan.group_ids):
        if group.min_version >= 0:
            staleness = max(staleness, step - max(group.min_version, masked_below(draft.rules, step)))
        trained += group.count(EpisodeState.VERDICT)
        trained_in(draft, group, step, later)
    lineage = continued(meta.lineage, step, message.same_as)
    left_behind = any(
        old.last == step and new.last == step for old, new in zip(meta.lineage, lineage, strict=True)
    )
    draft.set_meta(lineage=lineage)
    if left_behind:
        _drop_abandoned(draft, step + 1)
    draft.set_meta(
        v_train=step + 1,
        episodes_trained=meta.episodes_trained + trained,
        max_staleness_seen=staleness,
    )
    return draft.decide(Ok())


def _drop_abandoned(draft: Draft, version: int) -> None:
    """End every group not trained yet that holds units of weights that will not come again."""
    lineage = draft.meta.lineage
    groups = [
        group
        for group in draft.index.groups.values()
        if any(episode.max_version >= version for episode in group.episodes)
    ]
    for group in draft.groups(group.group_id for group in groups):
        if group.state <= GroupState.BATCHED and not all(
            accepts(lineage, e.min_epoch, e.min_version, e.max_version)
            or undecided(lineage, version, e.min_epoch, e.max_version)
            for e in group.episodes
        ):
            draft.drop(group, "abandoned")


def export(index: Index, message: ExportLedger) -> Decision:
    """The ledger as of the last committed step, for the checkpoint of that step."""
    if is_fenced(index, message.epoch):
        return fenced(index, message.epoch)
    if message.step != index.meta.v_train:
        return fault(
            "invalid",
            f"the ledger is at step {index.meta.v_train}; it cannot be exported as of step {message.step}",
        )
    # Batches of later steps exist while steps are redone: their groups are still to be trained.
    groups = [g for g in index.groups.values() if g.state in UNBATCHED or g.state == GroupState.BATCHED]
    copy = Copy(SCHEMA, index.meta, sorted(groups, key=attrgetter("seq")))
    return Decision(LedgerCopy(message.step), payload=msgspec.msgpack.encode(copy))


def checkpointed(index: Index, message: Checkpointed, now_ms: int) -> Decision:
    """The checkpoint after `step` steps is on disk: what was trained for the last time before it is
    COMMITTED, its bytes freed, and its part of the redo log forgotten."""
    if is_fenced(index, message.epoch):
        return fenced(index, message.epoch)
    if message.step > index.meta.v_train:
        return fault(
            "invalid",
            f"a checkpoint of step {message.step} cannot exist: {index.meta.v_train} steps are committed",
        )
    draft = Draft(index, now_ms)
    commit_before(draft, message.step)
    return draft.decide(Ok())


def commit_before(draft: Draft, step: int) -> None:
    """COMMITTED for every step before `step`."""
    if step <= draft.meta.checkpoint:
        return
    for group in draft.groups(draft.index.groups):
        if group.state == GroupState.TRAINED and group.step < step:
            draft.commit(group)
    for number in draft.index.batches:
        if number < step:
            draft.set_batch(number, None)
    # No batch before `step` is run again, so no unit below its bound is asked about again; but one that is
    # masked may be of any age.
    oldest = 0 if draft.rules.overtaken_masks else step - draft.rules.max_staleness
    lineage = pruned(draft.meta.lineage, oldest)
    draft.set_meta(checkpoint=step, lineage=lineage)
