"""The replay buffer service: every request that concerns tasks, episodes and batches.

Promises:

- `staleness_is_bounded`: no batch has a unit older than η steps, whatever fails or is late.
- `trained_effectively_once`: an acknowledged episode is in Redis, as durable as `buffer.durability` says, and
  in at most one batch. Every message may be repeated.
- `groups_are_whole`: a batch has whole groups, each with all its episodes and their scores.
- `nothing_is_unbounded`: stored data and running requests have limits. At a limit, lease requests wait.

The reward service, not this one, judges the content of an episode. If both Redis and its files are lost, the
ledger is lost too, and the job resumes from the last checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry

from areal_async.base.errors import FaultError
from areal_async.base.log import get_logger
from areal_async.base.metrics import busy
from areal_async.rpc.board import board
from areal_async.rpc.lanes import Lane, Lanes
from areal_async.rpc.messages import (
    Arrived,
    BufferStats,
    Claim,
    Claims,
    Drain,
    Fetch,
    Fetched,
    FetchMedia,
    Heartbeat,
    Lease,
    Leases,
    NextBatch,
    OpenTrainer,
    PutEpisodes,
    PutVerdicts,
    Release,
    SeeTasks,
    Stats,
    TasksSeen,
    Waiting,
)
from areal_async.rpc.schema import Message, Request
from areal_async.rpc.server import Answer, Handler, Peer, Server, by_type
from areal_async.service.context import ServiceContext
from areal_async.trajectory import (
    Episode,
    TrajectoryError,
    row_profile,
    seen_by,
    unpack_many,
    untrainable,
)
from areal_async.trajectory.layout import Media
from replay_buffer import metrics
from replay_buffer.attachments import AttachmentFiles, routes_key
from replay_buffer.coordinator import Coordinator, GroupBytes
from replay_buffer.ledger.batching import has_batch
from replay_buffer.ledger.decide import DECIDES, stats
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.leasing import Arrival, GroupArrivals, StoreEpisodes
from replay_buffer.ledger.opening import OpenedWith
from replay_buffer.ledger.records import Versions
from replay_buffer.ledger.rules import Rules, TaskOrder
from replay_buffer.media import GroupMedia
from replay_buffer.redis.address import RedisAddress, StoreUnavailable
from replay_buffer.redis.embedded import EmbeddedRedis, is_in_memory
from replay_buffer.redis.large import EPISODES
from replay_buffer.redis.store import Store
from replay_buffer.redis.writer import FILE, Bytes, ConfirmedRevision, LedgerClock

LONGEST_WAIT_MS = 30_000
LARGE_PUT_BYTES = 4 << 20  # Larger puts are read in a thread, so that they do not block other requests
PUTS_RUNNING = 8  # Most unconfirmed puts in Redis: other requests wait behind no more than these
MEDIA_RUNNING = 4  # Most requests for media at once: each holds up to `media.REPLY_BYTES`
LANES = {
    "score": Lane(8),
    "train": Lane(4),
    "lease": Lane(2, most_waiting=4096),
    "media": Lane(2, most_waiting=4096, most_running=MEDIA_RUNNING),
    "put": Lane(1, most_waiting=4096, most_bytes=256 << 20, most_running=PUTS_RUNNING),
}
"""Lanes of requests. Scoring and training have a larger share than puts: they free room in the buffer, and
puts fill it."""
LANE_OF: dict[type[Message], str] = {
    Claim: "score",
    PutVerdicts: "score",
    PutEpisodes: "put",
    FetchMedia: "media",
    **dict.fromkeys((Lease, Heartbeat, Release, Arrived, Drain), "lease"),
}
FIGURES_S = 1.0  # Seconds between updates of the metrics

log = get_logger("buffer")


def lane_of(request: Message) -> str:
    """Return the lane of a request. Requests without an entry in `LANE_OF` get the trainer's lane, because
    they are few and cheap."""
    return LANE_OF.get(type(request), "train")


def _wait_ms(message: Lease | Claim | NextBatch) -> int:
    return min(message.wait_ms, LONGEST_WAIT_MS)


class BufferServer:
    """Server of one job's requests. The coordinator decides the answers."""

    def __init__(self, coordinator: Coordinator, job: str, store: Store) -> None:
        self._coordinator = coordinator
        self._job = job
        self._store = store
        self._redis_bytes = 0
        self._media = GroupMedia(coordinator, store.attachments)
        self._lease_waits: dict[str, asyncio.Event] = {}
        """Worker → event that makes the buffer execute the worker's newest waiting lease request again."""
        self.handlers: dict[type[Request[Any]], Handler] = {
            **dict.fromkeys((asked for asked in DECIDES if issubclass(asked, Request)), self._execute),
            Lease: self._lease,
            PutEpisodes: self._put,
            Claim: self._claim,
            NextBatch: self._next_batch,
            Fetch: self._fetch,
            FetchMedia: self._media.fetch,
            OpenTrainer: self._open_trainer,
            Drain: self._drain,
            Stats: self._stats,
            SeeTasks: self._see_tasks,
        }
        """Handlers of requests. Most requests need only the ledger's decision (`_execute`), and the others
        have a method of their own."""
        self.handle = by_type("buffer", self.handlers)

    async def _execute(self, peer: Peer, message: Request[Any], attachments: list[memoryview]) -> Answer:
        decision = await self._coordinator.execute(message)
        return decision.reply, [decision.payload] if decision.payload is not None else []

    async def keep_figures(self, collector: metrics.BufferCollector) -> None:
        """Update the metrics until cancelled."""
        while True:
            if self._coordinator.index is not None:
                with contextlib.suppress(StoreUnavailable):
                    self._redis_bytes = await self._store.used_bytes()
            if (index := self._coordinator.index) is not None:
                figures = stats(index, self._coordinator.now_ms)
                collector.show(self._with_redis(figures), self._coordinator.lost_writes)
            collector.waits(self._coordinator.trouble)
            await asyncio.sleep(FIGURES_S)

    async def _lease(self, peer: Peer, message: Lease, attachments: list[memoryview]) -> Answer:
        """Answer a lease request. A worker asks again only when it serves another version. The worker's older
        request is then answered immediately, because the number of its waiting requests is limited."""
        self._look_again(message.worker)
        current = self._lease_waits[message.worker] = asyncio.Event()

        def is_empty(reply: Message) -> bool:
            newest = self._lease_waits.get(message.worker) is current
            return newest and isinstance(reply, Leases) and not reply.groups and not reply.drain

        try:
            return await self._coordinator.poll(message, _wait_ms(message), "lease", is_empty, again=current)
        finally:
            if self._lease_waits.get(message.worker) is current:
                del self._lease_waits[message.worker]

    def _look_again(self, worker: str) -> None:
        """Execute only this worker's waiting lease request again."""
        if (waiting := self._lease_waits.get(worker)) is not None:
            waiting.set()

    async def _drain(self, peer: Peer, message: Drain, attachments: list[memoryview]) -> Answer:
        log.info("worker drains", worker=message.worker, reason=message.reason)
        reply = (await self._coordinator.execute(message)).reply
        # Its waiting lease request is answered now, because it will get no grants.
        self._look_again(message.worker)
        return reply

    async def _put(self, peer: Peer, message: PutEpisodes, attachments: list[memoryview]) -> Answer:
        given = _by_group(message, attachments)
        blobs = [blob for each in given for blob in each.blobs]
        if sum(map(len, blobs)) > LARGE_PUT_BYTES:
            arrivals, media = await asyncio.to_thread(self._read, message, blobs, given)
        else:
            with busy("serve"):
                arrivals, media = self._read(message, blobs, given)
        for number, own in enumerate(given):
            if own.media or number in media:
                of_samples = media.get(number, {})
                arrivals[number], given[number] = await self._media.checked(arrivals[number], own, of_samples)
        return (await self._coordinator.store(StoreEpisodes(tuple(arrivals)), given)).reply

    def _read(
        self, message: PutEpisodes, blobs: Sequence[Bytes], given: Sequence[GroupBytes]
    ) -> tuple[list[GroupArrivals], dict[int, dict[int, list[Media]]]]:
        """Return the arrivals, and the media of samples that have some, by group number and sample."""
        unpacked = unpack_many(blobs)
        episodes = iter(zip(blobs, unpacked, strict=True))
        groups = []
        media: dict[int, dict[int, list[Media]]] = {}
        places = ((number, sample) for number, put in enumerate(message.groups) for sample in put.samples)
        for (number, sample), found in zip(places, unpacked, strict=True):
            if isinstance(found, Episode) and found.header.media:
                media.setdefault(number, {})[sample] = found.header.media
        for put, own in zip(message.groups, given, strict=True):
            # The bytes of routes count too, although they are not in Redis.
            more = dict(zip(own.routed, map(len, own.routes), strict=True))
            arrivals = [
                read_arrival(self._job, put.group_id, sample, found, len(blob) + more.get(sample, 0))
                for sample, (blob, found) in zip(put.samples, episodes, strict=False)
            ]
            groups.append(GroupArrivals(put.lease_id, put.group_id, tuple(arrivals)))
        return groups, media

    async def _claim(self, peer: Peer, message: Claim, attachments: list[memoryview]) -> Answer:
        def is_empty(reply: Message) -> bool:
            return isinstance(reply, Claims) and not reply.items

        def more_comes(index: Index) -> bool:
            return not index.claimable_group and 0 < index.claimable_episodes < message.max_episodes

        reply = await self._coordinator.poll(message, _wait_ms(message), "claim", is_empty, more_comes)
        if not isinstance(reply, Claims):
            return reply
        blobs = await self._coordinator.blobs([place_of(item.episode_id) for item in reply.items])
        # Between the claim and the read, a group may have been dropped and its bytes freed.
        held = [(item, blob) for item, blob in zip(reply.items, blobs, strict=True) if blob is not None]
        return Claims([item for item, _ in held]), [blob for _, blob in held]

    async def _open_trainer(self, peer: Peer, message: OpenTrainer, attachments: list[memoryview]) -> Answer:
        copy = bytes(attachments[0]) if attachments and len(attachments[0]) else None
        log.info("trainer opens", trainer=message.trainer, step=message.step, resumed=copy is not None)
        opened = OpenedWith(
            message.policy, message.trainer, message.step, copy, message.after_epoch, message.memory_epoch
        )
        return (await self._coordinator.execute(opened)).reply

    async def _next_batch(self, peer: Peer, message: NextBatch, attachments: list[memoryview]) -> Answer:
        def is_empty(reply: Message) -> bool:
            return isinstance(reply, Waiting)

        def more_comes(index: Index) -> bool:
            return not has_batch(index, message.policy, message.step)

        return await self._coordinator.poll(message, _wait_ms(message), "batch", is_empty, more_comes)

    async def _fetch(self, peer: Peer, message: Fetch, attachments: list[memoryview]) -> Answer:
        places = [place_of(episode_id) for episode_id in message.episode_ids]
        blobs = await self._coordinator.blobs(places)
        found = [blob for blob in blobs if blob is not None]
        if len(found) < len(blobs):
            missing = message.episode_ids[blobs.index(None)]
            raise FaultError("invalid", f"episode {missing} is not held here (any more)")
        media = [
            name
            for name, (group_id, _) in zip(message.episode_ids, places, strict=True)
            if self._media.may_have(group_id)
        ]
        if not message.routes:
            return Fetched(message.episode_ids, media=media), found
        routes = await self._coordinator.attachments([(id_, routes_key(sample)) for id_, sample in places])
        routed = {
            name: each for name, each in zip(message.episode_ids, routes, strict=True) if each is not None
        }
        return Fetched(message.episode_ids, [*routed], media), [*found, *routed.values()]

    async def _stats(self, peer: Peer, message: Stats, attachments: list[memoryview]) -> Answer:
        reply = (await self._coordinator.execute(message)).reply
        return self._with_redis(reply) if isinstance(reply, BufferStats) else reply

    async def _see_tasks(self, peer: Peer, message: SeeTasks, attachments: list[memoryview]) -> Answer:
        return TasksSeen(self._coordinator.tasks(message.task_ids))

    def _with_redis(self, figures: BufferStats) -> BufferStats:
        lost = self._coordinator.lost_writes
        return msgspec.structs.replace(figures, redis_bytes=self._redis_bytes, lost_writes=lost)


