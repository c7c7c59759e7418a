"""Channel `disk`: the trainer writes to a directory that all hosts see; receivers read there, or copy it to
shared memory first, one process for each host (`weights.copy_from_disk`)."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_async.config.errors import Mistake
from areal_async.config.job import JobConfig
from areal_async.errors import SnapshotError
from areal_async.rpc.schema import VersionTag
from areal_async.rpc.weights_messages import SnapshotNotice
from areal_async.weights import metrics
from areal_async.weights.channels import Channel, ReceivingEnd
from areal_async.weights.channels.host_cache import HostCache
from areal_async.weights.manifest import directory_name

if TYPE_CHECKING:
    from areal_async.rpc.client import Client
    from areal_async.runtime.context import ServiceContext

COPYING_PREFIX = ".copying-"


class Disk(Channel):
    @staticmethod
    def check_job(job: JobConfig, arguments: Mapping[str, Any], field: str) -> Iterator[Mistake]:
        if job.weights.directory is None:
            problem = "`disk` needs a directory that all hosts see, and none is given"
            fix = "Set it, or weights.channel to zmq or shm"
            yield Mistake("weights.directory", problem, fix, ("weights.channel",))

    @staticmethod
    def directory(job: JobConfig) -> Path | None:
        return job.weights.directory / job.job if job.weights.directory is not None else None

    @staticmethod
    def receiving_end(ctx: ServiceContext, name: str) -> ReceivingEnd:
        cached = ctx.job.weights.copy_from_disk
        return DiskReader(HostCache(ctx.shm_dir / "weights" / ctx.node_id) if cached else None)


class DiskReader(ReceivingEnd):
    """Reads in place without a `cache`, else copies into it."""

    def __init__(self, cache: HostCache | None) -> None:
        self._cache = cache

    async def bring(
        self, notice: SnapshotNotice, publisher: Client, newer: Callable[[], Awaitable[bool]] | None
    ) -> Path:
        if self._cache is None:
            metrics.RECEIVED.labels("disk", "publisher").inc(notice.size_bytes)
            return Path(notice.path)
        path = self._cache.path(directory_name(notice.tag))
        return await self._cache.obtain(
            path.name, notice.manifest_hash, lambda: asyncio.to_thread(_copy, Path(notice.path), path)
        )

    def served(self, tag: VersionTag, *, failed: bool = False) -> None:
        if self._cache is not None:
            self._cache.served(directory_name(tag), failed=failed)

    def distrust(self, notice: SnapshotNotice) -> None:
        if self._cache is not None:
            self._cache.discard(directory_name(notice.tag))

    async def close(self) -> None:
        if self._cache is not None:
            self._cache.close()


def _copy(source: Path, final: Path) -> None:
    staging = final.with_name(f"{COPYING_PREFIX}{final.name}")
    began_s = time.monotonic()
    try:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.copytree(source, staging)
        size = sum(path.stat().st_size for path in staging.iterdir())
        os.rename(staging, final)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise SnapshotError(f"{source} cannot be copied here: {error}") from error
    metrics.RECEIVED.labels("disk", "publisher").inc(size)
    metrics.FETCH_SECONDS.observe(time.monotonic() - began_s)
