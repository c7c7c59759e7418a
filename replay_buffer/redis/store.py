"""The ledger and the episodes in Redis.

Promises: `open` takes over the job with a new epoch, so that Redis refuses the writes of every earlier front.
After that, only this store can change the loaded data. The store refuses a Redis that could lose the ledger,
because it evicts keys or persists less than `buffer.durability` needs. The error names the setting to
change."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import hiredis
import msgspec

from replay_buffer.attachments import AttachmentFiles
from replay_buffer.ledger.index import LedgerRecords, WriteSet
from replay_buffer.ledger.records import SCHEMA, BatchPlan, ClaimRecord, GroupRecord, LeaseRecord, LedgerMeta
from replay_buffer.redis.address import RedisAddress, StoreError, StoreUnavailable, StoreUnusable, refusal
from replay_buffer.redis.connection import RedisConnection, checked, table
from replay_buffer.redis.large import BlobFiles, BlobRef, EpisodeKey, Large, staged_keys
from replay_buffer.redis.writer import Bytes, Keys, LedgerClock, LedgerWriter, fenced

SCRIPT = files("replay_buffer.redis").joinpath("write.lua").read_bytes()
TAKE_SCRIPT = files("replay_buffer.redis").joinpath("take_over.lua").read_bytes()
ROOM_SHARE = 0.99  # A full Redis has room again below this share of its maxmemory

T = TypeVar("T")

_decode_meta = msgspec.msgpack.Decoder(LedgerMeta).decode
_decode_group = msgspec.msgpack.Decoder(GroupRecord).decode
_decode_lease = msgspec.msgpack.Decoder(LeaseRecord).decode
_decode_claim = msgspec.msgpack.Decoder(ClaimRecord).decode
_decode_batch = msgspec.msgpack.Decoder(BatchPlan).decode


@dataclass(frozen=True)
class Opened:
    """A ledger that was just taken over. `idle_ms` is the time since the ledger's last write if this store
    had the ledger before. `lost_writes` counts writes that were confirmed to this store or an earlier front
    and are now missing."""

    records: LedgerRecords
    revision: int
    front_epoch: int
    idle_ms: int
    lost_writes: int
    lost_episodes: tuple[EpisodeKey, ...] = ()  # Episodes in the ledger whose bytes are missing


class Store:
    """The data of one job in the Redis at an address. `max_bytes` is the limit for its episodes, or 0 if
    unknown. `confirmed` is the last revision that an earlier front saw confirmed."""

    def __init__(
        self,
        address: str | RedisAddress,
        job: str,
        dataset_hash: str,
        durability: str,
        clock: LedgerClock,
        *,
        max_bytes: int = 0,
        confirmed: int = 0,
        folder: Path | None = None,
        attachments: AttachmentFiles | None = None,
    ) -> None:
        self.address = RedisAddress.parse(address) if isinstance(address, str) else address
        self.front_epoch = 0
        self.full = False
        """True after Redis refused a write for lack of memory, until it has room again."""
        self._keys = Keys(job)
        self._large = Large(self._keys)
        self._files = None if folder is None else BlobFiles(folder, durability)
        self.attachments = attachments
        self._dataset_hash = dataset_hash
        self._durability = durability
        self._clock = clock
        self._max_bytes = max_bytes
        self._connection: RedisConnection | None = None
        self._writer: LedgerWriter | None = None
        self._confirmed = confirmed
        self._owner = secrets.token_hex(8)
        """Id by which Redis knows this front as the owner of the ledger. Epochs alone cannot distinguish a
        front from its successor."""
        self._sha = ""

    @property
    def tail(self) -> asyncio.Future[None] | None:
        """Confirmation of all writes so far, or None before the first write."""
        return self._writer.tail if self._writer is not None else None

    async def open(self, on_failure: Callable[[StoreError], None]) -> Opened:
        """Take over the job, for the first time or again. Load its ledger, or create one.

        Raises `StoreFenced` if this store had the job before and another front has it now. Raises
        `StoreUnavailable` while Redis does not answer, and `StoreUnusable` if it must not be used."""
        await self._let_go()
        writes: RedisConnection | None = None
        try:
            await self._settle()
            self._sha = (await self._connected.ask("SCRIPT", "LOAD", SCRIPT)).decode()
            writes = await RedisConnection.open(self.address)
            revision = await self._take()
            opened = await self._load(lost_writes=max(0, self._confirmed - revision))
            opened = replace(opened, lost_episodes=await self._open_large())
            if self.attachments is not None:
                await self.attachments.open(opened.records.groups.keys())
            self._confirmed = opened.revision
            failed = partial(self._failed, on_failure)
            self._writer = LedgerWriter(writes, self._sha, self.front_epoch, self._clock, failed)
            return opened
        finally:
            if self._writer is None and writes is not None:
                writes.close()

    async def place_large(self, blobs: Sequence[Bytes]) -> tuple[list[Bytes | BlobRef], str]:
        """Write large enough blobs into a file, if there is a folder for files. Return the blobs for
        `submit`, and a name for `settled` after it. Raises OSError if the disk is full."""
        if self._files is None:
            return list(blobs), ""
        return await self._files.write(blobs)

    def settled(self, name: str, group_id: str) -> None:
        """Record that the put with the file `name`, written for that group, is decided."""
        if self._files is not None:
            self._files.settled(name, used=self._large.uses(group_id, name))

    def submit(
        self, revision: int, writes: WriteSet, attachments: Sequence[Bytes | BlobRef]
    ) -> asyncio.Future[None]:
        """Submit a write after all earlier ones. The future is done when Redis has confirmed the write."""
        if self._writer is None:
            raise StoreUnavailable("the store is not open", "gone")
        parcel = self._large.prepare(writes, attachments)
        if self.full and not attachments:
            parcel.commands.before_all("HDEL", ("",))
        written = self._writer.submit(revision, parcel.commands, parcel.ahead)
        if self._files is not None and parcel.files_freed:
            written.add_done_callback(partial(_free, self._files.remove, parcel.files_freed))
        if self.attachments is not None and (names := self.attachments.release(writes.freed)):
            written.add_done_callback(partial(_free, self.attachments.remove, names))
        return written

    async def blobs(self, wanted: Sequence[EpisodeKey]) -> list[Bytes | None]:
        """Return the encoded episodes of (group id, sample), in order. The entry of an episode that is not
        stored is None."""
        reads = self._connected
        refs = {place: ref for place in wanted if (ref := self._large.ref(*place)) is not None}
        small: dict[str, list[int]] = {}
        for group_id, sample in wanted:
            if (group_id, sample) not in refs:
                small.setdefault(group_id, []).append(sample)
        asked = [
            (group_id, samples, reads.call("HMGET", self._keys.blobs(group_id), *samples))
            for group_id, samples in small.items()
        ]
        in_keys = {
            place: reads.call("MGET", *self._large.key_names(ref))
            for place, ref in refs.items()
            if ref.chunks
        }
        answering = asyncio.gather(*(answer for _, _, answer in asked), *in_keys.values())
        found: dict[EpisodeKey, Bytes | None] = {}
        in_files = [(place, ref) for place, ref in refs.items() if not ref.chunks]
        if self._files is not None and in_files:
            maps = await self._files.read([ref for _, ref in in_files])
            found.update(zip((place for place, _ in in_files), maps, strict=True))
        # Gathered, so that every answer is read when the connection breaks.
        answers = [checked(answer) for answer in await answering]
        for (group_id, samples, _), blobs in zip(asked, answers, strict=False):
            found.update(zip(((group_id, sample) for sample in samples), blobs, strict=True))
        found.update(zip(in_keys, map(joined, answers[len(asked) :]), strict=True))
        return [found[place] for place in wanted]

    async def used_bytes(self) -> int:
        """Return all memory that Redis uses. Clears `full` if a full Redis has room again."""
        memory = await self._connected.info("memory")
        limit = int(memory["maxmemory"])
        counted = int(memory["used_memory"]) - int(memory.get("mem_not_counted_for_evict", 0))
        if not limit or counted < ROOM_SHARE * limit:
            self.full = False
        return int(memory["used_memory"])

    async def close(self) -> None:
        """Write everything in the queue, then disconnect."""
        await self._let_go()
        if self._files is not None:
            self._files.close()
        if self.attachments is not None:
            self.attachments.close()

    async def _let_go(self) -> None:
        if self._writer is not None:
            await self._writer.close()
            self._confirmed = max(self._confirmed, self._writer.confirmed)
            self._writer = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _failed(self, on_failure: Callable[[StoreError], None], error: StoreError) -> None:
        if isinstance(error, StoreUnavailable) and error.trouble == "memory":
            self.full = True
        on_failure(error)

    # --- large episodes ---

    async def _open_large(self) -> tuple[EpisodeKey, ...]:
        """Load the places of large episodes and remove leftovers of a crash. Return the episodes without
        bytes."""
        ask = self._connected.ask
        self._large.load(table(await ask("HGETALL", self._keys.large)), self.front_epoch)
        for staged in await ask("SMEMBERS", self._keys.staged):
            for name in staged_keys(self._keys, staged.decode()):
                await ask("UNLINK", name)
            await ask("SREM", self._keys.staged, staged)
        return () if self._files is None else tuple(await self._files.open(self._large.in_files()))

    # --- the server ---

    @property
    def _connected(self) -> RedisConnection:
        """Return the connection for everything except writes."""
        if self._connection is None:
            raise StoreUnavailable("the store is not open", "gone")
        return self._connection

    async def _settle(self) -> None:
        """Connect to the server, and check that it may be used.

        If this store was never open, an unusable server is a final error. If the store was open before, the
        server has been changed since, so the store waits until somebody corrects it."""
        try:
            self._connection = await RedisConnection.open(self.address)
            await check_keys(self._connection, self.address, self._keys)
            await check_redis(self._connection, self.address, self._durability, max_bytes=self._max_bytes)
        except StoreUnusable as error:
            if self.front_epoch:
                raise StoreUnavailable(str(error)) from error
            raise

    # --- taking over ---

    async def _take(self) -> int:
        """Increase the epoch, whichever front had the ledger. Redis then refuses every write under an older
        epoch, also unconfirmed writes of this front. Return the revision found.

        A front that had the job takes it back only if no other front took it since. Two cases do not count as
        another front: an own attempt whose answer was lost, and an epoch older than this front's. Such an
        epoch means that Redis has lost the writes since this front took over."""
        ask = self._connected.ask
        sha = await ask("SCRIPT", "LOAD", TAKE_SCRIPT)
        front, owner, state = await ask("HMGET", self._keys.meta, "front", "owner", "state")
        held, had = int(front or 0), self.front_epoch
        if had and (front is None or state is None):
            raise StoreUnusable(
                f"Redis at {self.address} has lost the whole ledger of this job (durability tier "
                f"{self._durability}). Resume from the last checkpoint."
            )
        if had and held >= had and owner != self._owner.encode():
            raise fenced(held)
        epoch = max(held, had) + 1
        meta = LedgerMeta(ledger_id=secrets.token_hex(8), dataset_hash=self._dataset_hash)
        begin = (SCHEMA, msgspec.msgpack.encode(meta))
        answer = await ask("EVALSHA", sha, 1, self._keys.meta, front or b"", epoch, self._owner, *begin)
        if answer[0] == b"moved":
            raise StoreUnavailable("another attempt to take the job over came in between", "gone")
        self.front_epoch = epoch
        return int(answer[1])

    async def _load(self, lost_writes: int) -> Opened:
        # No other front writes. At its memory limit, Redis refuses every transaction.
        meta, records = await read_ledger(self._connected, self._keys, str(self.address), transaction=False)
        if records.meta.dataset_hash != self._dataset_hash:
            raise StoreUnusable(
                f"the ledger in {self.address} was begun with the data set {records.meta.dataset_hash}, but "
                f"tasks.train is now {self._dataset_hash}: give back the old file, or rename the job"
            )
        alive_ms = meta.get(b"alive_ms")
        idle_ms = self._clock.begin(None if alive_ms is None else int(alive_ms))
        return Opened(records, int(meta[b"revision"]), self.front_epoch, idle_ms, lost_writes)


def joined(chunks: list[Any]) -> bytes | None:
    """Return one episode joined from its chunks, or None if a chunk is missing."""
    return None if None in chunks else b"".join(chunks)


async def read_ledger(
    redis: RedisConnection, keys: Keys, url: str, *, transaction: bool
) -> tuple[dict[bytes, bytes], LedgerRecords]:
    """Return the meta hash and all records, without changing anything. With `transaction`, all are read at
    one moment.

    Raises `StoreUnusable` if there is no ledger or it has another schema, and `StoreUnavailable` if Redis
    does not answer."""
    looks = [("HGETALL", key) for key in (keys.meta, keys.groups, keys.leases, keys.claims, keys.batches)]
    commands = [("MULTI",), *looks, ("EXEC",)] if transaction else looks
    answers = [checked(one) for one in await asyncio.gather(*[redis.call(*command) for command in commands])]
    meta, groups, leases, claims, batches = map(table, answers[-1] if transaction else answers)
    if b"state" not in meta:
        raise StoreUnusable(f"Redis at {url} holds no ledger of this job")
    if int(meta[b"schema"]) != SCHEMA:
        raise StoreUnusable(
            f"the ledger in {url} has schema {int(meta[b'schema'])}, this version reads {SCHEMA}: "
            "finish the job with the version that began it"
        )
    return meta, LedgerRecords(
        meta=_decode_meta(meta[b"state"]),
        groups={name.decode(): _decode_group(value) for name, value in groups.items()},
        leases={name.decode(): _decode_lease(value) for name, value in leases.items()},
        claims={name.decode(): _decode_claim(value) for name, value in claims.items()},
        batches={(plan.policy, plan.step): plan for plan in map(_decode_batch, batches.values())},
    )


# --- whether a server may hold a ledger ---


OLDEST = (6, 0)


def _free(remove: Callable[[T], None], freed: T, written: asyncio.Future[None]) -> None:
    if not written.cancelled() and written.exception() is None:
        remove(freed)


async def check_redis(
    redis: RedisConnection, place: RedisAddress, durability: str, *, max_bytes: int = 0
) -> None:
    """Raise `StoreUnusable` with the setting to change, or `StoreUnavailable` for a temporary problem.

    `max_bytes` is the job's limit."""
    info = await redis.info()
    _check_server(info, place, max_bytes)
    if durability != "memory":
        await _check_persistence(redis, info, place, durability)


