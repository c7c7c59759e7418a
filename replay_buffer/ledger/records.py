"""The records of the ledger, as they lie in Redis and in a checkpoint.

Each trained policy is a consumer of the same groups: the way of a group up to SCORED is one, and from there
on each of its policies goes its own (`Training`).

Records are immutable and encoded as msgpack arrays. A later version may append fields with defaults; anything
else needs a new `SCHEMA`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec

SCHEMA = 4
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
    ABSENT = 4  # Given up by the policy of groups: no bytes, no verdict, in no batch
    MASKED = 5  # Given up by the policy of verdicts: its verdict was no score. No bytes, in no batch


GIVEN_UP = (EpisodeState.ABSENT, EpisodeState.MASKED)


class LedgerRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the stored records."""


class StoredParts(LedgerRecord, frozen=True, array_like=True, gc=False):
    """The rewards of parts of an episode. `units` are little-endian float32, the type used in training, which
    needs less than half the space of msgpack numbers."""

    segments: dict[int, float] = {}
    agents: dict[str, float] = {}
    units: bytes = b""


class Versions(LedgerRecord, frozen=True, array_like=True, gc=False):
    """The weights of one policy that an episode's sampled units are of."""

    oldest: int
    newest: int
    epoch: int  # The smallest trainer epoch among them
    rows: bytes = b""  # Sizes of its training rows by version: `trajectory.row_profile`


class EpisodeRecord(LedgerRecord, frozen=True, array_like=True, gc=False):
    """One sample of a group."""

    state: int = EpisodeState.MISSING
    size_bytes: int = 0
    n_units: int = 0
    n_sampled: int = 0
    versions: dict[str, Versions] = {}  # Its versions by policy; one that sampled no unit of it is missing
    lease: int = 0  # Which of the group's leases stored it
    tries: int = 0  # Verdicts so far that were no score
    claim_id: str = ""  # The claim it is in, or that its score came from
    reward: float = 0.0
    components: dict[str, float] | None = None
    parts: StoredParts | None = None
    no_score: str = ""  # Kind of its last verdict that was no score; empty when there was none

    @property
    def is_held(self) -> bool:
        """Whether there are bytes of it."""
        return EpisodeState.MISSING < self.state < EpisodeState.ABSENT


MISSING = EpisodeRecord()
ABSENT = EpisodeRecord(state=int(EpisodeState.ABSENT))


class Training(LedgerRecord, frozen=True, array_like=True, gc=False):
    """Progress of one policy's trainer with a group."""

    state: int = GroupState.SCORED
    """The state is SCORED until a batch takes it, or takes it again; then BATCHED, TRAINED, and at its end
    COMMITTED or DROPPED. It counts from the moment that the group itself is SCORED."""
    min_version: int = NO_VERSION  # The oldest version of the policy in the group's episodes
    leased_version: int = NO_VERSION
    """Version that the worker of the last lease served when it leased: while that is live, no version in
    flight is older."""
    step: int = -1  # The step it is batched for or was trained in last
    steps: tuple[int, ...] = ()  # The steps it was trained in so far, on the trainer's present lineage

    @property
    def has_begun(self) -> bool:
        """Whether a batch has taken the group, or it has ended for this policy."""
        return self.state != GroupState.SCORED or bool(self.steps)

    @property
    def has_ended(self) -> bool:
        """Whether this policy needs the group no more."""
        return self.state >= GroupState.COMMITTED


