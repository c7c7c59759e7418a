"""Updates of an engine to the newest weights.

Promise (`versions_are_true`): the engine gets a snapshot only after all its hashes were verified. The engine
continues to generate while this module waits for, reads and verifies a snapshot. Only the three calls pause →
load → resume interrupt the engine, and their time is measured. An unusable snapshot is acknowledged with the
reason, and the engine keeps its weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import Protocol

from areal_async.base.errors import FaultError, RpcTimeout, SnapshotError
from areal_async.base.log import get_logger
from areal_async.base.versions import VersionTag
from areal_async.rpc.client import INCURABLE
from areal_async.rpc.weights_messages import SnapshotNotice
from areal_async.weights.receiver import Receiver
from rollout_service import metrics
from rollout_service.engines.base import EngineError, Weights
from rollout_service.replicas import ReplicaSet
from rollout_service.worker.device_turns import EngineTurns

log = get_logger("updates")

WAIT_MS = 10_000  # Longest wait of the publisher before it answers a request for a newer snapshot
RETRY_PAUSE_S = 0.5
FINISHED_PAUSE_S = 2.0
RENEW_S = 5.0  # Seconds after which a snapshot for a sleeping engine is asked for again, or a newer one


class Evaluations(Protocol):
    """Evaluations on the engine of a worker (`rollout_service.evaluator.SharedEvaluations`)."""

    async def first(self) -> Weights | None:
        """Return the oldest snapshot that awaits its evaluation, or None."""

    async def up_to(self, tag: VersionTag) -> None:
        """Evaluate all pinned snapshots that are not newer than `tag`, in order."""


@dataclass(eq=False)
class WeightUpdates:
    """Updater of a worker's engines to the newest weights. `on_change` is called after each update, on the
    event loop."""

    source: Receiver
    engine: ReplicaSet
    on_change: Callable[[], None] = lambda: None
    turns: EngineTurns | None = None
    """Turns of the engine on its device, if the trainer shares it in time."""
    evaluations: Evaluations | None = None
    """Evaluations on this engine. Each takes place before newer weights than its own are loaded."""
    retry_pause_s: float = RETRY_PAUSE_S
    finished_pause_s: float = FINISHED_PAUSE_S
    _offered: VersionTag | None = field(init=False, default=None)  # The last snapshot handled, usable or not

    async def start(self) -> VersionTag:
        """Wait for the first usable snapshot and start the engine with it."""
        snapshot: Weights | None = None
        while True:
            notice = await self._next()
            pinned = await self.evaluations.first() if self.evaluations is not None else None
            if pinned is None and (snapshot is None or snapshot.tag != notice.tag):
                snapshot = await self._open(notice)
            if (first := pinned or snapshot) is None:
                continue
            self._offered = None if pinned is not None else self._offered
            # With the turn, nothing here may wait for the trainer, which may be waiting for the device.
            if self.turns is not None and not await self.turns.take(RENEW_S):
                self._offered = None
                continue
            await self.engine.start(first)
            if pinned is None:
                await acknowledge(self.source, notice.tag)
                metrics.UPDATES.labels("served").inc()
            return first.tag

    async def run(self) -> None:
        """Load each newer snapshot, until cancelled. Raises errors that a retry cannot fix."""
        snapshot: Weights | None = None
        while True:
            notice = await self._next()
            if snapshot is None or snapshot.tag != notice.tag:
                if self.evaluations is not None:
                    await self.evaluations.up_to(notice.tag)
                snapshot = await self._open(notice)
            if snapshot is None:
                continue
            if self.turns is None or await self.engine.woken(snapshot, RENEW_S):
                await self._swap(notice.tag, snapshot)
                snapshot = None
            else:
                # The publisher keeps an announced snapshot only for a limited time.
                self._offered = self.engine.version

    async def _next(self) -> SnapshotNotice:
        over = False
        while True:
            try:
                news = await self.source.next(self._offered, WAIT_MS)
            except (RpcTimeout, FaultError) as error:
                if isinstance(error, FaultError) and error.kind in INCURABLE:
                    raise
                # After the last snapshot, the trainer may have ended for good. Before it, its absence is
                # worth a message.
                (log.debug if over else log.warning)("weights publisher does not answer", error=str(error))
                await asyncio.sleep(self.retry_pause_s)
                continue
            if isinstance(news, SnapshotNotice):
                return news
            over = news.finished
            if over:
                await asyncio.sleep(self.finished_pause_s)

    async def _open(self, notice: SnapshotNotice) -> Weights | None:
        """Return the verified snapshot. If it is unusable, acknowledge it with the reason and return None."""
        self._offered = notice.tag
        try:
            return await self.source.open(notice)
        except SnapshotError as error:
            metrics.UPDATES.labels("refused").inc()
            log.warning("snapshot refused", version=notice.tag.version, error=str(error))
            await acknowledge(self.source, notice.tag, error=str(error))
            return None

    async def _swap(self, tag: VersionTag, snapshot: Weights) -> None:
        try:
            stall = await self.engine.exchange(snapshot)
        except EngineError as error:
            await acknowledge(self.source, tag, error=str(error))
            raise
        metrics.STALL.observe(stall.total_s)
        metrics.UPDATES.labels("served").inc()
        pause, load, resume = (round(1e3 * spent_s, 2) for spent_s in astuple(stall))
        told = {"version": tag.version, "epoch": tag.epoch}
        log.debug("weights updated", **told, pause_ms=pause, load_ms=load, resume_ms=resume)
        self.on_change()
        await acknowledge(self.source, tag, stall_ms=1e3 * stall.total_s)


async def acknowledge(source: Receiver, tag: VersionTag, *, stall_ms: float = 0.0, error: str = "") -> None:
    """Tell the publisher that a snapshot is no longer needed. If the message is lost, the snapshot's files
    only stay a little longer."""
    try:
        await source.ack(tag, stall_ms, error)
    except (RpcTimeout, FaultError) as failed:
        log.warning("acknowledgement not taken", version=tag.version, error=str(failed))
