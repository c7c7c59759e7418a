"""Records of the ledger, as Redis and a checkpoint store them.

Each trained policy is a consumer of the same groups. All policies share a group's state up to SCORED. After
that, each policy has its own state (`Training`).

Records are immutable and encoded as msgpack arrays. A later version may append fields with defaults. Any
other change needs a new `SCHEMA`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec

SCHEMA = 5
NO_VERSION = -1


class GroupState(IntEnum):
    QUEUED = 0
    LEASED = 1
    GENERATED = 2
    SCORED = 3
    BATCHED = 4
    TRAINED = 5
    COMMITTED = 6
    DROPPED = 7


class EpisodeState(IntEnum):
    MISSING = 0
    STORED = 1
    CLAIMED = 2
    VERDICT = 3
    ABSENT = 4  # Given up by the policy for groups: no bytes, no verdict, in no batch
    MASKED = 5  # Given up by the policy for verdicts, after a verdict without a score: no bytes, in no batch


GIVEN_UP = (EpisodeState.ABSENT, EpisodeState.MASKED)


class LedgerRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the stored records."""


class StoredParts(LedgerRecord, frozen=True, array_like=True, gc=False):
    """Rewards of parts of an episode. `units` are little-endian float32, as in training. Such bytes take less
    than half the space of msgpack numbers."""

    segments: dict[int, float] = {}
    agents: dict[str, float] = {}
    units: bytes = b""


class Versions(LedgerRecord, frozen=True, array_like=True, gc=False):
    """Weight versions of one policy that sampled an episode's units."""

    oldest: int
    newest: int
    epoch: int  # The smallest trainer epoch of these versions
    rows: bytes = b""  # Sizes of the training rows by version: `trajectory.row_profile`


class EpisodeRecord(LedgerRecord, frozen=True, array_like=True, gc=False):
    """One sample of a group."""

    state: int = EpisodeState.MISSING
    size_bytes: int = 0
    n_units: int = 0
    n_sampled: int = 0
    versions: dict[str, Versions] = {}  # By policy, without the policies that sampled no unit
    lease: int = 0  # Index in the group's `leases` of the lease that stored it
    tries: int = 0  # Number of verdicts without a score so far
    claim_id: str = ""  # The present claim, or the claim that returned the score
    reward: float = 0.0
    components: dict[str, float] | None = None
    parts: StoredParts | None = None
    no_score: str = ""  # Kind of the last verdict without a score, or empty

    @property
    def is_held(self) -> bool:
        """Whether the ledger holds the episode's bytes."""
        return EpisodeState.MISSING < self.state < EpisodeState.ABSENT


MISSING = EpisodeRecord()
ABSENT = EpisodeRecord(state=int(EpisodeState.ABSENT))


class Training(LedgerRecord, frozen=True, array_like=True, gc=False):
    """Progress of one policy's trainer with a group."""

    state: int = GroupState.SCORED
    """State of the group for this trainer: SCORED until a batch takes the group (also before another use),
    then BATCHED, TRAINED, and finally COMMITTED or DROPPED. The value has no meaning before the group itself
    is SCORED."""
    min_version: int = NO_VERSION  # The oldest version of the policy in the group's episodes
    leased_version: int = NO_VERSION
    """Version that the worker of the last lease served when the lease was granted. While the lease is live,
    no version in flight is older."""
    step: int = -1  # The step of its present batch, or the last step that trained it
    steps: tuple[int, ...] = ()  # The steps so far that trained it, on the trainer's present lineage

    @property
    def has_begun(self) -> bool:
        """Whether a batch has taken the group, or the group has ended for this policy."""
        return self.state != GroupState.SCORED or bool(self.steps)

    @property
    def has_ended(self) -> bool:
        """Whether this policy no longer needs the group."""
        return self.state >= GroupState.COMMITTED


