"""What the front writes to the event log (`areal_async/runtime/events.py` has the form). Off by default."""

from __future__ import annotations

from typing import Any

from areal_async.runtime.events import record, recording
from replay_buffer.ledger.index import Index, Writes
from replay_buffer.ledger.records import Group, GroupState


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
        groups={id_: [_state(group), group.step, _stored(group)] for id_, group in index.groups.items()},
        **_place(index),
    )


def note_decided(index: Index, writes: Writes, command: str, *, front_epoch: int) -> None:
    """`writes` were decided on `index`, which does not hold them yet."""
    if not recording():
        return
    moved: dict[str, list[Any]] = {}
    stored: list[list[Any]] = []
    unstored: list[str] = []
    for group_id, group in writes.groups.items():
        old = index.groups.get(group_id)
        if _state(old) != _state(group) or (old and group and old.step != group.step):
            step = group.step if group is not None else old.step if old is not None else -1
            moved[group_id] = [_state(old), _state(group), step]
        if group is None:
            continue
        before, after = set(_stored(old)), _stored(group)
        for sample in after:
            episode = group.episodes[sample]
            if sample not in before:
                versions = [episode.min_epoch, episode.min_version, episode.max_version]
                stored.append([f"{group_id}.{sample}", *versions])
        unstored += [f"{group_id}.{sample}" for sample in sorted(before.difference(after))]
    old_counts = index.meta.counts
    fields: dict[str, Any] = {
        "moved": moved,
        "stored": stored,
        "unstored": unstored,
        "batches": {step: plan and list(plan.group_ids) for step, plan in writes.batches.items()},
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
        v_train=writes.meta.v_train,
        trainer_epoch=writes.meta.epoch,
        checkpoint=writes.meta.checkpoint,
        position=writes.meta.position,
        **{name: value for name, value in fields.items() if value},
    )


def _place(index: Index) -> dict[str, int]:
    meta = index.meta
    return {
        "v_train": meta.v_train,
        "trainer_epoch": meta.epoch,
        "checkpoint": meta.checkpoint,
        "position": meta.position,
    }


def _state(group: Group | None) -> str:
    return "" if group is None else GroupState(group.state).name


def _stored(group: Group | None) -> list[int]:
    """Samples whose bytes are held."""
    if group is None:
        return []
    return [sample for sample, episode in enumerate(group.episodes) if episode.is_held]
