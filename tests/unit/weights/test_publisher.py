import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from areal_async.base.errors import EndpointError, FaultError, RpcTimeout, SnapshotError
from areal_async.rpc.client import Client
from areal_async.rpc.messages import Stats
from areal_async.rpc.weights_messages import AckSnapshot, NoNews, SnapshotNotice
from areal_async.weights.receiver import Receiver
from areal_async.weights.retention import Purpose
from areal_async.weights.snapshot import MODEL_FILE, Companions, open_snapshot
from tests.unit.weights.world import SECRET, tag
from tests.waiting import LIMIT_S, wait_for
from trainer_service.publishing.publisher import Publisher


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100,), float(version)), "b": torch.arange(7)}


@pytest.fixture
def clock():
    """The publisher's time in seconds, which stands still: `clock[0]`."""
    return [0.0]


@pytest.fixture
def publisher(place, clock) -> Iterator[Publisher]:
    files = {"config.json": b"{}"}
    made = Publisher(place / "shm", f"ipc://{place}/s", job="j", companions=Companions(files), access=SECRET)
    made.clock = lambda: clock[0]
    made.start()
    yield made
    made.close()


async def receiver(publisher: Publisher, purpose: Purpose = "serve", name: str = "r") -> Receiver:
    client = Client(publisher.endpoint, job="j", role="r", name=name, access=SECRET)
    made = Receiver(client, name, purpose=purpose)
    await made.connect(10)
    return made


def expect_notice(news: SnapshotNotice | NoNews, version: int, final: bool = False) -> SnapshotNotice:
    assert isinstance(news, SnapshotNotice)
    assert (news.tag, news.final) == (tag(version), final)
    return news


async def test_a_receiver_opens_what_was_published_and_its_word_reaches_the_trainer(publisher):
    publisher.publish(tag(0), weights(0))
    r = await receiver(publisher)
    notice = expect_notice(await r.next(None), 0)
    snapshot = await r.open(notice)
    assert torch.equal(snapshot.tensors["w"], weights(0)["w"])
    assert (snapshot.path / "config.json").read_bytes() == b"{}"
    await r.ack(notice.tag, stall_ms=1.5)
    assert await r.next(notice.tag) == NoNews()
    await r.close()
    assert publisher.acks() == [AckSnapshot("r", "serve", tag(0), 1.5)]
    assert publisher.acks() == []


async def test_a_waiting_receiver_hears_of_a_publication_at_once(publisher):
    r = await receiver(publisher)
    waiting = asyncio.create_task(r.next(None, wait_ms=30_000))
    await r.next(None)  # answered, so the wait is under way
    publisher.publish(tag(0), weights(0))
    notice = expect_notice(await asyncio.wait_for(waiting, LIMIT_S), 0)
    waiting = asyncio.create_task(r.next(notice.tag, wait_ms=30_000))
    await r.next(notice.tag)
    publisher.publish(tag(1), weights(1))
    publisher.publish(tag(2), weights(2))
    later = await asyncio.wait_for(waiting, LIMIT_S)
    assert isinstance(later, SnapshotNotice)
    assert later.tag in (tag(1), tag(2))
    expect_notice(await r.next(tag(1)), 2)
    await r.close()


async def test_what_one_receiver_acknowledges_has_no_other_looked_after(place):
    """Hundreds acknowledge each version while hundreds wait for the next one."""
    looks = []

    def clock() -> float:
        looks.append(0)  # whoever asks for a snapshot is looked after at a time
        return 0.0

    publisher = Publisher(place / "shm", f"ipc://{place}/s", job="j", access=SECRET)
    publisher.clock = clock
    publisher.start()
    publisher.publish(tag(0), weights(0))
    receivers = [await receiver(publisher, name=f"r{number}") for number in range(8)]
    waiting = [asyncio.create_task(r.next(tag(0), wait_ms=60_000)) for r in receivers]
    for r in receivers:
        await r.next(tag(0))  # answered, so its wait is under way
    looks.clear()
    for r in receivers:
        await r.ack(tag(0))
    await receivers[0].next(tag(0))
    assert len(looks) == 1
    publisher.publish(tag(1), weights(1))
    for each in waiting:
        expect_notice(await asyncio.wait_for(each, LIMIT_S), 1)
    for r in receivers:
        await r.close()
    publisher.close()


