"""What is stored: the records of the ledger, as they lie in Redis and in a checkpoint.

Records are immutable and encoded as msgpack arrays. A later version may append fields with defaults; anything
else needs a new `SCHEMA`.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from replay_buffer.ledger.lineage import START, Lineage

SCHEMA = 1
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
    ABSENT = 4
    """Given up by the policy of groups: no bytes, no verdict, in no batch."""
    MASKED = 5
    """Given up by the policy of verdicts: its verdict was no score. No bytes, in no batch."""


GIVEN_UP = (EpisodeState.ABSENT, EpisodeState.MASKED)


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of what is stored."""


class StoredParts(Record, frozen=True, array_like=True, gc=False):
    """The rewards of parts of an episode. `units` are little-endian float32: what they are trained in, at
    less than half of what numbers of msgpack take."""

    segments: dict[int, float] = {}
    agents: dict[str, float] = {}
    units: bytes = b""


class Episode(Record, frozen=True, array_like=True, gc=False):
    """One sample of a group. Versions are over its sampled units, -1 without any."""

    state: int = EpisodeState.MISSING
    size_bytes: int = 0
    n_units: int = 0
    n_sampled: int = 0
    min_version: int = NO_VERSION
    max_version: int = NO_VERSION
    min_epoch: int = 0
    lease: int = 0
    """Which of the group's leases stored it."""
    tries: int = 0
    """Verdicts so far that were no score."""
    claim_id: str = ""
    """The claim it is in, or that its score came from."""
    reward: float = 0.0
    components: dict[str, float] | None = None
    parts: StoredParts | None = None
    waits_ms: int = 0
    """Since when it waits for its score: it was stored then, or had its last verdict that was none."""
    no_score: str = ""
    """Kind of its last verdict that was no score; empty when there was none."""

    @property
    def is_held(self) -> bool:
        """Whether there are bytes of it."""
        return EpisodeState.MISSING < self.state < EpisodeState.ABSENT


MISSING = Episode()
ABSENT = Episode(state=int(EpisodeState.ABSENT))


class Group(Record, frozen=True, array_like=True, gc=False):
    """The episodes of one attempt at one task. The record of a COMMITTED or DROPPED group is deleted."""

    group_id: str
    seq: int
    """Order in which groups came into being."""
    row: int
    pass_index: int
    attempt: int
    state: int
    episodes: tuple[Episode, ...]
    since_ms: int
    """When it entered `state`."""
    leases: tuple[str, ...] = ()
    """Ids of all leases it had; the last one is live iff the state is LEASED."""
    leased_version: int = NO_VERSION
    """What the worker of the last lease served when it leased: while that is live, no version in flight is
    older."""
    min_version: int = NO_VERSION
    size_bytes: int = 0
    step: int = -1
    """The step it is batched for or was trained in last."""
    steps: tuple[int, ...] = ()
    """The steps it was trained in so far, on the trainer's present lineage."""
    begun_ms: int = 0
    """When it was first leased, moved on by outages: what its deadline and its age count from. 0 before."""
    handed_over: int = 0
    """Of `leases`, those that a worker handed over as it stopped."""

    @property
    def judged(self) -> bool:
        """Whether every sample has its score or was given up."""
        return all(episode.state >= EpisodeState.VERDICT for episode in self.episodes)

    @property
    def missing(self) -> list[int]:
        return [i for i, episode in enumerate(self.episodes) if episode.state == EpisodeState.MISSING]

    def count(self, state: EpisodeState) -> int:
        return sum(episode.state == state for episode in self.episodes)


class Lease(Record, frozen=True, array_like=True, gc=False):
    lease_id: str
    group_id: str
    worker: str
    deadline_ms: int


class Claim(Record, frozen=True, array_like=True, gc=False):
    claim_id: str
    group_id: str
    scorer: str
    deadline_ms: int
    """Moved on by every sign of life of the scorer, up to `last_ms`."""
    last_ms: int


class BatchPlan(Record, frozen=True, array_like=True, gc=False):
    """The groups of a step, in order. Kept until a checkpoint covers it: the redo log."""

    step: int
    epoch: int
    """The trainer that was given it last."""
    group_ids: tuple[str, ...]


class OvertakenWait(Record, frozen=True, array_like=True, gc=False):
    step: int
    since_ms: int


class NoScores(Record, frozen=True, array_like=True, gc=False):
    """Verdicts of one kind that were no score: how many, and the newest."""

    count: int
    message: str
    episode_id: str
    at_ms: int


class Streak(Record, frozen=True, array_like=True, gc=False):
    """Tries of one kind that failed since the last that succeeded (`faults.py`)."""

    succeeded: bool = False
    """Whether one has succeeded since the job was started, or resumed after it had failed."""
    count: int = 0
    since_ms: int = 0
    """When the first of them failed."""
    tasks: tuple[tuple[int, int], ...] = ()
    """(row, pass) of the first few different tasks that they met."""
    given_up: tuple[tuple[int, int, int], ...] = ()
    """(row, pass, attempt) of groups dropped for it meanwhile."""
    taken_back: tuple[tuple[int, int, int], ...] = ()
    """(row, pass, attempt) of those of them that were tried once more, as they were given up first."""


class Meta(Record, frozen=True, array_like=True, gc=False):
    """The figures of the job that belong to no group."""

    ledger_id: str
    """Drawn at random when the ledger was made: tells a ledger's own copy from another's."""
    dataset_hash: str
    schema: int = SCHEMA
    position: int = 0
    """The cursor: tasks taken from the task order so far."""
    seq: int = 0
    ids: int = 0
    """Lease and claim ids given out so far."""
    epoch: int = 0
    """The trainer's; 0 before the first."""
    trainer: str = ""
    v_train: int = 0
    """Committed steps."""
    checkpoint: int = 0
    """Steps covered by the newest checkpoint on disk."""
    lineage: Lineage = START
    overtaken: OvertakenWait | None = None
    episodes_trained: int = 0
    """Episodes in committed steps; one that was in two of them counts twice."""
    episodes_dropped: int = 0
    max_staleness_seen: int = 0
    counts: dict[str, int] = {}
    """Transitions so far, by reason."""
    draining: dict[str, str] = {}
    """Workers that are leased nothing more, and why."""
    no_scores: dict[str, NoScores] = {}
    """By kind, the one heard of last at the end; of the kinds that came, the newest few."""
    failed: str = ""
    """Why the job is to end, by `fail_job` or `faults.py`; forgotten when a buffer starts: the job was
    resumed."""
    generating: Streak = Streak()
    scoring: Streak = Streak()
