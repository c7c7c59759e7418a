"""Images of a batch: the loader returns their bytes beside the episodes, each once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from areal_async.data.images import digest_of
from areal_async.rpc.messages import BatchEpisode, Fetch, Fetched, FetchedMedia, FetchMedia
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


def fetched(buffer: FakeBuffer) -> Any:
    episodes = [BatchEpisode(name, 0, 3, 1, 0, 0, 0.0) for name in buffer.blobs]
    return BatchLoader(buffer, "policy", OneRank(), threading.Event()).fetch(episodes)


@pytest.mark.parametrize("units", [1000, 3])
def test_each_image_is_fetched_once(monkeypatch: pytest.MonkeyPatch, units: int) -> None:
    monkeypatch.setattr(module, "FETCH_UNITS", units)
    buffer = FakeBuffer(ONE, TWO)
    found = fetched(buffer)
    assert {name: bytes(blob) for name, blob in found.items()} == buffer.blobs
    assert {digest: bytes(data) for digest, data in found.media.items()} == buffer.held
    assert len(buffer.asked) == 2


def test_a_lost_image_is_named() -> None:
    with pytest.raises(BatchError, match=f"has lost the image {digest_of(TWO)}"):
        fetched(FakeBuffer(ONE))
