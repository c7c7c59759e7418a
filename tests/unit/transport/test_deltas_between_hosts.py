"""Versions that travel as deltas: a receiver on another host makes each of the one it holds, bit for bit."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from areal_async.rpc.messages import SnapshotNotice, VersionTag
from areal_async.rpc.secret import RunSecret
from areal_async.weights import DeltaPolicy, Publisher, Receiver
from areal_async.weights.deltas import apply_delta
from areal_async.weights.transport.inlet import Inlet, Place
from areal_async.weights.transport.outlet import Outlet

SECRET = RunSecret(bytes(32))

STEPS = 6


def tag(version: int) -> VersionTag:
    return VersionTag(1, version)


def weights(version: int) -> dict[str, torch.Tensor]:
    values = torch.rand(300_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[:: 1000 + version] += version
    return {"w": values, "ids": torch.arange(10)}


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="deltas-"))
    yield path
    shutil.rmtree(path)


def test_a_chain_of_deltas_crosses_hosts_at_a_fraction_of_the_bytes(place: Path) -> None:
    outlet = Outlet("tcp://127.0.0.1:0", access=SECRET)
    publisher = Publisher(
        place / "shm",
        f"ipc://{place}/s",
        job="j",
        files={"config.json": b"{}"},
        deltas=DeltaPolicy(anchor_every=4),
        channel="zmq",
        node_id="trainer",
        outlet=outlet,
        access=SECRET,
    )
    publisher.start()
    sent: list[int] = []
    offered: list[bool] = []

    async def main() -> None:
        inlet = Inlet(
            Place("n", place / "node", give_up_s=5, access=SECRET), receiver="r", apply_delta=apply_delta
        )
        receiver = Receiver(publisher.endpoint, job="j", name="r", inlet=inlet, access=SECRET)
        await receiver.connect(10)
        after = None
        for version in range(STEPS):
            publisher.publish(tag(version), weights(version))
            news = await receiver.next(after, 20_000)
            assert isinstance(news, SnapshotNotice)
            assert news.tag == tag(version)
            before = outlet.station.bytes_sent
            snapshot = await receiver.open(news)
            assert torch.equal(snapshot.tensors["w"], weights(version)["w"])
            assert snapshot.path.parent == place / "node"
            for name in ("model.safetensors", "manifest.json", "config.json"):
                assert (snapshot.path / name).read_bytes() == (Path(news.path) / name).read_bytes()
            sent.append(outlet.station.bytes_sent - before)
            offered.append(news.delta is not None)
            await receiver.ack(news.tag)
            after = news.tag
        await receiver.close()

    asyncio.run(main())
    publisher.close()
    assert offered == [False, True, True, True, False, True]
    full = sent[0]
    assert all((n < 0.05 * full) == delta for n, delta in zip(sent, offered, strict=True))
