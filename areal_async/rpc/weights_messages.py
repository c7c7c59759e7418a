"""Requests of receivers and engines to the trainer for weights."""

from __future__ import annotations

from typing import Literal

from areal_async.base.versions import VersionTag
from areal_async.rpc.schema import Message, Ok, Record, Request

# --- weights: receivers -> trainer -------------------------------------------------------------------


class DeltaOffer(Record, frozen=True):
    """A delta in the directory `path`. It turns the snapshot `base` into the announced snapshot."""

    base: VersionTag
    path: str
    manifest_hash: str
    size_bytes: int


class SnapshotNotice(Message, frozen=True):
    """A complete snapshot.

    `path` is its directory, `manifest_hash` is the hash of its manifest, and `size_bytes` is the sum of its
    files. `final` marks the last snapshot of the job. `path` is on the host `node_id`. The job's channel
    brings the files to other hosts.
    """

    tag: VersionTag
    path: str
    manifest_hash: str
    final: bool = False
    size_bytes: int = 0
    node_id: str = ""
    delta: DeltaOffer | None = None
    """The delta, if the receiver holds its base and can use it, or None."""


class NoNews(Message, frozen=True):
    """Answer if no newer snapshot appeared within the wait. If `finished` is true, no further snapshot will
    follow."""

    finished: bool = False


class WaitSnapshot(Request[SnapshotNotice | NoNews], frozen=True):
    """Ask for a snapshot newer than `after` for a `purpose`. Waits at most `wait_ms`.

    `serve` returns the newest snapshot. `evaluate` returns the snapshots pinned for evaluation, in order.
    `deltas` means that the receiver has the files of `after` and can apply a delta to them. If such a delta
    is being made, the answer waits for it.
    """

    receiver: str
    purpose: Literal["serve", "evaluate"]
    after: VersionTag | None = None
    wait_ms: int = 0
    deltas: bool = False


class Sources(Message, frozen=True):
    """Endpoints of chunk servers, best first. `origin` is the endpoint of the publisher. The chunk table is
    attached."""

    endpoints: list[str]
    origin: str


class FindSources(Request[Sources], frozen=True):
    """Ask for servers of the chunks of the directory with this manifest.

    `endpoint` is the endpoint at which the receiver itself will serve the chunks.
    """

    manifest_hash: str
    endpoint: str


class GetChunk(Request[Ok], frozen=True):
    """Ask a chunk server for one chunk of the directory with this manifest. The `Ok` has it as attachment."""

    manifest_hash: str
    number: int


class AckSnapshot(Request[Ok], frozen=True):
    """Report that a receiver serves `tag` or has evaluated it. If this failed, `error` has the reason."""

    receiver: str
    purpose: Literal["serve", "evaluate"]
    tag: VersionTag
    stall_ms: float = 0.0
    error: str = ""


class TensorBucket(Record, frozen=True):
    """Tensors that are sent for one request as consecutive bytes, in this order.

    `dtypes` are torch's names. Wider dtypes come first, so that each tensor begins at a multiple of its item
    size.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class TorchBuild(Message, frozen=True):
    """Build of torch in one environment, as far as all members of a process group must agree.

    `torch`, `cuda` and `nccl` are the versions of torch, CUDA and NCCL. The last two are empty if the group
    uses gloo.
    """

    torch: str
    cuda: str
    nccl: str


class AskBuild(Request[TorchBuild], frozen=True):
    """An engine that starts asks for the trainer's build of torch."""


class SendsTensors(Message, frozen=True):
    """The trainer sends `buckets` in this order, as rank 0 of `group`.

    If `group` differs from the group in the request, it must be formed: its `world_size` members meet at
    `host:port`. The ranks of the engine begin at `rank_offset`. Each bucket must be taken within `limit_ms`.
    """

    group: str
    rank_offset: int
    world_size: int
    host: str
    port: int
    backend: Literal["nccl", "gloo"]
    buckets: list[TensorBucket]
    limit_ms: int


class SendsNothing(Message, frozen=True):
    """The trainer sends no tensors. The engine must load the snapshot."""

    reason: str


class AskTensors(Request[SendsTensors | SendsNothing], frozen=True):
    """A paused engine asks the trainer for the tensors of `tag`.

    Engines that ask at about the same time share one process group. `engine` is the engine's unique name.
    `group` is the engine's current group, or empty if it has none or something failed in it. `ranks` is the
    number of ranks that the engine adds to the group.
    """

    engine: str
    group: str
    tag: VersionTag
    ranks: int


JOIN = -1
"""Number of `TakeBucket` that stands for joining the group, before the first bucket."""


class TakeBucket(Request[Ok | NoNews | SendsNothing], frozen=True):
    """An engine asks for permission to take bucket `number` (from 0) of `tag`.

    The engine has taken all earlier buckets. The number `JOIN` asks for permission to join a new group.

    `Ok` means that all members are ready and take the bucket now. `NoNews` means that some are not ready
    after `wait_ms`, so the engine asks again. `SendsNothing` means that the group is broken. A request with
    the number after the last bucket reports that all are taken, and is answered at once.
    """

    engine: str
    group: str
    tag: VersionTag
    number: int
    wait_ms: int


class BreakGroup(Request[Ok], frozen=True):
    """An engine reports a failure on its side of `group`, so that the other members stop waiting."""

    engine: str
    group: str
    reason: str
