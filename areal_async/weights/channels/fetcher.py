"""A receiver's end of channel `zmq`: from a notice to a complete directory on this host.

Promises:
- One process per host fetches a snapshot (`host_cache.py`); the others wait for it, with a deadline.
- A fetch whose process dies is gone on with by another, with the chunks that were verified.
- What was brought stays until a later snapshot was acknowledged, here and by everybody else who holds it.
- A link that is slower than the trainer publishes never falls behind for ever: see `should_skip`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from areal_async.errors import FaultError, ProtocolError, RpcTimeout, SnapshotError, SnapshotSkipped
from areal_async.rpc.client import Client
from areal_async.rpc.endpoints import Access
from areal_async.rpc.schema import VersionTag
from areal_async.rpc.weights_messages import FindSources, SnapshotNotice
from areal_async.runtime.log import get_logger
from areal_async.weights import metrics
from areal_async.weights.channels import ReceivingEnd
from areal_async.weights.channels.chunk_server import ChunkServer
from areal_async.weights.channels.chunks import PartialDownload, decode_table
from areal_async.weights.channels.download import Download
from areal_async.weights.channels.host_cache import HostCache
from areal_async.weights.delta import apply_delta
from areal_async.weights.manifest import DELTA_SUFFIX, directory_name

log = get_logger("weights")

SKIP_BELOW = 0.5
STARVED_S = 3.0
"""Without a chunk for so long, it is said what is waited for."""
TABLE_S = 120.0
"""Longest wait for the answer with a chunk table: the publisher reads the whole snapshot for it, once."""
MAKING_PREFIX = ".making-"

Newer = Callable[[], Awaitable[bool]]


def should_skip(progress: float, skipped_last: bool) -> bool:
    """Whether a fetch with this share of its chunks here is ended for a newer snapshot.

    Not when half of it is here: then the newer one is better fetched after it. And never twice in a row: at
    least every second fetch is finished, so what is served is at most three fetches old, however fast the
    trainer publishes."""
    return progress < SKIP_BELOW and not skipped_last


class SnapshotFetcher(ReceivingEnd):
    """Brings snapshots to host `node_id`, into `root`, for the receiver called `name`, and serves their
    chunks to others at `listen`. `patience_s` and `give_up_s` are those of a `Download`."""

    makes_deltas = False

    def __init__(
        self,
        root: Path,
        *,
        node_id: str,
        name: str,
        job: str,
        listen: str,
        access: Access,
        patience_s: float,
        give_up_s: float,
    ) -> None:
        self.server = ChunkServer(listen, job=job, source="peer", access=access)
        self.bytes_received = 0
        self._cache = HostCache(root)
        self._node_id = node_id
        self._client = partial(Client, job=job, role="peer", name=name, access=access)
        self._patience_s = patience_s
        self._give_up_s = give_up_s
        self._serving = False
        self._shared: dict[str, str] = {}
        """Directories whose chunks are served, with the hashes of their manifests."""
        self._skipped_last = False

    async def bring(self, notice: SnapshotNotice, publisher: Client, newer: Newer | None) -> Path:
        self.makes_deltas = False
        if notice.node_id == self._node_id:
            return Path(notice.path)
        path = await self._cache.obtain(
            directory_name(notice.tag), notice.manifest_hash, lambda: self._make(notice, publisher, newer)
        )
        self.makes_deltas = True
        for name in [name for name in self._shared if not self._cache.path(name).exists()]:
            self.server.remove(self._shared.pop(name))
        return path

    def served(self, tag: VersionTag, *, failed: bool = False) -> None:
        self._cache.served(directory_name(tag), failed=failed)

    def distrust(self, notice: SnapshotNotice) -> None:
        self.makes_deltas = False
        self._cache.discard(directory_name(notice.tag))

    async def close(self) -> None:
        await self.server.close()
        self._cache.close()

    # --- making a directory, which this process alone does on this host ------------------------------

    async def _make(self, notice: SnapshotNotice, publisher: Client, newer: Newer | None) -> None:
        name = directory_name(notice.tag)
        if not await self._make_of_delta(notice, publisher, newer):
            await self._fetch(name, notice.manifest_hash, publisher, newer)
        self._skipped_last = False

    async def _make_of_delta(self, notice: SnapshotNotice, publisher: Client, newer: Newer | None) -> bool:
        """Whether the snapshot could be made from its difference to one that is here."""
        if notice.delta is None:
            return False
        cache, name, base = self._cache, directory_name(notice.tag), directory_name(notice.delta.base)
        delta = f"{name}{DELTA_SUFFIX}"
        staging = cache.path(f"{MAKING_PREFIX}{name}")
        kept = base in cache.held
        cache.hold(base)
        try:
            if not cache.path(base).exists():
                return False
            if cache.find(delta, notice.delta.manifest_hash) is None:
                await self._fetch(delta, notice.delta.manifest_hash, publisher, newer)
            shutil.rmtree(staging, ignore_errors=True)
            await asyncio.to_thread(apply_delta, cache.path(base), cache.path(delta), staging)
            os.rename(staging, cache.path(name))
        except SnapshotSkipped:
            raise
        except (SnapshotError, OSError) as error:
            log.warning("delta not used; the full snapshot is fetched", snapshot=name, error=str(error))
            shutil.rmtree(staging, ignore_errors=True)
            cache.discard(delta)
            return False
        finally:
            if not kept:
                cache.free(base)
        return True

    async def _fetch(self, name: str, manifest_hash: str, publisher: Client, newer: Newer | None) -> None:
        if not self._serving:
            await self.server.start()
            self._serving = True
        question = FindSources(manifest_hash, self.server.endpoint)
        try:
            found, attached = await publisher.exchange(question, timeout_s=TABLE_S)
        except (RpcTimeout, FaultError) as error:
            raise SnapshotError(f"nobody says who serves {name}: {error}") from error
        if len(attached) != 1:
            raise ProtocolError(f"{len(attached)} attachments came with the sources of {name}")
        table = decode_table(attached[0])
        if table.manifest_hash != manifest_hash:
            raise SnapshotError(f"the chunk table of {name} is of another snapshot")
        store = PartialDownload(self._cache.path(name), table)
        await asyncio.to_thread(store.resume)
        download = Download(
            store,
            found.endpoints,
            origin=found.origin,
            client=self._client,
            patience_s=self._patience_s,
            give_up_s=self._give_up_s,
        )
        self.server.add(store)
        try:
            await self._follow(download, newer)
        except BaseException:
            self.server.remove(manifest_hash)
            raise
        finally:
            self.bytes_received += download.bytes_received
        self._shared[name] = manifest_hash

    async def _follow(self, download: Download, newer: Newer | None) -> None:
        """Wait for the end of the download, and tell what it waits for when nothing comes."""
        running = asyncio.ensure_future(download.run())
        news = asyncio.ensure_future(newer()) if newer is not None else None
        told = ""
        try:
            while not running.done():
                watched = {running} if news is None or news.done() else {running, news}
                await asyncio.wait(watched, timeout=STARVED_S / 4, return_when=asyncio.FIRST_COMPLETED)
                if news is not None and news.done() and not running.done() and news.result():
                    self._skip_or_go_on(download)
                    news = None
                told = _tell(told, download.state if download.starved_s > STARVED_S else "")
            running.result()
        finally:
            _tell(told, "")
            for task in (running, news):
                if task is not None:
                    task.cancel()
            await asyncio.gather(running, *([news] if news is not None else []), return_exceptions=True)

    def _skip_or_go_on(self, download: Download) -> None:
        progress, name = download.partial.progress, download.partial.final.name
        if should_skip(progress, self._skipped_last):
            self._skipped_last = True
            metrics.SKIPPED.inc()
            raise SnapshotSkipped(f"{name} was skipped at {100 * progress:.0f} % for a newer one")


def _tell(before: str, now: str) -> str:
    """Say what is waited for; the metric has one series while something is."""
    if before != now:
        if before:
            with suppress(KeyError):
                metrics.WAITS.remove(before)
        if now:
            metrics.WAITS.labels(now).set(1)
    return now
