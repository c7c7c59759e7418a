"""The ledger and the episodes in Redis.

Promises: opening takes the job over and fences every earlier front, by epoch; what is loaded after that
cannot change but through this store. A Redis that could lose the ledger (it evicts keys, or does not persist
as the configured tier asks) is refused, with the setting to change."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import hiredis
import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from replay_buffer.clock import RedisClock
from replay_buffer.errors import StoreError, StoreFenced, StoreUnavailable, StoreUnusable
from replay_buffer.keys import Bytes, Commands, Keys, commands_of
from replay_buffer.ledger.index import Records, Writes
from replay_buffer.ledger.records import SCHEMA, BatchPlan, Claim, Group, Lease, Meta
from replay_buffer.pipe import ANSWER_LIMIT_S, CONNECT_LIMIT_S, RedisPipe
from replay_buffer.redis_check import check_redis
from replay_buffer.writer import Writer, check_answer, script_call

SCRIPT = files("replay_buffer").joinpath("write.lua").read_bytes()

_decode_meta = msgspec.msgpack.Decoder(Meta).decode
_decode_group = msgspec.msgpack.Decoder(Group).decode
_decode_lease = msgspec.msgpack.Decoder(Lease).decode
_decode_claim = msgspec.msgpack.Decoder(Claim).decode
_decode_batch = msgspec.msgpack.Decoder(BatchPlan).decode


@dataclass(frozen=True)
class Opened:
    """A ledger taken over. `idle_ms`: time since the last write of whoever had it before. `lost_writes`:
    writes confirmed to this store or an earlier front, and not there any more."""

    records: Records
    revision: int
    front_epoch: int
    idle_ms: int
    lost_writes: int


class Store:
    """One job in the Redis at `url` (`redis://…` or `unix://…`). `confirmed` is the revision that an earlier
    front is known to have seen there."""

    def __init__(
        self,
        url: str,
        job: str,
        dataset_hash: str,
        durability: str,
        clock: RedisClock,
        confirmed: int = 0,
    ) -> None:
        self.url = url
        self.front_epoch = 0
        self._keys = Keys(job)
        self._dataset_hash = dataset_hash
        self._durability = durability
        self._clock = clock
        self._redis = connect(url)
        self._reads: RedisPipe | None = None
        self._writer: Writer | None = None
        self._confirmed = confirmed
        self._owner = secrets.token_hex(8)
        """Which front holds the ledger, in Redis: epochs alone do not tell a front from its successor."""
        self._sha = ""

    @property
    def tail(self) -> asyncio.Future[None] | None:
        """Confirmation of all writes so far; None before the first."""
        return self._writer.tail if self._writer is not None else None

    async def open(self, on_failure: Callable[[StoreError], None]) -> Opened:
        """Take the job over (again), and load its ledger or begin one.

        A store that had the job before raises `StoreFenced` if another front has it now. Also raises
        `StoreUnavailable` while Redis does not answer, `StoreUnusable` when it must not be used."""
        await self._let_go()
        writes: RedisPipe | None = None
        try:
            await check_redis(self._redis, self.url, self._durability)
            self._sha = await self._redis.script_load(SCRIPT)
            writes, self._reads = await RedisPipe.open(self.url), await RedisPipe.open(self.url)
            await self._look_at_clock()
            had_before = self.front_epoch > 0
            revision = await (self._take_back() if had_before else self._take_over())
            opened = await self._load(lost_writes=max(0, self._confirmed - revision))
            self._confirmed = opened.revision
            self._writer = Writer(writes, self._sha, self.front_epoch, self._clock, on_failure)
            return opened
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis at {self.url} does not answer: {error}") from error
        finally:
            if self._writer is None and writes is not None:
                writes.close()

    def submit(self, revision: int, writes: Writes, attachments: Sequence[Bytes]) -> asyncio.Future[None]:
        """Write in order; the future ends when Redis has confirmed."""
        if self._writer is None:
            raise StoreUnavailable("the store is not open")
        return self._writer.submit(revision, commands_of(self._keys, writes, attachments))

    async def blobs(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """The codec blobs of (group id, sample), in order; None for one that is not held."""
        if self._reads is None:
            raise StoreUnavailable("the store is not open")
        by_group: dict[str, list[int]] = {}
        for group_id, sample in wanted:
            by_group.setdefault(group_id, []).append(sample)
        asked = [
            (group_id, samples, self._reads.call("HMGET", self._keys.blobs(group_id), *samples))
            for group_id, samples in by_group.items()
        ]
        found: dict[tuple[str, int], bytes | None] = {}
        # Gathered, so that no answer is left unread when the connection breaks.
        answers = await asyncio.gather(*(answer for _, _, answer in asked))
        for (group_id, samples, _), blobs in zip(asked, answers, strict=True):
            if isinstance(blobs, hiredis.ReplyError):
                raise StoreUnavailable(f"Redis did not give back episodes: {blobs}")
            found.update(zip(((group_id, sample) for sample in samples), blobs, strict=True))
        return [found[place] for place in wanted]

    async def used_bytes(self) -> int:
        """Memory that Redis uses, all of it."""
        try:
            return int((await self._redis.info("memory"))["used_memory"])
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis at {self.url} does not answer: {error}") from error

    async def close(self) -> None:
        """Write what is queued, and disconnect."""
        await self._let_go()
        await self._redis.aclose()

    async def _let_go(self) -> None:
        if self._writer is not None:
            await self._writer.close()
            self._confirmed = max(self._confirmed, self._writer.confirmed)
            self._writer = None
        if self._reads is not None:
            self._reads.close()
            self._reads = None

    # --- taking over ---

    async def _take_over(self) -> int:
        """As a new front: the epoch counts on, whoever had it. Returns the revision found."""
        keys = self._keys
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hincrby(keys.meta, "front", 1)
        pipeline.hset(keys.meta, "owner", self._owner)
        pipeline.hsetnx(keys.meta, "revision", 0)
        pipeline.hmget(keys.meta, "revision", "state")
        epoch, _, _, (revision, begun) = await pipeline.execute()
        if begun is None:
            begin = Commands(keys)
            meta = Meta(ledger_id=secrets.token_hex(8), dataset_hash=self._dataset_hash)
            state = msgspec.msgpack.encode(meta)
            begin.add("HSET", keys.meta, ("schema", SCHEMA, "state", state))
            await self._run(begin, epoch, 0)
        self.front_epoch = epoch
        return int(revision)

    async def _take_back(self) -> int:
        """As the front that had it: only if no other front came in between. The new epoch fences this front's
        own writes that were lost from sight. Returns the revision found.

        An attempt whose answer was lost may have got through, or may yet: then the epoch in Redis is another,
        and still this front's."""
        revision, front, owner = await self._redis.hmget(self._keys.meta, "revision", "front", "owner")
        if revision is None:
            raise StoreUnusable(
                f"Redis at {self.url} has lost the whole ledger of this job (durability tier "
                f"{self._durability}). Resume from the last checkpoint."
            )
        mine = owner == self._owner.encode()
        epoch = int(front) if mine else self.front_epoch
        step = Commands(self._keys)
        step.add("HSET", self._keys.meta, ("front", epoch + 1))
        try:
            await self._run(step, epoch, int(revision))
        except StoreFenced as error:
            if mine:
                raise StoreUnavailable("an earlier attempt to come back got through meanwhile") from error
            raise
        self.front_epoch = epoch + 1
        return int(revision)

    async def _run(self, commands: Commands, epoch: int, revision: int) -> None:
        call = script_call(self._sha, epoch, revision, commands)
        check_answer(await self._redis.execute_command(*call))

    async def _load(self, lost_writes: int) -> Opened:
        keys = self._keys
        pipeline = self._redis.pipeline(transaction=False)
        for key in (keys.meta, keys.groups, keys.leases, keys.claims, keys.batches):
            pipeline.hgetall(key)
        meta, groups, leases, claims, batches = await pipeline.execute()
        if int(meta[b"schema"]) != SCHEMA:
            raise StoreUnusable(
                f"the ledger in {self.url} has schema {int(meta[b'schema'])}, this version reads {SCHEMA}: "
                "finish the job with the version that began it"
            )
        records = Records(
            meta=_decode_meta(meta[b"state"]),
            groups={name.decode(): _decode_group(value) for name, value in groups.items()},
            leases={name.decode(): _decode_lease(value) for name, value in leases.items()},
            claims={name.decode(): _decode_claim(value) for name, value in claims.items()},
            batches={int(name): _decode_batch(value) for name, value in batches.items()},
        )
        if records.meta.dataset_hash != self._dataset_hash:
            raise StoreUnusable(
                f"the ledger in {self.url} was begun with the data set {records.meta.dataset_hash}, but "
                f"tasks.train is now {self._dataset_hash}: give back the old file, or rename the job"
            )
        idle_ms = max(0, self._clock.now_ms() - int(meta.get(b"alive_ms", self._clock.now_ms())))
        return Opened(records, int(meta[b"revision"]), self.front_epoch, idle_ms, lost_writes)

    async def _look_at_clock(self) -> None:
        sent_ms = self._clock.local_ms()
        seconds, micros = await self._redis.time()
        self._clock.observe(int(seconds) * 1000 + int(micros) // 1000, sent_ms, self._clock.local_ms())


def connect(url: str) -> Redis:
    """A client that repeats nothing by itself: what was not confirmed is the store's to sort out."""
    options: dict[str, Any] = {
        "socket_timeout": ANSWER_LIMIT_S,
        "socket_connect_timeout": CONNECT_LIMIT_S,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    return Redis.from_url(url, **options)
