"""Channel `nccl`, over gloo: a trainer's process sends tensors into a real server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from areal_async.base.versions import VersionTag
from areal_async.rpc.client import Client
from areal_async.rpc.secret import RunSecret
from areal_async.rpc.weights_messages import SendsTensors
from areal_async.trajectory import Sampling
from areal_async.weights.receiver import Receiver
from rollout_service.engines.base import EngineLost, GenerateRequest, GenerateResult
from rollout_service.engines.http.adapter import ServerSettings
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.engines.sglang.adapter import SGLangAdapter
from rollout_service.engines.sglang.messages import ModelInfo
from rollout_service.engines.sglang.weights import GRACE_S, TensorReceiver
from rollout_service.replicas import exchange
from rollout_service.worker import WeightUpdates
from tests.engines.servers import KEY, SGLANG, ask
from tests.unit.weights.member import Member
from tests.waiting import deadline_s

SECRET = RunSecret(bytes(32))

pytestmark = pytest.mark.engine
SENDING = Path(__file__).with_name("sending.py")
PROMPT = [5, 14, 7, 9]
LONG = Sampling(temperature=1.0, max_new_tokens=60)
WAIT_S = deadline_s(600)
EPOCH = 4


class Trainer:
    """The process of `sending.py`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def hear(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), WAIT_S)).decode().strip()

    async def publish(self) -> None:
        """The next version."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        assert (await self.hear()).startswith("published")


@contextlib.asynccontextmanager
async def trainer(
    folder: Path, snapshots: list[Any], *, limit_s: float = 20.0, failpoints: str = ""
) -> AsyncIterator[Trainer]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SENDING), f"ipc://{folder}/w", str(folder / "shm")),
        *(str(limit_s), failpoints),
        *(str(snapshot.path) for snapshot in snapshots),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    try:
        one = Trainer(process)
        assert await one.hear() == "serves"
        yield one
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def receiver_from(endpoint: str, grace_s: float = GRACE_S) -> TensorReceiver:
    client = Client(endpoint, job="job", role="engine", name="r/0", access=SECRET)
    return TensorReceiver(client, "r/0", grace_s=grace_s)


@contextlib.asynccontextmanager
async def following(
    folder: Path, url: str, model: Any, first: Trainer, *, grace_s: float = GRACE_S
) -> AsyncIterator[tuple[HttpEngine, asyncio.Task[None]]]:
    """An engine on the server at `url` that is kept on the newest weights."""
    endpoint = f"ipc://{folder}/w"
    settings = ServerSettings(slots=32, max_model_len=SGLANG.length, url=url)
    engine = HttpEngine(SGLangAdapter(model.directory, settings, receiver=receiver_from(endpoint, grace_s)))
    client = Client(endpoint, job="job", role="rollout", name="r", access=SECRET)
    receiver = Receiver(client, "r", tensors=False)
    alone: Any = SimpleNamespace(start=engine.start, exchange=partial(exchange, engine))
    updates = WeightUpdates(receiver, alone)
    await receiver.connect()
    await first.publish()
    await updates.start()
    task = asyncio.create_task(updates.run())
    try:
        yield engine, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.stop()
        await receiver.close()


async def reaches(engine: HttpEngine, tag: VersionTag) -> None:
    async with asyncio.timeout(WAIT_S):
        while engine.version != tag:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def received() -> float:
    labels = {"channel": "nccl", "source": "publisher"}
    return REGISTRY.get_sample_value("areal_weights_received_bytes_total", labels) or 0.0


def assert_true(model: Any, results: list[GenerateResult]) -> None:
    for result in results:
        assert result.finish_reason in ("stop", "length")
        model.assert_true(PROMPT, result)


async def test_versions_are_true_with_tensors_sent_under_requests_in_flight(
    recompute: HttpEngine, model: Any, tmp_path: Path
) -> None:
    results: list[GenerateResult] = []
    async with (
        trainer(tmp_path, [model.snapshot(v) for v in range(4)]) as sending,
        following(tmp_path, recompute.url, model, sending) as (engine, _),
    ):
        before = received()
        for version in (1, 2, 3):
            tag = VersionTag("policy", 0, version)
            askers = [asyncio.create_task(asked_until(engine, tag, f"v{version}.{n}")) for n in range(16)]
            await sending.publish()
            await reaches(engine, tag)
            late = await engine.generate(GenerateRequest(f"late{version}", PROMPT, LONG))
            assert set(late.versions) == {version}
            results += [late, *itertools.chain(*await asyncio.gather(*askers))]
        size = sum(t.nbytes for n, t in model.snapshot(0).tensors.items() if n != "lm_head.weight")
        assert received() - before == 3 * size
    assert_true(model, results)
    assert any(len(set(result.versions)) > 1 for result in results)


async def test_one_death_is_local_a_trainer_killed_while_it_sends(
    recompute: HttpEngine, model: Any, tmp_path: Path
) -> None:
    snapshots = [model.snapshot(v, epoch=1) for v in (0, 1)]
    async with trainer(tmp_path, snapshots, failpoints="weights.bucket_sent@2") as sending:
        async with following(tmp_path, recompute.url, model, sending) as (engine, _):
            before, tasks = received(), ask(engine, 16, PROMPT, LONG, "a")
            await sending.publish()
            assert await asyncio.wait_for(sending.process.wait(), WAIT_S) == -signal.SIGKILL
            # It holds a part of version 1, and takes the whole from the directory.
            await reaches(engine, VersionTag("policy", 1, 1))
            results = [
                *await asyncio.gather(*tasks),
                *await asyncio.gather(*ask(engine, 4, PROMPT, LONG, "b")),
            ]
            assert received() == before
            again = [model.snapshot(v, epoch=2) for v in (1, 2)]
            async with trainer(tmp_path, again) as anew:
                await anew.publish()
                await reaches(engine, VersionTag("policy", 2, 1))
                tasks = ask(engine, 16, PROMPT, LONG, "c")
                await anew.publish()
                await reaches(engine, VersionTag("policy", 2, 2))
                results += await asyncio.gather(*tasks)
            assert received() > before
    assert_true(model, results)


class Remote:
    """The trainer, for a member of its groups."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def answer(self, message: Any) -> Any:
        return await self._client.call(message, timeout_s=WAIT_S)


