"""Images of a batch: the loader returns their bytes beside the episodes, each once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from areal_async.base.errors import FaultError
from areal_async.data.images import digest_of
from areal_async.rpc.messages import Batch, BatchEpisode, BatchGroup, Fetch, Fetched, FetchedMedia, FetchMedia
from tests.scoring import episode_blob
from trainer_service.data import loader as module
from trainer_service.data.loader import BatchLoader
from trainer_service.errors import BatchError

ONE, TWO = b"first image", b"second image"


class FakeBuffer:
    """Holds three episodes with images in two groups, and answers with one medium at a time."""

    def __init__(self, *held: bytes) -> None:
        self.blobs = {
            "a.0": episode_blob(media=[ONE]),
            "a.1": episode_blob(media=[ONE, TWO]),
            "b.0": episode_blob(media=[TWO]),
            "c.0": episode_blob(),
        }
        self.held = {digest_of(data): data for data in held}
        self.asked: list[dict[str, list[str]]] = []

    def exchange(self, request: Any) -> Any:
        if isinstance(request, Fetch):
            with_media = [name for name in request.episode_ids if not name.startswith("c")]
            blobs = [memoryview(self.blobs[name]) for name in request.episode_ids]
            return Fetched(request.episode_ids, media=with_media), blobs
        assert isinstance(request, FetchMedia)
        self.asked.append(request.groups)
        first = next(digest for some in request.groups.values() for digest in some)
        if first not in self.held:
            return FetchedMedia([], [first]), []
        return FetchedMedia([first]), [memoryview(self.held[first])]


class OneRank:
    first = True

    def together(self, work: Any) -> Any:
        return work()

    def largest(self, value: int) -> int:
        return value


def batch_of(*groups: str) -> Batch:
    return Batch("policy", 1, 7, 0, [BatchGroup(name, name, "", []) for name in groups])


def loader_of(buffer: FakeBuffer) -> BatchLoader:
    return BatchLoader(buffer, "policy", OneRank(), threading.Event())


def fetched(buffer: FakeBuffer, loader: BatchLoader | None = None, *groups: str) -> Any:
    episodes = [BatchEpisode(name, 0, 3, 1, 0, 0, 0.0) for name in buffer.blobs]
    return (loader or loader_of(buffer)).fetch(batch_of(*groups), episodes)


@pytest.mark.parametrize("units", [1000, 3])
def test_each_image_is_fetched_once(monkeypatch: pytest.MonkeyPatch, units: int) -> None:
    monkeypatch.setattr(module, "FETCH_UNITS", units)
    buffer = FakeBuffer(ONE, TWO)
    found = fetched(buffer)
    assert {name: bytes(blob) for name, blob in found.items()} == buffer.blobs
    assert {digest: bytes(data) for digest, data in found.media.items()} == buffer.held
    assert len(buffer.asked) == 2


def test_a_batch_with_a_lost_image_is_asked_for_again_until_it_stays_the_same() -> None:
    buffer = FakeBuffer(ONE)
    loader = loader_of(buffer)
    assert fetched(buffer, loader, "a", "b") is None
    assert fetched(buffer, loader, "a", "d") is None
    with pytest.raises(
        BatchError, match=f"step 7 lacks bytes: the buffer has lost the image {digest_of(TWO)}"
    ):
        fetched(buffer, loader, "a", "d")
    buffer.held[digest_of(TWO)] = TWO
    assert fetched(buffer, loader, "a", "d").media.keys() == buffer.held.keys()


def test_a_group_that_was_dropped_for_another_rank_is_lost_too() -> None:
    class Dropped(FakeBuffer):
        def exchange(self, request: Any) -> Any:
            raise FaultError(self.kind, "episode a.0 is not held here (any more)")

    buffer = Dropped()
    buffer.kind = "invalid"
    assert fetched(buffer, None, "a") is None
    buffer.kind = "unavailable"
    with pytest.raises(FaultError, match="not held"):
        fetched(buffer)
