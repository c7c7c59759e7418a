"""Requests of workers, scorers and trainers to the buffer."""

from __future__ import annotations

from typing import Literal

from areal_async.base.records import Task
from areal_async.base.verdicts import Parts, Verdict
from areal_async.base.versions import VersionTag
from areal_async.rpc.schema import Message, Ok, Record, Request

# --- rollout, reward -> buffer -----------------------------------------------------------------------


class Arrived(Request[Ok], frozen=True):
    """A new process called `name` starts. Leases and claims of an earlier process with this name end."""

    name: str


# --- rollout -> buffer -------------------------------------------------------------------------------


class LeasedGroup(Record, frozen=True):
    """The right to produce the `missing` samples of a group for `deadline_ms`, renewed by heartbeats.

    `seed` is the group's seed. Sample i of attempt a derives its own seed from (seed, i, a).
    """

    group_id: str
    lease_id: str
    attempt: int
    task: Task
    group_size: int
    missing: list[int]
    seed: int
    deadline_ms: int


class Leases(Message, frozen=True):
    """The granted groups. If there are none, `reason` says why the worker waits. `drain` is as in
    `HeartbeatAck`."""

    groups: list[LeasedGroup]
    reason: str = ""
    drain: bool = False


class Lease(Request[Leases], frozen=True):
    """Ask for up to `capacity` groups. Waits at most `wait_ms`.

    `serving` is the version of each of the worker's policies.
    """

    worker: str
    capacity: int
    serving: list[VersionTag]
    wait_ms: int = 0


class HeartbeatAck(Message, frozen=True):
    """`lost` are leases that the worker no longer holds. It must abort their episodes.

    With `drain` the worker gets no more leases. It must finish its leases or hand them back.
    """

    lost: list[str]
    drain: bool = False


class Heartbeat(Request[HeartbeatAck], frozen=True):
    """A sign of life with all leases of the worker in `lease_ids`.

    A lease that is not in `lease_ids` and was granted before the buffer's last restart never reached the
    worker, so the buffer ends this lease.
    """

    worker: str
    lease_ids: list[str]


class Drain(Request[Ok], frozen=True):
    """Grant worker `worker` no more leases, because it ends soon.

    This holds until a new process of that name sends `Arrived`. `reason` is a text for people.
    """

    worker: str
    reason: str = ""


class Release(Request[Ok], frozen=True):
    """Hand a lease back before its deadline. Stored samples stay, and the missing samples are queued again.

    The reason `drained` means that the worker stops as planned. It does not count as a failure of the task.
    """

    worker: str
    lease_id: str
    reason: str
    failed: bool = False
    """Whether `reason` means that the lease's own episodes failed, and not the engine."""


class Refusal(Record, frozen=True):
    """One refused item of a batch, with the reason."""

    item: str
    reason: str


Durability = Literal["memory", "everysec", "always"]


class StoredGroup(Record, frozen=True):
    """The samples of one group that are stored, and the refused ones."""

    stored: list[int]
    refused: list[Refusal] = []


class PutAck(Message, frozen=True):
    """The answer for each group of a put, in order. The stored samples survive the failures that the level
    `durability` covers."""

    groups: list[StoredGroup]
    durability: Durability


class GroupSamples(Record, frozen=True):
    """Finished episodes of one group."""

    lease_id: str
    group_id: str
    samples: list[int]
    routes: list[int] = []
    """Samples that have routes."""
    media: list[str] = []
    """Digests of media that this worker has not sent yet for the group, such as results of tools. The buffer
    has the images of the task itself."""


class PutEpisodes(Request[PutAck], frozen=True):
    """Finished episodes of some groups. For each group, the codec blobs of its `samples` are attached, and
    after them the routes of its `routes` and the bytes of its `media`."""

    groups: list[GroupSamples]


# --- reward -> buffer --------------------------------------------------------------------------------


class ClaimedEpisode(Record, frozen=True):
    """A stored episode to score. The attachment of the same index is its codec blob."""

    episode_id: str
    claim_id: str
    task: Task
    deadline_ms: int
    tries: int = 0
    scope: Literal["episode", "group"] = "episode"
    """The unit of judgement. `group` means that one call judges all episodes of a claim id, which are
    consecutive."""


