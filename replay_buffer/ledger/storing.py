"""Arrivals: finished episodes of a leased group."""

from __future__ import annotations

from dataclasses import dataclass

from areal_async.rpc.messages import PutAck, Refusal
from replay_buffer.ledger import faults
from replay_buffer.ledger.age import lowest_version
from replay_buffer.ledger.draft import Decision, Draft
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.lineage import accepts, undecided
from replay_buffer.ledger.records import NO_VERSION, Episode, EpisodeState, Group, GroupState


@dataclass(frozen=True)
class Arrival:
    """One episode of a put, as read from its own bytes. `problem` says why it is none."""

    sample: int
    size_bytes: int = 0
    n_units: int = 0
    n_sampled: int = 0
    min_version: int = NO_VERSION
    max_version: int = NO_VERSION
    min_epoch: int = 0
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
    draft = Draft(index, now_ms)
    group = index.groups.get(command.group_id)
    if group is None or command.lease_id not in group.leases:
        return _refuse_all(draft, command, "lease_lost")
    lease_number = group.leases.index(command.lease_id)
    live = group.state == GroupState.LEASED and group.leases[-1] == command.lease_id
    stored: list[int] = []
    refused: list[Refusal] = []
    arrived: dict[int, Episode] = {}
    for attachment, arrival in enumerate(command.arrivals):
        reason = _problem(index, group, arrival, lease_number, live=live)
        if reason in ("stale", "abandoned"):
            draft.drop(group, reason)
            return _refuse_all(draft, command, reason)
        if reason:
            draft.count(f"refused:{reason.split(':')[0]}")
            refused.append(_refusal(command, arrival, reason))
            continue
        stored.append(arrival.sample)
        if group.episodes[arrival.sample].state == EpisodeState.MISSING and arrival.sample not in arrived:
            arrived[arrival.sample] = _episode(arrival, lease_number, now_ms)
            draft.keep_blob(group.group_id, arrival.sample, attachment)
    if arrived:
        draft.count("stored", len(arrived))
        faults.succeeded(draft, "generating")
        group = draft.add_episodes(group, arrived)
        if not group.missing:
            draft.set_lease(command.lease_id, None)
            draft.move(group, GroupState.GENERATED)
    return draft.decide(PutAck(stored, index.rules.durability, refused))


def _problem(index: Index, group: Group, arrival: Arrival, lease_number: int, *, live: bool) -> str:
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
    if arrival.max_version == NO_VERSION:
        return ""
    meta = index.meta
    if arrival.min_epoch > meta.epoch or (
        arrival.min_epoch == meta.epoch and arrival.max_version > meta.v_train + 1
    ):
        return (
            f"version_unknown: version {arrival.max_version} of trainer epoch {arrival.min_epoch} was not "
            f"published; the trainer is at version {meta.v_train} of epoch {meta.epoch}"
        )
    if not accepts(
        meta.lineage, arrival.min_epoch, arrival.min_version, arrival.max_version
    ) and not undecided(meta.lineage, meta.v_train, arrival.min_epoch, arrival.max_version):
        return "abandoned"
    if (
        arrival.min_version < lowest_version(index.rules, index.next_step)
        and arrival.min_version < lowest_version(index.rules, index.open_step)
        and not index.rules.overtaken_masks
    ):
        return "stale"
    return ""


def _episode(arrival: Arrival, lease_number: int, now_ms: int) -> Episode:
    return Episode(
        state=int(EpisodeState.STORED),
        size_bytes=arrival.size_bytes,
        n_units=arrival.n_units,
        n_sampled=arrival.n_sampled,
        min_version=arrival.min_version,
        max_version=arrival.max_version,
        min_epoch=arrival.min_epoch,
        lease=lease_number,
        waits_ms=now_ms,
    )


def _refuse_all(draft: Draft, command: StoreEpisodes, reason: str) -> Decision:
    draft.count(f"refused:{reason}", len(command.arrivals))
    refused = [_refusal(command, arrival, reason) for arrival in command.arrivals]
    return draft.decide(PutAck([], draft.rules.durability, refused))


def _refusal(command: StoreEpisodes, arrival: Arrival, reason: str) -> Refusal:
    return Refusal(f"{command.group_id}.{arrival.sample}", reason)
