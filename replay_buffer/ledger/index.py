"""The ledger in memory: the records in Redis, and figures derived from them.

Only `apply` changes an index. The figures depend on the present records alone. An index built from the
records in Redis is therefore equal to one that applied every change in turn.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from replay_buffer.ledger.records import (
    GIVEN_UP,
    NO_VERSION,
    BatchPlan,
    ClaimRecord,
    Consumer,
    EpisodeState,
    GroupRecord,
    GroupState,
    LeaseRecord,
    LedgerMeta,
)
from replay_buffer.ledger.rules import Rules, Tasks
from replay_buffer.ledger.sampling import Key, rank

Edge = Literal["lease", "claim", "batch"]
"""Events that a client can wait for: room for a lease, an episode to score, a batch to train."""

UNGENERATED = (GroupState.QUEUED, GroupState.LEASED)
SCORABLE = (GroupState.QUEUED, GroupState.LEASED, GroupState.GENERATED)


BatchKey = tuple[str, int]
"""(policy, step)"""


@dataclass
class WriteSet:
    """Records to write in one atomic step. None as a value deletes the record."""

    meta: LedgerMeta
    groups: dict[str, GroupRecord | None] = field(default_factory=dict)
    leases: dict[str, LeaseRecord | None] = field(default_factory=dict)
    claims: dict[str, ClaimRecord | None] = field(default_factory=dict)
    batches: dict[BatchKey, BatchPlan | None] = field(default_factory=dict)
    blobs: dict[str, dict[int, int]] = field(default_factory=dict)
    """Bytes to store: group id → sample → index of its blob among the message's attachments."""
    freed: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    """Bytes to free: group id → samples, or None for all samples."""


@dataclass
class LedgerRecords:
    """All records of a ledger, as loaded."""

    meta: LedgerMeta
    groups: Mapping[str, GroupRecord] = field(default_factory=dict)
    leases: Mapping[str, LeaseRecord] = field(default_factory=dict)
    claims: Mapping[str, ClaimRecord] = field(default_factory=dict)
    batches: Mapping[BatchKey, BatchPlan] = field(default_factory=dict)


