"""The publisher's deltas: made beside training, offered to whoever holds the base.

A delta is made by a thread of its own from two published directories, so a publication waits for nothing and
the trainer may change its tensors meanwhile. At most one is being made; a version published while the thread
is busy gets none (deltas that are slower than steps must not queue up behind them). Every `anchor_every`
versions there is none either: then all receivers take the full snapshot, so what a receiver has built up out
of deltas has a bounded history.

Everything here is called under the publisher's lock, which the thread takes too once it is done.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from areal_async.errors import SnapshotError
from areal_async.rpc.messages import DeltaOffer, VersionTag
from areal_async.runtime.log import get_logger
from areal_async.weights.comparison import Comparison, write_delta
from areal_async.weights.manifest import directory_name
from areal_async.weights.snapshot import SnapshotInfo

MAX_THREADS = 4

log = get_logger("weights")


@dataclass(frozen=True)
class DeltaPolicy:
    """When a delta is made and offered."""

    below_share: float = 0.5
    """Of the full snapshot's bytes: a delta that is not smaller is not offered."""
    anchor_every: int = 50
    """Every so many versions there is none; 0 means that there always is."""


@dataclass(frozen=True)
class DeltaStats:
    """What one version changed against its base."""

    tag: VersionTag
    base: VersionTag
    changed_share: float
    """Of the elements of bf16, fp16 and fp32 tensors."""
    delta_bytes: int | None
    """None where no delta is offered, because it would have been too large."""
    full_bytes: int


class DeltaPublisher:
    """`on_done(base, new)` is called by the thread, under `lock`, once both directories are not read any
    more."""

    def __init__(
        self,
        policy: DeltaPolicy,
        lock: threading.Condition,
        on_done: Callable[[VersionTag, VersionTag], None],
    ) -> None:
        self._policy = policy
        self._lock = lock
        self._on_done = on_done
        self._offers: dict[VersionTag, DeltaOffer] = {}
        self._making: tuple[VersionTag, VersionTag] | None = None
        self._since_anchor = 0
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-delta")
        self.measured: DeltaStats | None = None
        """Of the newest version that was compared with its base."""

    def begin(self, base: SnapshotInfo | None, new: SnapshotInfo) -> bool:
        """`new` is published. Whether a delta against `base` is being made from now on."""
        self._since_anchor += 1
        if base is None or self._since_anchor == self._policy.anchor_every:
            self._since_anchor = 0
            return False
        if self._making is not None:
            log.debug("no delta: the last one is still being made", version=new.tag.version)
            return False
        self._making = (base.tag, new.tag)
        self._pool.submit(self._make, base, new)
        return True

    def pending(self, tag: VersionTag | None, holds: VersionTag | None) -> bool:
        """Whether a delta from `holds` to `tag` is being made."""
        return tag is not None and self._making == (holds, tag)

    def get(self, tag: VersionTag, holds: VersionTag | None) -> DeltaOffer | None:
        """The delta to `tag` for a receiver of `holds`."""
        offer = self._offers.get(tag)
        return offer if offer is not None and offer.base == holds else None

    def withdraw(self, tag: VersionTag) -> DeltaOffer | None:
        """`tag` is retired: its delta, if it has one, is not offered any more."""
        return self._offers.pop(tag, None)

    def close(self) -> None:
        """Wait until nothing is written any more; what is half made is not finished. Not under the lock."""
        self._stop.set()
        self._pool.shutdown()

    def _make(self, base: SnapshotInfo, new: SnapshotInfo) -> None:
        compared: Comparison | None = None
        try:
            below = int(new.size_bytes * self._policy.below_share)
            threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
            compared = write_delta(
                base.path, new.path, below_bytes=below, threads=threads, stop=self._stop.is_set
            )
        except SnapshotError as error:
            if not self._stop.is_set():
                log.warning("no delta", version=new.tag.version, error=str(error))
        finally:
            with self._lock:
                if compared is not None:
                    self._note(base, new, compared)
                self._making = None
                self._on_done(base.tag, new.tag)

    def _note(self, base: SnapshotInfo, new: SnapshotInfo, compared: Comparison) -> None:
        delta = compared.delta
        if delta is not None:
            self._offers[new.tag] = DeltaOffer(
                base.tag, str(delta.path), delta.manifest_hash, delta.size_bytes
            )
        if compared.elements:
            size = delta.size_bytes if delta is not None else None
            self.measured = DeltaStats(new.tag, base.tag, compared.changed_share, size, new.size_bytes)
        log.debug(
            "delta made" if delta is not None else "no delta: it would be too large",
            snapshot=directory_name(new.tag),
            base=directory_name(base.tag),
            changed_share=round(compared.changed_share, 6),
            delta_bytes=delta.size_bytes if delta is not None else 0,
            full_bytes=new.size_bytes,
        )