def _by_group(message: PutEpisodes, attachments: Sequence[memoryview]) -> list[GroupBytes]:
    """Return the attachments of each group of a put. Raises `FaultError` if they do not match."""
    found, at = [], 0
    strange = False
    for put in message.groups:
        routes_at = at + len(put.samples)
        media_at = routes_at + len(put.routes)
        end = media_at + len(put.media)
        routed = {*put.routes}
        strange |= not routed <= {*put.samples} or len(routed) < len(put.routes)
        media = dict(zip(put.media, attachments[media_at:end], strict=False))
        strange |= len(media) < len(put.media)
        found.append(
            GroupBytes(attachments[at:routes_at], put.routes, attachments[routes_at:media_at], media)
        )
        at = end
    if strange or at != len(attachments):
        raise FaultError(
            "invalid",
            f"a put of {sum(len(put.samples) for put in message.groups)} samples, "
            f"{sum(len(put.routes) for put in message.groups)} with routes, and "
            f"{sum(len(put.media) for put in message.groups)} media, came with "
            f"{len(attachments)} attachments",
        )
    return found


def read_arrival(
    job: str, group_id: str, sample: int, found: Episode | TrajectoryError, size_bytes: int
) -> Arrival:
    """Return the properties of an episode that its bytes contain, checked against those in the message.
    `found` is the decoded blob, or the reason why it cannot be decoded."""
    if isinstance(found, TrajectoryError):
        return Arrival(sample, problem=str(found))
    try:
        versions = {
            policy: Versions(*held, rows=row_profile(seen_by(found, policy)))
            for policy, held in found.versions.items()
        }
    except TrajectoryError as error:
        return Arrival(sample, problem=str(error))
    header = found.header
    if (header.job, header.group_id, header.sample) != (job, group_id, sample):
        return Arrival(sample, problem=f"the blob is episode {found.episode_id} of job {header.job}")
    if why := untrainable(found):
        problem = (
            f"{why}, so it is no sample of what is trained. Sample at a temperature above 0 "
            "without top_p and top_k, or keep the answer as context: ctx.generate(…, train=False)"
        )
        return Arrival(sample, problem=problem)
    return Arrival(sample, size_bytes, found.n_units, found.n_sampled, versions)