class GroupRecord(LedgerRecord, frozen=True, array_like=True, gc=False):
    """One attempt at one task, with its episodes. The record is deleted once the group has ended for every
    policy that trains it."""

    group_id: str
    seq: int  # Order in which groups were created
    row: int
    pass_index: int
    attempt: int
    state: int  # QUEUED, LEASED, GENERATED or SCORED; `training` has the later states
    episodes: tuple[EpisodeRecord, ...]
    since_ms: int  # Time when the group, or one of its trainings, entered its state
    training: dict[str, Training]  # By policy that trains the group
    leases: tuple[str, ...] = ()  # Ids of all its leases so far; the last is live iff the state is LEASED
    size_bytes: int = 0
    begun_ms: int = 0
    """Time of the first lease, from which the group's deadline counts. An outage moves it forward. The value
    is 0 before the first lease."""
    handed_over: int = 0  # Number of `leases` that a worker returned when it stopped

    def state_for(self, policy: str) -> int:
        """Return the group's `GroupState` for the trainer of `policy`. That policy must train the group."""
        return self.state if self.state < GroupState.SCORED else self.training[policy].state

    @property
    def least_state(self) -> int:
        """The earliest `GroupState` of the group among the policies that train it."""
        if self.state < GroupState.SCORED:
            return self.state
        return min(training.state for training in self.training.values())

    @property
    def has_begun(self) -> bool:
        """Whether a policy has taken the group into a batch. From then on, the group may end for one policy
        alone."""
        return self.state == GroupState.SCORED and any(t.has_begun for t in self.training.values())

    @property
    def judged(self) -> bool:
        """Whether every sample has a score or was given up."""
        return all(episode.state >= EpisodeState.VERDICT for episode in self.episodes)

    @property
    def held(self) -> list[int]:
        """The samples whose bytes are stored."""
        return [sample for sample, episode in enumerate(self.episodes) if episode.is_held]

    @property
    def missing(self) -> list[int]:
        return [i for i, episode in enumerate(self.episodes) if episode.state == EpisodeState.MISSING]

    def count(self, state: EpisodeState) -> int:
        return sum(episode.state == state for episode in self.episodes)

    def oldest_version(self, policy: str) -> int:
        """Return the oldest version of `policy` in the group, or -1. While the group is leased, versions that
        may still arrive count too."""
        held = self.training[policy].min_version
        if self.state != GroupState.LEASED:
            return held
        leased = self.training[policy].leased_version
        return leased if held == NO_VERSION else min(held, leased)


class LeaseRecord(LedgerRecord, frozen=True, array_like=True, gc=False):
    lease_id: str
    group_id: str
    worker: str
    deadline_ms: int


class ClaimRecord(LedgerRecord, frozen=True, array_like=True, gc=False):
    claim_id: str
    group_id: str
    scorer: str
    deadline_ms: int  # Every heartbeat of the scorer moves it forward, up to `last_ms`
    last_ms: int


class BatchPlan(LedgerRecord, frozen=True, array_like=True, gc=False):
    """Groups in the batch of a policy's step, in order. The plans form the redo log: each is kept until a
    checkpoint covers its step."""

    policy: str
    step: int
    epoch: int  # Epoch of the trainer that got the plan last
    group_ids: tuple[str, ...]


# --- Which snapshots are on the lineage of a trainer.
#
# A trainer that resumes from a checkpoint at version `c` starts a new epoch. Snapshots of its predecessor up
# to `c` stay valid. A later snapshot of the predecessor stays valid only if the new epoch publishes the same
# bits again. All other snapshots are abandoned: their units are not trained, or count as older than they are
# (`counted_as` in `abandoned.py`). Only an episode's oldest epoch and its version range decide whether it is
# on the lineage. For an episode that spans a restart, this may drop valid units, but it never accepts
# abandoned units.


class Span(msgspec.Struct, frozen=True, array_like=True):
    """The versions `first` to `last` that epoch `epoch` published. `last` is None for the running epoch."""

    epoch: int
    first: int
    last: int | None = None


Lineage = tuple[Span, ...]

START: Lineage = (Span(0, 0),)  # Before the first trainer: version 0 is the job's initial model


def accepts(lineage: Lineage, min_epoch: int, min_version: int, max_version: int) -> bool:
    """Return whether all units of an episode were sampled from weights on the lineage. An episode without
    sampled units (versions -1) is always accepted."""
    if max_version < 0:
        return True
    for span in lineage:
        if span.epoch == min_epoch:
            return span.first <= min_version and (span.last is None or max_version <= span.last)
    return False


def reopened(lineage: Lineage, epoch: int, version: int) -> Lineage:
    """Return the lineage after a trainer of a new epoch starts from the weights of `version`."""
    held = tuple(
        Span(span.epoch, span.first, version if span.last is None else min(span.last, version))
        for span in lineage
        if span.first <= version
    )
    return (*held, Span(epoch, version))


def continued(lineage: Lineage, step: int, same_as: Sequence[int]) -> Lineage:
    """Return the lineage after the running epoch has published `step + 1`. The epochs in `same_as` published
    the same weights under that version, so their versions up to it stay valid. An epoch that has left the
    lineage never returns to it."""
    return tuple(
        Span(span.epoch, span.first, step + 1) if span.last == step and span.epoch in same_as else span
        for span in lineage
    )


def undecided(lineage: Lineage, step: int, min_epoch: int, max_version: int) -> bool:
    """Return whether later steps decide if an episode is on the lineage. `step` is the newest version of the
    running epoch. The episode is undecided if an earlier epoch, which published the same weights up to
    `step`, sampled units of it at a newer version."""
    return max_version > step and any(span.epoch == min_epoch and span.last == step for span in lineage)