class Index:
    """Records of the ledger in memory, with figures derived from them. `nonce` makes the lease and claim ids
    of this process unique."""

    def __init__(
        self, rules: Rules, tasks: Tasks, records: LedgerRecords, *, nonce: str, revision: int = 0
    ) -> None:
        self.rules = rules
        self.tasks = tasks
        self.nonce = nonce
        self._scores_groups = rules.scores_groups
        self.revision = revision
        self.meta = records.meta
        self.groups: dict[str, GroupRecord] = {}
        self.leases: dict[str, LeaseRecord] = {}
        self.claims: dict[str, ClaimRecord] = {}
        self.batches: dict[BatchKey, BatchPlan] = {}
        self.consumers = {policy: ConsumerIndex(rules, policy) for policy in rules.consumers}
        self.queue = SortedIndex()  # QUEUED groups, oldest first
        self.claimable = SortedIndex()
        """Groups with an episode to claim, oldest version first. An episode can be claimed when it is STORED.
        If its group is scored as one, the group must be GENERATED too."""
        self.deadlines = SortedIndex()
        """Leases, claims and groups with a deadline or an age limit, earliest first."""
        self.group_counts = [0] * len(GroupState)
        """Number of groups by their earliest state among their policies."""
        self.episode_counts = [0] * len(EpisodeState)
        self.payload_bytes = 0
        self.media_bytes = 0
        """Bytes of the groups' media, which no record has. The coordinator sets it before each decision."""
        self.claimable_episodes = 0
        self.generating = 0  # Missing episodes of LEASED groups
        self.leases_of: dict[str, set[str]] = {}  # Worker → its leases
        self.claims_of: dict[str, set[str]] = {}  # Scorer → its claims
        self._counts: dict[str, list[int]] = {}  # Group → its episodes by state, as last counted
        self._together: dict[str, bool] = {}  # Group → whether it is scored as one; empty if no group is
        held = WriteSet(
            records.meta, {**records.groups}, {**records.leases}, {**records.claims}, {**records.batches}
        )
        self._write(held)

    def gave(self, id_: str) -> bool:
        """Return whether this index, and not one of an earlier process, issued the id of a lease or a
        claim."""
        return id_[1:].startswith(f"{self.nonce}.")

    # --- figures ---

    def consumer(self, policy: str) -> Consumer:
        """Return the record of a trained policy."""
        return self.meta.consumer(policy)

    def next_step(self, policy: str) -> int:
        """Return the first step of `policy` without a batch."""
        step = self.consumer(policy).v_train
        while (policy, step) in self.batches:
            step += 1
        return step

    def open_step(self, policy: str) -> int:
        """Return the first step of `policy` that can still take an unbatched group. This step has no batch,
        or its batch has lost groups to abandoned weights."""
        step = self.consumer(policy).v_train
        while plan := self.batches.get((policy, step)):
            if not all(id_ in self.groups and has_place(self.groups[id_], policy) for id_ in plan.group_ids):
                break
            step += 1
        return step

    def plans(self, policy: str, first: int = 0) -> dict[int, BatchPlan]:
        """Return the batches of `policy` from the step `first` on, by step, ascending."""
        keys = sorted(key for key in self.batches if key[0] == policy and key[1] >= first)
        return {key[1]: self.batches[key] for key in keys}

    @property
    def claimable_group(self) -> bool:
        """Return whether an unclaimed group exists to which no more episodes will be added."""
        return any(self.groups[group_id].state == GroupState.GENERATED for group_id in self.claimable)

    @property
    def mean_episode_bytes(self) -> float:
        counts = self.episode_counts
        stored = sum(counts) - counts[EpisodeState.MISSING] - sum(counts[state] for state in GIVEN_UP)
        return self.payload_bytes / stored if stored else 0.0

    @property
    def next_deadline_ms(self) -> int | None:
        """Return the time of the next deadline of a lease, claim or group."""
        key = self.deadlines.first_key()
        return int(key[0]) if key else None

    @property
    def overtaken_due_ms(self) -> int | None:
        """Return the earliest time at which a trainer's wait for overtaken groups ends, or None if no trainer
        waits."""
        waits = [consumer.overtaken for consumer in self.meta.consumers.values()]
        since_ms = min((wait.since_ms for wait in waits if wait is not None), default=None)
        return None if since_ms is None else since_ms + self.rules.overtaken_ms

    # --- changes ---

    def apply(self, writes: WriteSet) -> set[Edge]:
        """Apply `writes`. Return the events that the writes may have caused."""
        self.revision += 1
        before = self.meta
        self.meta = writes.meta
        edges = self._write(writes)
        if _clocks(before) != _clocks(self.meta):
            edges |= {"lease", "batch"}
        if before.failed != self.meta.failed:
            edges |= {"claim", "batch"}
        return edges

    def _write(self, writes: WriteSet) -> set[Edge]:
        edges: set[Edge] = set()
        for group_id, group in writes.groups.items():
            edges |= self._set_group(group_id, group)
        for lease_id, lease in writes.leases.items():
            self.deadlines.set(lease_id, None if lease is None else (lease.deadline_ms,))
            _belongs(self.leases_of, lease_id, self.leases.get(lease_id), lease, "worker")
            _put(self.leases, lease_id, lease)
        for claim_id, claim in writes.claims.items():
            self.deadlines.set(claim_id, None if claim is None else (claim.deadline_ms,))
            _belongs(self.claims_of, claim_id, self.claims.get(claim_id), claim, "scorer")
            _put(self.claims, claim_id, claim)
        for key, batch in writes.batches.items():
            _put(self.batches, key, batch)
        return edges

    def _set_group(self, group_id: str, group: GroupRecord | None) -> set[Edge]:
        old = self.groups.get(group_id)
        before = now = 0
        if old is not None:
            counts = self._counts.pop(group_id)
            before = self._claimable(old, counts)
            self._tally(old, counts, -1)
        if group is not None:
            counts = self._counts[group_id] = [0] * len(EpisodeState)
            for episode in group.episodes:
                counts[episode.state] += 1
            now = self._claimable(group, counts)
            self._tally(group, counts, +1)
        else:
            self._together.pop(group_id, None)
        self.claimable_episodes += now - before
        _put(self.groups, group_id, group)
        for consumer in self.consumers.values():
            consumer.replace(group_id, old, group)
        waits = group is not None and group.state == GroupState.QUEUED
        self.queue.set(group_id, (group.seq,) if waits and group is not None else None)
        self.claimable.set(group_id, (_oldest(group), group.seq) if now and group is not None else None)
        due = None if group is None else due_ms(self.rules, group)
        self.deadlines.set(group_id, None if due is None else (due,))
        return _edges(old, group, more_to_claim=now > before)

    def is_scored_as_one(self, group: GroupRecord) -> bool:
        """Return whether the reward of the group's task scores groups."""
        if not self._scores_groups:
            return False
        known = self._together.get(group.group_id)
        if known is None:
            task = self.tasks.task(group.row, group.pass_index)
            known = self._together[group.group_id] = self.rules.scope(task) == "group"
        return known

    def _claimable(self, group: GroupRecord, counts: list[int]) -> int:
        """Return the number of the group's episodes that can be claimed."""
        states = (GroupState.GENERATED,) if self.is_scored_as_one(group) else SCORABLE
        return counts[EpisodeState.STORED] if group.state in states else 0

    def _tally(self, group: GroupRecord, counts: list[int], sign: int) -> None:
        """Add `group` to the counts (+1) or remove it (-1)."""
        for state, count in enumerate(counts):
            self.episode_counts[state] += sign * count
        self.group_counts[group.least_state] += sign
        self.payload_bytes += sign * group.size_bytes
        if group.state == GroupState.LEASED:
            self.generating += sign * counts[EpisodeState.MISSING]


