"""Leases: grant, renew, return and expire them, and handle lost bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from areal_async.base.versions import VersionTag
from areal_async.rpc.messages import (
    Arrived,
    Drain,
    Heartbeat,
    HeartbeatAck,
    Lease,
    LeasedGroup,
    Leases,
    PutAck,
    Refusal,
    Release,
    StoredGroup,
)
from areal_async.rpc.schema import Ok
from replay_buffer.ledger.abandoned import counted_as
from replay_buffer.ledger.admission import Demand, allowed, capacity, room
from replay_buffer.ledger.group_policy import DRAINED, end_lease, end_unfinished
from replay_buffer.ledger.index import Index, due_ms
from replay_buffer.ledger.pacing import later, start
from replay_buffer.ledger.records import (
    NO_VERSION,
    EpisodeRecord,
    EpisodeState,
    GroupRecord,
    GroupState,
    LeaseRecord,
    Pace,
    Versions,
    accepts,
    undecided,
)
from replay_buffer.ledger.scoring import end_claim
from replay_buffer.ledger.transaction import (
    Decision,
    Transaction,
    counted,
    take_back,
    try_failed,
    try_succeeded,
)

MAX_DRAINING = 1024
"""Most names of draining workers to keep. Without a limit, workers that keep changing their names would fill
Redis."""
FRESH_PART = 8
"""A renewal is not written if the last one is more recent than 1 / FRESH_PART of the lease's duration,
because workers also send a heartbeat at every new version."""


def demand_of(index: Index, policy: str) -> Demand:
    """Return the inputs of the admission formula for a policy."""
    rules, mine = index.rules.consumers[policy], index.consumers[policy]
    v_train = whole = index.consumer(policy).v_train
    while mine.batched.get(whole, 0) >= rules.batch_groups:
        whole += 1
    return Demand(
        policy=policy,
        max_staleness=rules.max_staleness,
        batch_groups=rules.batch_groups,
        steps=rules.steps,
        v_train=v_train,
        outstanding=mine.outstanding,
        pace=pace_of(index, policy),
        batched=mine.batched_new,
        whole_batches=whole - v_train,
    )


def is_done(index: Index, policy: str) -> bool:
    """Return whether the policy has trained all its steps."""
    return index.consumer(policy).v_train >= index.rules.consumers[policy].steps


def pace_of(index: Index, policy: str) -> Pace | None:
    """Return the pace of generation ahead of the policy's trainer, or None if `buffer.pacing` is `full`."""
    rules = index.rules.consumers[policy]
    if index.rules.pacing == "full":
        return None
    return index.consumer(policy).pace or Pace(start(rules.batch_groups, rules.max_staleness))


def space(index: Index) -> tuple[int, float, str]:
    """Return how many new groups fit into the buffer, how many bytes are left for these groups, and the
    reason if one of the two is 0. While the buffer is full, generation waits. Generated episodes are never
    refused.
    """
    rules, waiting = index.rules, index.group_counts[GroupState.TRAINED]
    for_checkpoint = f"; {waiting} of its groups wait for a checkpoint" if waiting else ""
    if (groups := rules.max_groups - len(index.groups)) <= 0:
        full = f"the buffer holds {len(index.groups)} groups (buffer.max_groups {rules.max_groups})"
        return 0, 0.0, full + for_checkpoint
    held = index.payload_bytes + index.media_bytes
    expected = held + index.generating * index.mean_episode_bytes
    if (size_bytes := rules.max_bytes - expected) <= 0:
        full = f"the buffer holds or expects buffer.max_bytes ({rules.max_bytes})"
        return groups, 0.0, full + for_checkpoint
    return groups, size_bytes, ""