def pruned(lineage: Lineage, oldest: int) -> Lineage:
    """Return `lineage` without spans whose versions are all older than `oldest`."""
    return tuple(span for span in lineage if span.last is None or span.last >= oldest)


# --- the job ---


class OvertakenWait(LedgerRecord, frozen=True, array_like=True, gc=False):
    step: int
    since_ms: int


class NoScores(LedgerRecord, frozen=True, array_like=True, gc=False):
    """Count of the verdicts of one kind that have no score, and the newest of them."""

    count: int
    message: str
    episode_id: str
    at_ms: int


class Pace(LedgerRecord, frozen=True, array_like=True, gc=False):
    """Lead of generation over a trainer, in steps, and the measurements behind it (`pacing.py`)."""

    ahead: float  # Groups beyond the groups that the trainer works on
    waits_for: int = -1  # Step for which the trainer found too few scored groups
    since_ms: int = 0  # Time of that request
    supplied: int = -1  # Last step with enough groups; -1 before a trainer's first step
    supplied_ms: int = 0  # Time when they were enough
    held_back: int = -1  # Last step before whose batch a worker asked for more than the pace allowed
    spares: tuple[int, ...] = ()  # Scored groups beyond the batch, at the last steps that did not wait
    lately: float = 0.0  # Running mean, from 0, of the wait for a step's groups, in steps
    step_ms: float = 0.0  # Running mean of a step without its wait
    lead_ms: float = 0.0  # Running mean from a group's first lease to its last verdict
    waited: float = 0.0  # Running mean of the share of time that the trainer waited for groups


class Attempt(LedgerRecord, frozen=True, array_like=True, gc=False):
    """A dropped group whose task may be tried again."""

    row: int
    pass_index: int
    attempt: int
    policies: tuple[str, ...] = ()  # The policies of the group; empty for all that train the task

    def is_for_the_same(self, other: Attempt) -> bool:
        """Return whether both are attempts at the same task for the same policies."""
        return (self.row, self.pass_index, self.policies) == (other.row, other.pass_index, other.policies)


class Streak(LedgerRecord, frozen=True, array_like=True, gc=False):
    """Consecutive failed leases, failed verdicts, or answers at fault, since the last success."""

    succeeded: bool = False
    """Whether a try has succeeded since the job was started, or resumed after a failure."""
    count: int = 0
    since_ms: int = 0  # Time of the first failure
    tasks: tuple[tuple[int, int], ...] = ()  # (row, pass) of the first few different tasks that failed
    given_up: tuple[Attempt, ...] = ()  # Groups dropped because of these failures
    taken_back: tuple[Attempt, ...] = ()
    """Tasks that were given up and got another try during the streak, each by its first given-up attempt."""


class Consumer(LedgerRecord, frozen=True, array_like=True, gc=False):
    """State of a trained policy in the ledger: its committed steps, its trainer, and its valid weights."""

    epoch: int = 0  # Epoch of its trainer; 0 before the first trainer
    trainer: str = ""
    v_train: int = 0  # Committed steps
    checkpoint: int = 0  # Steps covered by its newest checkpoint on disk
    lineage: Lineage = START
    overtaken: OvertakenWait | None = None
    episodes_trained: int = 0  # Episodes in committed steps; an episode in two steps counts twice
    max_staleness_seen: int = 0
    pace: Pace | None = None


class LedgerMeta(LedgerRecord, frozen=True, array_like=True, gc=False):
    """Figures of the job that belong to no group."""

    ledger_id: str  # Random, set at creation: tells copies of this ledger from other ledgers
    dataset_hash: str
    schema: int = SCHEMA
    position: int = 0  # The cursor: tasks taken from the task order so far
    seq: int = 0
    ids: int = 0  # Number of lease and claim ids issued so far
    consumers: dict[str, Consumer] = {}  # By policy; a policy without any activity may be missing
    episodes_dropped: int = 0
    counts: dict[str, int] = {}  # Transitions so far, by reason
    draining: dict[str, str] = {}  # Workers that get no more leases, and why
    no_scores: dict[str, NoScores] = {}
    """The newest verdict of each kind without a score, ordered by time with the newest last. Only the newest
    few kinds are kept."""
    failed: str = ""
    """Reason to end the job, set by the action `fail_job` or by `transaction.py`. A starting buffer clears
    it, because the job has been resumed."""
    generating: Streak = Streak()
    scoring: Streak = Streak()
    answering: Streak = Streak()

    def consumer(self, policy: str) -> Consumer:
        return self.consumers.get(policy, NEW)


NEW = Consumer()  # A consumer before its first trainer
