"""Deltas of the publisher: offered to whoever holds the base, and never in training's way."""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from glob import glob
from pathlib import Path

import pytest
import torch

from areal_async.base.errors import SnapshotError
from areal_async.rpc.client import Client
from areal_async.rpc.weights_messages import NoNews, WaitSnapshot
from areal_async.weights.delta import apply_delta, write_delta
from areal_async.weights.snapshot import open_snapshot
from tests.unit.weights.world import SECRET, tag
from tests.waiting import LIMIT_S
from trainer_service.publishing.publisher import Publisher


def weights(version: int) -> dict[str, torch.Tensor]:
    tensor = torch.ones(10_000)
    tensor[: version * 100] = -1
    return {"w": tensor}


class Gate:
    """`write_delta`, held until it is let go."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = threading.Semaphore(0)
        self.error: Exception | None = None

    def __call__(self, base: Path, new: Path, *, stop: Callable[[], bool], **how: object) -> object:
        self.begun.release()
        while not self.open.wait(0.01):
            if stop():
                break
        if self.error is not None:
            raise self.error
        return write_delta(base, new, stop=stop, **how)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def publisher(place: Path, gate: Gate) -> Iterator[Publisher]:
    made = Publisher(place / "shm", f"ipc://{place}/s", job="j", deltas_below=0.5, access=SECRET)
    made.deltas.write = gate
    made.start()
    yield made
    made.close()
    assert list((place / "shm").iterdir()) == []


@asynccontextmanager
async def node(publisher, name="r", deltas=True):
    """`ask(holds, wait_ms)` for a receiver that can make snapshots of deltas, or cannot."""
    async with Client(publisher.endpoint, job="j", role="receiver-serve", name=name, access=SECRET) as client:

        async def ask(holds=None, wait_ms=0):
            after = None if holds is None else tag(holds)
            return await client.call(WaitSnapshot(name, "serve", after, wait_ms, deltas), timeout_s=40)

        yield ask


async def test_a_receiver_makes_the_version_out_of_the_one_it_holds(publisher, gate, place):
    gate.open.set()
    first = publisher.publish(tag(0), weights(0))
    shutil.copytree(first.path, place / "node" / "policy-e1-v0")
    async with node(publisher) as ask:
        news = await ask(None)
        assert (news.delta, news.size_bytes) == (None, first.size_bytes)
        written = publisher.publish(tag(1), weights(1))
        news = await ask(0, wait_ms=20_000)
        assert news.tag == tag(1)
        assert news.delta is not None
        assert news.delta.base == tag(0)
        assert news.delta.size_bytes < 0.1 * news.size_bytes
        path = Path(news.delta.path)
        assert sum(map(os.path.getsize, glob(f"{path}/*"))) == news.delta.size_bytes
        made = apply_delta(place / "node" / "policy-e1-v0", path, place / "node" / "policy-e1-v1")
        assert made.manifest_hash == news.manifest_hash == written.manifest_hash
        opened = open_snapshot(made.path, manifest_hash=news.manifest_hash)
        assert torch.equal(opened.tensors["w"], weights(1)["w"])
        publisher.publish(tag(2), weights(2))
        assert (await ask(1, wait_ms=20_000)).delta is not None
        for other in (None, 0):  # holds nothing, or a version that the delta is not made of
            news = await ask(other)
            assert (news.tag, news.delta) == (tag(2), None)


async def test_training_waits_for_no_delta_and_only_who_can_use_it_does(publisher, gate):
    publisher.publish(tag(0), weights(0))
    publisher.publish(tag(1), weights(1))  # returns although the delta is held up
    async with node(publisher) as ask, node(publisher, "x", deltas=False) as plain:
        assert (await ask(None)).delta is None
        assert (await plain(0)).delta is None
        assert await ask(0) == NoNews()
        waiting = asyncio.create_task(ask(0, wait_ms=30_000))
        assert await ask(0, wait_ms=50) == NoNews()
        gate.open.set()
        assert (await asyncio.wait_for(waiting, LIMIT_S)).delta is not None
        assert (await plain(0)).delta is None


async def test_a_version_that_comes_while_a_delta_is_made_is_announced_in_full(publisher, gate):
    for version in range(3):
        publisher.publish(tag(version), weights(version))
    async with node(publisher) as ask:
        news = await ask(0)
        assert (news.tag, news.delta) == (tag(2), None)


def test_what_a_delta_is_made_of_stays_until_it_is_made(publisher, gate):
    made = [publisher.publish(tag(version), weights(version)) for version in range(4)]
    assert all(w.path.exists() for w in made)  # 1 is made of 0; 2 and 3 are the newest
    gate.open.set()
    for version in range(4, 200):
        publisher.publish(tag(version), weights(version % 50))
        if not made[0].path.exists():
            break
    assert [w.path.exists() for w in made[:2]] == [False, False]


async def test_a_delta_that_saves_little_is_not_offered(publisher, gate):
    gate.open.set()
    generator = torch.Generator().manual_seed(0)
    for version in range(2):
        publisher.publish(tag(version), {"w": torch.randn(10_000, generator=generator)})
    async with node(publisher) as ask:
        assert (await ask(0, wait_ms=20_000)).delta is None


async def test_a_delta_that_cannot_be_made_holds_nobody_up(publisher, gate):
    gate.error = SnapshotError("no space left")
    for version in range(2):
        publisher.publish(tag(version), weights(version))
    async with node(publisher) as ask:
        waiting = asyncio.create_task(ask(0, wait_ms=30_000))
        assert await ask(0) == NoNews()
        gate.open.set()
        assert (await asyncio.wait_for(waiting, LIMIT_S)).delta is None


def test_a_publisher_that_ends_leaves_no_half_made_delta(publisher, gate):
    for version in range(2):
        publisher.publish(tag(version), weights(version))
    assert gate.begun.acquire(timeout=LIMIT_S)
    publisher.close()  # the fixture then finds nothing under the root
    assert not [t for t in threading.enumerate() if t.name.startswith("weights-delta")]
