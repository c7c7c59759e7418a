"""Updates from a scripted source, and from a real publisher through shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_async.base.errors import FaultError, RpcTimeout, SnapshotError
from areal_async.rpc.client import Client
from areal_async.rpc.secret import RunSecret
from areal_async.rpc.weights_messages import NoNews
from areal_async.trajectory import Sampling
from areal_async.weights.receiver import Receiver
from rollout_service.engines.base import EngineError, EngineLost, GenerateRequest
from rollout_service.replicas import ReplicaSet, exchange
from rollout_service.worker import WeightUpdates
from tests.unit.rollout.fakes import Over, ScriptedSource, eventually, notice
from tests.unit.rollout.fleet import FakeServer, Fleet
from tests.waiting import LIMIT_S
from trainer_service.publishing.publisher import Publisher

SECRET = RunSecret(bytes(32))


def engine_of(source: ScriptedSource, misfit: int = -1) -> Any:
    """A server that writes into the journal of its source."""
    fleet = Fleet()
    fleet.misfits.add(misfit)
    server: Any = FakeServer(0, fleet)
    server.journal, server.exchange = source.journal, functools.partial(exchange, server)
    return server


async def follow(source: ScriptedSource, engine: Any = None) -> list[int]:
    """Start and run until the script is over; returns after how many journal entries each change came."""
    changes: list[int] = []
    updates = WeightUpdates(
        source,
        engine or engine_of(source),
        lambda: changes.append(len(source.journal)),
        retry_pause_s=0.0,
        finished_pause_s=0.0,
    )
    with contextlib.suppress(Over):
        await updates.start()
        await updates.run()
    return changes


async def test_versions_are_true_only_verified_snapshots_reach_the_engine() -> None:
    torn = {0: SnapshotError("torn"), 3: SnapshotError("mixed")}
    source = ScriptedSource(notice(0), notice(1), NoNews(), notice(3), notice(4), opens=torn)
    changes = await follow(source)
    assert source.journal == [
        *("verify 0", "ack 0", "verify 1", "start 1", "ack 1"),
        *("verify 3", "ack 3", "verify 4", "pause", "load 4", "resume", "ack 4"),
    ]
    assert source.acks == [(0, "torn"), (1, ""), (3, "mixed"), (4, "")]
    # A refused snapshot is not asked for again.
    assert [a.version if a else None for a in source.asked] == [None, 0, 1, 1, 3, 4]
    assert len(changes) == 1


async def test_a_publisher_that_is_away_is_waited_for() -> None:
    source = ScriptedSource(
        RpcTimeout("away"),
        notice(0),
        FaultError("unavailable", "soon"),
        NoNews(finished=True),
        RpcTimeout("gone"),
        notice(1),
    )
    await follow(source)
    assert source.acks == [(0, ""), (1, "")]


async def test_weights_that_do_not_fit_are_acknowledged_with_the_reason_and_end_the_worker() -> None:
    source = ScriptedSource(notice(0), notice(1))
    engine = engine_of(source, misfit=1)
    with pytest.raises(EngineError, match="does not fit"):
        await follow(source, engine)
    assert source.journal[-3:] == ["load 1", "resume", "ack 1"]
    assert source.acks[-1] == (1, "it does not fit")


@pytest.mark.parametrize("first", [EngineLost("the load broke"), EngineError("it does not fit")])
async def test_the_first_error_of_an_update_is_the_one_told(first, caplog):
    async def fails(snapshot: Any) -> None:
        raise first

    async def loses() -> None:
        source.journal.append("resume")
        raise EngineLost("no connection")

    source = ScriptedSource(notice(0), notice(1))
    engine = engine_of(source)
    engine.load, engine.resume = fails, loses
    with pytest.raises(EngineError, match=str(first)):
        await follow(source, engine)
    assert source.journal[-2:] == ["resume", "ack 1"]
    assert source.acks[-1] == (1, str(first))
    (told,) = [record for record in caplog.records if record.getMessage() == "engine did not resume"]
    assert told.__dict__["areal_fields"]["error"] == "no connection"
    assert str(first) in told.__dict__["areal_fields"]["after"]


async def test_versions_are_true_with_snapshots_through_shared_memory(endless: Any, tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "shm", f"ipc://{tmp_path}/w", job="job", keep=2, access=SECRET)
    publisher.start()
    client = Client(publisher.endpoint, job="job", role="rollout", name="rollout-0", access=SECRET)
    receiver = Receiver(client, "rollout-0")
    engine = ReplicaSet(lambda _: endless.engine(slots=8))
    done: list[tuple[GenerateRequest, Any]] = []
    acks: list[Any] = []
    reached = 0

    def changed() -> None:
        nonlocal reached
        reached = engine.version.version

    async def produce(lane: int) -> None:
        for number in itertools.count():
            if reached == 4:
                return
            sampling = Sampling(max_new_tokens=40, seed=100 * lane + number)
            asked = GenerateRequest(f"{lane}.{number}", [3 + lane, 5], sampling)
            done.append((asked, await engine.generate(asked)))

    async def publish() -> None:
        for version in range(1, 5):
            enough = engine.stats().tokens_total + 200
            await eventually(
                lambda n=enough, v=version: engine.stats().tokens_total >= n and reached >= v - 1
            )
            snapshot = endless.weights(version)
            await asyncio.to_thread(publisher.publish, snapshot.tag, snapshot.tensors)

    try:
        async with asyncio.timeout(LIMIT_S):
            await receiver.connect()
            publisher.publish(endless.weights(0).tag, endless.weights(0).tensors)
            updates = WeightUpdates(receiver, engine, changed)
            await updates.start()
            following = asyncio.ensure_future(updates.run())
            await asyncio.gather(*(produce(lane) for lane in range(8)), publish())
            # The last one comes after its version is served.
            await eventually(lambda: acks.extend(publisher.acks()) or len(acks) == 5)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    finally:
        await engine.stop()
        await receiver.close()
        publisher.close()
    assert [a.tag.version for a in acks] == [0, 1, 2, 3, 4]
    assert not any(a.error for a in acks)
    assert all(a.stall_ms > 0 for a in acks[1:])
    spans = 0
    for asked, got in done:
        assert len(got.token_ids) == 40
        endless.assert_true(asked, got)
        spans += len(np.unique(got.versions)) - 1
    assert spans >= 4
