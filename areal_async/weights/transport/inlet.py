"""A receiver's end of the channels that cross hosts: from a notice to a complete directory on this host.

Promises:
- One process per host fetches a snapshot (`nodeshelf.py`); the others wait for it, with a deadline.
- A fetch whose process dies is gone on with by another, with the chunks that were verified.
- What was brought stays until a later snapshot was acknowledged, here and by everybody else who holds it.
- A link that is slower than the trainer publishes never falls behind for ever: see `should_skip`.

It does not decide that a snapshot is true: `open_snapshot` does, on what is served.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_async.errors import FaultError, RpcTimeout, SnapshotError, SnapshotSkipped
from areal_async.rpc.endpoints import Access
from areal_async.rpc.messages import FindSources, SnapshotNotice, Sources, VersionTag
from areal_async.runtime.log import get_logger
from areal_async.weights import metrics
from areal_async.weights.manifest import directory_name
from areal_async.weights.transport import table as tables
from areal_async.weights.transport.fetch import Fetch
from areal_async.weights.transport.holding import Growing
from areal_async.weights.transport.nodeshelf import NodeShelf
from areal_async.weights.transport.station import Station
from areal_async.weights.transport.table import key_of

log = get_logger("weights")

SKIP_BELOW = 0.5
REFRESH_S = 1.0
"""Without a chunk for so long, the publisher is asked for other sources, once per such time."""
TOLD_S = 3.0
"""Without a chunk for so long, it is said what is waited for."""
WAIT_STEP_S = 0.02
COPYING = ".copying-"

Ask = Callable[[FindSources], Awaitable[tuple[Sources, list[memoryview]]]]
Apply = Callable[[Path, Path, Path], object]
"""`apply(base directory, delta directory, into)` makes the full directory `into`, with its manifest, or
raises `SnapshotError`; then the full snapshot is fetched."""


@dataclass(frozen=True)
class Place:
    """Where a receiver is. `root` is the folder of this host's snapshots, in shared memory."""

    node_id: str
    root: Path
    access: Access
    listen: str = "tcp://127.0.0.1:0"
    """Where its station hands chunks on."""
    copy_from_disk: bool = False
    """Whether a snapshot on a shared file system is copied here before it is read."""
    patience_s: float = 5.0
    """A source that sends no chunk for so long is left."""
    give_up_s: float = 60.0
    """Without a chunk from anyone for so long a fetch fails."""
    wait_s: float = 600.0
    """Longest wait for another process of this host that fetches."""


def should_skip(progress: float, skipped_last: bool) -> bool:
    """Whether a fetch with this share of its chunks here is ended for a newer snapshot.

    Not when half of it is here: then the newer one is better fetched after it. And never twice in a row: at
    least every second fetch is finished, so what is served is at most three fetches old, however fast the
    trainer publishes."""
    return progress < SKIP_BELOW and not skipped_last


