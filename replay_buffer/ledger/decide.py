"""The only entry to the ledger: a command goes in, a decision comes out."""

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
    PolicyStats,
    PutVerdicts,
    Release,
    Stats,
)
from areal_async.rpc.schema import Ok, Request
from replay_buffer.ledger import (
    batching,
    committing,
    leasing,
    opening,
    scoring,
    verdicts,
)
from replay_buffer.ledger.admission import capacity
from replay_buffer.ledger.batching import batch_wait, lease_wait
from replay_buffer.ledger.index import Index, WriteSet
from replay_buffer.ledger.pacing import explained
from replay_buffer.ledger.records import EpisodeState, GroupState
from replay_buffer.ledger.transaction import Decision, Transaction, forget_failures


@dataclass(frozen=True)
class ExpireDeadlines:
    """Command to end everything whose deadline has passed."""


@dataclass(frozen=True)
class ExtendDeadlines:
    """Report that the buffer or Redis was unavailable for this long."""

    outage_ms: int


@dataclass(frozen=True)
class BufferStarted:
    """Report that a buffer has started on the ledger of a failed job. This resumes the job."""


@dataclass(frozen=True)
class BytesLost:
    """Report that the store had no bytes for these episodes, (group id, sample), when it was opened."""

    places: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class KeepAlive:
    """Command for an idle buffer, to record the time. Redis records the time with every write, so this
    command writes nothing else."""


Decide = Callable[[Index, Any, int], Decision]

DECIDES: Mapping[type[Any], Decide] = {
    Lease: leasing.lease,
    Heartbeat: leasing.heartbeat,
    Arrived: leasing.arrived,
    Release: leasing.release,
    Drain: leasing.drain,
    leasing.StoreEpisodes: leasing.store_episodes,
    Claim: scoring.claim,
    PutVerdicts: verdicts.verdicts,
    opening.OpenedWith: opening.open_trainer,
    NextBatch: batching.next_batch,
    Commit: committing.commit,
    ExportLedger: committing.export,
    Checkpointed: committing.checkpointed,
    Stats: lambda index, request, now_ms: Decision(stats(index, now_ms)),
    ExpireDeadlines: lambda index, command, now_ms: leasing.expire(index, now_ms),
    ExtendDeadlines: lambda index, command, now_ms: leasing.extend(index, command.outage_ms, now_ms),
    KeepAlive: lambda index, command, now_ms: Decision(Ok(), WriteSet(index.meta)),
    BufferStarted: lambda index, command, now_ms: begun(index, now_ms),
    BytesLost: lambda index, command, now_ms: leasing.lose(index, command.places, now_ms),
}
"""Functions that decide each request of the protocol and each internal command of the coordinator."""

Command = (
    Request[Any]
    | leasing.StoreEpisodes
    | opening.OpenedWith
    | ExpireDeadlines
    | ExtendDeadlines
    | KeepAlive
    | BufferStarted
    | BytesLost
)


def decide(index: Index, command: Command, now_ms: int) -> Decision:
    """Decide on `command` at `now_ms` (milliseconds of the ledger's clock). The decision has the reply and
    the writes.

    If `index.next_deadline_ms <= now_ms`, the caller must first decide and apply `ExpireDeadlines`."""
    return DECIDES[type(command)](index, command, now_ms)


def begun(index: Index, now_ms: int) -> Decision:
    """Clear the reason to end the job, so that a resumed job tries again."""
    tx = Transaction(index, now_ms)
    if index.meta.failed:
        tx.set_meta(failed="")
        tx.count("failure_lifted")
        forget_failures(tx)
    return tx.decide(Ok())


def stats(index: Index, now_ms: int) -> BufferStats:
    """Return the figures of the ledger. The caller fills in `redis_bytes`."""
    meta = index.meta
    waiting = ((g.since_ms, g.group_id) for g in index.groups.values() if not g.has_begun)
    oldest_ms, oldest_group = min(waiting, default=(now_ms, ""))
    return BufferStats(
        groups={
            state.name: index.group_counts[state] for state in GroupState if state < GroupState.COMMITTED
        },
        episodes={state.name: index.episode_counts[state] for state in EpisodeState},
        reasons=meta.counts,
        policies={policy: policy_stats(index, policy) for policy in index.consumers},
        payload_bytes=index.payload_bytes + index.media_bytes,
        redis_bytes=0,
        queue_age_ms=max(0, now_ms - oldest_ms),
        episodes_dropped=meta.episodes_dropped,
        tasks_taken=meta.position,
        leases=len(index.leases),
        claims=len(index.claims),
        oldest_group=oldest_group,
        lease_wait=lease_wait(index),
        no_scores=[
            NoScore(kind, note.count, note.message, note.episode_id, max(0, now_ms - note.at_ms))
            for kind, note in meta.no_scores.items()
        ],
        failed=meta.failed,
    )


def policy_stats(index: Index, policy: str) -> PolicyStats:
    """Return the figures of one trained policy."""
    consumer, rules = index.consumer(policy), index.rules.consumers[policy]
    pace, size, eta = leasing.pace_of(index, policy), rules.batch_groups, rules.max_staleness
    return PolicyStats(
        v_train=consumer.v_train,
        outstanding=index.consumers[policy].outstanding,
        capacity=capacity(leasing.demand_of(index, policy), consumer.v_train),
        max_staleness_seen=consumer.max_staleness_seen,
        episodes_trained=consumer.episodes_trained,
        checkpoint=consumer.checkpoint,
        trainer_epoch=consumer.epoch,
        batch_wait=batch_wait(index, policy),
        ahead=pace.ahead if pace is not None else float(eta * size),
        pacing=explained(pace, size, eta) if pace is not None else "",
    )
