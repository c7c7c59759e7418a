"""Requests of workers, scorers and trainers to the buffer."""

from __future__ import annotations

from typing import Literal

from areal_async.base.records import Task
from areal_async.base.verdicts import Parts, Verdict
from areal_async.base.versions import VersionTag
from areal_async.rpc.schema import Message, Ok, Record, Request

# --- rollout, reward -> buffer -----------------------------------------------------------------------


class Arrived(Request[Ok], frozen=True):
    """A process called `name` begins: what an earlier one of that name had leased or claimed is over."""

    name: str


# --- rollout -> buffer -------------------------------------------------------------------------------


class LeasedGroup(Record, frozen=True):
    """The right to produce the `missing` samples of a group until `deadline_ms` from now (renewed by
    heartbeats). `seed` is the group's; sample i of attempt a derives its own from (seed, i, a)."""

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
    """Ask for up to `capacity` groups for a worker that serves `serving`, a version of each of its policies;
    waits at most `wait_ms`."""

    worker: str
    capacity: int
    serving: list[VersionTag]
    wait_ms: int = 0


class HeartbeatAck(Message, frozen=True):
    """An answer to a heartbeat. `lost` has the leases that the worker no longer holds; it must abort their
    episodes. `drain` means that it gets no more leases and must finish its episodes or hand them back."""

    lost: list[str]
    drain: bool = False


class Heartbeat(Request[HeartbeatAck], frozen=True):
    """`lease_ids` are all that the worker holds: any other that it was granted before the buffer's last
    restart has never reached it, and ends."""

    worker: str
    lease_ids: list[str]


class Drain(Request[Ok], frozen=True):
    """The worker `worker` is to end, or about to, and gets no more leases. This holds until a new process of
    that name arrives. `reason` is for people."""

    worker: str
    reason: str = ""


class Release(Request[Ok], frozen=True):
    """Hand a lease back before its deadline. Stored samples stay; missing samples are queued again. The
    reason `drained` marks a worker that stops as planned, so the lease does not count against the task."""

    worker: str
    lease_id: str
    reason: str
    failed: bool = False
    """True if its episodes failed with `reason` by their own doing, not because of the engine."""


class Refusal(Record, frozen=True):
    """One item of a batch that was not taken, and why."""

    item: str
    reason: str


Durability = Literal["memory", "everysec", "always"]


class PutAck(Message, frozen=True):
    """`stored` samples survive any process death as far as tier `durability` goes."""

    stored: list[int]
    durability: Durability
    refused: list[Refusal] = []


class PutEpisodes(Request[PutAck], frozen=True):
    """Finished episodes of one group. Attachment i is the codec blob of sample `samples[i]`."""

    lease_id: str
    group_id: str
    samples: list[int]
    routes: list[int] = []
    """Samples whose routes are attachments too, behind the blobs, in this order."""

    @property
    def left_in_file(self) -> int:
        return len(self.routes)


# --- reward -> buffer --------------------------------------------------------------------------------


class ClaimedEpisode(Record, frozen=True):
    """A stored episode to score. Its codec blob is the attachment of the same index."""

    episode_id: str
    claim_id: str
    task: Task
    deadline_ms: int
    tries: int = 0
    scope: Literal["episode", "group"] = "episode"
    """`group`: all episodes of one claim id, which follow each other, are judged in one call."""


class Claims(Message, frozen=True):
    items: list[ClaimedEpisode]


class Claim(Request[Claims], frozen=True):
    """A request for episodes. `holds` are the claims that the scorer works on. Any other claim that was
    granted before the buffer's last restart has not reached it, and ends. None gives no information."""

    scorer: str
    max_episodes: int
    wait_ms: int = 0
    holds: list[str] | None = None


class EpisodeVerdict(Record, frozen=True):
    episode_id: str
    claim_id: str
    verdict: Verdict
    elapsed_ms: float = 0.0
    """Milliseconds of the call alone, without its wait for a worker."""


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
    """Become the only trainer of `policy`, fencing any earlier one. `step` is the step of the trainer's own
    state (0, or the step of the restored checkpoint); the ledger copy of that checkpoint is the attachment.

    The new epoch is above `after_epoch`, the last epoch in the trainer's folder, because the buffer may have
    lost it with its Redis. `memory_epoch` is the epoch that left the state in memory; 0 if the state is on
    disk. With a state in memory there is no copy, no group becomes COMMITTED, and a ledger that has lost the
    step or the epoch refuses.
    """

    policy: str
    trainer: str
    step: int
    after_epoch: int = 0
    memory_epoch: int = 0


class BatchEpisode(Record, frozen=True):
    """One episode of a batch. `sample` is its index in the group; `n_sampled`, versions and rows are of the
    units that the batch's policy sampled."""

    episode_id: str
    sample: int
    n_units: int
    n_sampled: int
    min_version: int
    max_version: int
    reward: float
    components: dict[str, float] = {}
    parts: Parts | None = None
    rows: list[tuple[int, int]] = []
    """(tokens fed, units trained) of each of its training rows, in their order; (0, 0) for one whose units
    are all masked. Ranks are dealt rows by it before they have fetched any."""