def _clocks(meta: LedgerMeta) -> list[tuple[str, int, int]]:
    return [(policy, consumer.epoch, consumer.v_train) for policy, consumer in meta.consumers.items()]


def has_place(group: GroupRecord, policy: str) -> bool:
    """Return whether a group in the batch of a later step will still be trained in it. It will not if the
    policy has dropped the group, or if the group is TRAINED and may not be used again."""
    return policy in group.training and group.state_for(policy) == GroupState.BATCHED


def _oldest(group: GroupRecord) -> int:
    """Return the smallest version of any policy in the group. Groups with small versions are claimed first,
    because they are probably needed first."""
    return min((training.min_version for training in group.training.values()), default=NO_VERSION)


def due_ms(rules: Rules, group: GroupRecord) -> int | None:
    """Return the group's own deadline while samples are missing, or None if it has none."""
    if rules.group_deadline_ms is None or not group.begun_ms or group.state not in UNGENERATED:
        return None
    return group.begun_ms + rules.group_deadline_ms


def _edges(old: GroupRecord | None, new: GroupRecord | None, *, more_to_claim: bool) -> set[Edge]:
    edges: set[Edge] = {"claim"} if more_to_claim else set()
    for policy in {*(old.training if old else ()), *(new.training if new else ())}:
        was = old.state_for(policy) if old is not None and policy in old.training else None
        now = new.state_for(policy) if new is not None and policy in new.training else None
        if was == now:
            continue
        if now in (None, GroupState.QUEUED, GroupState.TRAINED, GroupState.DROPPED):
            edges.add("lease")
        if now == GroupState.SCORED or was in (GroupState.LEASED, GroupState.GENERATED, GroupState.SCORED):
            edges.add("batch")
    return edges


