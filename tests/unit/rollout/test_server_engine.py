"""The life of an engine behind a server that is only a web page: what it reads, what it undoes, when it is
lost, what it must be told in time."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_async.base.versions import VersionTag
from areal_async.cli.quickstart.model import write_model
from areal_async.trajectory import Sampling
from rollout_service.engines.base import (
    EngineError,
    EngineLost,
    GenerateRequest,
    GenerateResult,
    RequestError,
    UpdateMode,
)
from rollout_service.engines.http import engine as http_engine
from rollout_service.engines.http.adapter import Patience, ServerSettings
from rollout_service.engines.http.engine import Calls, HttpEngine
from rollout_service.engines.http.process import attached
from rollout_service.engines.sglang.adapter import SGLangAdapter
from rollout_service.replicas import exchange
from tests.snapshots import write_snapshot
from tests.unit.rollout.fake_sglang import FakeServer
from tests.waiting import LIMIT_S

PATIENCE = Patience(misses=3, span_s=0.3, pause_s=0.01)
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=1, stop=(), seed=0)


class Offer:
    """A snapshot of which only the directory may be needed."""

    def __init__(self, root: Path, version: int) -> None:
        self.tag = VersionTag("policy", 0, version)
        weights = {"w": torch.full((3,), float(version))}
        self.path = write_snapshot(root, self.tag, weights, files={"config.json": b"{}"}).path

    @property
    def tensors(self) -> dict[str, Any]:
        raise AssertionError("the tensors would be read while the engine is paused")


@asynccontextmanager
async def serving_engine(
    tmp_path: Path, update_mode: UpdateMode = "recompute", *, info: Any = None, ends: Any = 1, **more: Any
) -> AsyncIterator[tuple[HttpEngine, FakeServer]]:
    """`ends` are the ids that the model's generation config names."""
    write_model(tmp_path / "model", seed=0)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    server = FakeServer(**(info or {}))
    async with server.serving() as client:
        settings = ServerSettings(
            slots=4, max_model_len=64, update_mode=update_mode, url=client.url, patience=PATIENCE, **more
        )
        engine = HttpEngine(SGLangAdapter(tmp_path / "model", settings))
        try:
            await engine.start(Offer(tmp_path, 0))
            yield engine, server
        finally:
            await engine.stop()


def asked(name: str = "r") -> GenerateRequest:
    return GenerateRequest(name, [1, 2], GREEDY)


async def test_an_engine_has_stopped_only_when_its_server_has_ended(tmp_path, monkeypatch):
    """Also if an earlier `stop` was cancelled: until then the server's memory is not free."""
    asked_to_end, ended = asyncio.Event(), asyncio.Event()

    class Process:
        alive = True

        async def end(self) -> None:
            asked_to_end.set()
            await ended.wait()

    write_model(tmp_path / "model", seed=0)
    async with FakeServer().serving() as client:

        async def started(*_: Any) -> Any:
            return Process(), client

        monkeypatch.setattr(http_engine, "started", started)
        settings = ServerSettings(slots=4, max_model_len=64, python=Path("python"), patience=PATIENCE)
        engine = HttpEngine(SGLangAdapter(tmp_path / "model", settings))
        await engine.start(Offer(tmp_path, 0))
        first = asyncio.ensure_future(engine.stop())
        await asked_to_end.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.ensure_future(engine.stop())
        for _ in range(50):
            await asyncio.sleep(0)
        assert not second.done()
        ended.set()
        await second


async def test_a_session_is_cached_under_the_version_it_began_under_if_this_server_had_it(tmp_path):
    async with serving_engine(tmp_path, update_mode="session") as (engine, server):
        server.held.set()

        async def key(began: tuple[int, int] | None) -> str:
            await engine.generate(replace(asked(), session="g.0", began=began))
            return str(server.bodies[-1]["extra_key"])

        assert await key(None) == "policy-e0-v0"
        await exchange(engine, Offer(tmp_path, 1))
        assert await key((0, 0)) == "policy-e0-v0"
        assert await key(None) == await key((0, 1)) == "policy-e0-v1"
        assert await key((1, 0)) == "policy-e0-v1"  # another server's
        await engine.start(Offer(tmp_path, 2))
        assert await key((0, 1)) == "policy-e0-v2"  # its cache is gone
        await exchange(engine, Offer(tmp_path, 3))
        assert await key((0, 1)) == await key((0, 2)) == "policy-e0-v2"  # computed once more, not twice
        assert await key(None) == "policy-e0-v3"


@pytest.mark.parametrize(("ends", "told"), [(None, [1]), (5, [1, 5]), ([3, 5, 10**6], [1, 3, 5])])
async def test_a_server_is_told_what_ends_an_answer_and_its_text_is_not_read(tmp_path, ends, told):
    async with serving_engine(tmp_path, ends=ends) as (engine, server):
        server.held.set()
        texts = []
        for server.said in (1, 2, 3, 4):
            texts.append((await engine.generate(asked())).text)
        assert texts == ["", "<unk>", "" if 3 in told else "0", "1"]
        sampling = server.bodies[-1]["sampling_params"]
        assert (sampling["stop_token_ids"], sampling["skip_special_tokens"]) == (told, False)


@pytest.mark.parametrize("goes", [False, True])
async def test_versions_are_true_after_a_load_is_undone(tmp_path: Path, goes: bool) -> None:
    """The old directory is nobody's any more: what is removed while it is read may be filled anew."""

    async with serving_engine(tmp_path) as (engine, server):

        def undone() -> bool:
            if goes:
                shutil.rmtree(tmp_path / "policy-e0-v0")
            return True

        server.loads = [lambda: False, undone]
        await engine.pause()
        with pytest.raises(EngineLost if goes else EngineError, match="removed" if goes else "old one is"):
            await engine.load(Offer(tmp_path, 1))
        assert engine.alive() is not goes
        assert engine.version == VersionTag("policy", 0, 0)


