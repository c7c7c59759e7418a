"""The trainer's side of the distribution of weights.

Promises:
- A publication is done once the snapshot is complete on disk and waiting receivers are being notified. No
  receiver is told of the snapshot before that. `writing.py` describes which part of the work the trainer
  waits for.
- A separate thread serves receivers, so receivers and training steps do not delay each other.
- The full snapshot is announced at once. If a delta is still being made, only receivers that can use the
  delta wait for it.
- `retention.py` bounds the number of snapshots. The files of an old snapshot are reused for a new one after
  the last reader has finished.
- `close` leaves no thread, no socket and no file.

Any one thread except the publisher's own may call all methods. In a trainer of several ranks, each other rank
has a `PieceWriter` (`make_piece_writer`).
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from areal_async.base.errors import FaultError, SnapshotError
from areal_async.base.loop_thread import LoopThread
from areal_async.base.versions import VersionTag
from areal_async.rpc.schema import Message, Ok
from areal_async.rpc.secret import Access
from areal_async.rpc.server import Answer, Peer, Server
from areal_async.rpc.weights_messages import AckSnapshot, NoNews, SnapshotNotice, WaitSnapshot
from areal_async.service.context import ServiceContext
from areal_async.weights.channels import PublishingEnd, channel_of, makes_deltas
from areal_async.weights.delta import DeltaPublisher
from areal_async.weights.layout import Layout
from areal_async.weights.manifest import Part, remove_snapshots
from areal_async.weights.pieces import TensorPiece, whole_piece, whole_tensors
from areal_async.weights.retention import RetentionPolicy
from areal_async.weights.snapshot import (
    MODEL_FILE,
    NOTHING_BESIDE,
    Companions,
    SnapshotInfo,
    finish_snapshot,
)
from trainer_service.publishing.writing import FilePool, PieceWriter, Publication, spare_file
from trainer_service.ranks import SideGroup

MAX_WAIT_MS = 60_000
MAX_ACKS = 1024
HOLD_MS = 600_000


class Publisher(PieceWriter):
    """Write snapshots under `root` and announce them to receivers at `endpoint`.

    Every snapshot contains `companions`. The newest `keep` snapshots stay, also while the next one is
    written, and others stay only while they are needed. `group` is the group of the trainer's ranks. A
    receiver that was told of a snapshot may read it for `HOLD_MS` without an acknowledgement. A delta is
    offered if its size, as a share of the full size, is below `deltas_below`. With None, no deltas are made.
    `channel` is the publishing end of the transport to the receivers.
    """

    def __init__(
        self,
        root: Path,
        endpoint: str,
        *,
        job: str,
        access: Access,
        keep: int = 1,
        group: SideGroup | None = None,
        companions: Companions = NOTHING_BESIDE,
        deltas_below: float | None = None,
        channel: PublishingEnd | None = None,
    ) -> None:
        super().__init__(root, group, tied=companions.tied, lead=self)
        self.endpoint = endpoint
        self.clock: Callable[[], float] = time.monotonic
        self._companions = companions.in_memory()
        self._channel = channel if channel is not None else PublishingEnd()
        self._kept = RetentionPolicy(keep, HOLD_MS)
        self._keep = keep
        self._numbers = itertools.count()
        self._ready: list[int] = []
        self._taken: int | None = None
        """The file that is being filled."""
        self._in_use: dict[VersionTag, int] = {}
        self._written: dict[VersionTag, SnapshotInfo] = {}
        self._retired: list[Path] = []
        """Folders without readers, to be removed in the background, because removing gigabytes takes a while
        and no step may wait for that."""
        self._acks: deque[AckSnapshot] = deque(maxlen=MAX_ACKS)
        self._finished = False
        self._closing = False
        self._lock = threading.Condition()
        self.deltas = DeltaPublisher(deltas_below, self._lock, self._delta_done)
        self._server = Server(endpoint, service="weights", job=job, access=access, handler=self._handle)
        self._thread: LoopThread | None = None
        self._changed: asyncio.Event | None = None

    def start(self) -> None:
        """Start to serve and remove the snapshots of an earlier publisher under `root`. Raises
        `EndpointError`."""
        self._root.mkdir(parents=True, exist_ok=True)
        thread = LoopThread("weights-publisher")
        try:
            thread.run(self._start_server())
        except BaseException:
            thread.close()
            raise
        # Removal is safe only now. The endpoint was free, so no other publisher uses this folder.
        remove_snapshots(self._root)
        self._thread, self.endpoint = thread, self._server.endpoint

    def begin(self, tag: VersionTag, pieces: Iterable[TensorPiece], **how: bool) -> Publication:
        """Publish as `PieceWriter.begin` does. `start` must be called before."""
        if self._channel.takes_tensors:
            pieces = [*pieces]
            # Receivers may request the tensors as soon as the snapshot is announced.
            self._channel.offer(tag, whole_tensors(pieces))
        return super().begin(tag, pieces, **how)

    def publish(self, tag: VersionTag, tensors: Mapping[str, torch.Tensor], **how: bool) -> SnapshotInfo:
        """Publish whole tensors of one process as `tag` and wait for the announcement."""
        pieces = [whole_piece(name, tensor) for name, tensor in tensors.items()]
        self.prepare(pieces)
        return self.begin(tag, pieces, **how).result()

    def acks(self) -> list[AckSnapshot]:
        """Return the acknowledgements since the last call, oldest first (at most the last `MAX_ACKS`)."""
        with self._lock:
            acks = list(self._acks)
            self._acks.clear()
        return acks

    def pending_evaluations(self) -> list[int]:
        """Return the pinned versions that still await evaluation, oldest first. Any thread may call this."""
        with self._lock:
            return [tag.version for tag in self._kept.pending_evaluations]

    def wait_evaluated(self, timeout_s: float) -> bool:
        """Wait until no pinned snapshot awaits evaluation. Return False after `timeout_s`."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._kept.pending_evaluations, timeout_s)

    def close(self, *, remove: bool = True) -> None:
        """Stop serving and, with `remove`, remove every snapshot.

        Receivers are not told that the publisher has stopped, because a trainer that fails is restarted.
        """
        thread = self._thread
        if thread is None:
            return
        super().close()
        self._closing = True
        self._wake()
        self.deltas.close()
        thread.run(self._stop_server())
        thread.close()
        self._thread = None
        if remove:
            remove_snapshots(self._root)

    # --- the trainer's side: what the first rank decides, see `Lead` ---------------------------------

    def offer_files(self) -> FilePool:
        with self._lock:
            # An evaluation releases its version's file late, so the file for the next evaluation is made in
            # advance.
            while len(self._in_use) + len(self._ready) <= self._keep + self._kept.n_pinned_alone:
                self._ready.append(next(self._numbers))
            return self._files()

    def _files(self) -> FilePool:
        return FilePool([*self._in_use.values(), *self._ready], [*self._ready])

    def take_file(self, tag: VersionTag) -> FilePool:
        with self._lock:
            newest = self._kept.newest
            if self._finished:
                raise SnapshotError(f"{tag.label} cannot follow the final snapshot")
            if newest is not None and tag <= newest:
                raise SnapshotError(f"{tag.label} is not newer than {newest.label}")
            try:
                self._make_room()
                if not self._ready:
                    self._remove_retired()  # a new file may need the room of the old ones
            except OSError as error:
                text = f"an old snapshot under {self._root} cannot be removed: {error}"
                raise SnapshotError(text) from error
            if not self._ready:
                self._ready.append(next(self._numbers))
            files = self._files()
            self._taken = self._ready.pop(0)
            return files

    def announce(
        self, tag: VersionTag, layout: Layout, parts: list[Part], *, evaluate: bool, final: bool
    ) -> SnapshotInfo:
        assert self._taken is not None
        model = spare_file(self._root, self._taken)
        try:
            self._remove_retired()
            written = finish_snapshot(self._root, tag, layout, parts, model, self._companions)
        except OSError as error:
            raise SnapshotError(f"{tag.label} cannot be written under {self._root}: {error}") from error
        self._channel.add(written.path, written.manifest_hash)
        with self._lock:
            self._in_use[tag], self._taken = self._taken, None
            self._written[tag] = written
            self._kept.add(tag, evaluate=evaluate, final=final)
            self._finished = final
            base = self._kept.previous
            if base is not None and self.deltas.begin(self._written[base], written):
                self._kept.use(base, tag)
        self._wake()
        return written

    def _make_room(self) -> None:
        """Retire snapshots that are not needed. Their model files are kept for reuse, as many as the next
        snapshots will fill, and the rest are removed."""
        if self._taken is not None:  # left by a publication that failed
            spare_file(self._root, self._taken).unlink(missing_ok=True)
            self._taken = None
        for tag, reusable in self._kept.retire(self._now_ms()):
            written, number = self._written.pop(tag), self._in_use.pop(tag)
            # Bytes that are on their way to another host are read directly from the files.
            unread = self._channel.remove(written.manifest_hash)
            if reusable and unread and len(self._ready) <= max(0, self._keep - len(self._in_use)):
                (written.path / MODEL_FILE).rename(spare_file(self._root, number))
                self._ready.append(number)
            self._retired.append(written.path)
            if (delta := self.deltas.withdraw(tag)) is not None:
                self._channel.remove(delta.manifest_hash)
                self._retired.append(Path(delta.path))

    def _remove_retired(self) -> None:
        while self._retired:
            shutil.rmtree(self._retired[-1])
            self._retired.pop()

    def _delta_done(self, base: VersionTag, new: VersionTag) -> None:
        """Announce the delta that was just made, if there is one. The thread that makes deltas calls this
        under the lock."""
        self._kept.release(base, new)
        if (offer := self.deltas.get(new, base)) is not None:
            self._channel.add(Path(offer.path), offer.manifest_hash)
        if not self._closing:
            self._wake()

    def _now_ms(self) -> int:
        return int(self.clock() * 1000)

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.loop.call_soon_threadsafe(self._wake_waiters)

    # --- the receivers' side: on the publisher's loop ------------------------------------------------

    async def _start_server(self) -> None:
        self._changed = asyncio.Event()
        await self._server.start()
        try:
            await self._channel.start()
        except BaseException:
            await self._server.stop()
            raise

    async def _stop_server(self) -> None:
        await self._server.stop()
        await self._channel.close()

    def _wake_waiters(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        if changed is not None:
            changed.set()

    async def _handle(self, peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        if isinstance(message, WaitSnapshot):
            return await self._wait_snapshot(message)
        if isinstance(message, AckSnapshot):
            with self._lock:
                self._kept.acknowledge(message.receiver, message.purpose, message.tag)
                self._acks.append(message)
                self._lock.notify_all()
            return Ok()
        answer = await self._channel.answer(message)
        if answer is None:
            raise FaultError("invalid", f"the weights publisher does not serve {type(message).__name__}")
        return answer

    async def _wait_snapshot(self, message: WaitSnapshot) -> Message:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + min(message.wait_ms, MAX_WAIT_MS) / 1000
        while True:
            changed = self._changed  # read before the check, so that no change is missed
            assert changed is not None
            answer = self._look(message)
            if not isinstance(answer, NoNews) or answer.finished or self._closing:
                return answer
            try:
                async with asyncio.timeout_at(deadline_s):
                    await changed.wait()
            except TimeoutError:
                return answer

    def _look(self, message: WaitSnapshot) -> SnapshotNotice | NoNews:
        with self._lock:
            serve, deltas = message.purpose == "serve", self.deltas
            if serve and message.deltas and deltas.pending(self._kept.newest, message.after):
                return NoNews()
            ask = self._kept.serve if serve else self._kept.evaluate
            tag = ask(message.receiver, message.after, self._now_ms())
            if tag is not None:
                written = self._written[tag]
                final, size, node_id = self._kept.is_final(tag), written.size_bytes, self._channel.node_id
                delta = deltas.get(tag, message.after) if message.deltas else None
                place = (str(written.path), written.manifest_hash)
                return SnapshotNotice(tag, *place, final, size, node_id, delta)
            return NoNews(finished=self._finished)


def make_publisher(
    ctx: ServiceContext,
    *,
    files: Mapping[str, bytes | Path],
    tied: Mapping[str, str],
    group: SideGroup | None = None,
) -> Publisher:
    """Return the publisher of the job, on the first rank of its trainer. Raises `EndpointError`."""
    section = ctx.job.weights
    end = channel_of(ctx.job).publishing_end(ctx)
    end.node_id = ctx.node_id
    return Publisher(
        root_of(ctx),
        ctx.weights.endpoint,
        job=ctx.job.job,
        access=ctx.keys,
        keep=section.keep,
        group=group,
        companions=Companions(files, tied),
        deltas_below=section.delta_below if makes_deltas(ctx.job) else None,
        channel=end,
    )


def root_of(ctx: ServiceContext) -> Path:
    return channel_of(ctx.job).directory(ctx.job) or ctx.shm_dir
