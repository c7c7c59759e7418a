"""The life of an engine behind a server that is only a web page: what it reads, what it undoes, when it is
lost, what it must be told in time."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_async.quickstart.model import write_model
from areal_async.rpc.schema import VersionTag
from areal_async.trajectory import Sampling
from areal_async.weights.snapshot import write_snapshot
from rollout_service.engines.base import EngineError, EngineLost, GenerateRequest, RequestError
from rollout_service.engines.http.adapter import Patience, ServerSettings
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.engines.http.process import attached
from rollout_service.engines.sglang.adapter import SGLangAdapter
from tests.unit.rollout.fake_sglang import FakeServer

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
async def serving_engine(tmp_path: Path) -> AsyncIterator[tuple[HttpEngine, FakeServer]]:
    write_model(tmp_path / "model", seed=0)
    server = FakeServer()
    async with server.serving() as client:
        settings = ServerSettings(slots=4, max_model_len=64, url=client.url, patience=PATIENCE)
        engine = HttpEngine(SGLangAdapter(tmp_path / "model", settings))
        try:
            await engine.start(Offer(tmp_path, 0))
            yield engine, server
        finally:
            await engine.stop()


def asked(name: str = "r") -> GenerateRequest:
    return GenerateRequest(name, [1, 2], GREEDY)


async def test_an_update_needs_the_directory_alone(tmp_path: Path) -> None:
    async with serving_engine(tmp_path) as (engine, server):
        offer = Offer(tmp_path, 1)
        with pytest.raises(EngineError, match="paused"):
            await engine.load(offer)
        await engine.pause()
        await engine.load(offer)
        await engine.resume()
        assert engine.version == VersionTag("policy", 0, 1)
        assert server.version == "policy-e0-v1"


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
async def test_an_attached_server_is_lost_after_several_silent_probes_and_not_after_two(
    tmp_path: Path, silent: int
) -> None:
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
