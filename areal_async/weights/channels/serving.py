"""Servers of snapshots for receivers on other hosts, and the assignment of sources to receivers.

`ChunkServer` serves the chunks of directories that are here, or on their way here: the publisher has one, and
every receiver. `SnapshotServer` is the publisher's end of channel `zmq`. It makes the chunk table of a
snapshot once, as soon as that is published, in a thread of its own.

Promises:
- Only clients with the keys (or, on loopback, the secret of the run) are answered; see `rpc/server.py`.
- A chunk that has not arrived yet is sent as soon as it has. For an unknown snapshot the server waits
  `EARLY_S`, since its own download may begin later than the receiver's.
- A receiver has at most `MAX_ASKED` chunks in flight; a slow receiver does not delay others.
- Bytes are sent from the mapped file, without a copy.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
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

MAX_ASKED = 64  # Chunks that one receiver may have asked for and not received
MAX_ASKED_BYTES = 4096
"""Longest frame that a server takes, handshakes included; a longer one ends the connection."""
EARLY_S = 2.0
MAX_WAIT_S = 10.0  # Longest wait of one request for its chunk; who still wants it asks again
MAX_SOURCES = 16  # Sources that one receiver is told of
MAX_MEMBERS = 4096


class ChunkServer:
    """A server at `listen` for the chunks of every added store. TCP port 0 picks a free port (see
    `endpoint`).

    `source` is the role of this process in metrics: "publisher" or "peer". The server belongs to one event
    loop. Any thread may call `add` and `remove`; all else must be called on the loop.
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
            # Asking twice for a chunk does no harm, and remembered replies would keep files.
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
        """Serve its chunks from now on."""
        self._stores[store.layout.table.manifest_hash] = store
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake)

    def remove(self, manifest_hash: str) -> bool:
        """Serve the snapshot no more; whether its files may be overwritten, since no socket reads them."""
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
        """Return the chunk that `message` asks for. Raises `SnapshotError` where the snapshot is not here,
        and `FaultError`: "unavailable" while the chunk is still to come."""
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


class RelayTree:
    """Who fetches a snapshot from whom. Pure.

    Receivers stand in line in the order in which they asked. The first fetches from the origin (the trainer),
    each other from one before it: with a fan-out of 1 they form a chain, with k a tree in which each serves k
    others. The origin sends every byte once, however many receive. In a chain every link carries it once,
    too; chunks are passed on as they come, so n receivers take the time of one and n - 1 chunks more. A
    fan-out of 0 has everyone fetch from the origin."""

    def __init__(self, fan_out: int) -> None:
        self._fan_out = fan_out
        self._lines: dict[str, list[str]] = {}

    def join(self, snapshot: str, endpoint: str, origin: str) -> list[str]:
        """Return the sources of `endpoint`, best first; it takes its place in line at the first call."""
        line = self._lines.setdefault(snapshot, [])
        if endpoint not in line:
            if len(line) >= MAX_MEMBERS:
                return [origin]
            line.append(endpoint)
        return sources(line, line.index(endpoint), origin, self._fan_out)

    def forget(self, snapshot: str) -> None:
        self._lines.pop(snapshot, None)


def sources(line: Sequence[str], me: int, origin: str, fan_out: int) -> list[str]:
    """Return the sources of member `me` of `line` (endpoints, in order), best first: its parent, its parent's
    parents, the origin, then everybody else. Whoever is gone is stepped over, and receivers that hold all
    chunks between them complete each other without an origin."""
    if fan_out < 1:
        return [origin]
    ancestors: list[str] = []
    at = me
    while at > 0:
        at = (at - 1) // fan_out
        ancestors.append(line[at])
    # The first in line are the first to be complete.
    others = [member for member in line if member not in {*ancestors, line[me]}]
    nearest = ancestors[: MAX_SOURCES - 1]
    return [*nearest, origin, *others[: MAX_SOURCES - 1 - len(nearest)]]


class SnapshotServer(PublishingEnd):
    """Serves chunks at `listen` for a publisher, on whose event loop it runs."""

    def __init__(
        self,
        listen: str,
        *,
        job: str,
        access: Access,
        fan_out: int = 1,
        server: type[ChunkServer] = ChunkServer,
    ) -> None:
        self.chunks = server(listen, job=job, source="publisher", access=access)
        self._tree = RelayTree(fan_out)
        self._tables: dict[str, Future[bytes]] = {}
        """The chunk table of each served snapshot, by the hash of its manifest."""
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
            self._tree.forget(manifest_hash)
        # A table that is being made reads the files, too.
        quiet = table is None or table.cancel() or table.done()
        return self.chunks.remove(manifest_hash) and quiet

    async def answer(self, message: Message) -> Answer | None:
        """Sources and chunk table for a receiver. Raises `FaultError("stale")` for a snapshot that is not
        served any more."""
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
            found = self._tree.join(message.manifest_hash, message.endpoint, origin)
        return Sources(found, origin), [data]

    def _make_table(self, directory: Path, manifest_hash: str) -> bytes:
        table = build_table(directory, manifest_hash)
        with self._lock:
            if manifest_hash in self._tables:
                self.chunks.add(ChunkStore(directory, table))
        return encode_table(table)
