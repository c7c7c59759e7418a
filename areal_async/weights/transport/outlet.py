"""The publisher's end of the zmq channel: tables of what is published, and who stands where in line.

A table is made once per snapshot, in a thread of its own, at the first request, or as soon as the snapshot is
published once somebody has asked for an earlier one. Sending is the station's thread.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from areal_async.errors import FaultError, SnapshotError
from areal_async.rpc.endpoints import Access
from areal_async.rpc.messages import FindSources, Sources
from areal_async.weights.transport import table as tables
from areal_async.weights.transport.holding import Holding
from areal_async.weights.transport.relay import Lines
from areal_async.weights.transport.station import Station
from areal_async.weights.transport.table import key_of


@dataclass
class _Offer:
    directory: Path
    manifest_hash: str
    table: Future[bytes] | None = None


class Outlet:
    """Serves chunks at `listen` for a publisher. `offer` and `withdraw` may be called from
    any thread, `sources` on one event loop."""

    def __init__(self, listen: str, *, access: Access, fan_out: int = 1) -> None:
        self.station = Station(listen, source="publisher", access=access)
        self._lines = Lines(fan_out)
        self._offers: dict[bytes, _Offer] = {}
        self._lock = threading.Lock()
        self._asked = False
        self._hasher = ThreadPoolExecutor(1, "weights-hash")

    def start(self) -> None:
        """Raises `EndpointError`."""
        self.station.start()

    def close(self) -> None:
        self._hasher.shutdown(cancel_futures=True)
        self.station.close()

    def offer(self, directory: Path, manifest_hash: str) -> None:
        """The complete `directory` may be fetched from now on."""
        offer = _Offer(directory, manifest_hash)
        with self._lock:
            self._offers[key_of(manifest_hash)] = offer
            if self._asked:
                self._tabulate(offer)

    def withdraw(self, directory: Path) -> bool:
        """Serve it no more; whether its files may be overwritten, not only removed."""
        with self._lock:
            keys = [key for key, offer in self._offers.items() if offer.directory == directory]
            offers = [self._offers.pop(key) for key in keys]
            for key in keys:
                self._lines.forget(key)
        # A table under way reads the files, too.
        quiet = all(offer.table is None or offer.table.cancel() or offer.table.done() for offer in offers)
        for key in keys:
            quiet = self.station.release(key) and quiet
        return quiet

    async def sources(self, message: FindSources) -> tuple[Sources, list[bytes]]:
        """Answer a receiver. Raises `FaultError("stale")` for a snapshot that is not offered any more."""
        try:
            key = key_of(message.manifest_hash)
        except SnapshotError as error:
            raise FaultError("invalid", str(error)) from error
        with self._lock:
            self._asked = True
            offer = self._offers.get(key)
            table = self._tabulate(offer) if offer is not None else None
        if table is None:
            raise FaultError("stale", "the snapshot is not given out any more: ask for the newest")
        try:
            data = await asyncio.shield(asyncio.wrap_future(table))
        except SnapshotError as error:
            raise FaultError("stale", f"the snapshot is not given out any more: {error}") from error
        except asyncio.CancelledError:
            if table.cancelled():
                raise FaultError("stale", "the snapshot is not given out any more") from None
            raise
        with self._lock:
            origin = self.station.endpoint
            if message.endpoint:
                found = self._lines.join(key, message.endpoint, origin, message.failed)
            else:
                found = [origin]
        return Sources(found, origin), [] if message.known else [data]

    def _tabulate(self, offer: _Offer) -> Future[bytes]:
        if offer.table is None:
            offer.table = self._hasher.submit(self._make_table, offer)
        return offer.table

    def _make_table(self, offer: _Offer) -> bytes:
        table = tables.build_table(offer.directory, offer.manifest_hash)
        with self._lock:
            offered = self._offers.get(key_of(offer.manifest_hash)) is offer
        if offered:
            self.station.hold(Holding(offer.directory, table))
        return tables.encode(table)
