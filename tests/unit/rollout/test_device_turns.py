"""Engines and trainer take turns on one device: locks, order of calls, deaths at each point of a turn."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from areal_async.base.device_turns import DeviceTurns, planned_switch_s, turn_steps
from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, GenerateRequest
from rollout_service.engines.http.adapter import Directory, ServerSettings
from rollout_service.engines.http.process import ServerProcess
from rollout_service.engines.sglang.adapter import SGLangAdapter
from rollout_service.engines.vllm.adapter import VllmAdapter
from rollout_service.worker.device_turns import EngineTurns
from tests.unit.rollout.fake_sglang import serving
from tests.unit.rollout.fakes import eventually
from tests.unit.rollout.fleet import AT_ONCE, Snapshot, driven
from tests.waiting import LIMIT_S

# --- the length of a turn ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_staleness", "switch_s", "step_s", "steps"),
    [
        (4, 0.0, 1.0, 1),
        (4, 1.0, 19.0, 1),  # exactly 5 %
        (4, 1.0, 18.9, 2),
        (4, 1.0, 6.4, 3),
        (4, 1.0, 0.1, 5),  # it cannot be had: as long as the bound allows
        (0, 100.0, 1.0, 1),
        (8, 4.0, 0.0, 9),
    ],
)
def test_a_turn_is_the_shortest_that_spends_few_seconds_on_switches(max_staleness, switch_s, step_s, steps):
    assert turn_steps(max_staleness, switch_s, step_s) == steps


def test_a_planned_switch_moves_everything_there_and_back():
    assert planned_switch_s(50_000_000_000, 25e9) == 4.0


# --- the locks ---------------------------------------------------------------------------------------


def close(turns):
    """Close the locks as the kernel does when their process ends."""
    os.close(turns.turn_fd)
    os.close(turns.wish_fd)


def test_a_device_has_engines_or_the_trainer_and_a_wish_keeps_engines_away(tmp_path):
    engine, other, trainer = (DeviceTurns.open(tmp_path) for _ in range(3))
    assert engine.try_wake()
    assert other.try_wake(), "several engines may be awake"
    assert not trainer.try_train()
    assert engine.wished
    engine.slept()
    assert not trainer.try_train()
    other.slept()
    assert not engine.try_wake(), "the trainer waits for it"
    assert trainer.try_train()
    assert not engine.try_wake()
    trainer.trained()
    assert not engine.wished
    assert engine.try_wake()
    for each in (engine, other, trainer):
        close(each)


HOLDER = """
import sys
from pathlib import Path
from areal_async.base.device_turns import DeviceTurns
turns = DeviceTurns.open(Path(sys.argv[1]))
assert getattr(turns, sys.argv[2])()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("call", ["try_wake", "try_train"])
def test_a_killed_process_loses_its_turn_and_its_wish(tmp_path, call):
    command = [sys.executable, "-c", HOLDER, str(tmp_path), call]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        turns = DeviceTurns.open(tmp_path)
        assert not turns.try_train()
        holder.kill()
    assert turns.try_train()
    close(turns)


def test_the_turn_of_a_killed_worker_lasts_as_long_as_its_server(tmp_path):
    held, trainer = DeviceTurns.open(tmp_path), DeviceTurns.open(tmp_path)
    assert held.try_wake()
    sleeping = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    server = ServerProcess("the server", sleeping, {}, tmp_path / "log", held_fds=(held.turn_fd,))
    close(held)  # as the kernel does when the worker is killed
    assert not trainer.try_train()
    server.kill()
    while server.alive:
        pass
    assert trainer.try_train()
    close(trainer)


# --- a set of engines --------------------------------------------------------------------------------


async def test_a_sleeping_set_keeps_its_requests_and_loads_what_came_meanwhile_before_it_samples() -> None:
    async with driven(2) as fleet:
        asked = await fleet.begin("a", "b")
        await fleet.set.sleep()
        assert await fleet.set.device_bytes() == 0
        late = fleet.ask("late")
        update = asyncio.ensure_future(fleet.set.exchange(Snapshot(1)))
        await eventually(lambda: fleet.where("late"))
        assert not update.done()
        await fleet.set.wake()
        await update
        for server in fleet.made:
            calls = server.journal
            assert calls == ["start 0", "pause", "sleep", "wake", "pause", "load 1", "resume"]
        assert fleet.set.version.version == 1
        fleet.let_go()
        await asyncio.gather(*asked, late)
        assert await fleet.set.device_bytes() == 14


