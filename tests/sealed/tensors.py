"""A trainer or an engine on a sealed host, as far as channel `nccl` goes: `tensors.py trainer|engine FOLDER`.

The trainer is on host 1, the engine on host 2, which prints what came of the snapshot and of the tensors."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from areal_async.base.addresses import Address, interface_of
from areal_async.base.versions import VersionTag
from areal_async.config.job import JobConfig
from areal_async.rpc.client import Client
from areal_async.rpc.secret import RunSecret
from areal_async.rpc.weights_messages import AskTensors, SnapshotNotice
from areal_async.service.context import ServiceContext
from areal_async.weights.receiver import make_receiver
from tests.contexts import context_for_test
from tests.unit.weights.member import Member
from trainer_service.publishing.publisher import make_publisher

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
LIMIT_S = 300.0
TAG = VersionTag("policy", 1, 0)
WEIGHTS = {"w": torch.arange(300_000.0)}


def context(folder: Path, node: str) -> ServiceContext:
    """Of a process on one of two hosts, as a launcher of several would make it."""
    places: Any = {"job": "j", "model": str(folder), "tasks": {"train": "t.jsonl"}, "run_dir": str(folder)}
    job = JobConfig.model_validate(places | {"weights": {"channel": "nccl"}})
    ctx = context_for_test(job, folder, "trainer", "trainer", node_id=node)
    hosts = {
        name: msgspec.structs.replace(ctx.host, node_id=name, address=address)
        for name, address in ADDRESSES.items()
    }
    return dataclasses.replace(
        ctx,
        host=hosts[node],
        topology=msgspec.structs.replace(ctx.topology, hosts=hosts),
        keys=RunSecret(bytes(32)),
        weights=Address(f"tcp://{ADDRESSES['a']}:23456", "trainer"),
    )


def trainer(ctx: ServiceContext) -> None:
    publisher = make_publisher(ctx, files={}, tied={})
    publisher.start()
    publisher.publish(TAG, WEIGHTS)
    print("published", flush=True)
    sys.stdin.readline()
    publisher.close()


async def engine(ctx: ServiceContext) -> None:
    receiver = make_receiver(ctx, "serve", name="rollout-0")
    await receiver.connect(LIMIT_S)
    notice = await receiver.next(None, int(LIMIT_S * 1000))
    assert isinstance(notice, SnapshotNotice)
    snapshot = await receiver.open(notice)
    print("snapshot", torch.equal(snapshot.tensors["w"], WEIGHTS["w"]), flush=True)
    asks = Client(ctx.weights, job="j", role="rollout", name="e", access=ctx.keys)
    await asks.connect(LIMIT_S)
    by_wire = SimpleNamespace(answer=partial(asks.call, timeout_s=LIMIT_S))
    member = Member("rollout-0/0")
    member.tag = TAG
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(ctx.host.address)  # as a server is given it
    plan = await by_wire.answer(AskTensors(member.name, "", TAG, 1))
    taken = await member.take(by_wire, plan)
    print("tensors", plan.backend, torch.equal(taken["w"], WEIGHTS["w"]), flush=True)
    await asks.close()
    await receiver.close()


if __name__ == "__main__":
    side, place = sys.argv[1], Path(sys.argv[2])
    if side == "trainer":
        trainer(context(place, "a"))
    else:
        asyncio.run(engine(context(place, "b")))
