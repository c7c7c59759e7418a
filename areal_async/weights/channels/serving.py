"""Serving of snapshots to receivers on other hosts, and assignment of receivers to sources.

`ChunkServer` serves the chunks of directories on this host, complete or in download. The publisher and every
receiver have a `ChunkServer`. `SnapshotServer` is the publisher's end of channel `zmq`. It makes the chunk
table of a snapshot once, right after publication, in a thread of its own.

Promises:
- The server answers only clients that have the keys (or, on loopback, the run's secret). See `rpc/server.py`.
- If a requested chunk is still being downloaded, it is sent as soon as it arrives. A request for an unknown
  snapshot waits up to `EARLY_S`, because the download of this host may begin later than the client's.
- A receiver has at most `MAX_ASKED` chunks in flight. A slow receiver does not delay other receivers.
- Bytes are sent from the mapped file, without a copy.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from areal_async.base.errors import FaultError, SnapshotError
from areal_async.base.events import failpoint
from areal_async.rpc.reply_book import ServerLimits
from areal_async.rpc.schema import Message, Ok
from areal_async.rpc.secret import CHUNKS, Access
from areal_async.rpc.server import Answer, Peer, Server
from areal_async.rpc.weights_messages import FindSources, GetChunk, Sources
from areal_async.weights import metrics
from areal_async.weights.channels.channel import PublishingEnd
from areal_async.weights.channels.chunks import ChunkStore, build_table, encode_table

MAX_ASKED = 64  # most chunks that one receiver may have requested and not received
MAX_ASKED_BYTES = 4096
"""Longest frame that a server accepts, including handshakes. A longer frame closes the connection."""
EARLY_S = 2.0
MAX_WAIT_S = 10.0  # longest wait of one request for its chunk; the client then retries
MAX_SOURCES = 16  # most sources that are named to one receiver
MAX_MEMBERS = 4096


class ChunkServer:
    """Serve the chunks of every added store at `listen` (tcp; port 0 picks a free port, see `endpoint`).

    `source` is this process's role in metrics: "publisher" or "peer". The object belongs to one event loop.
    Any thread may call `add` and `remove`.
    """

    def __init__(self, listen: str, *, job: str, source: str, access: Access) -> None:
        self.bytes_sent = 0
        self._stores: dict[str, ChunkStore] = {}
        self._added = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sent_point = f"weights.{source}_sent"
        self._sent = metrics.SENT.labels("zmq", source)
        self._server = Server(
            listen,
            service="chunks",
            job=job,
            access=access,
            identity=CHUNKS,
            handler=self._handle,
            # A repeated request for a chunk is harmless, and cached replies would keep files open.
            limits=ServerLimits(in_flight=MAX_ASKED, cached_replies=0, part_bytes=MAX_ASKED_BYTES),
        )

    @property
    def endpoint(self) -> str:
        return self._server.endpoint

    async def start(self) -> None:
        """Bind and serve. Raises `EndpointError`."""
        await self._server.start()
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        await self._server.stop(grace_s=0)
        self._loop = None
        for manifest_hash in [*self._stores]:
            self.remove(manifest_hash)

    def add(self, store: ChunkStore) -> None:
        """Serve the chunks of `store` from now on."""
        self._stores[store.layout.table.manifest_hash] = store
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake)

    def remove(self, manifest_hash: str) -> bool:
        """Stop serving the snapshot. Return True if no socket reads its files any more, so that they may be
        overwritten."""
        store = self._stores.pop(manifest_hash, None)
        return store is None or store.close()

    def _wake(self) -> None:
        self._added.set()
        self._added = asyncio.Event()

    async def _handle(self, peer: Peer, message: Message, attachments: list[memoryview]) -> Answer:
        if not isinstance(message, GetChunk):
            raise FaultError("invalid", f"a chunk server does not serve {type(message).__name__}")
        try:
            return await self.chunk(message)
        except SnapshotError as error:
            raise FaultError("stale", str(error)) from error

    async def chunk(self, message: GetChunk) -> Answer:
        """Return the chunk that `message` requests.

        Raises `SnapshotError` if the snapshot is not on this host, and `FaultError` "unavailable" if the
        chunk has not arrived.
        """
        store = await self._store(message.manifest_hash)
        if not 0 <= message.number < store.layout.n_chunks:
            raise FaultError("invalid", f"the snapshot has {store.layout.n_chunks} chunks")
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await store.when_here(message.number)
        except TimeoutError:
            raise FaultError("unavailable", f"chunk {message.number} has not come yet") from None
        data = store.data(message.number)
        self.bytes_sent += data.nbytes
        self._sent.inc(data.nbytes)
        failpoint(self._sent_point)
        return Ok(), [data]

    async def _store(self, manifest_hash: str) -> ChunkStore:
        try:
            async with asyncio.timeout(EARLY_S):
                while manifest_hash not in self._stores:
                    await self._added.wait()
                return self._stores[manifest_hash]
        except TimeoutError:
            raise SnapshotError("this snapshot is not here") from None


def sources(line: list[str], endpoint: str, origin: str) -> list[str]:
    """Return the sources of the receiver at `endpoint`, best first. The first call for a receiver appends it
    to `line`.

    Receivers form a line in the order of their first requests. The first receiver fetches from the origin
    (the trainer), and each other receiver fetches from the one before it. So the origin and every receiver
    send each byte only once. Chunks are relayed as they arrive, so each further receiver lengthens the
    transfer only by the time of one chunk.

    The sources are first the earlier receivers, beginning with the nearest, then the origin, then the later
    receivers. A receiver skips sources that have left. If the receivers together have all chunks, they can
    complete their copies without the origin.
    """
    if endpoint not in line:
        if len(line) >= MAX_MEMBERS:
            return [origin]
        line.append(endpoint)
    me = line.index(endpoint)
    return [*line[:me][::-1][: MAX_SOURCES - 1], origin, *line[me + 1 :]][:MAX_SOURCES]


class SnapshotServer(PublishingEnd):
    """Serves chunks at `listen` for a publisher, on the publisher's event loop."""

    def __init__(self, listen: str, *, job: str, access: Access) -> None:
        self.chunks = ChunkServer(listen, job=job, source="publisher", access=access)
        self._lines: dict[str, list[str]] = {}
        """The receivers of each snapshot, in the order of their first requests."""
        self._tables: dict[str, Future[bytes]] = {}
        """The chunk tables of the served snapshots, by the hash of their manifests."""
        self._lock = threading.Lock()
        self._hasher = ThreadPoolExecutor(1, "weights-hash")

    async def start(self) -> None:
        await self.chunks.start()

    async def close(self) -> None:
        self._hasher.shutdown(cancel_futures=True)
        await self.chunks.close()

    def add(self, directory: Path, manifest_hash: str) -> None:
        with self._lock:
            self._tables[manifest_hash] = self._hasher.submit(self._make_table, directory, manifest_hash)

    def remove(self, manifest_hash: str) -> bool:
        with self._lock:
            table = self._tables.pop(manifest_hash, None)
            self._lines.pop(manifest_hash, None)
        # A table in progress also reads the files.
        quiet = table is None or table.cancel() or table.done()
        return self.chunks.remove(manifest_hash) and quiet

    async def answer(self, message: Message) -> Answer | None:
        """Return sources and chunk table for a receiver. Raises `FaultError("stale")` for a snapshot no
        longer served."""
        if not isinstance(message, FindSources):
            return None
        gone = "the snapshot is not given out any more: ask for the newest"
        with self._lock:
            table = self._tables.get(message.manifest_hash)
        if table is None:
            raise FaultError("stale", gone)
        try:
            data = await asyncio.shield(asyncio.wrap_future(table))
        except SnapshotError as error:
            raise FaultError("stale", f"{gone} ({error})") from error
        except asyncio.CancelledError:
            if table.cancelled():
                raise FaultError("stale", gone) from None
            raise
        with self._lock:
            origin = self.chunks.endpoint
            found = sources(self._lines.setdefault(message.manifest_hash, []), message.endpoint, origin)
        return Sources(found, origin), [data]

    def _make_table(self, directory: Path, manifest_hash: str) -> bytes:
        table = build_table(directory, manifest_hash)
        with self._lock:
            if manifest_hash in self._tables:
                self.chunks.add(ChunkStore(directory, table))
        return encode_table(table)
