"""Every type that crosses a process boundary, and which reply belongs to which request.

A request is declared once, with the reply that answers it: `class Heartbeat(Request[HeartbeatAck])`. Clients
(`await client.call(Heartbeat(…))` is a `HeartbeatAck`), the dispatch of servers and the decoders follow from
that. Each message is an immutable msgspec struct, encoded as msgpack, told apart by its tag (the class name).
Bulk bytes never sit inside a message: they travel as attachments, separate frames in the order that the
message names. Durations are integer milliseconds; no message carries a clock reading.

`SCHEMA` is compared at hello: two processes of different schema refuse each other with a `Fault`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec

from areal_async.rpc.verdicts import Parts, Verdict

SCHEMA = 2


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every request and reply."""


R = TypeVar("R", bound=Message)


class Request(Message, Generic[R], frozen=True):
    """Base of every request; `R` is its reply, one message or a union of several.

    A field `wait_ms` is how long the server may keep the request until it has something to say."""


@cache
def replies_to(request: type[Request[Any]]) -> tuple[type[Message], ...]:
    """The messages that may answer a request, apart from a `Fault`."""
    (reply,) = get_args(request.__orig_bases__[0])  # type: ignore[attr-defined]
    return get_args(reply) or (reply,)


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """A value that only travels inside messages (and is stored, where the ledger says so)."""


POLICY = "policy"
"""Name of the one policy of a job that names none."""
POLICY_NAME = r"[a-z0-9][a-z0-9_-]{0,31}"
"""Pattern of a policy's name."""
_LABEL = re.compile(rf"({POLICY_NAME})-e(0|[1-9][0-9]*)-v(0|[1-9][0-9]*)")


class VersionTag(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """Identity of a snapshot: the policy it is of, its trainer's epoch, and the steps behind the weights."""

    policy: str
    epoch: int
    version: int

    @property
    def label(self) -> str:
        """The tag as text, for names of folders and of a server's weights: `policy-e1-v7`."""
        return f"{self.policy}-e{self.epoch}-v{self.version}"

    @classmethod
    def parse(cls, label: str) -> VersionTag:
        """The inverse of `label`. Raises ValueError for a text that is none."""
        match = _LABEL.fullmatch(label)
        if match is None:
            raise ValueError(f"{label!r} names no version of a policy's weights, such as policy-e1-v7")
        return cls(match[1], int(match[2]), int(match[3]))


class Task(Record, frozen=True):
    """One prompt with its ground truth. `task_id` is `<dataset hash>:<row>:<pass>`."""

    task_id: str
    prompt: list[dict[str, Any]] | str
    data_source: str = ""
    ability: str = ""
    reward_style: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}


# --- every service -----------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    schema: int
    service: str
    front_epoch: int = 0


class Hello(Request[Welcome], frozen=True):
    """First message of every client connection."""

    schema: int
    job: str
    role: str
    name: str


class Ok(Message, frozen=True):
    pass


FaultKind = Literal[
    "schema",  # the peer speaks another schema, or another job
    "invalid",  # the request itself is wrong; do not retry
    "fenced",  # a newer front, lease or trainer epoch has replaced the caller
    "busy",  # back-pressure: retry later
    "unavailable",  # the service cannot reach what it needs (Redis); retry later
    "stale",  # the hard staleness bound would be broken; fatal
    "failed",  # the job file has the job end here, and the message says why; fatal
    "internal",
]


