"""A trainer opens the job: at its start, or back from a checkpoint.

Two ledgers may be at hand then. Redis has everything up to the moment of the crash; the copy in the
checkpoint is as of the checkpoint's step `c`. Where Redis is the copy's own continuation and still has every
batch from `c` on, the redo log is complete: the trainer goes back to `c` and is given the same batches in the
same order. Otherwise the copy wins: the cursor and the figures are the checkpoint's, of the groups that were
under way those episodes survive whose bytes are still held, and every other group ends, by name.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from areal_async.rpc.messages import TrainerOpened
from replay_buffer.ledger.committing import Copy, commit_before
from replay_buffer.ledger.draft import Decision, Draft, fault, figures
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.lineage import accepts, reopened
from replay_buffer.ledger.records import (
    MISSING,
    SCHEMA,
    Episode,
    EpisodeState,
    Group,
    GroupState,
    Meta,
)
from replay_buffer.ledger.reuse import plans_from, rewound

KEPT = (
    "ids",
    "epoch",
    "seq",
    "checkpoint",
    "overtaken",
    "trainer",
    "draining",
    "failed",
    "generating",
    "scoring",
)
"""Figures that a copy does not replace."""


class OpenedWith(msgspec.Struct, frozen=True):
    """An `OpenTrainer` with its attachment: the ledger copy of the checkpoint, None at the start of a job."""

    trainer: str
    step: int
    copy: bytes | None = None
    after_epoch: int = 0


def open_trainer(index: Index, command: OpenedWith, now_ms: int) -> Decision:
    """Start a new trainer epoch at `step`, fencing every earlier one."""
    copy: Copy | None = None
    if command.copy is not None:
        try:
            copy = msgspec.msgpack.decode(command.copy, type=Copy)
        except msgspec.DecodeError as error:
            return fault("invalid", f"the ledger copy of the checkpoint cannot be read: {error}")
        problem = _problem(index, command, copy)
        if problem:
            return fault("invalid", problem)
    draft = Draft(index, now_ms)
    if _continues(index, command.step, copy):
        _rewind(draft, command.step)
    elif copy is not None:
        _adopt(draft, copy)
    else:
        return fault(
            "invalid",
            f"a trainer at step {command.step} cannot join a ledger at step {index.meta.v_train} whose last "
            f"checkpoint is of step {index.meta.checkpoint}: resume from a checkpoint with its ledger copy, "
            "or start a job of another name",
        )
    epoch = max(draft.meta.epoch, command.after_epoch) + 1
    lineage = reopened(draft.meta.lineage, epoch, command.step)
    draft.set_meta(epoch=epoch, trainer=command.trainer, lineage=lineage, overtaken=None)
    return draft.decide(TrainerOpened(epoch, command.step))


def _problem(index: Index, command: OpenedWith, copy: Copy) -> str:
    if copy.schema != SCHEMA:
        return f"the ledger copy has schema {copy.schema}; this buffer reads {SCHEMA}"
    if copy.meta.v_train != command.step:
        return f"the ledger copy is of step {copy.meta.v_train}, but the trainer is at step {command.step}"
    if copy.meta.dataset_hash != index.meta.dataset_hash:
        return (
            f"the checkpoint was made with the data set {copy.meta.dataset_hash}, but tasks.train is now "
            f"{index.meta.dataset_hash}: give back the old file, or start a new job"
        )
    return ""


def _continues(index: Index, step: int, copy: Copy | None) -> bool:
    """Whether Redis is the copy's continuation, with every batch from `step` on. It is not where it has lost
    the very epoch that the copy is of: its steps may then be those of another lineage."""
    known = copy is None or copy.meta.epoch <= index.meta.epoch
    return known and index.meta.checkpoint <= step <= index.meta.v_train and _same_ledger(index, copy)


def _same_ledger(index: Index, copy: Copy | None) -> bool:
    return copy is None or copy.meta.ledger_id == index.meta.ledger_id


def _rewind(draft: Draft, step: int) -> None:
    """Back to `step` by the redo log: what was trained from there on is BATCHED again, for the same steps."""
    plans = plans_from(draft.index, step)
    groups = list(draft.index.groups.values())
    undone = sum(rewound(draft, group, step, plans.get(group.group_id)) for group in groups)
    commit_before(draft, step)
    draft.set_meta(v_train=step, episodes_trained=draft.meta.episodes_trained - undone)


def _adopt(draft: Draft, copy: Copy) -> None:
    """The copy wins. Epochs and ids go on from the larger of both, so that nothing is given out twice."""
    index, now = draft.index, draft.index.meta
    draft.set_meta(
        **{name: getattr(copy.meta, name) for name in Meta.__struct_fields__ if name not in KEPT},
        ids=max(now.ids, copy.meta.ids),
        epoch=max(now.epoch, copy.meta.epoch),
        seq=max(now.seq, copy.meta.seq),
        checkpoint=copy.meta.v_train,
    )
    for id_ in index.leases:
        draft.set_lease(id_, None)
    for id_ in index.claims:
        draft.set_claim(id_, None)
    for number in index.batches:
        draft.set_batch(number, None)
    # Another ledger's groups may bear the same names; their episodes are of other weights.
    held = index.groups if _same_ledger(index, copy) else {}
    known = {group.group_id for group in copy.groups if group.group_id in held}
    for group in index.groups.values():
        if group.group_id in known:
            continue
        # What was batched for a step before the checkpoint, by this ledger, is in the checkpoint's weights.
        covered = (
            held
            and group.state in (GroupState.BATCHED, GroupState.TRAINED)
            and group.step < copy.meta.v_train
        )
        draft.remove(group, "committed" if covered else "dropped:not_in_checkpoint")
    for group in copy.groups:
        _adopt_group(draft, group, held.get(group.group_id))


def _adopt_group(draft: Draft, group: Group, held: Group | None) -> None:
    episodes = tuple(
        _survivor(draft, held.episodes[sample]) if held is not None else MISSING
        for sample in range(len(group.episodes))
    )
    lost = tuple(
        sample
        for sample, episode in enumerate(held.episodes if held is not None else ())
        if episode.state != EpisodeState.MISSING and episodes[sample] is MISSING
    )
    unclaimed = sum(e.state == EpisodeState.CLAIMED for e in held.episodes) if held is not None else 0
    if unclaimed:
        draft.count("claim_ended:adopted", unclaimed)
    if held is None and (gone := sum(episode.is_held for episode in group.episodes)):
        draft.count("episode_dropped:not_held", gone)
    if lost:
        draft.free(group.group_id, lost)
        draft.count("episode_dropped:abandoned", len(lost))
    state = GroupState.GENERATED
    if any(episode.state == EpisodeState.MISSING for episode in episodes):
        state = GroupState.QUEUED
        # It has a deadline before it again, and room for every sample.
        episodes = tuple(MISSING if e.state == EpisodeState.ABSENT else e for e in episodes)
    elif all(episode.state >= EpisodeState.VERDICT for episode in episodes):
        state = GroupState.SCORED
    if group.steps and state != GroupState.SCORED:
        # Its bytes are gone, or were of other weights: it is not used again, but its part in the
        # checkpoint's weights stays.
        draft.count("committed:adopted")
        if held is not None:
            draft.forget(held)
        return
    last = held if held is not None else group
    draft.set_group(
        group,
        state=int(state),
        leases=last.leases,
        handed_over=last.handed_over,
        begun_ms=draft.now_ms if last.leases else 0,
        step=-1,
        since_ms=draft.now_ms,
        **figures(episodes),
    )
    draft.count(f"{state.name.lower()}:adopted")


def _survivor(draft: Draft, episode: Episode) -> Episode:
    """The episode as Redis holds it, its claim ended; MISSING if abandoned weights had a part in it."""
    step = draft.meta.v_train
    lineage = reopened(draft.meta.lineage, draft.meta.epoch + 1, step)
    if not accepts(lineage, episode.min_epoch, episode.min_version, episode.max_version):
        return MISSING
    if episode.state == EpisodeState.CLAIMED:
        return replace(episode, state=int(EpisodeState.STORED), claim_id="")
    return episode