def lease(index: Index, message: Lease, now_ms: int) -> Decision:
    """Grant up to `capacity` groups: queued groups first, then new ones from the cursor. A group takes a
    place of every policy that trains it. It is granted only to a worker that serves all these policies."""
    if (why := index.meta.draining.get(message.worker)) is not None:
        return Decision(Leases([], f"this worker drains and is leased nothing more: {why}", drain=True))
    if index.meta.failed:
        return Decision(Leases([], f"the job is to end: {index.meta.failed}"))
    serving = {tag.policy: tag for tag in message.serving}
    places: dict[str, int] = {}
    reasons = []
    for policy in index.consumers:
        places[policy], why = _places(index, policy, serving.get(policy))
        reasons += [why] if why else []
    tx = Transaction(index, now_ms)
    _note_held_back(tx, message, serving)
    if not any(places.values()):
        return tx.decide(Leases([], reasons[0]))
    new, bytes_left, full = space(index)
    granted: list[LeasedGroup] = []
    for group in _candidates(tx, places, new, bytes_left) if message.capacity > 0 else ():
        granted.append(_lease_out(tx, group, message.worker, serving))
        for policy in group.training:
            places[policy] -= 1
        if len(granted) == message.capacity:
            break
    reason = ""
    if not granted:
        exhausted = f"the task file is exhausted after {tx.meta.position} tasks"
        reason = full or next(iter(reasons), exhausted)
    return tx.decide(Leases(granted, reason))


def _places(index: Index, policy: str, serving: VersionTag | None) -> tuple[int, str]:
    """Return how many groups of `policy` a worker may lease at the version it serves, and the reason if the
    number is 0."""
    if serving is None:
        return 0, f"this worker serves no version of {policy}"
    running = index.consumer(policy)
    if not accepts(running.lineage, serving.epoch, serving.version, serving.version):
        return 0, (
            f"this worker serves version {serving.version} of trainer epoch {serving.epoch}, which the "
            f"trainer of epoch {running.epoch} has abandoned; it waits for an update"
        )
    return room(demand_of(index, policy), serving.version)


def _note_held_back(tx: Transaction, message: Lease, serving: Mapping[str, VersionTag]) -> None:
    """Record that pacing, and not the staleness limit, gave a worker fewer groups than it asked for."""
    for policy in tx.index.consumers:
        demand = demand_of(tx.index, policy)
        if demand.pace is None or demand.pace.held_back > demand.pace.supplied or policy not in serving:
            continue
        version = serving[policy].version
        most = demand.outstanding + message.capacity
        if capacity(demand, version) < min(most, allowed(demand, version)):
            tx.set_consumer(policy, pace=replace(demand.pace, held_back=demand.pace.supplied + 1))


def _candidates(
    tx: Transaction, places: Mapping[str, int], new: int, bytes_left: float
) -> Iterator[GroupRecord]:
    """Yield queued groups, then groups that this decision queues, if their policies have places.

    The limits on groups and bytes apply only to new groups. A queued group is already in the buffer, and
    finishing it makes room. The limit on bytes does not apply to a job's first groups, because the size of an
    episode is not known yet."""

    def has_room(policies: Iterable[str]) -> bool:
        return all(places[policy] > 0 for policy in policies)

    for group in map(tx.index.groups.__getitem__, tx.index.queue):
        if has_room(group.training):
            yield group
    group_bytes = tx.rules.group_size * tx.index.mean_episode_bytes
    for _ in range(new):
        if bytes_left <= 0:
            return
        bytes_left -= group_bytes
        if (place := tx.index.tasks.at(tx.meta.position)) is not None:
            # A policy that has trained all its steps still samples, but nobody waits for its groups.
            task = tx.index.tasks.task(*place)
            bytes_left -= sum(image.facts.size_bytes for image in task.images)
            using = tx.rules.policies_of(task)
            policies = tuple(policy for policy in using if not is_done(tx.index, policy))
            if not policies or not has_room(policies):
                return
            tx.set_meta(position=tx.meta.position + 1)
            yield tx.new_group(*place, attempt=0, policies=policies)
        elif (again := take_back(tx, has_room)) is not None:
            yield again
        else:
            return


