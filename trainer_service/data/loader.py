"""Loading of a step's data on all ranks.

Only rank 0 asks the buffer for the manifest; it broadcasts the manifest as msgpack bytes. Every rank makes
the same plan from it and fetches only its own episodes, by id. No rank waits in a collective while another
waits for the buffer (`Ranks.together`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_async.base.errors import FaultError
from areal_async.base.log import get_logger
from areal_async.data.media import MediaFetch
from areal_async.rpc.board import board
from areal_async.rpc.client import SyncClient
from areal_async.rpc.messages import Batch, BatchEpisode, Fetch, NextBatch, Waiting
from areal_async.trajectory import read_header
from trainer_service.errors import BatchError
from trainer_service.ranks import Ranks

POLL_MS = 1000  # Length of one long poll for a batch
REPORT_S = 10.0  # Interval between reports of a wait with the same edge
FETCH_UNITS = 4 << 20  # Most units in one fetch of episodes without routes
UNIT_BYTES = 13

log = get_logger("trainer")


class FetchedBytes(dict[str, memoryview]):
    """Codec blobs of episodes by id. `routes` has the bytes of their routes, if any, by id, and `media` those
    of their images, by digest."""

    def __init__(self, blobs: Mapping[str, memoryview] | None = None) -> None:
        super().__init__(blobs or {})
        self.routes: dict[str, memoryview] = {}
        self.media: dict[str, memoryview] = {}
        self.lost: list[str] = []  # Reports of bytes that the buffer does not have

    def media_of(self, blob: memoryview) -> dict[str, memoryview]:
        """Return the images of an episode by digest, in its order."""
        digests = [each.digest for each in read_header(blob)[0].media]
        return {digest: self.media[digest] for digest in digests if digest in self.media}


class BatchLoader:
    """Loader for the batches of a policy's trainer, on one rank."""

    def __init__(
        self,
        buffer: SyncClient,
        policy: str,
        ranks: Ranks,
        stopping: threading.Event,
        *,
        check: Callable[[], None] = lambda: None,
        route_bytes: int = 0,
    ) -> None:
        """`check` is called in every round of a wait; its error ends the wait. `route_bytes` is the number of
        bytes of routes per unit; if it is not 0, routes are fetched too."""
        self._buffer, self._policy, self._ranks = buffer, policy, ranks
        self._stopping, self._check, self._route_bytes = stopping, check, route_bytes
        self._incomplete: list[str] = []  # Groups of the last batch with lost bytes

    def next_batch(self, epoch: int, step: int) -> Batch | None:
        """Return the manifest of `step`, the same on every rank. The result is None if the trainer is asked
        to stop first."""
        begun_s = reported_s = time.monotonic()
        edge = ""
        while True:
            answer = self._round(epoch, step)
            if answer is None or isinstance(answer, Batch):
                board.waits("batch", "")
                return answer
            now_s = time.monotonic()
            if self._ranks.first and (answer.edge != edge or now_s - reported_s >= REPORT_S):
                waited_s = round(now_s - begun_s, 1)
                log.info(
                    "waiting for a batch",
                    step=step,
                    edge=answer.edge,
                    detail=answer.detail,
                    waited_s=waited_s,
                )
                board.waits("batch", f"a batch ({answer.edge}: {answer.detail})")
                edge, reported_s = answer.edge, now_s

    def _round(self, epoch: int, step: int) -> Batch | Waiting | None:
        """Make one long poll on rank 0 and broadcast the answer to all ranks."""

        def poll() -> Batch | Waiting | None:
            self._check()
            if self._stopping.is_set():
                return None
            return self._buffer.call(NextBatch(self._policy, epoch, step, POLL_MS))

        answer: Any = self._ranks.on_first(poll)
        found: Batch | Waiting | None = self._ranks.share(answer, Batch | Waiting | None)
        return found

    def fetch(self, batch: Batch, episodes: Sequence[BatchEpisode]) -> FetchedBytes | None:
        """Return the bytes of these episodes of the batch. All ranks call it.

        The result is None if the buffer has lost bytes of a group. It then drops the group, so the caller
        asks for the batch again. Raises `BatchError` if the batch has not changed since the last time."""
        found = self._ranks.together(lambda: self._fetch(episodes))
        if not self._ranks.largest(len(found.lost)):
            return found
        groups = [group.group_id for group in batch.groups]
        if groups == self._incomplete:
            raise BatchError(f"the batch of step {batch.step} lacks bytes: {'; '.join(found.lost)}")
        self._incomplete = groups
        log.warning("asking for the batch again", step=batch.step, lost=found.lost)
        return None

    def _fetch(self, episodes: Sequence[BatchEpisode]) -> FetchedBytes:
        blobs = FetchedBytes()
        most = FETCH_UNITS * UNIT_BYTES // (UNIT_BYTES + self._route_bytes)
        for part in _by_units(episodes, most):
            ids = [episode.episode_id for episode in part]
            try:
                reply, found = self._buffer.exchange(Fetch(ids, self._route_bytes > 0))
            except FaultError as error:
                if error.kind != "invalid":
                    raise
                blobs.lost.append(str(error))  # the group was dropped when another rank asked for its images
                return blobs
            if len(found) != len(ids) + len(reply.routes):
                raise BatchError(f"asked the buffer for {len(ids)} episodes, got {len(found)}")
            blobs.update(zip(ids, found, strict=False))
            self._add_media(blobs, reply.media)
            # Routes that the buffer has already freed are empty.
            blobs.routes |= {
                name: one for name, one in zip(reply.routes, found[len(ids) :], strict=True) if one
            }
        return blobs

    def _add_media(self, blobs: FetchedBytes, episode_ids: Sequence[str]) -> None:
        """Fetch the media that the headers of these episodes name."""
        wanted: dict[str, list[str]] = {}
        for episode_id in episode_ids:
            named = (each.digest for each in read_header(blobs[episode_id])[0].media)
            new = [digest for digest in named if digest not in blobs.media]
            wanted.setdefault(episode_id.rpartition(".")[0], []).extend(new)
        fetch = MediaFetch({group_id: some for group_id, some in wanted.items() if some})
        while (request := fetch.request()) is not None:
            fetch.take(*self._buffer.exchange(request))
        blobs.lost += [f"the buffer has lost the image {digest}" for digest in fetch.lost]
        blobs.media |= fetch.found


def _by_units(episodes: Sequence[BatchEpisode], most: int) -> list[list[BatchEpisode]]:
    parts: list[list[BatchEpisode]] = []
    units = 0
    for episode in episodes:
        if not parts or units + episode.n_units > most:
            parts.append([])
            units = 0
        parts[-1].append(episode)
        units += episode.n_units
    return parts
