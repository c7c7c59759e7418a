"""Arrivals: finished episodes of a leased group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from areal_async.rpc.messages import PutAck, Refusal
from replay_buffer.ledger import faults
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.lineage import accepts, undecided
from replay_buffer.ledger.records import EpisodeRecord, EpisodeState, GroupRecord, GroupState, Versions
from replay_buffer.ledger.transaction import Decision, Transaction


@dataclass(frozen=True)
class Arrival:
    """One episode of a put, as read from its own bytes. `problem` says why it is none."""

    sample: int
    size_bytes: int = 0
    n_units: int = 0
    n_sampled: int = 0
    versions: Mapping[str, Versions] = field(default_factory=dict)
    """By policy, of the sampled units."""
    problem: str = ""


@dataclass(frozen=True)
class StoreEpisodes:
    """A `PutEpisodes` whose attachment `i` was read as `arrivals[i]`."""

    lease_id: str
    group_id: str
    arrivals: tuple[Arrival, ...]


def store_episodes(index: Index, command: StoreEpisodes, now_ms: int) -> Decision:
    """Store what the live lease of the group delivers, each sample once.

    A sample that this very lease stored before is acknowledged again: its acknowledgement was lost. Anything
    else from a lease that is not live is refused, for its group may be another worker's by now. An episode
    too old for every step to come, or from abandoned weights, ends its whole group."""
    tx = Transaction(index, now_ms)
    group = index.groups.get(command.group_id)
    if group is None or command.lease_id not in group.leases:
        return _refuse_all(tx, command, "lease_lost")
    lease_number = group.leases.index(command.lease_id)
    live = group.state == GroupState.LEASED and group.leases[-1] == command.lease_id
    stored: list[int] = []
    refused: list[Refusal] = []
    arrived: dict[int, EpisodeRecord] = {}
    for attachment, arrival in enumerate(command.arrivals):
        reason = _problem(index, group, arrival, lease_number, live=live)
        if reason in ("stale", "abandoned"):
            tx.drop(group, reason)
            return _refuse_all(tx, command, reason)
        if reason:
            tx.count(f"refused:{reason.split(':')[0]}")
            refused.append(_refusal(command, arrival, reason))
            continue
        stored.append(arrival.sample)
        if group.episodes[arrival.sample].state == EpisodeState.MISSING and arrival.sample not in arrived:
            arrived[arrival.sample] = _episode(arrival, lease_number, now_ms)
            tx.keep_blob(group.group_id, arrival.sample, attachment)
    if arrived:
        tx.count("stored", len(arrived))
        faults.succeeded(tx, "generating")
        group = tx.add_episodes(group, arrived)
        if not group.missing:
            tx.set_lease(command.lease_id, None)
            tx.move(group, GroupState.GENERATED)
    return tx.decide(PutAck(stored, index.rules.durability, refused))


def _problem(index: Index, group: GroupRecord, arrival: Arrival, lease_number: int, *, live: bool) -> str:
    """Why an arrival cannot be stored; empty when it can, or is stored already by this lease."""
    if not 0 <= arrival.sample < len(group.episodes):
        return f"invalid: the group has the samples 0 to {len(group.episodes) - 1}"
    held = group.episodes[arrival.sample]
    if held.state == EpisodeState.ABSENT:
        return "given_up"
    if held.state != EpisodeState.MISSING:
        return "" if held.lease == lease_number else "stored_by_another_lease"
    if not live:
        return "lease_lost"
    if arrival.problem:
        return f"invalid: {arrival.problem}"
    problems = [
        _of_versions(index, policy, held, trained=policy in group.training)
        for policy, held in arrival.versions.items()
    ]
    return next(filter(None, problems), "")


def _of_versions(index: Index, policy: str, held: Versions, *, trained: bool) -> str:
    """Why an episode cannot be stored with units of a policy's weights `held`; empty when it can. Where the
    group is not `trained` by the policy, its units are context, of any age."""
    if policy not in index.consumers:
        return ""
    running, rules = index.consumer(policy), index.rules.consumers[policy]
    if held.epoch > running.epoch or (held.epoch == running.epoch and held.newest > running.v_train + 1):
        return (
            f"version_unknown: version {held.newest} of trainer epoch {held.epoch} was not "
            f"published; the trainer is at version {running.v_train} of epoch {running.epoch}"
        )
    if not trained:
        return ""
    if not accepts(running.lineage, held.epoch, held.oldest, held.newest) and not undecided(
        running.lineage, running.v_train, held.epoch, held.newest
    ):
        return "abandoned"
    if (
        held.oldest < rules.lowest_version(index.next_step(policy))
        and held.oldest < rules.lowest_version(index.open_step(policy))
        and not index.rules.overtaken_masks
    ):
        return "stale"
    return ""


def _episode(arrival: Arrival, lease_number: int, now_ms: int) -> EpisodeRecord:
    return EpisodeRecord(
        state=int(EpisodeState.STORED),
        size_bytes=arrival.size_bytes,
        n_units=arrival.n_units,
        n_sampled=arrival.n_sampled,
        versions=dict(arrival.versions),
        lease=lease_number,
        waits_ms=now_ms,
    )


def _refuse_all(tx: Transaction, command: StoreEpisodes, reason: str) -> Decision:
    tx.count(f"refused:{reason}", len(command.arrivals))
    refused = [_refusal(command, arrival, reason) for arrival in command.arrivals]
    return tx.decide(PutAck([], tx.rules.durability, refused))


def _refusal(command: StoreEpisodes, arrival: Arrival, reason: str) -> Refusal:
    return Refusal(f"{command.group_id}.{arrival.sample}", reason)