def _lease_out(
    tx: Transaction, group: GroupRecord, worker: str, serving: Mapping[str, VersionTag]
) -> LeasedGroup:
    lease_id = tx.new_id("L")
    tx.move(
        group,
        GroupState.LEASED,
        leases=(*group.leases, lease_id),
        training={
            policy: replace(training, leased_version=serving[policy].version)
            for policy, training in group.training.items()
        },
        begun_ms=group.begun_ms or tx.now_ms,
    )
    tx.set_lease(lease_id, LeaseRecord(lease_id, group.group_id, worker, tx.now_ms + tx.rules.lease_ms))
    task = tx.index.tasks.task(group.row, group.pass_index)
    return LeasedGroup(
        group_id=group.group_id,
        lease_id=lease_id,
        attempt=group.attempt,
        task=task,
        group_size=len(group.episodes),
        missing=group.missing,
        seed=tx.rules.group_seed(task.task_id),
        deadline_ms=tx.rules.lease_ms,
    )


def heartbeat(index: Index, message: Heartbeat, now_ms: int) -> Decision:
    """Renew the worker's leases. Return the named leases that are lost."""
    tx = Transaction(index, now_ms)
    for unknown in _undelivered(index, message):
        end_lease(tx, index.groups[unknown.group_id], "undelivered")
    lost = []
    for lease_id in message.lease_ids:
        held = index.leases.get(lease_id)
        if held is None or held.worker != message.worker:
            lost.append(lease_id)
        elif now_ms + index.rules.lease_ms - held.deadline_ms > index.rules.lease_ms // FRESH_PART:
            tx.set_lease(lease_id, replace(held, deadline_ms=now_ms + index.rules.lease_ms))
    return tx.decide(HeartbeatAck(lost, message.worker in index.meta.draining))


def drain(index: Index, message: Drain, now_ms: int) -> Decision:
    """Grant the worker no more leases. It may finish its present leases or return them."""
    tx = Transaction(index, now_ms)
    if message.worker not in index.meta.draining:
        names = [*index.meta.draining.items(), (message.worker, message.reason or "it was told to")]
        tx.set_meta(draining=dict(names[-MAX_DRAINING:]))
        tx.count("worker_drains")
    return tx.decide(Ok())


def _undelivered(index: Index, message: Heartbeat) -> list[LeaseRecord]:
    """Return the leases that the ledger has for the worker but that the worker does not know. They were
    granted before this process loaded the ledger, and the reply with them was lost with the connection or the
    earlier process."""
    known = set(message.lease_ids)
    unknown = sorted(index.leases_of.get(message.worker, set()).difference(known))
    return [index.leases[lease_id] for lease_id in unknown if not index.gave(lease_id)]


def release(index: Index, message: Release, now_ms: int) -> Decision:
    """End a lease early. A lease that no longer exists is not an error."""
    reason = DRAINED if message.reason == DRAINED else "released"
    tx = Transaction(index, now_ms)
    held = index.leases.get(message.lease_id)
    if held is not None and held.worker == message.worker:
        group = index.groups[held.group_id]
        if message.failed:
            try_failed(tx, "generating", group, message.reason)
        end_lease(tx, group, reason)
    return tx.decide(Ok())


def arrived(index: Index, message: Arrived, now_ms: int) -> Decision:
    """Handle a process that restarts under its old name. Its leases and claims end, and it no longer
    drains."""
    tx = Transaction(index, now_ms)
    if message.name in index.meta.draining:
        tx.set_meta(draining={n: why for n, why in index.meta.draining.items() if n != message.name})
    for lease_id in sorted(index.leases_of.get(message.name, ())):
        end_lease(tx, index.groups[index.leases[lease_id].group_id], "worker_restarted")
    for claim_id in sorted(index.claims_of.get(message.name, ())):
        end_claim(tx, claim_id, "scorer_restarted")
    return tx.decide(Ok())