class GroupRecord(LedgerRecord, frozen=True, array_like=True, gc=False):
    """The episodes of one attempt at one task. The record is deleted when the group has ended for every
    policy that trains it."""

    group_id: str
    seq: int  # Order in which groups came into being
    row: int
    pass_index: int
    attempt: int
    state: int  # QUEUED, LEASED, GENERATED or SCORED; what comes after that is in `training`
    episodes: tuple[EpisodeRecord, ...]
    since_ms: int  # When it, or one of its trainings, entered its state
    training: dict[str, Training]  # Its trainings, by policy that trains it
    leases: tuple[str, ...] = ()  # Ids of all leases it had; the last one is live iff the state is LEASED
    size_bytes: int = 0
    begun_ms: int = 0
    """Time of the first lease, moved on by outages. The group's deadline counts from it. 0 before the first
    lease."""
    handed_over: int = 0  # Number of `leases` that a worker handed over as it stopped

    def state_for(self, policy: str) -> int:
        """Return its `GroupState` as the trainer of `policy` sees it. `policy` must be one of those that
        train the group."""
        return self.state if self.state < GroupState.SCORED else self.training[policy].state

    @property
    def least_state(self) -> int:
        """Return its `GroupState` as seen by the policy with the least progress on it."""
        if self.state < GroupState.SCORED:
            return self.state
        return min(training.state for training in self.training.values())

    @property
    def has_begun(self) -> bool:
        """Whether some policy has taken it into a batch: from then on it may end for one policy alone."""
        return self.state == GroupState.SCORED and any(t.has_begun for t in self.training.values())

    @property
    def judged(self) -> bool:
        """Whether every sample has its score or was given up."""
        return all(episode.state >= EpisodeState.VERDICT for episode in self.episodes)

    @property
    def missing(self) -> list[int]:
        return [i for i, episode in enumerate(self.episodes) if episode.state == EpisodeState.MISSING]

    def count(self, state: EpisodeState) -> int:
        return sum(episode.state == state for episode in self.episodes)

    def oldest_version(self, policy: str) -> int:
        """Return the oldest version of `policy` that the group has or, while it is leased, may still get; -1
        if there is none."""
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
    deadline_ms: int  # Moved on by every sign of life of the scorer, up to `last_ms`
    last_ms: int


class BatchPlan(LedgerRecord, frozen=True, array_like=True, gc=False):
    """The groups of a policy's step, in order. Kept until a checkpoint covers it: the redo log."""

    policy: str
    step: int
    epoch: int  # The trainer that was given it last
    group_ids: tuple[str, ...]