class Inlet:
    """Brings snapshots to one host, for one receiver, on one event loop."""

    def __init__(self, place: Place, *, receiver: str, apply_delta: Apply | None = None) -> None:
        self.place = place
        self._receiver = receiver
        self._apply = apply_delta
        self._shelf: NodeShelf | None = None
        self._station: Station | None = None
        self._served: dict[str, bytes] = {}
        """Directories that the station hands out, with their keys."""
        self._skipped_last = False

    @property
    def applies(self) -> bool:
        """Whether a snapshot can be made here of an earlier one."""
        return self._apply is not None

    def is_here(self, notice: SnapshotNotice) -> bool:
        """Whether the announced path can be read as it is."""
        if notice.channel == "zmq":
            return notice.node_id == self.place.node_id
        return notice.channel == "shm" or not self.place.copy_from_disk

    async def bring(
        self, notice: SnapshotNotice, ask: Ask, newer: asyncio.Future[bool] | None = None
    ) -> Path:
        """The announced snapshot's directory on this host. `newer` is done once a newer one is announced.

        Raises `SnapshotError`, and `SnapshotSkipped` where `should_skip` says so."""
        shelf = self._opened()
        name = directory_name(notice.tag)
        shelf.hold(name)
        deadline_s = time.monotonic() + self.place.wait_s
        try:
            while True:
                if path := shelf.find(name, notice.manifest_hash):
                    return path
                claim = shelf.claim(name)
                if claim is not None:
                    try:
                        if path := shelf.find(name, notice.manifest_hash):
                            return path
                        await self._make(notice, name, ask, newer)
                        self._skipped_last = False
                    finally:
                        os.close(claim)
                    await asyncio.to_thread(self._sweep)
                    if path := shelf.find(name, notice.manifest_hash):
                        return path
                    raise SnapshotError(f"what came for {name} has another manifest than was announced")
                if time.monotonic() > deadline_s:
                    raise SnapshotError(
                        f"another process on {self.place.node_id} has not fetched {name} for "
                        f"{self.place.wait_s:g} s"
                    )
                await asyncio.sleep(WAIT_STEP_S)
        except BaseException:
            shelf.free(name)
            raise

    def served(self, tag: VersionTag, error: str = "") -> None:
        """The receiver has acknowledged `tag`: what is older may go, and with an error that one, too."""
        if self._shelf is None:
            return
        name = directory_name(tag)
        for held in self._shelf.held:
            if (held == name) == bool(error) and _tag_of(held) <= tag:
                self._shelf.free(held)

    def distrust(self, notice: SnapshotNotice) -> None:
        """What was brought did not open: the next try must not find it."""
        if self._shelf is not None:
            self._shelf.discard(directory_name(notice.tag))

    async def close(self) -> None:
        station, self._station = self._station, None
        if station is not None:
            await asyncio.to_thread(station.close)
        if self._shelf is not None:
            self._shelf.close()

    # --- making a directory, with its claim in hand --------------------------------------------------

    async def _make(
        self, notice: SnapshotNotice, name: str, ask: Ask, newer: asyncio.Future[bool] | None
    ) -> None:
        if notice.channel == "disk":
            await asyncio.to_thread(self._copy, Path(notice.path), name)
        elif not await self._make_from_delta(notice, name, ask, newer):
            await self._fetch(name, notice.manifest_hash, ask, newer)

    async def _make_from_delta(
        self, notice: SnapshotNotice, name: str, ask: Ask, newer: asyncio.Future[bool] | None
    ) -> bool:
        """Whether the snapshot could be made from its difference to one that is here."""
        delta, shelf = notice.delta, self._opened()
        if delta is None or self._apply is None:
            return False
        base_name, delta_name = directory_name(delta.base), f"{name}.delta"
        kept = base_name in shelf.held
        shelf.hold(base_name)
        staging = shelf.path(f"{COPYING}{name}")
        try:
            base = shelf.path(base_name)
            if not base.exists():
                return False
            path = shelf.find(delta_name, delta.manifest_hash)
            if path is None:
                await self._fetch(delta_name, delta.manifest_hash, ask, newer)
                path = shelf.path(delta_name)
            shutil.rmtree(staging, ignore_errors=True)
            await asyncio.to_thread(self._apply, base, path, staging)
            os.rename(staging, shelf.path(name))
        except SnapshotSkipped:
            raise
        except (SnapshotError, OSError) as error:
            log.warning("delta not used; the full snapshot is fetched", snapshot=name, error=str(error))
            shutil.rmtree(staging, ignore_errors=True)
            shelf.discard(delta_name)
            return False
        finally:
            if not kept:
                shelf.free(base_name)
        return True

    def _copy(self, source: Path, name: str) -> None:
        shelf = self._opened()
        staging = shelf.path(f"{COPYING}{name}")
        began_s = time.monotonic()
        try:
            shutil.rmtree(staging, ignore_errors=True)
            shutil.copytree(source, staging)
            size = sum(path.stat().st_size for path in staging.iterdir())
            os.rename(staging, shelf.path(name))
        except (OSError, shutil.Error) as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise SnapshotError(f"{source} cannot be copied here: {error}") from error
        metrics.RECEIVED.labels("disk", "publisher").inc(size)
        metrics.FETCH_SECONDS.observe(time.monotonic() - began_s)

    async def _fetch(
        self, name: str, manifest_hash: str, ask: Ask, newer: asyncio.Future[bool] | None
    ) -> None:
        shelf = self._opened()
        station = await self._started()
        question = FindSources(self._receiver, self.place.node_id, manifest_hash, station.endpoint)
        try:
            answer, attached = await ask(question)
        except (RpcTimeout, FaultError) as error:
            raise SnapshotError(f"nobody says who serves {name}: {error}") from error
        if len(attached) != 1:
            raise SnapshotError(f"the publisher sent no chunk table of {name}")
        table = tables.decode(attached[0])
        if table.manifest_hash != manifest_hash:
            raise SnapshotError(f"the chunk table of {name} is of another snapshot")
        growing = Growing(shelf.path(name), table)
        have = await asyncio.to_thread(growing.resume)
        fetch = station.fetch(
            growing,
            answer.endpoints,
            origin=answer.origin,
            have=have,
            patience_s=self.place.patience_s,
            give_up_s=self.place.give_up_s,
        )
        try:
            await self._follow(fetch, station, question, ask, newer)
        except BaseException:
            with suppress(SnapshotError):
                await asyncio.wrap_future(station.cancel(fetch))
            raise
        self._served[name] = key_of(manifest_hash)
        if fetch.failed:
            # So that nobody has to wait for them again.
            with suppress(RpcTimeout, FaultError):
                await ask(_again(question, fetch))

    async def _follow(
        self,
        fetch: Fetch,
        station: Station,
        question: FindSources,
        ask: Ask,
        newer: asyncio.Future[bool] | None,
    ) -> None:
        """Wait for the end of the fetch; where nothing comes, see whether there are other sources."""
        result = asyncio.ensure_future(asyncio.wrap_future(fetch.result))
        asked_s = time.monotonic()
        asking: asyncio.Task[None] | None = None
        words = ""
        try:
            while not result.done():
                watched: list[asyncio.Future[Any]] = [result]
                if newer is not None and not newer.done():
                    watched.append(newer)
                await asyncio.wait(watched, timeout=REFRESH_S / 4, return_when=asyncio.FIRST_COMPLETED)
                if newer is not None and newer.done() and not result.done():
                    self._skip_or_go_on(fetch, newer)
                    newer = None
                words = _say(words, fetch.words() if fetch.starved_s > TOLD_S else "")
                idle_s = min(fetch.starved_s, time.monotonic() - asked_s)
                if idle_s > REFRESH_S and (asking is None or asking.done()):
                    asked_s = time.monotonic()
                    asking = asyncio.create_task(self._ask_again(fetch, station, question, ask))
            result.result()
        finally:
            _say(words, "")
            if asking is not None:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            if not result.done():
                result.cancel()
            elif not result.cancelled():
                result.exception()

    async def _ask_again(self, fetch: Fetch, station: Station, question: FindSources, ask: Ask) -> None:
        try:
            answer, _ = await ask(_again(question, fetch))
        except (RpcTimeout, FaultError) as error:
            # Its peers may still hold what the publisher has given up.
            log.debug("no other sources", error=str(error))
        else:
            fetch.origin = answer.origin
            station.use(fetch, answer.endpoints)

    def _skip_or_go_on(self, fetch: Fetch, newer: asyncio.Future[bool]) -> None:
        if newer.cancelled() or newer.exception() is not None or not newer.result():
            return
        if should_skip(fetch.progress, self._skipped_last):
            self._skipped_last = True
            metrics.SKIPPED.inc()
            name = fetch.growing.final.name
            raise SnapshotSkipped(f"{name} was skipped at {100 * fetch.progress:.0f} % for a newer one")

    # --- parts ---------------------------------------------------------------------------------------

    def _opened(self) -> NodeShelf:
        if self._shelf is None:
            self._shelf = NodeShelf(self.place.root)
        return self._shelf

    async def _started(self) -> Station:
        if self._station is None:
            station = Station(self.place.listen, source="peer", access=self.place.access)
            station.start()
            self._station = station
        return self._station

    def _sweep(self) -> None:
        shelf = self._opened()
        shelf.sweep()
        for name in [name for name in self._served if not shelf.path(name).exists()]:
            if self._station is not None:
                self._station.release(self._served.pop(name))


def _again(question: FindSources, fetch: Fetch) -> FindSources:
    return FindSources(
        question.receiver,
        question.node_id,
        question.manifest_hash,
        question.endpoint,
        sorted(fetch.failed),
        known=True,
    )


def _say(before: str, now: str) -> str:
    """Tell what is waited for; the metric has one series while something is."""
    if before != now:
        if before:
            with suppress(KeyError):
                metrics.WAITS.remove(before)
        if now:
            metrics.WAITS.labels(now).set(1)
    return now


def _tag_of(name: str) -> VersionTag:
    epoch, _, version = name.removesuffix(".delta").removeprefix("e").partition("-v")
    return VersionTag(int(epoch), int(version))