class BatchGroup(Record, frozen=True):
    group_id: str
    task_id: str
    data_source: str
    episodes: list[BatchEpisode]
    uses: int = 0
    """Steps that it was trained in before."""


class Batch(Message, frozen=True):
    """The manifest of a step: its groups, in order. Bytes are fetched by id."""

    policy: str
    epoch: int
    step: int
    max_staleness: int
    groups: list[BatchGroup]
    lowest_version: int = 0
    """Units of older versions are masked: they are in no gradient."""


class Waiting(Message, frozen=True):
    """No batch yet: the starving edge and its figures, in words a person can act on."""

    edge: str
    detail: str


class NextBatch(Request[Batch | Waiting], frozen=True):
    """Ask for the batch of `step`. Idempotent by (epoch, step); waits at most `wait_ms`."""

    policy: str
    epoch: int
    step: int
    wait_ms: int = 0


class Fetched(Message, frozen=True):
    episode_ids: list[str]
    routes: list[str] = []
    """Episodes whose routes are attachments too, behind the blobs, in this order."""


class Fetch(Request[Fetched], frozen=True):
    """Ask for codec blobs by episode id; they come back as attachments in the same order."""

    episode_ids: list[str]
    routes: bool = False
    """Whether their routes are wanted, as far as they are there."""


class Commit(Request[Ok], frozen=True):
    """Step `step` is trained and its snapshot `step + 1` published. Idempotent by (epoch, step).

    `same_as` are earlier trainer epochs whose version `step + 1` had the very same weights: units sampled
    from those are still true."""

    policy: str
    epoch: int
    step: int
    same_as: list[int] = []


class LedgerCopy(Message, frozen=True):
    """The ledger as bytes, in the one attachment."""

    step: int


class LedgerSeen(Message, frozen=True):
    """The records of the ledger at `now_ms`, as bytes in the one attachment."""

    now_ms: int
    redis_bytes: int


class SeeLedger(Request[LedgerSeen], frozen=True):
    """Ask for the ledger as it is, to look at."""


class TasksSeen(Message, frozen=True):
    tasks: list[Task]


class SeeTasks(Request[TasksSeen], frozen=True):
    """Ask for the tasks with these ids. Ids that the buffer does not have are left out."""

    task_ids: list[str]


class ExportLedger(Request[LedgerCopy], frozen=True):
    """Ask for the ledger as of the last committed step, to go into the checkpoint."""

    policy: str
    epoch: int
    step: int


class Checkpointed(Request[Ok], frozen=True):
    """The checkpoint after `step` steps is on disk: groups trained before it become COMMITTED and their
    bytes are freed."""

    policy: str
    epoch: int
    step: int


# --- anyone -> buffer --------------------------------------------------------------------------------


class NoScore(Record, frozen=True):
    """Verdicts of one kind without a score. `kind` is `timeout`, `abstain`, or `error:` and the failure's own
    kind. Message and episode are from the newest one."""

    kind: str
    count: int
    message: str
    episode_id: str
    age_ms: int


class PolicyStats(Record, frozen=True):
    """The figures of one trained policy: its clock, and the inputs of the admission formula."""

    v_train: int
    """Committed steps."""
    outstanding: int
    """Groups leased, and not yet trained or dropped."""
    capacity: int
    """Most of them, for a worker that is up to date."""
    max_staleness_seen: int = 0
    episodes_trained: int = 0
    checkpoint: int = 0
    """Steps that the newest checkpoint covers."""
    trainer_epoch: int = 0
    batch_wait: str = ""
    """Reason why the next step waits; empty when its batch can be made."""
    ahead: float = 0.0
    """Groups that may be outstanding in addition to the groups that the trainer works on."""
    pacing: str = ""
    """Why it is so many; empty under `buffer.pacing: full`."""


class BufferStats(Message, frozen=True):
    """Counts by group state, reasons of every transition, and the figures of each policy. A group is counted
    in the state in which the policy sees it that has come least far with it."""

    groups: dict[str, int]
    episodes: dict[str, int]
    reasons: dict[str, int]
    policies: dict[str, PolicyStats]
    payload_bytes: int
    redis_bytes: int
    queue_age_ms: int = 0
    episodes_dropped: int = 0
    tasks_taken: int = 0
    """Position of the cursor in the order of tasks."""
    leases: int = 0
    claims: int = 0
    oldest_group: str = ""
    """The group that has been longest in a state before BATCHED; `queue_age_ms` is how long."""
    lease_wait: str = ""
    """Why a worker that serves the newest version would be given nothing now; empty when it would."""
    no_scores: list[NoScore] = []
    """Verdicts that were no score, by kind: the newest of each, and how many there were."""
    failed: str = ""
    """Why the job ends (`then: fail_job`, or nothing succeeds any more); empty when it does not."""
    lost_writes: int = 0
    """Acknowledged writes that Redis came back without, since this buffer was started."""


class Stats(Request[BufferStats], frozen=True):
    pass