async def test_a_set_without_newer_weights_wakes_with_its_own() -> None:
    async with driven() as fleet:
        await fleet.set.sleep()
        await fleet.set.wake()
        await fleet.set.sleep()
        await fleet.set.wake()
        once = ["pause", "sleep", "wake", "resume"]
        assert fleet.made[0].journal == ["start 0", *once, *once]


async def test_weights_that_a_waking_engine_refuses_are_an_error_and_the_old_ones_go_on() -> None:
    async with driven() as fleet:
        fleet.misfits = {1}
        await fleet.set.sleep()
        update = asyncio.ensure_future(fleet.set.exchange(Snapshot(1)))
        await asyncio.sleep(0)
        await fleet.set.wake()
        with pytest.raises(EngineError, match="does not fit"):
            await update
        asked = await fleet.begin("a")
        fleet.let_go()
        assert (await asked[0]).versions.tolist() == [0]


@pytest.mark.parametrize("moment", ["before", "during", "after", "refused"])
async def test_an_engine_that_dies_around_its_sleep_starts_again_only_after_the_turn(moment: str) -> None:
    async with driven() as fleet:
        asked = await fleet.begin("a")
        first = fleet.server(0)
        if moment == "before":
            first.kill()
        if moment == "refused":
            fleet.sleepless = {0}
        await fleet.set.sleep()
        if moment == "during":
            first.kill()
            await eventually(lambda: not fleet.set.replicas[0].serves)
        assert await fleet.set.device_bytes() == 0
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(fleet.made) == 1, "it was started on the trainer's device"
        if moment == "after":
            first.kill()
        fleet.sleepless = set()
        await fleet.set.wake()
        fleet.let_go()
        await asked[0]
        assert len(fleet.made) == 2
        assert fleet.where("a") == [0, 0]


async def test_an_engine_that_is_starting_when_the_trainer_wishes_starts_after_its_turn() -> None:
    """Its start is given up in each turn, and no such end counts as a death."""
    fetching, fetched = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def newest() -> AsyncIterator[Any]:
        fetching.set()
        await fetched.wait()
        yield Snapshot(0)

    async with driven(newest=newest) as fleet:
        fleet.server(0).kill()
        for _ in range(AT_ONCE.limit + 2):
            await fetching.wait()
            await fleet.set.sleep()  # although the trainer gives no weights meanwhile
            fetching.clear()
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(fleet.made) == 1
            await fleet.set.wake()
        fetched.set()
        await eventually(lambda: fleet.set.replicas[0].serves)
        assert fleet.server(0).journal == ["start 0"]


async def test_a_restart_during_an_evaluation_takes_the_pinned_weights() -> None:
    @asynccontextmanager
    async def newest() -> AsyncIterator[Any]:
        yield Snapshot(9)

    async with driven(newest=newest) as fleet:
        fleet.set.pinned = Snapshot(0)
        fleet.server(0).kill()
        await eventually(lambda: len(fleet.made) == 2 and fleet.set.replicas[0].serves)
        assert fleet.server(0).journal == ["start 0"]
        fleet.set.pinned = None
        fleet.server(0).kill()
        await eventually(lambda: len(fleet.made) == 3 and fleet.set.replicas[0].serves)
        assert fleet.server(0).journal == ["start 9"]


# --- a worker's turns --------------------------------------------------------------------------------


async def test_an_engine_sleeps_for_each_turn_of_the_trainer_and_never_beside_it(tmp_path: Path) -> None:
    async with driven() as fleet:
        worker = EngineTurns(DeviceTurns.open(tmp_path), fleet.set)
        trainer = DeviceTurns.open(tmp_path)
        await worker.take()
        running = asyncio.ensure_future(worker.run())
        asked = await fleet.begin("a")
        server = fleet.server(0)
        for turn in range(1, 4):
            async with asyncio.timeout(LIMIT_S):
                while not trainer.try_train():  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert server.asleep
            assert server.journal.count("sleep") == turn
            for _ in range(20):
                await asyncio.sleep(0.002)
            assert server.asleep, "it woke in the trainer's turn"
            trainer.trained()
            await eventually(lambda: not server.asleep)
        fleet.let_go()
        await asked[0]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


# --- the servers' calls ------------------------------------------------------------------------------