def _check_server(info: dict[str, str], place: RedisAddress, max_bytes: int) -> None:
    version, policy, limit = info["redis_version"], info["maxmemory_policy"], int(info.get("maxmemory", 0))
    problem = ""
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        problem = f"is version {version}; at least {OLDEST[0]}.{OLDEST[1]} is needed"
    elif policy != "noeviction":
        problem = f"would drop keys when full: its maxmemory-policy is {policy}. Set it to noeviction."
    elif limit and limit < max_bytes:
        problem = (
            f"has maxmemory {limit}, less than the {max_bytes} bytes of episodes that the job may hold. "
            "Raise maxmemory there to about 1.3 times that, or lower buffer.max_bytes."
        )
    elif info.get("role", "master") != "master":
        master = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
        problem = f"is a replica of {master}, and takes no writes. Set buffer.redis to the master."
    if problem:
        raise StoreUnusable(f"Redis at {place} {problem}")


async def _check_persistence(
    redis: RedisConnection, info: dict[str, str], place: RedisAddress, durability: str
) -> None:
    if not int(info["aof_enabled"]):
        raise StoreUnusable(
            f"Redis at {place} keeps no append-only file, which buffer.durability {durability} needs. Set "
            "appendonly to yes there, or buffer.durability to memory."
        )
    if info.get("aof_last_write_status", "ok") != "ok":
        raise refusal(f"MISCONF the last write of the append-only file of {place} failed")
    fsync = await _setting(redis, "appendfsync")
    if fsync is None:
        raise StoreUnusable(
            f"Redis at {place} does not tell its appendfsync, so that it fits buffer.durability {durability} "
            "is not known. Allow the user +config|get, or set buffer.durability to memory."
        )
    if fsync == "no" or (durability == "always" and fsync != "always"):
        raise StoreUnusable(
            f"Redis at {place} has appendfsync {fsync}, but buffer.durability is {durability}. Make them "
            "agree."
        )
    if await _setting(redis, "no-appendfsync-on-rewrite") == "yes":
        raise StoreUnusable(
            f"Redis at {place} does not flush its file while it rewrites it. Set no-appendfsync-on-rewrite "
            "to no there, or buffer.durability to memory."
        )


