"""Upload of finished episodes to the buffer, and return of leases.

Promises: an added episode is sent repeatedly until the buffer has acknowledged or refused it, or its lease is
lost. A lease is closed once no more episodes will come for it. A lease that is incomplete at that time is
returned to the buffer with the reason.

A lease has at most one message in flight. Episodes that finish in the meantime are sent in the next message.
So short episodes share a message, also those of several groups, and a long episode does not delay finished
ones.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from areal_async.base.errors import FaultError, RpcTimeout
from areal_async.base.events import failpoint, record
from areal_async.base.log import get_logger
from areal_async.rpc.client import Client, wait_out
from areal_async.rpc.messages import GroupSamples, PutEpisodes, Refusal, Release
from rollout_service import metrics

log = get_logger("rollout")

MAX_PUTS = 4  # Most messages with episodes in flight
RELEASE_LIMIT_S = 1.0
NO_MEDIA: Mapping[str, bytes] = {}
IDLE_WAIT_S = 1.0  # Longest wait of a loop without a wake-up


async def first_of(
    tasks: Sequence[asyncio.Task[Any]], event: asyncio.Event, timeout_s: float = IDLE_WAIT_S
) -> None:
    """Wait until a task is done, the event is set or the time is up."""
    if event.is_set():
        return
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([*tasks, waiter], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()


@dataclass
class MessageRoom:
    """Room for more episodes in a message. The first episode always fits."""

    episodes: int
    size_bytes: int
    empty: bool = True

    def take(self, size_bytes: int) -> bool:
        """Return whether an episode of this size fits, and then count it."""
        if not self.empty and (self.episodes < 1 or self.size_bytes < size_bytes):
            return False
        self.empty = False
        self.episodes -= 1
        self.size_bytes -= size_bytes
        return True


@dataclass(frozen=True)
class PutBatch:
    """Encoded episodes of a lease in one message, by sample, with their routes if there are any, and media
    by digest."""

    lease_id: str
    group_id: str
    episodes: dict[int, bytes]
    routes: dict[int, bytes]
    media: dict[str, bytes]

    def as_message(self) -> GroupSamples:
        parts = map(list, (self.episodes, self.routes, self.media))
        return GroupSamples(self.lease_id, self.group_id, *parts)

    def attachments(self) -> list[bytes]:
        return [*self.episodes.values(), *self.routes.values(), *self.media.values()]


@dataclass
class LeaseUpload:
    """State of the samples of one lease."""

    group_id: str
    samples: int  # Number of samples in the lease
    finished: dict[int, bytes] = field(default_factory=dict)  # Encoded episodes not sent yet
    routes: dict[int, bytes] = field(default_factory=dict)  # Routes of episodes that have some
    media: dict[int, Mapping[str, bytes]] = field(default_factory=dict)  # New media of episodes, by digest
    sent: set[str] = field(default_factory=set)  # Digests of media that the buffer has
    complete: bool = False  # No more episodes will come for this lease
    under_way: PutBatch | None = None
    stored: int = 0  # Number of acknowledged samples
    failure: str = ""  # Reason why a sample will not come
    at_fault: bool = False
    """Whether the episodes themselves failed, not the engine or this worker."""

    @property
    def whole(self) -> bool:
        """Return whether all samples are stored. The buffer has then ended the lease itself."""
        return self.stored >= self.samples


@dataclass
class UploadQueue:
    """Queue of the open leases, which decides which episodes form a message. Calls that name an unknown lease
    do nothing."""

    max_episodes: int = 256
    max_bytes: int = 8 << 20
    """Largest number of bytes of one message. A single larger episode has a message of its own."""
    leases: dict[str, LeaseUpload] = field(init=False, default_factory=dict)

    @property
    def episodes(self) -> int:
        """Number of finished episodes that are not acknowledged yet."""
        return sum(
            len(lease.finished) + (len(lease.under_way.episodes) if lease.under_way else 0)
            for lease in self.leases.values()
        )

    def open(self, lease_id: str, group_id: str, samples: int) -> None:
        """Open a lease with this many samples."""
        self.leases[lease_id] = LeaseUpload(group_id, samples)

    def add(
        self,
        lease_id: str,
        sample: int,
        blob: bytes,
        routes: bytes | None = None,
        media: Mapping[str, bytes] = NO_MEDIA,
    ) -> None:
        """Add a finished episode. `media` are those that its task does not have, such as results of tools."""
        if (lease := self.leases.get(lease_id)) is not None:
            lease.finished[sample] = blob
            if routes is not None:
                lease.routes[sample] = routes
            if media:
                lease.media[sample] = media

    def fail(self, lease_id: str, reason: str, *, at_fault: bool = False) -> None:
        """Record that a sample of the lease has failed. `at_fault` means that the episode itself caused
        this."""
        if (lease := self.leases.get(lease_id)) is not None:
            lease.failure = reason
            lease.at_fault = lease.at_fault or at_fault

    def complete(self, lease_id: str) -> None:
        """Record that no more episodes will come for the lease."""
        if (lease := self.leases.get(lease_id)) is not None:
            lease.complete = True

    def drop(self, lease_id: str) -> int:
        """Remove a lost lease. Return how many of its episodes were waiting."""
        lease = self.leases.pop(lease_id, None)
        return len(lease.finished) if lease else 0

    def take(self) -> list[PutBatch]:
        """Return the groups of the next message, or an empty list if there is none. They count as in flight
        until `settled` is called."""
        message: list[PutBatch] = []
        room = MessageRoom(self.max_episodes, self.max_bytes)
        for lease_id, lease in self.leases.items():
            if lease.finished and lease.under_way is None:
                batch = self._batch(lease_id, lease, room)
                if not batch.episodes:
                    break
                lease.under_way = batch
                message.append(batch)
        return message

    def settled(self, batch: PutBatch, stored: int = 0) -> None:
        """Record the answer to a batch: `stored` of its episodes are stored, and the others refused."""
        lease = self.leases.get(batch.lease_id)
        if lease is not None and lease.under_way is batch:
            lease.under_way = None
            lease.stored += stored
            if stored:
                lease.sent.update(batch.media)

    def pop_ended(self) -> dict[str, LeaseUpload]:
        """Remove and return the leases for which no more episodes will come and all messages are answered."""
        ended = {
            lease_id: lease
            for lease_id, lease in self.leases.items()
            if lease.complete and not lease.finished and lease.under_way is None
        }
        for lease_id in ended:
            del self.leases[lease_id]
        return ended

    def _batch(self, lease_id: str, lease: LeaseUpload, room: MessageRoom) -> PutBatch:
        """Return the finished episodes of a lease for which the message has room."""
        episodes: dict[int, bytes] = {}
        routes: dict[int, bytes] = {}
        media: dict[str, bytes] = {}
        for sample, blob in list(lease.finished.items()):
            given = lease.media.get(sample, NO_MEDIA).items()
            new = {digest: data for digest, data in given if digest not in lease.sent and digest not in media}
            size_bytes = len(blob) + len(lease.routes.get(sample, b"")) + sum(map(len, new.values()))
            if not room.take(size_bytes):
                break
            episodes[sample] = lease.finished.pop(sample)
            media |= new
            lease.media.pop(sample, None)
            if sample in lease.routes:
                routes[sample] = lease.routes.pop(sample)
        return PutBatch(lease_id, lease.group_id, episodes, routes, media)


@dataclass(eq=False)
class Uploader:
    """Sender of the episodes of one worker's leases. `on_progress()` is called whenever a message was
    answered. `on_closed(lease_id)` is called when a lease is closed, either complete or before it is
    returned. `on_refused(lease_id, reason)` is called when the buffer no longer accepts any sample of a
    lease."""

    buffer: Client
    name: str
    _: KW_ONLY
    on_progress: Callable[[], None]
    on_closed: Callable[[str], None]
    on_refused: Callable[[str, str], None]
    retry_pause_s: float
    flush_s: float
    queue: UploadQueue = field(init=False, default_factory=UploadQueue)
    """Open leases. Callers use its `open`, `fail` and `drop`."""
    _calls: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _wake: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    @property
    def idle(self) -> bool:
        return not self._calls and not self.queue.leases

    def add(
        self,
        lease_id: str,
        sample: int,
        blob: bytes,
        routes: bytes | None = None,
        media: Mapping[str, bytes] = NO_MEDIA,
    ) -> None:
        """Add a finished episode. If its lease is lost, the episode is ignored."""
        self.queue.add(lease_id, sample, blob, routes, media)
        self._wake.set()

    def complete(self, lease_id: str) -> None:
        """Record that no more episodes will come for the lease."""
        self.queue.complete(lease_id)
        self._wake.set()

    async def run(self) -> None:
        """Send messages and end completed leases, until cancelled."""
        while True:
            self._wake.clear()
            self._send(MAX_PUTS)
            for lease_id, lease in self.queue.pop_ended().items():
                if not lease.whole:
                    release = self._release(lease_id, lease, lease.failure)
                    self._calls.add(asyncio.ensure_future(release))
                self.on_closed(lease_id)
            metrics.UNSENT.set(self.queue.episodes)
            await first_of([*self._calls], self._wake)
            for call in [call for call in self._calls if call.done()]:
                self._calls.discard(call)
                call.result()
                self.on_progress()

    def _send(self, most: float = math.inf) -> bool:
        """Send messages, with at most `most` calls in flight. Return whether any call is in flight."""
        while len(self._calls) < most and (message := self.queue.take()):
            self._calls.add(asyncio.ensure_future(self._put(message)))
        return bool(self._calls)

    async def close(self, reason: str) -> None:
        """Send finished episodes for a limited time. Then return every incomplete lease to the buffer, with
        its own reason if it has one, and otherwise with `reason`."""
        try:
            async with asyncio.timeout(self.flush_s):
                while self._send():
                    done, self._calls = await asyncio.wait(self._calls, return_when=asyncio.FIRST_COMPLETED)
                    for call in done:
                        call.result()
        except (TimeoutError, RpcTimeout, FaultError):
            log.info("stopped with episodes unsent", episodes=self.queue.episodes)
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        releases = (
            self._release(key, lease, lease.failure or reason)
            for key, lease in self.queue.leases.items()
            if not lease.whole
        )
        await asyncio.gather(*releases)

    async def _release(self, lease_id: str, lease: LeaseUpload, reason: str) -> None:
        """Return a lease early. A failed call is harmless, because the lease expires."""
        try:
            async with asyncio.timeout(min(RELEASE_LIMIT_S, self.flush_s)):
                await self.buffer.call(Release(self.name, lease_id, reason, lease.at_fault))
        except (TimeoutError, RpcTimeout, FaultError) as error:
            log.info("lease not released", lease_id=lease_id, error=str(error))

    async def _put(self, message: list[PutBatch]) -> None:
        """Send one message repeatedly until it is answered, without the groups whose leases are lost in the
        meantime. Repeats are harmless, because the buffer stores each sample once."""
        stored: dict[str, int] = {}
        while batches := [batch for batch in message if batch.lease_id in self.queue.leases]:
            for batch in batches:
                named = {"lease_id": batch.lease_id, "group_id": batch.group_id}
                record("put", **named, samples=list(batch.episodes))
            failpoint("rollout.before_put")
            try:
                ack = await self.buffer.call(
                    PutEpisodes([batch.as_message() for batch in batches]),
                    attachments=[blob for batch in batches for blob in batch.attachments()],
                )
            except (RpcTimeout, FaultError) as error:
                await wait_out(error, "put", self.retry_pause_s)
                continue
            for batch, answer in zip(batches, ack.groups, strict=True):
                refused = [[refusal.item, refusal.reason] for refusal in answer.refused]
                named = {"lease_id": batch.lease_id, "group_id": batch.group_id}
                record("put_acked", **named, stored=answer.stored, refused=refused, durability=ack.durability)
            failpoint("rollout.after_put")
            for batch, answer in zip(batches, ack.groups, strict=True):
                stored[batch.lease_id] = len(answer.stored)
                if answer.refused:
                    self._refused(batch.lease_id, answer.refused)
            metrics.EPISODES.inc(sum(stored.values()))
            break
        for batch in message:
            self.queue.settled(batch, stored.get(batch.lease_id, 0))
        self._wake.set()
        self.on_progress()

    def _refused(self, lease_id: str, refused: Sequence[Refusal]) -> None:
        reasons = [refusal.reason.split(":")[0] for refusal in refused]
        for reason in reasons:
            metrics.REFUSED.labels(reason).inc()
        first = refused[0]
        log.info("episodes refused", n=len(reasons), item=first.item, reason=first.reason)
        if "invalid" in reasons:
            reason = f"the buffer refused {first.item}: {first.reason}"
            self.queue.fail(lease_id, reason, at_fault=True)
        elif lease_id in self.queue.leases:
            # Stale, abandoned, past its deadline or leased to another worker: the buffer accepts no sample of
            # this group any more.
            self.on_refused(lease_id, first.reason)