class StandIn:
    """Takes every call, and writes it down."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.tags: list[Any] = []
        self.sleeps = True

    def app(self) -> web.Application:
        async def handle(request: web.Request) -> web.Response:
            self.calls.append(request.path_qs)
            if request.can_read_body:
                self.tags.append(await request.json())
            return web.json_response(
                {"status": "ok", "is_sleeping": self.sleeps, "success": True, "results": []}
            )

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        return app


def settings(**given: Any) -> ServerSettings:
    return ServerSettings(slots=2, max_model_len=16, python=Path("python"), sleeps=True, **given)


@pytest.mark.parametrize("mode", ["recompute", "keep"])
async def test_sglang_releases_what_it_holds_after_it_has_taken_back_its_requests(mode, tiny, tmp_path):
    stand_in, adapter = StandIn(), SGLangAdapter(tiny.directory, settings(update_mode=mode))
    async with serving(stand_in.app()) as client:
        await adapter.pause(client)
        await adapter.sleep(client)
        await adapter.wake(client)
        await adapter.resume(client)
    assert stand_in.calls[1:] == [
        "/pause_generation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/continue_generation",
    ]
    kinds = {"tags": ["kv_cache", "weights", "cuda_graph"]}
    assert stand_in.tags[1:4] == [{"mode": "retract"}, kinds, kinds]


async def test_vllm_gets_its_cache_back_only_when_it_may_sample(tiny, tmp_path):
    stand_in = StandIn()
    adapter = VllmAdapter(tiny.directory, settings(), scratch=tmp_path)
    async with serving(stand_in.app()) as client:
        await adapter.pause(client)
        await adapter.sleep(client)
        await adapter.wake(client)
        await adapter.load(client, Directory(Snapshot(1).tag, tmp_path))
        assert not any("kv_cache" in call for call in stand_in.calls)
        await adapter.resume(client)
        asleep = stand_in.calls.index("/sleep?level=1&mode=keep")
        assert stand_in.calls[asleep : asleep + 3] == [
            "/sleep?level=1&mode=keep",
            "/is_sleeping",
            "/wake_up?tags=weights",
        ]
        assert stand_in.calls[-2:] == ["/wake_up?tags=kv_cache", "/resume"]
        await adapter.resume(client)
        assert stand_in.calls[-2:] == ["/resume", "/resume"]
        stand_in.sleeps = False
        with pytest.raises(EngineError, match="did not fall asleep"):
            await adapter.sleep(client)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_servers_of_a_shared_gpu_are_started_so_that_they_can_sleep(device, tiny, tmp_path):
    from rollout_service.engines.http.adapter import Launch

    found = settings(device=device, gpus=("0",) if device == "cuda" else ())
    launch = Launch(found, tiny.directory, Directory(Snapshot(0).tag, tmp_path), 16)
    sglang = SGLangAdapter(tiny.directory, found).command(launch)
    vllm = VllmAdapter(tiny.directory, found, scratch=tmp_path).command(launch)
    on_gpu = device == "cuda"
    assert ("--enable-memory-saver" in sglang and "--enable-weights-cpu-backup" in sglang) == on_gpu
    assert ("--enable-sleep-mode" in vllm) == on_gpu


# --- the local engine --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["recompute", "keep"])
async def test_the_local_engine_continues_after_its_sleep_as_if_nothing_had_been(endless, mode) -> None:
    engine = endless.engine(update_mode=mode)
    await engine.start(endless.weights(0))
    told: list[list[int]] = [[] for _ in range(3)]
    greedy = Sampling(temperature=0.0, max_new_tokens=24)
    requests = [GenerateRequest(f"r{n}", [3 + n, 4, 5], greedy) for n in range(3)]
    try:
        async with asyncio.timeout(LIMIT_S):
            asked = [
                asyncio.ensure_future(engine.generate(request, each.extend))
                for request, each in zip(requests, told, strict=True)
            ]
            await eventually(lambda: all(told))
            await engine.pause()
            await engine.sleep()
            assert await engine.device_bytes() == 0
            assert any(len(each) < 24 for each in told), "no request is under way"
            await engine.wake()
            await engine.resume()
            for request, answer in zip(requests, await asyncio.gather(*asked), strict=True):
                alone = await engine.generate(GenerateRequest("alone", request.prompt_ids, greedy))
                np.testing.assert_array_equal(answer.token_ids, alone.token_ids)
                endless.assert_true(request, answer)
            assert await engine.device_bytes() > 0
    finally:
        await engine.stop()