def expire(index: Index, now_ms: int) -> Decision:
    """End every lease, claim and group whose deadline has passed."""
    tx = Transaction(index, now_ms)
    for id_, (deadline_ms,) in index.deadlines.items():
        if deadline_ms > now_ms:
            break
        if (lease_ := index.leases.get(id_)) is not None:
            group = tx.group(lease_.group_id)
            # This decision may already have ended the group, by the group's own deadline.
            if group is not None and group.state == GroupState.LEASED:
                end_lease(tx, group, "lease_expired")
        elif id_ in index.claims:
            end_claim(tx, id_, "claim_expired")
        elif (group := tx.group(id_)) is not None and group.missing:
            end_unfinished(tx, group, "deadline")
    return tx.decide(Ok())


def extend(index: Index, outage_ms: int, now_ms: int) -> Decision:
    """Move every deadline by the length of an outage, because no lease or claim could be renewed during
    it."""
    tx = Transaction(index, now_ms)
    for lease_id, lease_ in index.leases.items():
        tx.set_lease(lease_id, replace(lease_, deadline_ms=lease_.deadline_ms + outage_ms))
    for claim_id, claim in index.claims.items():
        moved = replace(claim, deadline_ms=claim.deadline_ms + outage_ms, last_ms=claim.last_ms + outage_ms)
        tx.set_claim(claim_id, moved)
    for group in index.groups.values():
        if due_ms(index.rules, group) is not None:
            tx.set_group(group, begun_ms=group.begun_ms + outage_ms)
    for policy, consumer in index.meta.consumers.items():
        if (wait := consumer.overtaken) is not None:
            moved_wait = replace(wait, since_ms=wait.since_ms + outage_ms)
            tx.set_consumer(policy, overtaken=moved_wait)
        if consumer.pace is not None:
            tx.set_consumer(policy, pace=later(consumer.pace, outage_ms))
    return tx.decide(Ok())


def lose(index: Index, places: Sequence[tuple[str, int]], now_ms: int) -> Decision:
    """Drop groups whose bytes are missing in the store, for example after a power failure before they were on
    disk.

    `places` has (group id, sample) of the missing episodes. The groups' tasks are tried again. A group that
    is already trained stays. If a trainer needs the group's bytes again, the trainer reports that they are
    missing."""
    tx = Transaction(index, now_ms)
    tx.count("bytes_lost", len(places))
    for group in tx.groups(dict.fromkeys(group_id for group_id, _ in places)):
        tx.drop(group, "bytes_lost")
    return tx.decide(Ok())


# --- arrivals: finished episodes of a leased group ---


@dataclass(frozen=True)
class Arrival:
    """One episode of a put, as read from its own bytes. `problem` is the reason if it is not valid."""

    sample: int
    size_bytes: int = 0
    n_units: int = 0
    n_sampled: int = 0
    versions: Mapping[str, Versions] = field(default_factory=dict)  # Versions of the sampled units by policy
    problem: str = ""


@dataclass(frozen=True)
class GroupArrivals:
    """The episodes of one group in a put."""

    lease_id: str
    group_id: str
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True)
class StoreEpisodes:
    """A `PutEpisodes` message. The attachments are the blobs of all arrivals, in order."""

    groups: tuple[GroupArrivals, ...]


def store_episodes(index: Index, command: StoreEpisodes, now_ms: int) -> Decision:
    """Store the episodes of live leases, each sample once.

    A sample that the same lease stored before is acknowledged again, because the acknowledgement may have
    been lost. Other episodes from a lease that has ended are refused, because another worker may have the
    group. An episode that is too old for every later step, or from abandoned weights, ends its whole group.
    """
    tx = Transaction(index, now_ms)
    answers: list[StoredGroup] = []
    first = 0
    known: KnownProblems = {}
    for put in command.groups:
        answers.append(_store_group(tx, put, first, known))
        first += len(put.arrivals)
    return tx.decide(PutAck(answers, index.rules.durability))


