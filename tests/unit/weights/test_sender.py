"""The trainer's half of channel `nccl`, with members in threads and processes of their own, over gloo."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from areal_async.rpc.schema import VersionTag
from areal_async.rpc.weights_messages import AskTensors, SendsNothing, SendsTensors
from areal_async.weights.channels.tensor_sender import TensorSender, in_buckets

LIMIT_S = 60.0
DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def sender() -> Iterator[TensorSender]:
    with serving() as sender:
        yield sender


@contextmanager
def serving(**options: Any) -> Iterator[TensorSender]:
    sender = TensorSender(**{"device": "cpu", "limit_s": LIMIT_S, "bucket_bytes": 4000} | options)
    asyncio.run(sender.start())
    yield sender
    asyncio.run(sender.close())


def weights(seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(20, 30, generator=noise) for i in range(5)} | {
        "head": torch.randn(7, generator=noise).to(torch.bfloat16)
    }


class Member:
    """An engine's side, as a server has it."""

    def __init__(self) -> None:
        self.group = ""
        self.backend: Any = None

    def join(self, plan: SendsTensors) -> None:
        if plan.group == self.group:
            return
        limit = timedelta(seconds=LIMIT_S)
        store: dist.Store = dist.TCPStore(plan.host, plan.port, 2, False, timeout=limit)
        for prefix in (plan.group, f"{plan.group}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self.backend = dist.ProcessGroupGloo(store, 1, 2, limit)
        self.group = plan.group

    def take(self, plan: SendsTensors, buckets: int | None = None) -> dict[str, torch.Tensor]:
        self.join(plan)
        how = dist.BroadcastOptions()
        how.rootRank = 0
        taken = {}
        for bucket in plan.buckets[:buckets]:
            for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
                taken[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                self.backend.broadcast([taken[name]], how).wait()
        return taken


def ask(sender: TensorSender, version: int, group: str = "", engine: str = "rollout-0/0") -> Any:
    return asyncio.run(sender.answer(AskTensors(engine, group, VersionTag("policy", 0, version), 1)))


def assert_equal(taken: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert taken.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(taken[name], tensor), name


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "weights-send":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def test_versions_are_true_what_is_sent_is_what_was_offered_whatever_training_does(sender):
    member = Member()
    for version in range(3):
        tensors = weights(version)
        sender.offer(VersionTag("policy", 0, version), tensors)
        for tensor in tensors.values():
            tensor.fill_(9)
        plan = ask(sender, version, member.group)
        assert len(plan.buckets) > 2
        assert (plan.group == member.group) == (version > 0)
        assert_equal(member.take(plan), weights(version))
        wait_for_threads()


def test_versions_are_true_an_offer_does_not_touch_what_is_being_sent(sender):
    sender.offer(VersionTag("policy", 0, 0), weights(0))
    plan, member = ask(sender, 0), Member()
    sender.offer(VersionTag("policy", 0, 1), weights(1))  # before the member has taken anything
    assert_equal(member.take(plan), weights(0))
    wait_for_threads()
    assert_equal(member.take(ask(sender, 1, member.group)), weights(1))


def test_only_the_newest_version_is_sent(sender):
    assert isinstance(ask(sender, 0), SendsNothing)
    sender.offer(VersionTag("policy", 0, 1), weights(1))
    assert isinstance(ask(sender, 0), SendsNothing)
    assert isinstance(ask(sender, 2), SendsNothing)
    asyncio.run(sender.close())
    assert isinstance(ask(sender, 1), SendsNothing)


def test_each_engine_has_a_group_of_its_own(sender):
    sender.offer(VersionTag("policy", 0, 0), weights(0))
    plans = [ask(sender, 0, engine=f"rollout-0/{i}") for i in range(3)]
    assert len({plan.group for plan in plans}) == 3
    # In another order than they asked in: nobody waits for anybody.
    for plan in reversed(plans):
        assert_equal(Member().take(plan), weights(0))


def test_one_death_is_local_a_member_that_never_comes_costs_only_its_group():
    with serving(limit_s=2.0) as sender:
        sender.offer(VersionTag("policy", 0, 0), weights(0))
        absent = ask(sender, 0)
        assert_equal(Member().take(ask(sender, 0, engine="rollout-1/0")), weights(0))
        wait_for_threads()
        # The next group has another name, also for a member that takes the old one for whole.
        anew = ask(sender, 0, absent.group)
        assert anew.group != absent.group
        assert_equal(Member().take(anew), weights(0))


DIES = """
import os, sys
sys.path.insert(0, sys.argv[2])
from test_sender import Member
from areal_async.rpc.weights_messages import SendsTensors
import msgspec
plan = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=SendsTensors)
Member().take(plan, buckets=1)
os._exit(1)
"""


def test_one_death_is_local_a_member_that_dies_while_it_takes(sender):
    large = {f"layer.{i}": torch.ones(1_500_000) for i in range(4)}  # more than sockets hold
    sender.offer(VersionTag("policy", 0, 0), large)
    plan = ask(sender, 0)
    given = [msgspec.msgpack.encode(plan).hex(), str(Path(__file__).parent)]
    done = subprocess.run([sys.executable, "-c", DIES, *given], timeout=DEADLINE_S, check=False)
    assert done.returncode == 1
    wait_for_threads()
    anew = ask(sender, 0, plan.group)
    assert anew.group != plan.group
    assert_equal(Member().take(anew), large)


def test_a_request_that_is_repeated_gets_a_group_that_works(sender):
    sender.offer(VersionTag("policy", 0, 0), weights(0))
    first = ask(sender, 0)
    for group in (first.group, ""):  # the first is still sent to
        again = ask(sender, 0, group)
        assert again.group != first.group
        assert_equal(Member().take(again), weights(0))


def test_too_many_sends_are_refused():
    with serving(max_sends=2) as sender:
        sender.offer(VersionTag("policy", 0, 0), weights(0))
        plans = [ask(sender, 0, engine=str(i)) for i in range(3)]
        assert isinstance(plans[2], SendsNothing)
        for plan in plans[:2]:
            Member().take(plan)


def test_buckets_hold_every_tensor_once_in_order():
    tensors = weights(0) | {"large": torch.zeros(5000)}
    buckets = list(in_buckets(tensors, 4000))
    assert [name for bucket in buckets for name in bucket.names] == list(tensors)
    sizes = [sum(tensors[name].nbytes for name in bucket.names) for bucket in buckets]
    assert all(size <= 4000 or len(bucket.names) == 1 for size, bucket in zip(sizes, buckets, strict=True))
    assert buckets[0].dtypes[0] == "float32"
    assert buckets[0].shapes[0] == [20, 30]
    assert list(in_buckets({}, 10)) == []