class Fault(Message, frozen=True):
    """The typed error of every call. `kind` decides what a caller may do; `message` is for people."""

    kind: FaultKind
    message: str
    retry_after_ms: int = 0


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
    """The granted groups; when empty, `reason` says what the worker waits for. `drain`: as in
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
    """`lost` are leases the worker no longer holds: it must abort their episodes. `drain`: it will get no
    more, and is to finish what it has or hand it back."""

    lost: list[str]
    drain: bool = False


class Heartbeat(Request[HeartbeatAck], frozen=True):
    """`lease_ids` are all that the worker holds: any other that it was granted before the buffer's last
    restart has never reached it, and ends."""

    worker: str
    lease_ids: list[str]


class Drain(Request[Ok], frozen=True):
    """Worker `worker` is to end, or about to: lease it nothing more. Holds until a process of that name
    arrives. `reason` is for people."""

    worker: str
    reason: str = ""


class Release(Request[Ok], frozen=True):
    """Hand a lease back before its deadline. What is stored stays; the missing samples are re-queued. With
    the reason `drained` it is handed over by a worker that stops as planned, which says nothing against the
    task."""

    worker: str
    lease_id: str
    reason: str
    failed: bool = False
    """Episodes of it failed with that reason, by what they do and not by the engine."""


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
    waited_ms: int = 0
    """Since it was stored, or since its last verdict that was no score."""


class Claims(Message, frozen=True):
    items: list[ClaimedEpisode]


class Claim(Request[Claims], frozen=True):
    """`holds` are the claims that the scorer works on: any other that it was granted before the buffer's last
    restart has never reached it, and ends. None says nothing."""

    scorer: str
    max_episodes: int
    wait_ms: int = 0
    holds: list[str] | None = None


class EpisodeVerdict(Record, frozen=True):
    episode_id: str
    claim_id: str
    verdict: Verdict
    elapsed_ms: float = 0.0
    """Of the call alone, without its wait for a worker."""


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
    """Become the only trainer of `policy`, fencing any earlier one. `step` is the step the trainer's own
    state is at (0, or that of the restored checkpoint); the ledger copy of that checkpoint is the attachment.

    The new epoch is above `after_epoch`, the last one that the trainer's folder knows of: the buffer may have
    lost it with its Redis."""

    policy: str
    trainer: str
    step: int
    after_epoch: int = 0


class BatchEpisode(Record, frozen=True):
    """One episode of a batch. `sample` is its index in the group; versions are over the units that the
    batch's policy sampled."""

    episode_id: str
    sample: int
    n_units: int
    n_sampled: int
    min_version: int
    max_version: int
    reward: float
    components: dict[str, float] = {}
    parts: Parts | None = None


class BatchGroup(Record, frozen=True):
    group_id: str
    task_id: str
    data_source: str
    episodes: list[BatchEpisode]
    uses: int = 0
    """Steps that it was trained in before."""


class Batch(Message, frozen=True):
    """The manifest of a step: what is trained, in order. Bytes are fetched by id."""

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


class Fetch(Request[Fetched], frozen=True):
    """Ask for codec blobs by episode id; they come back as attachments in the same order."""

    episode_ids: list[str]


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
    """Verdicts of one kind that were no score. `kind` is `timeout`, `abstain`, or `error:` and the failure's
    own kind; message and episode are those of the newest."""

    kind: str
    count: int
    message: str
    episode_id: str
    age_ms: int


class PolicyStats(Record, frozen=True):
    """The figures of one trained policy: its clock, and those of the admission formula."""

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
    """What the next step waits for; empty when its batch can be made."""


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
    """Where the cursor stands in the order of tasks."""
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


class Stats(Request[BufferStats], frozen=True):
    pass


# --- supervisor -> every service; anyone -> supervisor -----------------------------------------------

ServiceState = Literal["starting", "serving", "draining"]


class ServiceStatus(Message, frozen=True):
    """What a service says of itself."""

    name: str
    pid: int
    state: ServiceState
    waiting_for: dict[str, str]
    """What it waits for, in words, by what that is about; empty when it waits for nothing."""
    figures: dict[str, dict[str, float]]
    """Its Prometheus series: name → the values of its labels, joined by commas → value."""
    notice: str = ""
    """Its newest warning, error or news, in words."""
    notices: int = 0
    """How many there were: a greater number means that `notice` is new."""
    no_scores: list[NoScore] = []
    """The buffer's verdicts without a score, by kind."""


class Status(Request[ServiceStatus], frozen=True):
    """Ask any service, at its own endpoint, what it says of itself."""


class RunDescription(Message, frozen=True):
    """`status` has the fields of `areal_async.status.aggregator.RunStatus` as plain values; None until the
    run is watched."""

    status: dict[str, Any] | None = None


class DescribeRun(Request[RunDescription], frozen=True):
    """Ask the supervisor how the run stands."""


# --- weights: receivers -> trainer -------------------------------------------------------------------


