"""Publisher and receivers together, over the channels that cross hosts."""

import asyncio
import dataclasses
import socket
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch

from areal_async.base.errors import SnapshotError
from areal_async.config.job import JobConfig
from areal_async.config.registry import PartError
from areal_async.rpc.client import Client
from areal_async.rpc.weights_messages import AskTensors, SnapshotNotice
from areal_async.weights.channels import channel_of, makes_deltas
from areal_async.weights.channels.fetching import Download, SnapshotFetcher
from areal_async.weights.channels.serving import ChunkServer, SnapshotServer
from areal_async.weights.receiver import Receiver, make_receiver
from areal_async.weights.snapshot import Companions
from tests.contexts import context_for_test
from tests.unit.weights.member import Member
from tests.unit.weights.world import PATIENCE_S, SECRET, files_of, names, tag
from trainer_service.publishing.publisher import Publisher, make_publisher


def weights(version, n=400_000):
    return {"w": torch.full((n,), float(version)), "b": torch.arange(7)}


@pytest.fixture
def publishers(place):
    """Make publishers of `zmq`, closed at the end. They have their server in `.chunks`."""
    with ExitStack() as stack:

        def make(deltas_below=None):
            end = SnapshotServer("tcp://127.0.0.1:0", job="j", access=SECRET)
            end.node_id = "trainer"
            made = Publisher(
                place / "shm",
                f"ipc://{place}/s",
                job="j",
                companions=Companions({"config.json": b"{}"}),
                channel=end,
                deltas_below=deltas_below,
                access=SECRET,
            )
            made.chunks = end.chunks
            made.start()
            stack.callback(made.close)
            return made

        yield make


async def receiver(place, node, name="r", purpose="serve"):
    end = SnapshotFetcher(
        place / "nodes" / node,
        node_id=node,
        server=ChunkServer("tcp://127.0.0.1:0", job="j", source="peer", access=SECRET),
        download=partial(
            Download,
            client=partial(Client, job="j", role="peer", name=name, access=SECRET),
            patience_s=PATIENCE_S,
            give_up_s=3,
        ),
    )
    client = Client(f"ipc://{place}/s", job="j", role=f"receiver-{purpose}", name=name, access=SECRET)
    made = Receiver(client, name, purpose=purpose, channel=end)
    made.end = end
    await made.connect(10)
    return made


async def take(r, after=None):
    notice = await r.next(after, 5000)
    assert isinstance(notice, SnapshotNotice), notice
    return notice, await r.open(notice)


async def test_receivers_on_other_hosts_get_the_snapshot_and_the_trainer_sends_it_once(place, publishers):
    p = publishers()
    size = p.publish(tag(0), weights(0)).size_bytes
    rs = [await receiver(place, f"n{i}", f"r{i}") for i in range(4)]
    for _, snapshot in await asyncio.gather(*(take(r) for r in rs)):
        assert snapshot.tensors["w"][0] == 0
        assert snapshot.path.parent.parent == place / "nodes"
    assert p.chunks.bytes_sent == size
    p.publish(tag(1), weights(1))
    for _, snapshot in await asyncio.gather(*(take(r, tag(0)) for r in rs)):
        assert snapshot.tensors["w"][0] == 1
    assert p.chunks.bytes_sent == 2 * size
    for r in rs:
        await r.ack(tag(1))
        await r.close()


async def test_one_process_per_host_fetches_and_the_others_find_it(place, publishers):
    p = publishers()
    size = p.publish(tag(0), weights(0)).size_bytes
    rs = [await receiver(place, "n", f"r{i}") for i in range(3)]
    paths = {snapshot.path for _, snapshot in await asyncio.gather(*(take(r) for r in rs))}
    assert paths == {place / "nodes" / "n" / "policy-e1-v0"}
    for r in rs:
        await r.close()
    assert p.chunks.bytes_sent == size


async def test_nothing_is_unbounded_a_host_keeps_the_newest_two_and_what_is_served(place, publishers):
    p = publishers()
    root = place / "nodes" / "n"
    slow, fast = await receiver(place, "n", "slow"), await receiver(place, "n", "fast")
    p.publish(tag(0), weights(0))
    first, _ = await take(slow)
    await slow.ack(first.tag)
    after = None
    for version in range(1, 6):
        p.publish(tag(version), weights(version))
        notice, snapshot = await take(fast, after)
        assert snapshot.tensors["w"][0] == version
        after = notice.tag
        await fast.ack(after)
    assert names(root) == {"policy-e1-v0", "policy-e1-v4", "policy-e1-v5"}
    notice, snapshot = await take(slow, first.tag)
    await slow.ack(notice.tag)
    p.publish(tag(6), weights(6))
    await take(fast, after)
    assert names(root) == {"policy-e1-v5", "policy-e1-v6"}
    await slow.close()
    await fast.close()


