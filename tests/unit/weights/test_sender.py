"""The trainer's half of channel `nccl`, with members in threads and processes of their own, over gloo."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from prometheus_client import REGISTRY

from areal_async.base.versions import VersionTag
from areal_async.rpc.schema import Ok
from areal_async.rpc.weights_messages import (
    AskBuild,
    BreakGroup,
    SendsNothing,
    SendsTensors,
    TakeBucket,
    TorchBuild,
)
from areal_async.weights.channels import tensor_sender
from areal_async.weights.channels.tensor_group import JOIN
from areal_async.weights.channels.tensor_sender import TensorSender, in_buckets
from tests.unit.weights.member import LIMIT_S, Member
from tests.waiting import deadline_s

DEADLINE_S = deadline_s(120)


@pytest.fixture(autouse=True)
def small_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(tensor_sender, "BUCKET_BYTES", 4000)
    monkeypatch.setattr(tensor_sender, "WINDOW_S", 0.2)


@pytest.fixture
def sender() -> Iterator[TensorSender]:
    sender = TensorSender(device="cpu", limit_s=LIMIT_S)
    yield sender
    asyncio.run(sender.close())


@asynccontextmanager
async def serving(limit_s: float = LIMIT_S) -> AsyncIterator[TensorSender]:
    sender = TensorSender(device="cpu", limit_s=limit_s)
    await sender.start()
    yield sender
    await sender.close()


def weights(seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(20, 30, generator=noise) for i in range(5)} | {
        "head": torch.randn(7, generator=noise).to(torch.bfloat16)
    }


async def asked(sender: TensorSender, version: int, *members: Member) -> list[Any]:
    """The answers to members that ask at the same time."""
    return await asyncio.gather(*(sender.answer(member.ask(version)) for member in members))


async def updated(sender: TensorSender, version: int, *members: Member) -> list[dict[str, torch.Tensor]]:
    """What members have after an update that they all take."""
    sender.offer(VersionTag("policy", 0, version), weights(version))
    plans = await asked(sender, version, *members)
    both = zip(members, plans, strict=True)
    return await asyncio.gather(*(member.take(sender, plan) for member, plan in both))


def assert_equal(taken: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert taken.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(taken[name], tensor), name


async def threads_end() -> None:
    for thread in threading.enumerate():
        if thread.name == "weights-send":
            await asyncio.to_thread(thread.join, DEADLINE_S)
            assert not thread.is_alive()


def sent() -> float:
    labels = {"channel": "nccl", "source": "publisher"}
    return REGISTRY.get_sample_value("areal_weights_sent_bytes_total", labels) or 0.0


async def test_versions_are_true_what_is_sent_is_what_was_offered_whatever_training_does(sender):
    member = Member()
    for version in range(3):
        tensors = weights(version)
        sender.offer(VersionTag("policy", 0, version), tensors)
        for tensor in tensors.values():
            tensor.fill_(9)
        (plan,) = await asked(sender, version, member)
        assert len(plan.buckets) > 2
        assert (plan.group == member.group) == (version > 0)
        assert_equal(await member.take(sender, plan), weights(version))
        await threads_end()


async def test_versions_are_true_an_offer_does_not_touch_what_is_being_sent(sender):
    first, second = VersionTag("policy", 0, 0), VersionTag("policy", 0, 1)
    sender.offer(first, weights(0))
    member = Member()
    (plan,) = await asked(sender, 0, member)
    sender.offer(second, weights(1))  # before the member has taken anything
    joined = asyncio.create_task(sender.answer(TakeBucket(member.name, plan.group, first, JOIN, 9000)))
    assert isinstance(await joined, Ok)
    await asyncio.to_thread(member.join, plan)
    taken = {}
    for number in range(len(plan.buckets)):
        assert isinstance(await sender.answer(TakeBucket(member.name, plan.group, first, number, 9000)), Ok)
        taken |= await asyncio.to_thread(member.receive, plan, number)
    assert_equal(taken, weights(0))
    await sender.answer(TakeBucket(member.name, plan.group, first, len(plan.buckets), 0))
    await threads_end()
    assert_equal(await member.take(sender, *await asked(sender, 1, member)), weights(1))


async def test_only_the_newest_version_is_sent(sender):
    (answer,) = await asked(sender, 0, Member())
    assert isinstance(answer, SendsNothing)
    sender.offer(VersionTag("policy", 0, 1), weights(1))
    for version in (0, 2):
        (answer,) = await asked(sender, version, Member())
        assert isinstance(answer, SendsNothing)
    # Those that are still gathered when a newer one comes are not sent the older one.
    waits = asyncio.create_task(sender.answer(Member().ask(1)))
    await asyncio.sleep(0)
    sender.offer(VersionTag("policy", 0, 2), weights(2))
    assert isinstance(await waits, SendsNothing)
    await sender.close()
    (answer,) = await asked(sender, 2, Member())
    assert isinstance(answer, SendsNothing)


async def test_engines_share_one_group_and_one_broadcast_whatever_their_widths(sender):
    members = [Member(f"rollout-{i}/0", ranks) for i, ranks in enumerate((1, 2, 3))]
    groups, before = set(), sent()
    for version in range(3):
        for taken in await updated(sender, version, *members):
            assert_equal(taken, weights(version))
        groups |= {member.group for member in members}
        await threads_end()
    assert len(groups) == 1  # formed once
    # Each byte left once, not once for each engine.
    assert sent() - before == 3 * sum(tensor.nbytes for tensor in weights(0).values())


async def test_an_engine_that_asks_late_takes_the_snapshot_and_is_waited_for_the_next_time():
    async with serving() as sender:
        members = [Member(f"rollout-{i}/0") for i in range(2)]
        first, late = members
        assert_equal((await updated(sender, 0, first))[0], weights(0))
        (answer,) = await asked(sender, 0, late)
        assert isinstance(answer, SendsNothing)
        await threads_end()
        old = first.group
        for taken in await updated(sender, 1, *members):
            assert_equal(taken, weights(1))
        assert first.group == late.group != old


async def test_nobody_is_waited_for_where_all_of_the_last_time_have_asked(monkeypatch):
    async with serving() as sender:
        members = [Member(f"rollout-{i}/0") for i in range(2)]
        await updated(sender, 0, *members)
        await threads_end()
        monkeypatch.setattr(tensor_sender, "WINDOW_S", 1000.0)
        for taken in await asyncio.wait_for(updated(sender, 1, *members), DEADLINE_S):
            assert_equal(taken, weights(1))


async def broken(sender: TensorSender, member: Member, plan: SendsTensors) -> None:
    """The member is told in good time that the group is of no use, and reports its own failure, if it has
    one."""
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(member.take(sender, plan), DEADLINE_S)
    await member.fail(sender, plan)


async def assert_the_others_go_on(sender: TensorSender, members: Sequence[Member]) -> None:
    """They form another group, without the one that is gone."""
    await threads_end()
    for taken in await updated(sender, 9, *members):
        assert_equal(taken, weights(9))


@pytest.mark.parametrize("refuses", [True, False], ids=["refuses", "hangs"])
@pytest.mark.parametrize("at", [None, "join", 0, 2])
async def test_one_death_is_local_a_member_that_fails_costs_the_update_of_its_group(at, refuses):
    """`at` is what it did before: nothing, come to the group, or take so many buckets. One that hangs costs
    no more than the limit."""
    async with serving(LIMIT_S if refuses else 1.0) as sender:
        members = [Member(f"rollout-{i}/0") for i in range(3)]
        sender.offer(VersionTag("policy", 0, 0), weights(0))
        plans = await asked(sender, 0, *members)

        async def fails() -> None:
            if at is not None:
                await members[1].in_step(sender, plans[1], JOIN)
            if at not in (None, "join"):
                await asyncio.to_thread(members[1].join, plans[1])
                for number in range(at):
                    await members[1].in_step(sender, plans[1], number)
                    await asyncio.to_thread(members[1].receive, plans[1], number)
            if refuses:
                await members[1].fail(sender, plans[1])

        others = [(members[i], plans[i]) for i in (0, 2)]
        await asyncio.gather(fails(), *(broken(sender, *other) for other in others))
        await assert_the_others_go_on(sender, [member for member, _ in others])


DIES = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[2])
from member import Member
from areal_async.rpc.weights_messages import SendsTensors
import msgspec
plan = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=SendsTensors)
member = Member("rollout-1/0")
member.join(plan)
member.receive(plan, 0)
os._exit(1)
"""