async def test_the_evaluator_gets_the_pinned_ones_in_order_and_the_trainer_waits_for_it(publisher):
    for version in range(5):
        publisher.publish(tag(version), weights(version), evaluate=version in (0, 2, 4), final=version == 4)
    assert not publisher.wait_evaluated(0.01)
    e = await receiver(publisher, "evaluate", "e")
    after = None
    for version in (0, 2, 4):
        notice = expect_notice(await e.next(after, 1000), version, final=version == 4)
        snapshot = await e.open(notice)
        assert snapshot.tensors["w"][0] == version
        await e.ack(notice.tag)
        after = notice.tag
    assert await e.next(after, 30_000) == NoNews(finished=True)
    await e.close()

    assert await asyncio.to_thread(publisher.wait_evaluated, 20)


async def test_a_failed_evaluation_is_over_too(publisher):
    publisher.publish(tag(0), weights(0), evaluate=True)
    e = await receiver(publisher, "evaluate", "e")
    notice = expect_notice(await e.next(None), 0)
    await e.ack(notice.tag, error="no memory")
    await e.close()
    assert publisher.wait_evaluated(0)
    assert publisher.acks()[0].error == "no memory"


async def test_a_trainer_that_ends_before_its_last_step_does_not_say_that_nothing_more_will_come(publisher):
    """It ended by an error, and is started again: an evaluator that was told so would be done."""
    publisher.publish(tag(0), weights(0))
    e = await receiver(publisher, "evaluate", "e")
    waiting = asyncio.create_task(e.next(None, 2_000))
    await e.next(None)  # answered, so the wait is under way
    await asyncio.to_thread(publisher.close)
    answer = await asyncio.gather(waiting, return_exceptions=True)
    assert answer[0] == NoNews(finished=False) or isinstance(answer[0], RpcTimeout)
    await e.close()


def test_nothing_is_unbounded_old_snapshots_go_and_their_memory_is_used_again(publisher, place):
    inodes = set()
    for version in range(20):
        written = publisher.publish(tag(version), weights(version))
        inodes.add(os.stat(written.path / MODEL_FILE).st_ino)
        assert open_snapshot(written.path, manifest_hash=written.manifest_hash).tensors["w"][0] == version
        assert len(set(os.listdir(place / "shm"))) <= 2
    assert len(inodes) == 2


async def evaluated(publisher: Publisher) -> None:
    e = await receiver(publisher, "evaluate", "e")
    await e.ack(expect_notice(await e.next(None, 1000), 5).tag)
    await e.close()


def test_a_step_waits_for_no_new_memory_while_an_evaluation_holds_a_version(publisher, place):
    """A file that is not made and touched before takes ten times as long to fill."""
    inodes = set()
    for version in range(20):
        ready = {path.stat().st_ino for path in (place / "shm").glob(".spare-*")}
        written = publisher.publish(tag(version), weights(version), evaluate=version == 5)
        found = os.stat(written.path / MODEL_FILE).st_ino
        if version > 1:
            assert found in ready | inodes
        inodes.add(found)
        if version == 6:  # from now on one file more is needed
            wait_for(lambda: list((place / "shm").glob(".spare-*")), "a third file")
        if version == 12:
            asyncio.run(evaluated(publisher))
    assert len(inodes) == 3
    assert len(os.listdir(place / "shm")) == 2, "what the evaluation needed besides is given back"


async def test_versions_are_true_memory_somebody_may_still_read_is_not_used_again(publisher, place, clock):
    publisher.publish(tag(0), weights(0))
    r = await receiver(publisher)
    notice = expect_notice(await r.next(None), 0)
    for version in range(1, 6):
        publisher.publish(tag(version), weights(version))
    assert (await r.open(notice)).tensors["w"][0] == 0
    reading = os.open(Path(notice.path) / MODEL_FILE, os.O_RDONLY)
    content = os.pread(reading, 10_000, 0)
    clock[0] = 1000.0  # the hold is over, without an acknowledgement
    for version in range(6, 12):
        publisher.publish(tag(version), weights(version))
    assert os.pread(reading, 10_000, 0) == content
    os.close(reading)
    with pytest.raises(SnapshotError, match="cannot be read"):
        await r.open(notice)
    await r.close()
    assert len(set(os.listdir(place / "shm"))) <= 3


