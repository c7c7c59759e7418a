"""The one way into the ledger: from a command to a decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from areal_async.rpc.messages import (
    Arrived,
    BufferStats,
    Checkpointed,
    Claim,
    Commit,
    Drain,
    ExportLedger,
    Heartbeat,
    Lease,
    NextBatch,
    NoScore,
    Ok,
    PutVerdicts,
    Release,
    Request,
    Stats,
)
from replay_buffer.ledger import (
    batching,
    committing,
    faults,
    leasing,
    losing,
    opening,
    scoring,
    storing,
    verdicts,
)
from replay_buffer.ledger.admission import capacity
from replay_buffer.ledger.draft import Decision, Draft
from replay_buffer.ledger.index import UNBATCHED, Index, Writes
from replay_buffer.ledger.records import EpisodeState, GroupState
from replay_buffer.ledger.words import batch_wait, lease_wait


@dataclass(frozen=True)
class Expire:
    """Time has passed: end what has reached its deadline."""


@dataclass(frozen=True)
class Extend:
    """The front or Redis was out for this long."""

    outage_ms: int


@dataclass(frozen=True)
class Begun:
    """A buffer begins: a job that had failed has been resumed."""


@dataclass(frozen=True)
class Alive:
    """The front lives, and has nothing else to write: Redis notes the time with every write."""


Decide = Callable[[Index, Any, int], Decision]

DECIDES: Mapping[type[Any], Decide] = {
    Lease: leasing.lease,
    Heartbeat: leasing.heartbeat,
    Arrived: leasing.arrived,
    Release: leasing.release,
    Drain: leasing.drain,
    storing.StoreEpisodes: storing.store_episodes,
    Claim: scoring.claim,
    PutVerdicts: verdicts.verdicts,
    opening.OpenedWith: opening.open_trainer,
    NextBatch: batching.next_batch,
    Commit: committing.commit,
    ExportLedger: lambda index, request, now_ms: committing.export(index, request),
    Checkpointed: committing.checkpointed,
    Stats: lambda index, request, now_ms: Decision(stats(index, now_ms)),
    Expire: lambda index, command, now_ms: leasing.expire(index, now_ms),
    Extend: lambda index, command, now_ms: leasing.extend(index, command.outage_ms, now_ms),
    Alive: lambda index, command, now_ms: Decision(Ok(), Writes(index.meta)),
    Begun: lambda index, command, now_ms: begun(index, now_ms),
    losing.BytesLost: lambda index, command, now_ms: losing.lose(index, command.places, now_ms),
}
"""What decides each request of the wire, and each command that the coordinator gives itself."""

Command = (
    Request[Any]
    | storing.StoreEpisodes
    | opening.OpenedWith
    | Expire
    | Extend
    | Alive
    | Begun
    | losing.BytesLost
)


def decide(index: Index, command: Command, now_ms: int) -> Decision:
    """What to answer to `command` at `now_ms` (milliseconds of Redis TIME), and what to write for it.

    Expects `Expire` to have been decided and applied when `index.next_deadline_ms <= now_ms`."""
    return DECIDES[type(command)](index, command, now_ms)


def begun(index: Index, now_ms: int) -> Decision:
    """Forget why the job was to end: what failed it is tried again."""
    draft = Draft(index, now_ms)
    if index.meta.failed:
        draft.set_meta(failed="")
        draft.count("failure_lifted")
        faults.forget(draft)
    return draft.decide(Ok())


def stats(index: Index, now_ms: int) -> BufferStats:
    """The figures of the ledger; `redis_bytes` is left for whoever can ask Redis."""
    meta = index.meta
    unbatched = (
        (g.since_ms, g.group_id) for g in index.groups.values() if g.state in UNBATCHED and not g.steps
    )
    oldest_ms, oldest_group = min(unbatched, default=(now_ms, ""))
    return BufferStats(
        groups={
            state.name: index.group_counts[state] for state in GroupState if state < GroupState.COMMITTED
        },
        episodes={state.name: index.episode_counts[state] for state in EpisodeState},
        reasons=meta.counts,
        v_train=meta.v_train,
        outstanding=index.outstanding,
        capacity=capacity(leasing.limits_of(index.rules), meta.v_train, meta.v_train),
        payload_bytes=index.payload_bytes,
        redis_bytes=0,
        queue_age_ms=max(0, now_ms - oldest_ms),
        max_staleness_seen=meta.max_staleness_seen,
        episodes_trained=meta.episodes_trained,
        episodes_dropped=meta.episodes_dropped,
        checkpoint=meta.checkpoint,
        trainer_epoch=meta.epoch,
        tasks_taken=meta.position,
        leases=len(index.leases),
        claims=len(index.claims),
        oldest_group=oldest_group,
        lease_wait=lease_wait(index),
        batch_wait=batch_wait(index),
        no_scores=[
            NoScore(kind, note.count, note.message, note.episode_id, max(0, now_ms - note.at_ms))
            for kind, note in meta.no_scores.items()
        ],
        failed=meta.failed,
    )