async def test_versions_are_true_what_was_damaged_here_is_refused_and_fetched_again(place, publishers):
    p = publishers()
    p.publish(tag(0), weights(0))
    r, other = await receiver(place, "n"), await receiver(place, "n", "other")
    notice, snapshot = await take(r)
    model = snapshot.path / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\xff")
    with pytest.raises(SnapshotError, match="does not match its hash"):
        await other.open(notice)
    assert (await other.open(notice)).tensors["w"][0] == 0
    await r.close()
    await other.close()


async def test_a_receiver_survives_a_trainer_that_comes_back_with_another_epoch(place, publishers):
    p = publishers()
    p.publish(tag(0), weights(0))
    r = await receiver(place, "n")
    notice, _ = await take(r)
    await r.ack(notice.tag)
    p.publish(tag(1), weights(1))
    lost = await r.next(tag(0), 5000)
    await asyncio.to_thread(p.close)
    again = publishers()
    with pytest.raises(SnapshotError, match="not given out any more"):
        await r.open(lost)
    again.publish(tag(1, epoch=2), weights(5))
    notice, snapshot = await take(r, lost.tag)
    assert (notice.tag, float(snapshot.tensors["w"][0])) == (tag(1, epoch=2), 5.0)
    await r.close()


def sparse(version):
    values = torch.rand(300_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[:: 1000 + version] += version
    return {"w": values, "ids": torch.arange(10)}


async def test_a_chain_of_deltas_crosses_hosts_at_a_fraction_of_the_bytes(place, publishers):
    p = publishers(deltas_below=0.5)
    sent, offered = [], []
    r = await receiver(place, "n")
    after = None
    for version in range(4):
        p.publish(tag(version), sparse(version))
        news = await r.next(after, 20_000)
        assert news.tag == tag(version)
        before = p.chunks.bytes_sent
        snapshot = await r.open(news)
        assert torch.equal(snapshot.tensors["w"], sparse(version)["w"])
        assert snapshot.path.parent == place / "nodes" / "n"
        for name in ("model.safetensors", "manifest.json", "config.json"):
            assert (snapshot.path / name).read_bytes() == (Path(news.path) / name).read_bytes()
        sent.append(p.chunks.bytes_sent - before)
        offered.append(news.delta is not None)
        await r.ack(news.tag)
        after = news.tag
    await r.close()
    assert offered == [False, True, True, True]
    assert all((n < 0.05 * sent[0]) == delta for n, delta in zip(sent, offered, strict=True))


async def test_versions_are_true_a_delta_that_cannot_be_used_is_replaced_by_the_full_snapshot(
    place, publishers
):
    p = publishers(deltas_below=0.5)
    r = await receiver(place, "n")
    p.publish(tag(0), sparse(0))
    notice, first = await take(r)
    await r.ack(notice.tag)
    p.publish(tag(1), sparse(1))
    news = await r.next(tag(0), 20_000)
    assert news.delta is not None
    model = first.path / "model.safetensors"  # the base is damaged after it was verified
    model.write_bytes(model.read_bytes()[:-2] + b"\xff\xff")
    assert torch.equal((await r.open(news)).tensors["w"], sparse(1)["w"])
    assert r.end.bytes_received > notice.size_bytes + news.size_bytes
    await r.close()


COURIER = """
import shutil
from pathlib import Path
from areal_async import Channel, PublishingEnd, ReceivingEnd, Section

class Sender(PublishingEnd):
    def __init__(self, post): self.post = post
    def add(self, directory, manifest_hash): shutil.copytree(directory, self.post / manifest_hash)

class Taker(ReceivingEnd):
    def __init__(self, post): self.post = post
    async def bring(self, notice, publisher):
        return (self.post / notice.manifest_hash).rename(self.post / Path(notice.path).name)

class Courier(Channel):
    class Arguments(Section):
        post: Path

    @staticmethod
    def publishing_end(ctx): return Sender(Path(ctx.job.weights.channel_args["post"]))
    @staticmethod
    def receiving_end(ctx, name): return Taker(Path(ctx.job.weights.channel_args["post"]))
"""


def job_with(place, **weights_section):
    places = {"model": str(place / "model"), "run_dir": str(place), "tasks": {"train": "unused.jsonl"}}
    return JobConfig.model_validate({"job": "j", "weights": weights_section} | places)


CHANNELS = {
    "shm": ({}, "shm"),
    "zmq": ({}, "shm"),
    "nccl": ({}, "shm"),
    "disk": ({"directory": "there"}, "there/j"),
    "own": ({"post": "post"}, "post"),
}
"""Folders that each channel is given, and where a receiver on the trainer's host finds a version."""


@pytest.mark.parametrize("name", CHANNELS)
async def test_every_channel_brings_each_version_as_it_was_published(place, name):
    """`own` is a channel of the user's."""
    (place / "courier.py").write_text(COURIER)
    (place / "post").mkdir()
    folders, where = CHANNELS[name]
    channel = f"{place}/courier.py:Courier" if name == "own" else name
    args = {key: str(place / folder) for key, folder in folders.items()}
    job = job_with(place, channel=channel, channel_args=args)
    ctx = context_for_test(job, place, "trainer", "trainer")
    assert makes_deltas(ctx.job) == (name == "zmq")
    p = make_publisher(ctx, files={"config.json": b"{}"}, tied={})
    p.start()
    try:
        r = make_receiver(ctx, "serve", name="rollout-0")
        await r.connect(10)
        after = None
        for version in range(3):
            written = p.publish(tag(version), weights(version))
            notice, snapshot = await take(r, after)
            assert files_of(snapshot.path).keys() == {"manifest.json", "model.safetensors", "config.json"}
            assert files_of(snapshot.path) == files_of(written.path)
            assert torch.equal(snapshot.tensors["w"], weights(version)["w"])
            assert snapshot.path == place / where / tag(version).label
            await r.ack(notice.tag)
            after = notice.tag
        await r.close()
    finally:
        await asyncio.to_thread(p.close)


def test_a_misspelt_argument_of_a_channel_is_named(place):
    (place / "courier.py").write_text(COURIER)
    misspelt = job_with(place, channel=f"{place}/courier.py:Courier", channel_args={"pots": 1})
    with pytest.raises(
        PartError, match=r"weights\.channel_args\.pots: .* has no argument 'pots'. It takes post"
    ):
        channel_of(misspelt)


def address_beyond_loopback():
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return one.address
    pytest.skip("this machine has no network")


def connections_on_loopback():
    found = psutil.Process().net_connections("tcp4")
    return {c.fd for c in found if c.status == psutil.CONN_ESTABLISHED and c.raddr.ip.startswith("127.")}


async def test_nccl_takes_tensors_and_the_snapshot_to_another_host_by_the_address_of_the_trainers(
    place, monkeypatch
):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    address, before = address_beyond_loopback(), connections_on_loopback()
    job = job_with(place, channel="nccl")
    trainer = context_for_test(job, place, "trainer", "trainer")
    host = msgspec.structs.replace(trainer.host, address=address)
    other = msgspec.structs.replace(host, node_id="b")
    topology = msgspec.structs.replace(trainer.topology, hosts={host.node_id: host, "b": other})
    trainer = dataclasses.replace(trainer, topology=topology, host=host)
    worker = dataclasses.replace(trainer, host=other)
    p = make_publisher(trainer, files={}, tied={})
    p.start()
    try:
        p.publish(tag(0), weights(0))
        r = make_receiver(worker, "serve", name="rollout-0")
        await r.connect(10)
        _, snapshot = await take(r)
        assert snapshot.path.parent == worker.shm_dir / "weights" / "b"
        assert snapshot.tensors["w"][0] == 0
        engine = Client(worker.weights, job="j", role="rollout", name="e", access=worker.keys)
        await engine.connect(10)
        by_wire = SimpleNamespace(answer=partial(engine.call, timeout_s=30))
        member = Member("rollout-0/0")
        member.tag = tag(0)
        plan = await by_wire.answer(AskTensors(member.name, "", tag(0), 1))
        assert plan.host == address
        taken = await member.take(by_wire, plan)
        assert torch.equal(taken["w"], weights(0)["w"])
        assert connections_on_loopback() == before
        await engine.close()
        await r.close()
    finally:
        await asyncio.to_thread(p.close)


def test_checking_a_job_with_any_channel_loads_no_torch():
    code = """
import sys
from areal_async.config.registry import CHANNELS
for name in CHANNELS.names:
    CHANNELS.find(name)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