class Claims(Message, frozen=True):
    items: list[ClaimedEpisode]


class Claim(Request[Claims], frozen=True):
    """Ask for episodes to score. `holds` are the claims on which the scorer works. A claim that is not in
    `holds` and was granted before the buffer's last restart never reached the scorer, so the buffer ends this
    claim. If `holds` is None, no claim ends.
    """

    scorer: str
    max_episodes: int
    wait_ms: int = 0
    holds: list[str] | None = None


class EpisodeVerdict(Record, frozen=True):
    episode_id: str
    claim_id: str
    verdict: Verdict
    elapsed_ms: float = 0.0
    """Duration of the call in milliseconds, without the wait for a scoring process."""


class VerdictAck(Message, frozen=True):
    refused: list[Refusal] = []


class PutVerdicts(Request[VerdictAck], frozen=True):
    scorer: str
    verdicts: list[EpisodeVerdict]


# --- trainer -> buffer -------------------------------------------------------------------------------


class TrainerOpened(Message, frozen=True):
    epoch: int
    step: int


class OpenTrainer(Request[TrainerOpened], frozen=True):
    """Become the only trainer of `policy` and exclude any earlier one.

    `step` is the step of the trainer's own state: 0, or the step of the restored checkpoint. The attachment
    is the checkpoint's copy of the ledger.

    The epoch numbers the trainer processes of a policy. The new epoch is greater than `after_epoch`, the last
    one recorded in the trainer's folder, which a buffer that lost its Redis does not know. `memory_epoch` is
    the epoch of the trainer that left the restored state in memory, or 0 for a state on disk. A state from
    memory comes without a copy of the ledger, and no group becomes COMMITTED. The buffer then refuses the
    request if its own ledger has lost the step or the epoch.
    """

    policy: str
    trainer: str
    step: int
    after_epoch: int = 0
    memory_epoch: int = 0


class BatchEpisode(Record, frozen=True):
    """One episode of a batch. `sample` is its index in the group.

    `n_sampled`, versions and rows describe the units that the batch's policy sampled.
    """

    episode_id: str
    sample: int
    n_units: int
    n_sampled: int
    min_version: int
    max_version: int
    reward: float
    components: dict[str, float] = {}
    parts: Parts | None = None
    rows: list[tuple[int, int, int]] = []
    """(tokens fed, units trained, tokens fed for images) of each training row, in order, or zeros for a row
    of masked units.

    Rows are assigned to ranks by these numbers before any row is fetched.
    """


class BatchGroup(Record, frozen=True):
    group_id: str
    task_id: str
    data_source: str
    episodes: list[BatchEpisode]
    uses: int = 0
    """Earlier steps that trained the group."""


class Batch(Message, frozen=True):
    """The manifest of a step: the trained episodes, in order. Their bytes are fetched by id."""

    policy: str
    epoch: int
    step: int
    max_staleness: int
    groups: list[BatchGroup]
    lowest_version: int = 0
    """Units of older versions are masked, so they are not trained."""


class Waiting(Message, frozen=True):
    """The answer if there is no batch yet. It names the starving edge, and `detail` explains it for
    people."""

    edge: str
    detail: str


class NextBatch(Request[Batch | Waiting], frozen=True):
    """Ask for the batch of `step`. Idempotent by (epoch, step). Waits at most `wait_ms`."""

    policy: str
    epoch: int
    step: int
    wait_ms: int = 0


class Fetched(Message, frozen=True):
    episode_ids: list[str]
    routes: list[str] = []
    """Episodes that have routes. The routes are attached after the blobs, in this order."""
    media: list[str] = []
    """Episodes that may have media. Their headers name the media, and `FetchMedia` returns them."""


class Fetch(Request[Fetched], frozen=True):
    """Ask for codec blobs by episode id. They are attached in the same order."""

    episode_ids: list[str]
    routes: bool = False
    """Whether to attach the routes of the episodes that have them."""


