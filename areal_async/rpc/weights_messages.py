"""Requests of receivers and engines to the trainer for weights."""

from __future__ import annotations

from typing import Literal

from areal_async.base.versions import VersionTag
from areal_async.rpc.schema import Message, Ok, Record, Request

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
    """The delta, for a receiver that said that it holds the base and can use it; None for others."""


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
    """Ask for the sources of the chunks of the directory with this manifest. `endpoint` is the address at
    which the asker will serve the chunks itself."""

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
    """Tensors sent under one request as one run of bytes, in this order, with nothing between them. `dtypes`
    are torch's names; wider ones come first, so that each tensor begins at a multiple of its item's size."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class SendsTensors(Message, frozen=True):
    """The trainer sends `buckets` in this order, as rank 0 of `group`. A group of another name than the one
    asked with is yet to be formed: its `world_size` members meet at `host:port`, the engine's as the ranks
    from `rank_offset` on. Each bucket must be taken within `limit_ms`."""

    group: str
    rank_offset: int
    world_size: int
    host: str
    port: int
    backend: Literal["nccl", "gloo"]
    buckets: list[TensorBucket]
    limit_ms: int


class SendsNothing(Message, frozen=True):
    """No tensors will be sent. Load the snapshot instead."""

    reason: str


class AskTensors(Request[SendsTensors | SendsNothing], frozen=True):
    """A request of a paused engine for the tensors of `tag`, through a process group with all the engines
    that ask at about the same time.

    `engine` is its name among all engines. `group` is the intact group that it belongs to, or empty. `ranks`
    is the number of members on its side.
    """

    engine: str
    group: str
    tag: VersionTag
    ranks: int


JOIN = -1
"""Number of the step before the first bucket: the member joins the group."""


class TakeBucket(Request[Ok | NoNews | SendsNothing], frozen=True):
    """An engine has taken all buckets of `tag` before this `number`, from 0, and asks whether it may take
    this one; `JOIN` stands for joining a group that is yet to be formed.

    `Ok`: all members of the group are ready for it, and take it now. `NoNews`: not all are after `wait_ms`;
    ask again. `SendsNothing`: the group is broken. The number after the last bucket's is answered at once."""

    engine: str
    group: str
    tag: VersionTag
    number: int
    wait_ms: int


class BreakGroup(Request[Ok], frozen=True):
    """An engine says that something failed on its side of `group`, and why: the others need not wait for
    it."""

    engine: str
    group: str
    reason: str