async def test_an_engine_whose_old_weights_do_not_come_back_is_lost(tmp_path: Path) -> None:
    async with serving_engine(tmp_path) as (engine, server):
        waiting = asyncio.create_task(engine.generate(asked()))
        server.loads = [lambda: False, lambda: False]
        await engine.pause()
        with pytest.raises(EngineLost, match="unknown weights"):
            await engine.load(Offer(tmp_path, 1))
        with pytest.raises(EngineLost):
            await waiting
        with pytest.raises(EngineLost):
            await engine.resume()


@pytest.mark.parametrize("silent", [2, 10**6])
async def test_an_attached_server_is_lost_after_several_silent_probes_and_not_after_two(tmp_path, silent):
    async with serving_engine(tmp_path) as (engine, server):
        server.breaks, server.silent = True, silent
        calls = [engine.generate(asked(f"r{n}")) for n in range(5)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, EngineLost) for outcome in outcomes)
        assert engine.alive() is (silent == 2)
        if silent > 2:
            with pytest.raises(EngineLost):
                await engine.pause()


async def test_an_answer_under_a_version_of_another_is_no_answer(tmp_path: Path) -> None:
    async with serving_engine(tmp_path) as (engine, server):
        server.held.set()
        server.versions = [{"version": "another's", "start": 0, "end": 1}]
        with pytest.raises(EngineError, match="no version of this project"):
            await engine.generate(asked())
        assert engine.alive()
        with pytest.raises(RequestError, match="vocabulary"):
            await engine.generate(GenerateRequest("r", [99], GREEDY))


def test_an_attached_server_that_does_not_serve_in_time_is_named() -> None:
    settings = ServerSettings(slots=1, max_model_len=8, url="http://127.0.0.1:1", ready_s=0.3)
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:1 \(rollout\.server\.urls\) does not serve"):
        asyncio.run(attached("vLLM", settings, path="/health"))


# --- requests, as their callers see them ------------------------------------------------------------------

NONE = np.empty(0, np.int32)


class Answering:
    """Answers when told to; forgets an abort that it hears before the request."""

    def __init__(self) -> None:
        self.calls = Calls(self.abort)
        self.gates: dict[str, asyncio.Event] = {}
        self.aborts: list[str] = []
        self.forgets = 0

    async def abort(self, rid: str) -> None:
        self.aborts.append(rid)
        if len(self.aborts) > self.forgets and rid in self.gates:
            self.gates[rid].set()

    def start(self, name: str) -> asyncio.Task[GenerateResult]:
        async def answer() -> GenerateResult:
            gate = self.gates[name] = asyncio.Event()
            await gate.wait()
            reason: Any = "abort" if name in self.aborts else "stop"
            return GenerateResult(NONE, NONE.astype(np.float32), NONE, NONE, reason, "")

        request = GenerateRequest(name, [1], Sampling())
        return asyncio.create_task(self.calls.run(request, name, answer))


def driven(body: Callable[[Answering], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """The test that runs `body` within a deadline, after which no call is left."""

    async def bounded() -> None:
        server = Answering()
        await asyncio.wait_for(body(server), LIMIT_S)
        assert len(server.calls) == 0
        await server.calls.settle()

    return lambda: asyncio.run(bounded())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@driven
async def test_an_abort_is_repeated_until_the_server_hears_it(server: Answering) -> None:
    server.forgets = 2
    call = server.start("a")
    await turns()
    server.calls.abort(["a", "unknown"])
    assert (await call).finish_reason == "abort"
    assert server.aborts == ["a"] * 3


@driven
async def test_what_is_held_is_not_sent_and_can_be_aborted(server: Answering) -> None:
    server.calls.hold()
    one, two = server.start("one"), server.start("two")
    await turns()
    assert not server.gates
    server.calls.abort(["one"])
    assert (await one).finish_reason == "abort"
    server.calls.let_go()
    await turns()
    server.gates["two"].set()
    assert (await two).finish_reason == "stop"
    assert not server.aborts


@driven
async def test_a_cancelled_caller_leaves_nothing_running_in_the_server(server: Answering) -> None:
    call = server.start("a")
    await turns()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await turns()
    assert server.aborts == ["a"]
    assert server.gates["a"].is_set()


@driven
async def test_a_cancelled_caller_whose_request_is_held_sends_nothing(server: Answering) -> None:
    server.calls.hold()
    held = server.start("held")
    await turns()
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    server.calls.let_go()
    await turns()
    assert not server.gates
    assert not server.aborts


@driven
async def test_failing_all_ends_every_caller_with_the_error(server: Answering) -> None:
    calls = [server.start("sent")]
    await turns()
    server.calls.hold()
    calls.append(server.start("held"))
    await turns()
    server.calls.fail(EngineLost("it died"))
    for call in calls:
        with pytest.raises(EngineLost, match="it died"):
            await call


@driven
async def test_an_abort_that_nobody_asked_for_is_no_answer(server: Answering) -> None:
    call = server.start("a")
    await turns()
    await server.abort("a")
    with pytest.raises(EngineLost, match="nobody aborted"):
        await call


@driven
async def test_an_id_is_in_flight_once(server: Answering) -> None:
    call = server.start("a")
    await turns()
    with pytest.raises(EngineError, match="in flight already"):
        await server.start("a")
    server.gates["a"].set()
    await call