async def _setting(redis: RedisConnection, name: str) -> str | None:
    """Return a configuration value, or None if this server does not report it."""
    try:
        answer: list[bytes] = await redis.ask("CONFIG", "GET", name)
    except StoreUnavailable as error:
        if error.trouble == "gone":
            raise
        return None
    return answer[1].decode() if answer else None


async def check_keys(redis: RedisConnection, place: RedisAddress, keys: Keys) -> None:
    """Raise `StoreUnusable` if this server cannot hold the keys of the job, or this user may not access
    them."""
    answer = await redis.call("HEXISTS", keys.meta, "front")
    if not isinstance(answer, hiredis.ReplyError):
        return
    text = str(answer)
    if text.startswith("NOPERM"):
        raise StoreUnusable(
            f"the user {place.user!r} of Redis at {place} lacks rights to {keys.prefix}*: {text} "
            "(docs/buffer.md#use-your-own-redis)"
        )
    if not text.startswith(("MOVED", "ASK")):
        raise refusal(text)
    words = text.split()
    where = f"slot {words[1]} is served by {words[2]}" if words[0] == "MOVED" and len(words) > 2 else text
    raise StoreUnusable(
        f"Redis at {place} is a cluster node that does not serve the keys {keys.prefix}*: {where}. Set "
        "buffer.redis to that node: a job lives on one shard"
    )