KnownProblems = dict[tuple[str, int, int, int, bool], str]
"""Results of `_of_versions` in one decision, because most episodes of a put have equal versions."""


def _store_group(tx: Transaction, put: GroupArrivals, first: int, known: KnownProblems) -> StoredGroup:
    """Store the episodes of one lease. `first` is the attachment of the first of them."""
    index, group = tx.index, tx.group(put.group_id)
    if group is None or put.lease_id not in group.leases:
        return _refuse_all(tx, put, "lease_lost")
    lease_number = group.leases.index(put.lease_id)
    live = group.state == GroupState.LEASED and group.leases[-1] == put.lease_id
    stored: list[int] = []
    refused: list[Refusal] = []
    arrived: dict[int, EpisodeRecord] = {}
    for attachment, arrival in enumerate(put.arrivals, first):
        reason = _problem(index, group, arrival, lease_number, known, live=live)
        if reason in ("stale", "abandoned"):
            tx.drop(group, reason)
            return _refuse_all(tx, put, reason)
        if reason:
            tx.count(f"refused:{reason.split(':')[0]}")
            refused.append(_refusal(put, arrival, reason))
            continue
        stored.append(arrival.sample)
        if group.episodes[arrival.sample].state == EpisodeState.MISSING and arrival.sample not in arrived:
            arrived[arrival.sample] = _episode(arrival, lease_number)
            tx.keep_blob(group.group_id, arrival.sample, attachment)
    if arrived:
        tx.count("stored", len(arrived))
        try_succeeded(tx, "generating")
        group = tx.add_episodes(group, arrived)
        if not group.missing:
            tx.set_lease(put.lease_id, None)
            tx.move(group, GroupState.GENERATED)
    return StoredGroup(stored, refused)


def _problem(
    index: Index, group: GroupRecord, arrival: Arrival, lease_number: int, known: KnownProblems, *, live: bool
) -> str:
    """Return why an arrival cannot be stored, or an empty string if it can be stored or this lease has
    already stored it."""
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
    for policy, versions in arrival.versions.items():
        trained = policy in group.training
        key = policy, versions.oldest, versions.newest, versions.epoch, trained
        if (problem := known.get(key)) is None:
            problem = known[key] = _of_versions(index, policy, versions, trained=trained)
        if problem:
            return problem
    return ""


def _of_versions(index: Index, policy: str, held: Versions, *, trained: bool) -> str:
    """Return why an episode cannot be stored because of the versions `held` of a policy's units, or an empty
    string. If the policy does not train the group (`trained` is false), the policy's units are context and
    may be of any age."""
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
        known = counted_as(running.lineage, running.v_train, held.epoch, held.oldest)
        if not index.rules.abandoned_trains or known == NO_VERSION:
            return "abandoned"
    oldest = counted(index.rules, running, held)
    if (
        oldest < rules.lowest_version(index.next_step(policy))
        and oldest < rules.lowest_version(index.open_step(policy))
        and not index.rules.overtaken_masks
    ):
        return "stale"
    return ""


def _episode(arrival: Arrival, lease_number: int) -> EpisodeRecord:
    return EpisodeRecord(
        state=int(EpisodeState.STORED),
        size_bytes=arrival.size_bytes,
        n_units=arrival.n_units,
        n_sampled=arrival.n_sampled,
        versions=dict(arrival.versions),
        lease=lease_number,
    )


def _refuse_all(tx: Transaction, put: GroupArrivals, reason: str) -> StoredGroup:
    tx.count(f"refused:{reason}", len(put.arrivals))
    return StoredGroup([], [_refusal(put, arrival, reason) for arrival in put.arrivals])


def _refusal(put: GroupArrivals, arrival: Arrival, reason: str) -> Refusal:
    return Refusal(f"{put.group_id}.{arrival.sample}", reason)