async def test_versions_are_true_a_damaged_snapshot_is_refused_and_the_next_one_opens(publisher):
    written = publisher.publish(tag(0), weights(0))
    data = (written.path / MODEL_FILE).read_bytes()
    (written.path / MODEL_FILE).write_bytes(data[:-1] + b"\xff")
    r = await receiver(publisher)
    notice = expect_notice(await r.next(None), 0)
    with pytest.raises(SnapshotError, match="does not match its hash") as caught:
        await r.open(notice)
    await r.ack(notice.tag, error=str(caught.value))
    publisher.publish(tag(1), weights(1))
    snapshot = await r.open(expect_notice(await r.next(notice.tag), 1))
    assert snapshot.tensors["w"][0] == 1
    await r.close()
    assert "does not match its hash" in publisher.acks()[0].error


def test_a_publication_that_fails_leaves_the_publisher_working(publisher, place):
    publisher.publish(tag(0), weights(0))
    with pytest.raises(SnapshotError, match="complex"):
        publisher.publish(tag(1), {"w": torch.ones(1, dtype=torch.complex64)})
    publisher.publish(tag(1), weights(1))
    assert set(os.listdir(place / "shm")) == {"policy-e1-v0", "policy-e1-v1"}


async def test_other_requests_are_refused(publisher):
    async with Client(publisher.endpoint, job="j", role="r", name="n", access=SECRET) as client:
        with pytest.raises(FaultError, match="does not serve Stats"):
            await client.call(Stats(), timeout_s=60)


def threads_of_publishers() -> int:
    """Those of this process by their names: other tests' come and go meanwhile."""
    names = [thread.name for thread in threading.enumerate()]
    return sum(name.startswith(("weights-", "delta")) for name in names)


def test_closing_leaves_no_thread_socket_or_file(place):
    def use() -> None:
        publisher = Publisher(place / "shm", f"ipc://{place}/s", job="j", access=SECRET)
        publisher.start()
        publisher.publish(tag(0), weights(0), evaluate=True)
        publisher.close()
        publisher.close()
        assert list((place / "shm").iterdir()) == []
        assert set(os.listdir(place)) == {"shm"}

    def held() -> tuple[int, int]:
        gc.collect()  # of earlier tests, whose mappings hold descriptors
        return threads_of_publishers(), len(os.listdir("/proc/self/fd"))

    use()
    threads, descriptors = held()
    for _ in range(3):
        use()
    left = held()
    assert left[0] <= threads
    assert left[1] < descriptors + 3  # one left behind by each use would be three; another test's come and go


def test_one_death_is_local_a_new_publisher_clears_what_a_killed_one_left(place):
    root = place / "shm"
    killed = Publisher(root, f"ipc://{place}/s", job="j", access=SECRET)
    killed.start()
    killed.publish(tag(0), weights(0))
    killed.close(remove=False)
    (root / ".writing-policy-e1-v1").mkdir()
    (root / ".spare-7").write_bytes(b"x")
    (root / "notes").write_text("not ours")
    fresh = Publisher(root, f"ipc://{place}/s", job="j", access=SECRET)
    fresh.start()
    assert set(os.listdir(root)) == {"notes"}
    fresh.publish(tag(0, epoch=2), weights(0))
    fresh.close()


def test_a_second_publisher_neither_takes_the_address_nor_the_files(publisher, place):
    publisher.publish(tag(0), weights(0))
    threads = threads_of_publishers()
    second = Publisher(place / "shm", publisher.endpoint, job="j", access=SECRET)
    with pytest.raises(EndpointError, match="already serves"):
        second.start()
    second.close()
    assert set(os.listdir(place / "shm")) - {".spare-1"} == {"policy-e1-v0"}
    assert threads_of_publishers() <= threads