def place_of(episode_id: str) -> tuple[str, int]:
    """Return (group id, sample) of an episode id. Raises `FaultError` for an invalid id."""
    group_id, _, sample = episode_id.rpartition(".")
    if not group_id or not sample.isdecimal():
        raise FaultError("invalid", f"{episode_id!r} is not an episode id")
    return group_id, int(sample)


async def main(ctx: ServiceContext, registry: CollectorRegistry = REGISTRY) -> None:
    """Run the service's process: Redis, coordinator and server. Return on a stop request, or raise the error
    that prevents the service from running."""
    # Long: one stack holds what each part has begun, and ends it in the reverse order.
    job = ctx.job
    rules, tasks, clock = Rules.of(job), TaskOrder.of(job), LedgerClock()
    embedded = None
    if job.buffer.redis == "embedded":
        password = ctx.keys.token("redis")
        embedded = EmbeddedRedis(
            ctx.run_dir / "buffer", ctx.socket_dir / "redis", rules.durability, password=password
        )
        if rules.durability == "always" and is_in_memory(ctx.run_dir):
            rules = replace(rules, durability="everysec")
            log.warning(
                f"buffer.durability is always, but {ctx.run_dir} is in memory, not on a disk: acknowledged "
                "episodes survive the death of any process, not that of the machine (everysec)"
            )
    async with contextlib.AsyncExitStack() as stack:
        if embedded is not None:
            stack.push_async_callback(embedded.stop)
            await embedded.start()
        address = RedisAddress.parse(embedded.url) if embedded is not None else RedisAddress.of(job.buffer)
        mark = ConfirmedRevision(ctx.run_dir / "buffer" / FILE)
        stack.callback(mark.close)
        # A Redis started by the job runs on this host, so large episodes are files beside it. Attachments
        # are always files, wherever Redis runs.
        beside = ctx.run_dir / "buffer" / EPISODES
        store = Store(
            address,
            job.job,
            tasks.dataset_hash,
            rules.durability,
            clock,
            max_bytes=rules.max_bytes,
            confirmed=mark.read(),
            folder=beside if embedded is not None else None,
            attachments=AttachmentFiles(beside, durable=rules.durability != "memory"),
        )
        revive = embedded.start if embedded is not None else None
        coordinator = Coordinator(store, rules, tasks, clock, revive, on_confirmed=mark.write)
        stack.push_async_callback(coordinator.stop)
        await coordinator.start()
        buffer = BufferServer(coordinator, job.job, store)
        server = Server(
            ctx.buffer.endpoint,
            service="buffer",
            job=job.job,
            access=ctx.keys,
            handler=buffer.handle,
            lanes=Lanes(LANES, lane_of),
        )
        await server.start()
        stack.push_async_callback(server.stop)
        stack.callback(coordinator.stop_waiting)
        collector = metrics.BufferCollector(lambda: store.tail, rules=rules)
        registry.register(collector)
        stack.callback(registry.unregister, collector)
        board.figures = collector.figures
        figures = asyncio.create_task(buffer.keep_figures(collector), name="buffer-figures")
        stack.callback(figures.cancel)
        ctx.ready()
        log.info("buffer serves", redis=str(address), durability=rules.durability, tasks=len(tasks.table))
        stopped = asyncio.create_task(ctx.stop.wait(), name="stop")
        stack.callback(stopped.cancel)
        ends: set[asyncio.Future[Any]] = {stopped, coordinator.ended, figures}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if coordinator.ended.done():
            raise coordinator.ended.result()
        if figures.done():
            figures.result()