async def asks(member: Member, trainer: Remote, version: int) -> SendsTensors:
    """The plan for a member that asks as soon as the version can be had."""
    async with asyncio.timeout(WAIT_S):
        while True:
            answer = await trainer.answer(member.ask(version, EPOCH))
            if isinstance(answer, SendsTensors):
                return answer
            await asyncio.sleep(0.01)


async def test_one_death_is_local_engines_are_one_group_and_one_that_dies_costs_an_update(
    recompute: HttpEngine, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    results: list[GenerateResult] = []
    client = Client(f"ipc://{tmp_path}/w", job="job", role="engine", name="r/1", access=SECRET)
    other, far = Member("r/1", 2), Remote(client)
    snapshots = [model.snapshot(v, epoch=EPOCH) for v in range(4)]
    size = sum(t.nbytes for n, t in snapshots[0].tensors.items() if n != "lm_head.weight")

    async def late(engine: HttpEngine, version: int) -> None:
        await reaches(engine, VersionTag("policy", EPOCH, version))
        results.append(await engine.generate(GenerateRequest(f"late{version}", PROMPT, LONG)))
        assert set(results[-1].versions) == {version}

    async with (
        trainer(tmp_path, snapshots, limit_s=3.0) as sending,
        following(tmp_path, recompute.url, model, sending) as (engine, _),
    ):
        await client.connect(WAIT_S)
        before, tasks = received(), ask(engine, 16, PROMPT, LONG, "a")
        await sending.publish()
        plan = await asks(other, far, 1)
        assert plan.world_size == 4  # the trainer, the server, and the other one's two
        taken = await other.take(far, plan)
        await late(engine, 1)
        assert all(torch.equal(tensor, snapshots[1].tensors[name]) for name, tensor in taken.items())
        assert received() - before == sum(tensor.nbytes for tensor in taken.values()) == size

        await sending.publish()
        again = await asks(other, far, 2)
        assert again.group == plan.group
        await other.in_step(far, again, 0)
        await asyncio.to_thread(other.receive, again, 0)
        other.backends = []  # its end
        await late(engine, 2)
        assert received() - before == size  # it took the directory
        await sending.publish()
        await late(engine, 3)
        assert received() - before == 2 * size  # in a group without the other one
        results += await asyncio.gather(*tasks)
    await client.close()
    assert_true(model, results)


async def asked_until(engine: HttpEngine, tag: VersionTag, name: str) -> list[GenerateResult]:
    """One request after the other, until the engine serves the version: some are in flight when it comes."""
    results: list[GenerateResult] = []
    while engine.version != tag:
        results.append(await engine.generate(GenerateRequest(f"{name}-{len(results)}", PROMPT, LONG)))
    return results


async def asked_until_lost(engine: HttpEngine, name: str) -> list[GenerateResult]:
    """One request after the other, until the engine is lost."""
    results: list[GenerateResult] = []
    with contextlib.suppress(EngineLost):
        while True:
            results.append(await engine.generate(GenerateRequest(f"{name}-{len(results)}", PROMPT, LONG)))
    return results


async def test_a_trainer_that_stands_still_while_it_sends_costs_the_engine_its_limit(
    recompute: HttpEngine, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets, inside, request = itertools.count(1), asyncio.Event(), ServerClient.request

    async def noting(client: ServerClient, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        if path == "/update_weights_from_distributed" and next(buckets) == 2:
            inside.set()
        return await request(client, method, path, *args, **kwargs)

    monkeypatch.setattr(ServerClient, "request", noting)
    async with trainer(
        tmp_path, [model.snapshot(v, epoch=3) for v in (0, 1)], limit_s=2.0, failpoints="hold@2"
    ) as sending:
        async with following(tmp_path, recompute.url, model, sending, grace_s=1.0) as (engine, task):
            askers = [asyncio.create_task(asked_until_lost(engine, f"s{n}")) for n in range(4)]
            await sending.publish()
            await asyncio.wait_for(inside.wait(), WAIT_S)  # The server has been told to take the bucket
            sending.process.send_signal(signal.SIGSTOP)
            with pytest.raises(EngineLost, match="did not answer"):
                await asyncio.wait_for(task, WAIT_S)
            # Each of them ends, since the engine is lost; what was answered was so before the pause.
            answered = await asyncio.wait_for(asyncio.gather(*askers), WAIT_S)
            assert all(set(result.versions) == {0} for results in answered for result in results)
            assert not engine.alive()
            sending.process.kill()
    # What hung was the server's side of the group, which ends with the trainer.
    client = ServerClient("the server", recompute.url, key=KEY)
    info = await client.get("/model_info", ModelInfo)
    assert info.weight_version == "policy-e3-v0"
    await client.request("POST", "/end_weight_update", {})
    await client.request("POST", "/continue_generation", {"torch_empty_cache": False})
    await client.close()


async def test_without_a_trainer_that_answers_the_directory_is_loaded(
    recompute: HttpEngine, model: Any, tmp_path: Path
) -> None:
    receiver = receiver_from(f"ipc://{tmp_path}/nobody")
    settings = ServerSettings(slots=32, max_model_len=SGLANG.length, url=recompute.url)
    engine = HttpEngine(SGLangAdapter(model.directory, settings, receiver=receiver))
    await engine.start(model.snapshot(0))
    await exchange(engine, model.snapshot(1))
    result = await engine.generate(GenerateRequest("n", PROMPT, LONG))
    assert set(result.versions) == {1}
    assert_true(model, [result])
    await engine.stop()
