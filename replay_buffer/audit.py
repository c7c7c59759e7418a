"""What the front writes to the event log (`areal_async/runtime/events.py` has the form). Off by default."""

from __future__ import annotations

from typing import Any

from areal_async.runtime.events import record, recording
from replay_buffer.ledger.index import Index, WriteSet
from replay_buffer.ledger.records import GroupRecord, GroupState, LedgerMeta, Versions

NO_VERSIONS = Versions(-1, -1, -1)


def note_loaded(index: Index, *, front_epoch: int, idle_ms: int, lost_writes: int) -> None:
    """A ledger was taken over."""
    if not recording():
        return
    record(
        "loaded",
        front_epoch=front_epoch,
        revision=index.revision,
        idle_ms=idle_ms,
        lost_writes=lost_writes,
        groups={
            id_: [*_standing(group, next(iter(group.training))), _stored(group)]
            for id_, group in index.groups.items()
        },
        **_place(index.meta, index),
    )


def note_decided(index: Index, writes: WriteSet, command: str, *, front_epoch: int) -> None:
    """`writes` were decided on `index`, which does not hold them yet."""
    if not recording():
        return
    moved: dict[str, list[Any]] = {}
    stored: list[list[Any]] = []
    unstored: list[str] = []
    for group_id, group in writes.groups.items():
        old = index.groups.get(group_id)
        for policy in {**(old.training if old else {}), **(group.training if group else {})}:
            (was, step), (now, next_step) = _standing(old, policy), _standing(group, policy)
            if (was, step) != (now, next_step):
                last = next_step if group is not None else step
                moved[_named(index, group_id, policy)] = [was, now, last]
        if group is None:
            continue
        before, after = set(_stored(old)), _stored(group)
        for sample in after:
            episode = group.episodes[sample]
            if sample not in before:
                for policy, held in episode.versions.items() or [("", NO_VERSIONS)]:
                    name = _named(index, f"{group_id}.{sample}", policy)
                    stored.append([name, held.epoch, held.oldest, held.newest])
        unstored += [f"{group_id}.{sample}" for sample in sorted(before.difference(after))]
    old_counts = index.meta.counts
    fields: dict[str, Any] = {
        "moved": moved,
        "stored": stored,
        "unstored": unstored,
        "batches": {
            _named(index, step, policy): plan and list(plan.group_ids)
            for (policy, step), plan in writes.batches.items()
        },
        "counts": {
            reason: count - old_counts.get(reason, 0)
            for reason, count in writes.meta.counts.items()
            if count != old_counts.get(reason, 0)
        },
    }
    record(
        "decided",
        front_epoch=front_epoch,
        revision=index.revision,
        command=command,
        **_place(writes.meta, index),
        **{name: value for name, value in fields.items() if value},
    )


def _place(meta: LedgerMeta, index: Index) -> dict[str, Any]:
    """Where the trainers and the cursor stand; a job of one policy has that one's figures as they are."""
    trainers = {
        policy: {"v_train": each.v_train, "trainer_epoch": each.epoch, "checkpoint": each.checkpoint}
        for policy in index.consumers
        for each in [meta.consumer(policy)]
    }
    clocks = next(iter(trainers.values())) if len(trainers) == 1 else {"policies": trainers}
    return {**clocks, "position": meta.position}


def _named(index: Index, what: Any, policy: str) -> Any:
    """`what` of a policy: by its own name in a job of one."""
    return what if len(index.consumers) == 1 else f"{policy}/{what}"


def _standing(group: GroupRecord | None, policy: str) -> tuple[str, int]:
    """The state of a group as a policy sees it, and its step; ("", -1) where it is not there."""
    if group is None or policy not in group.training:
        return "", -1
    return GroupState(group.state_for(policy)).name, group.training[policy].step


def _stored(group: GroupRecord | None) -> list[int]:
    """Samples whose bytes are held."""
    if group is None:
        return []
    return [sample for sample, episode in enumerate(group.episodes) if episode.is_held]
