"""The SGLang engine on a server that is only a web page: what it reads, what it undoes, how it sees work."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from areal_async.quickstart.model import write_model
from areal_async.rpc.messages import VersionTag
from areal_async.trajectory import Sampling
from areal_async.weights.snapshot import write_snapshot
from rollout_service.engines.base import EngineError, EngineLost, GenerateRequest
from rollout_service.engines.server.liveness import Patience
from rollout_service.engines.server.settings import ServerSettings
from rollout_service.engines.sglang import SGLangEngine

PATIENCE = Patience(misses=3, span_s=0.3, pause_s=0.01)
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=1, stop=(), seed=0)
ONE_UNIT = [{"version": "e0-v0", "start": 0, "end": 1}]
PATHS = ("abort_request", "continue_generation", "pause_generation", "freeze_gc")


class FakeServer:
    """Takes what an engine sends to a server."""

    def __init__(self) -> None:
        self.version = ""
        self.used_tokens = 0
        self.loads: list[Callable[[], bool]] = []
        """What becomes of the next loads; the ones after succeed."""
        self.held = asyncio.Event()
        self.asked = 0
        self.breaks = False
        """Whether requests lose their connection."""
        self.silent = 0
        """Probes of liveness that are left without an answer."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        for path in PATHS:
            app.router.add_post(f"/{path}", self._done)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/update_weights_from_disk", self._load)
        info = {"version": "0.5.23", "context_length": 72}
        gets = {
            "openapi.json": self._openapi,
            "server_info": lambda: info,
            "model_info": self._model_info,
            "v1/loads": lambda: {"loads": [{"num_running_reqs": 1, "num_used_tokens": self.used_tokens}]},
        }
        for path, content in gets.items():
            app.router.add_get(f"/{path}", self._page(content))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            self.held.set()
            await runner.cleanup()

    @staticmethod
    def _page(content: Callable[[], Any]) -> Any:
        async def page(request: web.Request) -> web.Response:
            return web.json_response(content())

        return page

    def _model_info(self) -> dict[str, Any]:
        if self.silent and self.breaks:
            self.silent -= 1
            raise web.HTTPServiceUnavailable
        return {"weight_version": self.version}

    @staticmethod
    def _openapi() -> dict[str, Any]:
        paths = [*PATHS, "generate", "model_info", "update_weights_from_disk", "v1/loads"]
        modes = {"properties": {"mode": {"enum": ["abort", "retract", "in_place"]}}}
        return {
            "paths": {f"/{path}": {} for path in paths},
            "components": {"schemas": {"PauseGenerationReqInput": modes}},
        }

    async def _done(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _load(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if self.loads and not self.loads.pop(0)():
            return web.json_response({"success": False, "message": "it fails"}, status=400)
        self.version = asked["weight_version"]
        return web.json_response({"success": True})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.breaks:
            assert request.transport is not None
            request.transport.abort()
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}, "weight_versions": ONE_UNIT}
        if watched := body.get("token_ids_logprob"):
            by = body["sampling_params"]["temperature"]
            meta["output_token_ids_logprobs"] = [[[-0.1 * (i + 1) / by, i, None] for i in watched]]
        else:
            self.asked += 1
            await self.held.wait()
            meta["output_token_logprobs"] = [[-0.5, 1, None]]
        return web.json_response({"text": "", "output_ids": [1], "meta_info": meta})


class Offer:
    """A snapshot of which only the directory may be needed."""

    def __init__(self, root: Path, version: int) -> None:
        self.tag = VersionTag(0, version)
        weights = {"w": torch.full((3,), float(version))}
        self.path = write_snapshot(root, self.tag, weights, files={"config.json": b"{}"}).path

    @property
    def tensors(self) -> dict[str, Any]:
        raise AssertionError("the tensors would be read while the engine is paused")


def with_engine(tmp_path: Path, body: Callable[[SGLangEngine, FakeServer], Any]) -> None:
    write_model(tmp_path / "model", seed=0)

    async def main() -> None:
        server = FakeServer()
        async with asyncio.timeout(60), server.serving() as url:
            settings = ServerSettings(slots=4, max_model_len=64, url=url, patience=PATIENCE)
            engine = SGLangEngine(tmp_path / "model", settings)
            try:
                await engine.start(Offer(tmp_path, 0))
                await body(engine, server)
            finally:
                await engine.stop()

    asyncio.run(main())


def test_an_update_needs_the_directory_alone(tmp_path: Path) -> None:
    async def body(engine: SGLangEngine, server: FakeServer) -> None:
        await engine.pause()
        await engine.load(Offer(tmp_path, 1))
        await engine.resume()
        assert engine.version == VersionTag(0, 1)
        assert server.version == "e0-v1"

    with_engine(tmp_path, body)


@pytest.mark.parametrize("goes", [False, True])
def test_versions_are_true_after_a_load_is_undone(tmp_path: Path, goes: bool) -> None:
    """The old directory is nobody's any more: what is removed while it is read may be filled anew."""

    async def body(engine: SGLangEngine, server: FakeServer) -> None:
        def undone() -> bool:
            if goes:
                shutil.rmtree(tmp_path / "e0-v0")
            return True

        server.loads = [lambda: False, undone]
        await engine.pause()
        with pytest.raises(EngineLost if goes else EngineError, match="removed" if goes else "old one is"):
            await engine.load(Offer(tmp_path, 1))
        assert engine.alive() is not goes
        assert engine.version == VersionTag(0, 0)

    with_engine(tmp_path, body)


@pytest.mark.parametrize("silent", [2, 10**6])
def test_an_attached_server_is_lost_after_several_silent_probes_and_not_after_two(
    tmp_path: Path, silent: int
) -> None:
    async def body(engine: SGLangEngine, server: FakeServer) -> None:
        server.breaks, server.silent = True, silent
        with pytest.raises(EngineLost):
            await engine.generate(GenerateRequest("r", [1, 2], GREEDY))
        assert engine.alive() is (silent == 2)

    with_engine(tmp_path, body)
