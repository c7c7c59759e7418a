"""A receiver's end of channel `zmq`. It turns the notice of a snapshot into a complete directory on this
host.

`Download` fetches one directory, chunk by chunk, from one source at a time. It uses the first source in the
list that did not fail in this round. A source fails if it sends nothing for a time limit (the patience),
sends a chunk with a wrong hash, lacks the snapshot or cannot be reached. After all sources have failed, a new
round begins with all of them and twice the patience, because the link may be slower than assumed. The
download fails after `give_up_s` without data from any source. Verified chunks stay on disk for the next
download. At any time at most `window_bytes` are requested and not yet received, so a source never queues more
than this for one receiver.

Promises:
- One process per host fetches a snapshot (`host_cache.py`). Other processes wait for it, with a deadline.
- If the fetching process dies, another process continues with the verified chunks.
- A fetched snapshot stays until all its users on this host have acknowledged a later one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from areal_async.base.addresses import Address
from areal_async.base.errors import FaultError, ProtocolError, RpcTimeout, SnapshotError, WireError
from areal_async.base.events import failpoint
from areal_async.base.log import get_logger
from areal_async.base.versions import VersionTag
from areal_async.rpc.board import board
from areal_async.rpc.client import Client
from areal_async.rpc.secret import CHUNKS
from areal_async.rpc.weights_messages import FindSources, GetChunk, SnapshotNotice
from areal_async.weights import metrics
from areal_async.weights.channels.channel import ReceivingEnd
from areal_async.weights.channels.chunks import PartialDownload, decode_table
from areal_async.weights.channels.host_cache import HostCache
from areal_async.weights.channels.serving import MAX_ASKED, ChunkServer
from areal_async.weights.delta import apply_delta
from areal_async.weights.manifest import DELTA_SUFFIX

log = get_logger("weights")

MAX_PATIENCE_S = 60.0
ROUND_PAUSE_S = 0.25  # pause between two rounds, because no source answers
VERIFY_THREADS = 2  # threads that verify and write chunks: one thread is slower than the socket
STARVED_S = 3.0  # after this time without a chunk, the wait is reported
TABLE_S = 120.0
"""Longest wait for a chunk table. To make the table, the publisher reads the whole snapshot once."""
MAKING_PREFIX = ".making-"


class Download:
    """Fills `partial` from `sources` (endpoints, best first).

    `origin` is the publisher's endpoint in `sources`. `client(address)` makes the clients for the requests.
    """

    def __init__(
        self,
        partial: PartialDownload,
        sources: Sequence[str],
        *,
        origin: str,
        client: Callable[[Address], Client],
        patience_s: float = 5.0,
        give_up_s: float = 60.0,
        window_bytes: int = 16 << 20,
    ) -> None:
        self.partial = partial
        self.bytes_received = 0
        self._sources = list(sources)
        self._origin = origin
        self._client = client
        self._patience_s = patience_s
        self._give_up_s = give_up_s
        chunk_bytes = partial.layout.table.chunk_bytes
        self._credits = min(MAX_ASKED, max(4, window_bytes // chunk_bytes))
        self._fed_s = time.monotonic()
        self._active = ""
        self._clients: dict[str, Client] = {}

    @property
    def starved_s(self) -> float:
        """Return the seconds since the last chunk arrived."""
        return time.monotonic() - self._fed_s

    @property
    def state(self) -> str:
        """Return a text with the progress and the cause of the wait."""
        share = f"{100 * self.partial.progress:.0f} % of {self.partial.final.name} are here"
        return f"{share}; {self._active or 'no source'} has sent nothing for {self.starved_s:.0f} s"

    async def run(self) -> Path:
        """Download the missing chunks and return the path of the complete directory. Raises
        `SnapshotError`."""
        began_s = self._fed_s = time.monotonic()
        async with AsyncExitStack() as stack:
            stack.callback(self._end)
            stack.push_async_callback(self._close_clients)
            pool = stack.enter_context(ThreadPoolExecutor(VERIFY_THREADS, "weights-verify"))
            patience_s, left = self._patience_s, set[str]()
            while self.partial.missing:
                source = next((name for name in self._sources if name not in left), "")
                limit_s = min(patience_s, self._give_up_s - self.starved_s)
                if limit_s <= 0:
                    raise SnapshotError(f"no source sent anything for {self._give_up_s:g} s: {self.state}")
                if source:
                    left.add(source)
                    await self._take_from(source, limit_s, pool)
                else:
                    left.clear()
                    patience_s = min(MAX_PATIENCE_S, 2 * patience_s)
                    await asyncio.sleep(ROUND_PAUSE_S)
            self.partial.finish()
        metrics.FETCH_SECONDS.observe(time.monotonic() - began_s)
        return self.partial.final

    async def _take_from(self, source: str, patience_s: float, pool: ThreadPoolExecutor) -> None:
        """Fetch chunks from the source until none is missing or the source fails."""
        self._active = source
        wanted = iter(self.partial.missing)
        reason = f"it has sent nothing for {patience_s:g} s"
        try:
            async with asyncio.timeout(patience_s) as limit:
                client = await self._connected(source)
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._credits):
                        group.create_task(self._take(client, source, wanted, limit, patience_s, pool))
            return
        except TimeoutError:
            metrics.REFUSED.labels("late").inc()
        except (WireError, ExceptionGroup) as error:
            first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            if not isinstance(first, WireError):
                raise first from None
            reason = str(first)
        finally:
            self._active = ""
        log.warning("source left", source=source, snapshot=self.partial.final.name, reason=reason)
        # The source need not send the remaining requested chunks.
        if source in self._clients:
            await self._clients.pop(source).close()

    async def _take(
        self,
        client: Client,
        source: str,
        wanted: Iterator[int],
        limit: asyncio.Timeout,
        patience_s: float,
        pool: ThreadPoolExecutor,
    ) -> None:
        """Fetch one chunk after another. Each of several such tasks has one request in flight."""
        loop = asyncio.get_running_loop()
        for number in wanted:
            data = await self._chunk(client, number, source)
            if not limit.expired():
                limit.reschedule(loop.time() + patience_s)
            if not await loop.run_in_executor(pool, self.partial.put, number, data):
                metrics.REFUSED.labels("hash").inc()
                if source == self._origin:
                    raise SnapshotError(f"the publisher sent other bytes than chunk {number}'s")
                raise ProtocolError(f"it sent other bytes than chunk {number}'s")
            failpoint("weights.received")
            self._fed_s = time.monotonic()
            self.bytes_received += data.nbytes
            self.partial.announce(number)

    async def _chunk(self, client: Client, number: int, source: str) -> memoryview:
        ask = GetChunk(self.partial.layout.table.manifest_hash, number)
        _, attached = await client.exchange(ask, timeout_s=self._give_up_s)
        if len(attached) != 1:
            raise ProtocolError(f"{len(attached)} attachments came with a chunk")
        metrics.RECEIVED.labels("zmq", "publisher" if source == self._origin else "peer").inc(
            attached[0].nbytes
        )
        return attached[0]

    async def _connected(self, source: str) -> Client:
        if source not in self._clients:
            self._clients[source] = self._client(Address(source, CHUNKS))
        await self._clients[source].connect(self._give_up_s)
        return self._clients[source]

    async def _close_clients(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    def _end(self) -> None:
        if self.partial.missing or self.partial.directory != self.partial.final:
            self.partial.abandon()


class SnapshotFetcher(ReceivingEnd):
    """Fetches snapshots to host `node_id`, into the folder `root`. `server` serves their chunks to other
    receivers.

    `download(store, sources, origin=…)` makes each `Download`.
    """

    makes_deltas = False

    def __init__(
        self, root: Path, *, node_id: str, server: ChunkServer, download: Callable[..., Download]
    ) -> None:
        self.server = server
        self.bytes_received = 0
        self._cache = HostCache(root)
        self._node_id = node_id
        self._download = download
        self._serving = False
        self._shared: dict[str, str] = {}
        """Directories whose chunks are served, and the hashes of their manifests."""

    async def bring(self, notice: SnapshotNotice, publisher: Client) -> Path:
        self.makes_deltas = False
        if notice.node_id == self._node_id:
            return Path(notice.path)
        path = await self._cache.obtain(
            notice.tag.label, notice.manifest_hash, lambda: self._make(notice, publisher)
        )
        self.makes_deltas = True
        for name in [name for name in self._shared if not self._cache.path(name).exists()]:
            self.server.remove(self._shared.pop(name))
        return path

    def served(self, tag: VersionTag, *, failed: bool = False) -> None:
        self._cache.served(tag.label, failed=failed)

    def distrust(self, notice: SnapshotNotice) -> None:
        self.makes_deltas = False
        self._cache.discard(notice.tag.label)

    async def close(self) -> None:
        await self.server.close()
        self._cache.close()

    # --- making a directory, which this process alone does on this host ------------------------------

    async def _make(self, notice: SnapshotNotice, publisher: Client) -> None:
        if not await self._make_of_delta(notice, publisher):
            await self._fetch(notice.tag.label, notice.manifest_hash, publisher)

    async def _make_of_delta(self, notice: SnapshotNotice, publisher: Client) -> bool:
        """Try to make the snapshot from a delta and a snapshot that is on this host. Return whether this
        succeeded."""
        if notice.delta is None:
            return False
        cache, name, base = self._cache, notice.tag.label, notice.delta.base.label
        delta = f"{name}{DELTA_SUFFIX}"
        staging = cache.path(f"{MAKING_PREFIX}{name}")
        kept = base in cache.held
        cache.hold(base)
        try:
            if not cache.path(base).exists():
                return False
            if cache.find(delta, notice.delta.manifest_hash) is None:
                await self._fetch(delta, notice.delta.manifest_hash, publisher)
            shutil.rmtree(staging, ignore_errors=True)
            await asyncio.to_thread(apply_delta, cache.path(base), cache.path(delta), staging)
            os.rename(staging, cache.path(name))
        except (SnapshotError, OSError) as error:
            log.warning("delta not used; the full snapshot is fetched", snapshot=name, error=str(error))
            shutil.rmtree(staging, ignore_errors=True)
            cache.discard(delta)
            return False
        finally:
            if not kept:
                cache.free(base)
        return True

    async def _fetch(self, name: str, manifest_hash: str, publisher: Client) -> None:
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
        download = self._download(store, found.endpoints, origin=found.origin)
        self.server.add(store)
        try:
            await self._follow(download)
        except BaseException:
            self.server.remove(manifest_hash)
            raise
        finally:
            self.bytes_received += download.bytes_received
        self._shared[name] = manifest_hash

    async def _follow(self, download: Download) -> None:
        """Wait for the end of the download. While no data arrives, report the cause of the wait."""
        running, told = asyncio.ensure_future(download.run()), ""
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=STARVED_S / 4)
                told = _report_wait(download.state if download.starved_s > STARVED_S else "", told)
            running.result()
        finally:
            _report_wait("", told)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def _report_wait(state: str, told: str) -> str:
    """Report the wait `state`, or the end of a wait if `state` is empty. Do nothing if the last report,
    `told`, was the same. Return `state`."""
    if state != told:
        board.waits("weights", state)
        if told:
            with suppress(KeyError):  # another download waited for the same
                metrics.WAITS.remove(told)
        if state:
            metrics.WAITS.labels(state).set(1)
    return state