class Commit(Request[Ok], frozen=True):
    """Report that step `step` is trained and that the resulting snapshot `step + 1` is published. Idempotent
    by (epoch, step).

    `same_as` are earlier trainer epochs whose version `step + 1` had equal weights. Units sampled from those
    versions remain valid.
    """

    policy: str
    epoch: int
    step: int
    same_as: list[int] = []


class LedgerCopy(Message, frozen=True):
    """The ledger as bytes, in one attachment."""

    step: int


class TasksSeen(Message, frozen=True):
    tasks: list[Task]


class SeeTasks(Request[TasksSeen], frozen=True):
    """Ask for the tasks with these ids, read-only. Tasks that the buffer does not have are left out."""

    task_ids: list[str]


class ExportLedger(Request[LedgerCopy], frozen=True):
    """Ask for the ledger as of the last committed step, for the checkpoint."""

    policy: str
    epoch: int
    step: int


class Checkpointed(Request[Ok], frozen=True):
    """Report that the checkpoint after `step` steps is on disk.

    Groups that were trained before the checkpoint become COMMITTED, and their bytes are freed.
    """

    policy: str
    epoch: int
    step: int


# --- rollout, reward, trainer -> buffer --------------------------------------------------------------


class FetchedMedia(Message, frozen=True):
    """The media of `digests` are attached, in this order. `lost` are digests that the buffer does not have.
    Digests that are in neither list did not fit into the reply, and the client asks for them again. A reply
    names at least one of the requested digests."""

    digests: list[str]
    lost: list[str] = []


class FetchMedia(Request[FetchedMedia], frozen=True):
    """Ask for media, such as images, by digest. `groups` has the digests of each group. A digest of several
    groups is attached once."""

    groups: dict[str, list[str]]


# --- anyone -> buffer --------------------------------------------------------------------------------


class NoScore(Record, frozen=True):
    """Verdicts of one kind without a score.

    `kind` is `timeout`, `abstain`, or `error:` and the kind of the failure. The message and the episode are
    those of the newest such verdict.
    """

    kind: str
    count: int
    message: str
    episode_id: str
    age_ms: int


class PolicyStats(Record, frozen=True):
    """Figures of one trained policy: its committed steps and the terms of the admission formula."""

    v_train: int
    """Committed steps."""
    outstanding: int
    """Groups that are leased and not yet trained or dropped."""
    capacity: int
    """Largest number of outstanding groups if a worker with the newest version asks for a lease."""
    max_staleness_seen: int = 0
    episodes_trained: int = 0
    checkpoint: int = 0
    """Steps that the newest checkpoint covers."""
    trainer_epoch: int = 0
    batch_wait: str = ""
    """Reason why the next step waits, or empty if a batch is ready for it."""
    ahead: float = 0.0
    """Number of groups that may be outstanding besides the groups on which the trainer works."""
    pacing: str = ""
    """Reason for the value of `ahead`, or empty under `buffer.pacing: full`."""


class BufferStats(Message, frozen=True):
    """Counts by group state, reasons of every transition, and the figures of each policy.

    If a group has different states for different policies, the earliest of these states counts.
    """

    groups: dict[str, int]
    episodes: dict[str, int]
    reasons: dict[str, int]
    policies: dict[str, PolicyStats]
    payload_bytes: int
    redis_bytes: int
    queue_age_ms: int = 0
    episodes_dropped: int = 0
    tasks_taken: int = 0
    """Position in the order of tasks."""
    leases: int = 0
    claims: int = 0
    oldest_group: str = ""
    """The group that has been in its present state for the longest time (`queue_age_ms`), among groups that
    are not BATCHED yet."""
    lease_wait: str = ""
    """Reason why a worker with the newest version gets no lease now, or empty if it gets one."""
    no_scores: list[NoScore] = []
    """Verdicts without a score: for each kind, the newest verdict and the count."""
    failed: str = ""
    """Reason why the buffer ends the job (a verdict with `then: fail_job`, or nothing succeeds any more).
    Otherwise empty."""
    lost_writes: int = 0
    """Acknowledged writes that Redis has lost since the start of this buffer."""


class Stats(Request[BufferStats], frozen=True):
    pass