class DeltaOffer(Record, frozen=True):
    """The directory `path` makes the announced snapshot out of `base`, for whoever holds exactly that."""

    base: VersionTag
    path: str
    manifest_hash: str
    size_bytes: int


class SnapshotNotice(Message, frozen=True):
    """A complete snapshot: `path` is its directory, `manifest_hash` the hash of its manifest, `size_bytes`
    the sum of its files. `final` marks the last one of the job.

    `path` is on the host `node_id`; how other hosts come by the files is the affair of the job's channel."""

    tag: VersionTag
    path: str
    manifest_hash: str
    final: bool = False
    size_bytes: int = 0
    node_id: str = ""
    delta: DeltaOffer | None = None
    """Only in the answer to a receiver that said that it holds the base and can use it."""


class NoNews(Message, frozen=True):
    """Nothing newer within the wait. `finished`: none will come."""

    finished: bool = False


class WaitSnapshot(Request[SnapshotNotice | NoNews], frozen=True):
    """Ask for the newest snapshot after `after` for a `purpose`; waits at most `wait_ms`.

    `serve` gets the newest of all. `evaluate` gets, in order, the ones pinned for evaluation. `deltas`: the
    receiver holds the files of `after` and can make others of them; it waits for a delta being made."""

    receiver: str
    purpose: Literal["serve", "evaluate"]
    after: VersionTag | None = None
    wait_ms: int = 0
    deltas: bool = False


class Sources(Message, frozen=True):
    """Endpoints of chunk servers, best first; `origin` is the publisher's. The chunk table is attached."""

    endpoints: list[str]
    origin: str


class FindSources(Request[Sources], frozen=True):
    """Ask who serves the chunks of the directory with this manifest. `endpoint` is where the asker will serve
    them itself."""

    manifest_hash: str
    endpoint: str


class GetChunk(Request[Ok], frozen=True):
    """Ask a chunk server for one chunk of the directory with this manifest. It is attached to the `Ok`."""

    manifest_hash: str
    number: int


class AckSnapshot(Request[Ok], frozen=True):
    """A receiver serves (or has evaluated) `tag`; with `error`, it could not, and why."""

    receiver: str
    purpose: Literal["serve", "evaluate"]
    tag: VersionTag
    stall_ms: float = 0.0
    error: str = ""


class TensorBucket(Record, frozen=True):
    """Tensors sent in this order under one request. `dtypes` are torch's names."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class SendsTensors(Message, frozen=True):
    """The trainer sends `buckets` in this order, as rank 0 of `group`. A group of another name than the one
    asked with is yet to be formed: its members meet at `host:port`. Each bucket must be taken within
    `limit_ms`."""

    group: str
    host: str
    port: int
    backend: Literal["nccl", "gloo"]
    buckets: list[TensorBucket]
    limit_ms: int


class SendsNothing(Message, frozen=True):
    """No tensors come: the snapshot is to be loaded instead."""

    reason: str


class AskTensors(Request[SendsTensors | SendsNothing], frozen=True):
    """An engine that is paused asks the trainer for the tensors of `tag`, through a process group.

    `engine` is its name among all engines; `group` the one that it is a member of and in which nothing
    failed, or empty; `ranks` the members on its side."""

    engine: str
    group: str
    tag: VersionTag
    ranks: int


# --- command line -> supervisor ----------------------------------------------------------------------


class WorkersChanged(Message, frozen=True):
    """What was done, in words, and the workers of the run that are to stay."""

    text: str
    workers: list[str]


class DrainWorker(Request[WorkersChanged], frozen=True):
    """Have one worker finish what it has within `limit_ms`, hand back the rest, and end. `outside`: a worker
    that the supervisor has not started, and cannot wait for."""

    worker: str
    limit_ms: int
    outside: bool = False


class ScaleWorkers(Request[WorkersChanged], frozen=True):
    """Have `workers` rollout workers: start more, or drain the newest, each within `limit_ms`."""

    workers: int
    limit_ms: int


REQUESTS: tuple[type[Request[Any]], ...] = tuple(Request.__subclasses__())
REPLIES: tuple[type[Message], ...] = tuple(
    dict.fromkeys([Fault, *(reply for request in REQUESTS for reply in replies_to(request))])
)
