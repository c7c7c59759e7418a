"""Bytes that the ledger says are held, and are not: a machine that lost power before they were on its
disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_async.rpc.messages import Ok
from replay_buffer.ledger.draft import LEGAL, Decision, Draft
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.records import GroupState


@dataclass(frozen=True)
class BytesLost:
    """Episodes, as (group id, sample), found to be without their bytes when the store was opened."""

    places: tuple[tuple[str, int], ...]


def lose(index: Index, places: Sequence[tuple[str, int]], now_ms: int) -> Decision:
    """Drop their groups; the tasks are tried again. What was trained already stays so: only a trainer that
    needs it once more will miss it, and says so."""
    draft = Draft(index, now_ms)
    draft.count("bytes_lost", len(places))
    for group in draft.groups(dict.fromkeys(group_id for group_id, _ in places)):
        if GroupState.DROPPED in LEGAL[GroupState(group.state)]:
            draft.drop(group, "bytes_lost")
    return draft.decide(Ok())
