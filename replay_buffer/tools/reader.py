"""Read-only access to a job's ledger and episodes.

Promises: nothing is changed. For a live run, its Redis is read without a new front epoch. For an ended run, a
copy of its files is read in a temporary Redis. The ledger is read as of one moment and the episodes after it,
so the episodes of a group that leaves the buffer in between are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

from areal_async.base.errors import RunFolderError
from areal_async.launch.folders import mark_owned
from areal_async.launch.one_host import short_socket_dir
from areal_async.launch.run_handle import Run
from areal_async.trajectory import read_header
from replay_buffer.attachments import read_media
from replay_buffer.ledger.index import Index
from replay_buffer.ledger.records import GroupRecord
from replay_buffer.ledger.rules import Rules, TaskOrder, Tasks
from replay_buffer.redis.address import RedisAddress, StoreUnavailable
from replay_buffer.redis.connection import RedisConnection, table
from replay_buffer.redis.embedded import EmbeddedRedis
from replay_buffer.redis.large import EPISODES, BlobRef, read_ref
from replay_buffer.redis.store import joined, read_ledger
from replay_buffer.redis.writer import Keys


@dataclass(frozen=True)
class Look:
    """A ledger as of the time `now_ms` of the ledger's clock. For an ended run this is the time of the last
    write."""

    index: Index
    now_ms: int
    written_ms: int
    """Unix time of the last write, by the clock of Redis."""
    redis_bytes: int


class LedgerReader:
    """Reader of the ledger of a run and its task file. `open_reader` creates it."""

    def __init__(self, redis: RedisConnection, url: str, run: Run, tasks: Tasks) -> None:
        self.tasks = tasks
        self._redis = redis
        self._url = url
        self._run = run
        self._keys = Keys(run.job.job)

    async def look(self) -> Look:
        """Return the present ledger. Raises `StoreUnavailable` or `StoreUnusable`."""
        try:
            found = await read_ledger(self._redis, self._keys, self._url, transaction=True)
        except StoreUnavailable as error:
            if error.trouble != "memory":
                raise
            # At its memory limit, Redis refuses transactions. But then it accepts no episodes either.
            found = await read_ledger(self._redis, self._keys, self._url, transaction=False)
        meta, records = found
        seconds, micros = await self._redis.ask("TIME")
        used = int((await self._redis.info("memory"))["used_memory"])
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        written_ms = int(meta.get(b"wall_ms", now_ms))
        passed_ms = max(0, now_ms - written_ms) if self._run.alive else 0
        return Look(
            index=Index(Rules.of(self._run.job), self.tasks, records, nonce=""),
            now_ms=int(meta.get(b"alive_ms", now_ms)) + passed_ms,
            written_ms=written_ms,
            redis_bytes=used,
        )

    async def blobs(self, group: GroupRecord) -> dict[int, bytes]:
        """Return the codec blobs of a group by sample, without samples whose bytes are missing."""
        names = [f"{group.group_id}.{sample}" for sample in range(len(group.episodes))]
        held = table(await self._redis.ask("HGETALL", self._keys.blobs(group.group_id)))
        refs = await self._redis.ask("HMGET", self._keys.large, *names)
        blobs = {int(sample): blob for sample, blob in held.items()}
        for sample, ref in enumerate(refs):
            if ref is not None and (blob := await self._large(read_ref(ref))) is not None:
                blobs[sample] = blob
        return blobs

    async def media(self, group: GroupRecord, blobs: Iterable[bytes]) -> dict[str, bytes]:
        """Return the images of a group's episodes by digest, without images whose files are missing."""
        if not any(read_header(blob)[0].media for blob in blobs):
            return {}
        return await asyncio.to_thread(read_media, self._run.folder / "buffer" / EPISODES, group.group_id)

    async def _large(self, ref: BlobRef) -> bytes | None:
        if ref.chunks:
            keys = [self._keys.chunk(ref.name, ref.at + i) for i in range(ref.chunks)]
            return joined(await self._redis.ask("MGET", *keys))
        return await asyncio.to_thread(_from_file, self._run.folder / "buffer" / EPISODES / ref.name, ref)


def _from_file(path: Path, ref: BlobRef) -> bytes | None:
    try:
        with path.open("rb") as file:
            file.seek(ref.at)
            blob = file.read(ref.size_bytes)
    except FileNotFoundError:
        return None
    return blob if len(blob) == ref.size_bytes else None


@contextlib.asynccontextmanager
async def open_reader(run: Run) -> AsyncIterator[LedgerReader]:
    """Yield a reader of the run's ledger. Raises `RunFolderError` if the ledger no longer exists, and
    `TaskFileError` if the task file is missing."""
    tasks = TaskOrder.of(run.job)
    async with contextlib.AsyncExitStack() as stack:
        if run.job.buffer.redis != "embedded":
            address = RedisAddress.of(run.job.buffer)
        elif run.topology is not None:
            password = run.keys.token("redis")
            address = RedisAddress.parse(f"unix://:{password}@{run.topology.home_host.socket_dir}/redis")
        else:
            address = RedisAddress.parse(await stack.enter_async_context(_copied_redis(run)))
        redis = await RedisConnection.open(address)
        stack.callback(redis.close)
        yield LedgerReader(redis, str(address), run, tasks)


@contextlib.asynccontextmanager
async def _copied_redis(run: Run) -> AsyncIterator[str]:
    """Yield the address of a temporary Redis on a copy of the run's files. The originals are not opened,
    because Redis would cut off an incomplete end."""
    source = run.folder / "buffer"
    if not any(source.glob("appendonly*")) and not (source / "dump.rdb").exists():
        raise RunFolderError(f"{run.folder} holds nothing of a buffer (any more).")
    prefix = f"areal-{os.getuid()}-look-"
    with tempfile.TemporaryDirectory(prefix=prefix) as folder, contextlib.ExitStack() as stack:
        mark_owned(Path(folder))
        data = Path(folder, "data")
        shutil.copytree(source, data, ignore=shutil.ignore_patterns(EPISODES))
        sockets = short_socket_dir(Path(folder))
        if sockets != Path(folder):
            sockets.mkdir(mode=0o700)
            stack.callback(shutil.rmtree, sockets, ignore_errors=True)
            mark_owned(sockets)
        server = EmbeddedRedis(data, sockets / "redis", run.job.buffer.durability)
        try:
            await server.start()
            yield server.url
        finally:
            await server.stop()
