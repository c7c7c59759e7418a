"""Serving the chunks of snapshots that are here, or on their way here, to receivers on other hosts.

Promises:
- Only who has the keys (or, on loopback, the secret of the run) is answered; see `rpc/server.py`.
- A chunk that is not here yet is sent as soon as it is; a snapshot that is not here at all is waited for
  `EARLY_S`, since the sender's own download may begin later than that of whoever asks.
- A receiver has at most `MAX_ASKED` chunks under way; a slow one holds up nobody else.
- Bytes are sent from the mapped file, without a copy.
"""

from __future__ import annotations

import asyncio

from areal_async.errors import FaultError, SnapshotError
from areal_async.rpc.endpoints import Access
from areal_async.rpc.schema import Message, Ok
from areal_async.rpc.server import Answer, Peer, Server
from areal_async.rpc.weights_messages import GetChunk
from areal_async.runtime.failpoint import failpoint
from areal_async.weights import metrics
from areal_async.weights.channels.chunks import ChunkStore

MAX_ASKED = 64
"""Chunks that one receiver may have asked for and not received."""
MAX_ASKED_BYTES = 4096
"""Longest frame that a server takes, handshakes included; a longer one ends the connection."""
EARLY_S = 2.0
MAX_WAIT_S = 10.0
"""Longest wait of one request for its chunk; who still wants it asks again."""


class ChunkServer:
    """Serve at `listen` (tcp; port 0 picks one, see `endpoint`) the chunks of every store that was added.

    `source` is what this process is for metrics: "publisher" or "peer". Belongs to one event loop, but for
    `add` and `remove`, which any thread may call."""

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
            handler=self._handle,
            max_in_flight_per_peer=MAX_ASKED,
            cached_replies=0,  # asking twice for a chunk does no harm, and remembered ones would keep files
            max_part_bytes=MAX_ASKED_BYTES,
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
        """The chunk that `message` asks for. Raises `SnapshotError` where the snapshot is not here, and
        `FaultError`: "unavailable" while the chunk is still to come."""
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