async def test_one_death_is_local_a_member_that_dies_while_it_takes(sender):
    """In a process of its own; the others are inside the next broadcast by then. That a connection is closed
    reaches some of them only at their own limit: gloo loses it now and then, on a busy machine."""
    members = [Member(f"rollout-{i}/0", limit_s=10.0) for i in range(4)]
    large = {f"layer.{i}": torch.ones(1_500_000) for i in range(4)}  # more than sockets hold
    sender.offer(VersionTag("policy", 0, 0), large)
    plans = await asked(sender, 0, *members)
    given = [msgspec.msgpack.encode(plans[1]).hex(), str(Path(__file__).parent)]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", DIES, *given)

    async def steps() -> None:
        for number in (JOIN, 0, 1):  # of the second it only says so
            await members[1].in_step(sender, plans[1], number)

    others = [(members[i], plans[i]) for i in (0, 2, 3)]
    await asyncio.gather(steps(), *(broken(sender, *other) for other in others))
    assert await process.wait() == 1
    await assert_the_others_go_on(sender, [member for member, _ in others])


async def test_too_many_sends_are_refused(monkeypatch):
    monkeypatch.setattr(tensor_sender, "MAX_SENDS", 1)
    async with serving() as sender:
        tags = [VersionTag("policy", 0, version) for version in range(2)]
        sender.offer(tags[0], weights(0))
        (plan,) = await asked(sender, 0, Member("a"))
        sender.offer(tags[1], weights(1))
        (refused,) = await asked(sender, 1, Member("b"))
        assert isinstance(refused, SendsNothing)
        await sender.answer(BreakGroup("a", plan.group, "enough"))
        await threads_end()
        (plan,) = await asked(sender, 1, Member("b"))
        assert isinstance(plan, SendsTensors)
        await sender.answer(BreakGroup("b", plan.group, "enough"))


def test_buckets_hold_every_tensor_once_in_order():
    tensors = weights(0) | {"large": torch.zeros(5000)}
    buckets = list(in_buckets(tensors, 4000))
    assert [name for bucket in buckets for name in bucket.names] == list(tensors)
    sizes = [sum(tensors[name].nbytes for name in bucket.names) for bucket in buckets]
    assert all(size <= 4000 or len(bucket.names) == 1 for size, bucket in zip(sizes, buckets, strict=True))
    (last,) = (bucket for bucket in buckets if "head" in bucket.names)
    assert last.dtypes == sorted(last.dtypes, reverse=True)  # f32 before bf16
    assert buckets[0].dtypes[0] == "float32"
    assert buckets[0].shapes[0] == [20, 30]
    assert list(in_buckets({}, 10)) == []


async def test_an_engine_hears_which_torch_it_must_suit(sender):
    """A group over gloo has no NCCL that must agree."""
    assert await sender.answer(AskBuild()) == TorchBuild(torch.__version__, "", "")