# --- Which snapshots are on the lineage of a trainer.
#
# A trainer that comes back from a checkpoint at version `c` starts a new epoch. What its predecessor
# published up to `c` is still true; of what it published after `c`, as much as the new epoch publishes
# again bit by bit. The rest is abandoned: units sampled under it are not trained, or count as older than they
# are (`counted_as` in `abandoned.py`). An episode is judged by its oldest epoch and its version range alone,
# which errs on the safe side for an episode that spans a restart.


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Epoch `epoch` published the versions `first` to `last`; `last` None: it is the running one."""

    epoch: int
    first: int
    last: int | None = None


Lineage = tuple[Span, ...]

START: Lineage = (Span(0, 0),)  # Before any trainer: version 0 is the model that the job starts from


def accepts(lineage: Lineage, min_epoch: int, min_version: int, max_version: int) -> bool:
    """Whether every unit of an episode was sampled from weights on the lineage. An episode without sampled
    units (versions -1) always is."""
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
    """Return the lineage after the running epoch has published `step + 1`. The epochs in `same_as` had
    published the same version. An abandoned epoch stays abandoned."""
    return tuple(
        Span(span.epoch, span.first, step + 1) if span.last == step and span.epoch in same_as else span
        for span in lineage
    )


def undecided(lineage: Lineage, step: int, min_epoch: int, max_version: int) -> bool:
    """Whether an episode with units beyond version `step`, the newest of the running epoch, is of an earlier
    epoch that this one has equalled so far: the steps to come will tell."""
    return max_version > step and any(span.epoch == min_epoch and span.last == step for span in lineage)


def pruned(lineage: Lineage, oldest: int) -> Lineage:
    """`lineage` without the spans that no unit of version `oldest` or newer can belong to."""
    return tuple(span for span in lineage if span.last is None or span.last >= oldest)


# --- the job ---


class OvertakenWait(LedgerRecord, frozen=True, array_like=True, gc=False):
    step: int
    since_ms: int


class NoScores(LedgerRecord, frozen=True, array_like=True, gc=False):
    """Verdicts of one kind that were no score: how many, and the newest."""

    count: int
    message: str
    episode_id: str
    at_ms: int


class Pace(LedgerRecord, frozen=True, array_like=True, gc=False):
    """Lead of generation over a trainer, in steps, and the figures that it was found from (`pacing.py`)."""

    ahead: float  # Groups beyond those that the trainer works on
    waits_for: int = -1  # The step for which there were too few scored groups when the trainer asked
    since_ms: int = 0  # When it did
    supplied: int = -1  # The last step for which there were enough; -1 before a trainer's first
    supplied_ms: int = 0  # When there were
    held_back: int = -1  # The last step before whose batch a worker asked for more than the pace gave
    spares: tuple[int, ...] = ()  # Scored groups beyond the batch, at the last steps that did not wait
    lately: float = 0.0  # Running means: how long the trainer waited for a step's groups, in steps; from 0,
    step_ms: float = 0.0  # a step without its wait,
    lead_ms: float = 0.0  # a group from its first lease to its last verdict,
    waited: float = 0.0  # the share of its time that the trainer waited for groups


class Attempt(LedgerRecord, frozen=True, array_like=True, gc=False):
    """A dropped group, with the facts that a new attempt at its task needs."""

    row: int
    pass_index: int
    attempt: int
    policies: tuple[str, ...] = ()  # Those that it was for; empty for all that train the task

    def is_for_the_same(self, other: Attempt) -> bool:
        """Whether both are attempts at one task for the same policies."""
        return (self.row, self.pass_index, self.policies) == (other.row, other.pass_index, other.policies)


class Streak(LedgerRecord, frozen=True, array_like=True, gc=False):
    """Tries of one kind that failed since the last that succeeded (`transaction.py`)."""

    succeeded: bool = False
    """Whether one has succeeded since the job was started, or resumed after it had failed."""
    count: int = 0
    since_ms: int = 0  # When the first of them failed
    tasks: tuple[tuple[int, int], ...] = ()  # (row, pass) of the first few different tasks that they met
    given_up: tuple[Attempt, ...] = ()  # Groups dropped for it meanwhile
    taken_back: tuple[Attempt, ...] = ()
    """Samples that were tried once more, as they were given up first."""


class Consumer(LedgerRecord, frozen=True, array_like=True, gc=False):
    """A trained policy as the ledger sees it: its clock, its trainer, and the weights that count."""

    epoch: int = 0  # Epoch of its trainer; 0 before the first
    trainer: str = ""
    v_train: int = 0  # Committed steps
    checkpoint: int = 0  # Steps covered by its newest checkpoint on disk
    lineage: Lineage = START
    overtaken: OvertakenWait | None = None
    episodes_trained: int = 0  # Episodes in committed steps; one that was in two of them counts twice
    max_staleness_seen: int = 0
    pace: Pace | None = None


class LedgerMeta(LedgerRecord, frozen=True, array_like=True, gc=False):
    """The figures of the job that belong to no group."""

    ledger_id: str  # Drawn at random when the ledger was made: tells a ledger's own copy from another's
    dataset_hash: str
    schema: int = SCHEMA
    position: int = 0  # The cursor: tasks taken from the task order so far
    seq: int = 0
    ids: int = 0  # Lease and claim ids given out so far
    consumers: dict[str, Consumer] = {}  # Records by policy; one that has done nothing yet may be missing
    episodes_dropped: int = 0
    counts: dict[str, int] = {}  # Transitions so far, by reason
    draining: dict[str, str] = {}  # Workers that are leased nothing more, and why
    no_scores: dict[str, NoScores] = {}
    """The newest of each kind, the one heard of last at the end; of the kinds that came, the newest few."""
    failed: str = ""
    """Why the job is to end, by `fail_job` or `transaction.py`; forgotten when a buffer starts: the job was
    resumed."""
    generating: Streak = Streak()
    scoring: Streak = Streak()
    answering: Streak = Streak()

    def consumer(self, policy: str) -> Consumer:
        return self.consumers.get(policy, NEW)


NEW = Consumer()  # A consumer before its first trainer