def _belongs(table: dict[str, set[str]], id_: str, old: Any, new: Any, owner: str) -> None:
    """Update the sets of ids by the owner of their records."""
    if new is not None:
        table.setdefault(getattr(new, owner), set()).add(id_)
    elif old is not None:
        mine = table[getattr(old, owner)]
        mine.discard(id_)
        if not mine:
            del table[getattr(old, owner)]


def _put(table: dict[Any, Any], key: Any, value: Any) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


OUTSTANDING = (GroupState.LEASED, GroupState.GENERATED, GroupState.SCORED, GroupState.BATCHED)
"""States of groups that count in the admission formula: leased, and not yet TRAINED or DROPPED. A group that
was trained and is SCORED or BATCHED again does not count."""
UNBATCHED = (GroupState.QUEUED, GroupState.LEASED, GroupState.GENERATED, GroupState.SCORED)


class ConsumerIndex:
    """Figures for the trainer of `policy`, derived from the groups. Only `replace` changes them."""

    def __init__(self, rules: Rules, policy: str) -> None:
        self.policy = policy
        self._rules = rules
        self.ready = SortedIndex()  # SCORED, never trained groups, in the order of `buffer.sampling`
        self.reusable = SortedIndex()
        """SCORED groups that were trained before and may be trained again. The least used come first, then
        the order of `ready`."""
        self.aging = SortedIndex()
        """Unbatched groups with a known version, from their units or their lease, oldest version first."""
        self.group_counts = [0] * len(GroupState)
        self.reused = 0  # Trained groups that are SCORED or BATCHED again
        self.batched: dict[int, int] = {}  # Step → number of groups BATCHED for it
        self.batched_new: dict[int, int] = {}  # The same for groups that were never trained

    @property
    def outstanding(self) -> int:
        return sum(self.group_counts[state] for state in OUTSTANDING) - self.reused

    def replace(self, group_id: str, old: GroupRecord | None, new: GroupRecord | None) -> None:
        """Replace the record `old` of a group by `new` in all figures. None means no record."""
        for group, sign in ((old, -1), (new, +1)):
            if group is not None and self.policy in group.training:
                state = group.state_for(self.policy)
                self.group_counts[state] += sign
                training = group.training[self.policy]
                if training.steps and state in OUTSTANDING:
                    self.reused += sign
                if state == GroupState.BATCHED:
                    for counts in (self.batched, *(() if training.steps else (self.batched_new,))):
                        _put(counts, training.step, counts.get(training.step, 0) + sign or None)
        if new is None or self.policy not in new.training:
            for order in (self.ready, self.reusable, self.aging):
                order.set(group_id, None)
            return
        training, state = new.training[self.policy], new.state_for(self.policy)
        place = rank(self._rules, new, training.min_version) if state == GroupState.SCORED else None
        uses = len(training.steps)
        self.ready.set(group_id, place if not uses else None)
        self.reusable.set(group_id, (uses, *place) if uses and place is not None else None)
        oldest = new.oldest_version(self.policy)
        aging = state in UNBATCHED and oldest != NO_VERSION
        self.aging.set(group_id, (oldest, new.seq) if aging else None)


class SortedIndex:
    """Ids sorted by (key, id). A change costs a binary search and moves at most a few thousand pointers."""

    def __init__(self) -> None:
        self._key_of: dict[str, Key] = {}
        self._sorted: list[tuple[Key, str]] = []

    def set(self, id_: str, key: Key | None) -> None:
        """Set the key of `id_`. None removes the id."""
        old = self._key_of.get(id_)
        if old == key:
            return
        if old is not None:
            del self._sorted[bisect_left(self._sorted, (old, id_))]
            del self._key_of[id_]
        if key is not None:
            self._key_of[id_] = key
            insort(self._sorted, (key, id_))

    def first_key(self) -> Key | None:
        return self._sorted[0][0] if self._sorted else None

    def items(self) -> Iterator[tuple[str, Key]]:
        return ((id_, key) for key, id_ in self._sorted)

    def __iter__(self) -> Iterator[str]:
        return (id_ for _, id_ in self._sorted)

    def __len__(self) -> int:
        return len(self._sorted)
