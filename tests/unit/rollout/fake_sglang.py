"""A web page that answers as an SGLang server does, and a client of such pages."""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from aiohttp import web

from rollout_service.engines.http.client import ServerClient
from tests.waiting import LIMIT_S

ONE_UNIT = [{"version": "policy-e0-v0", "start": 0, "end": 1}]
PATHS = ("abort_request", "continue_generation", "pause_generation", "freeze_gc")


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[ServerClient]:
    """A client of a server with the routes of `app`, within a deadline."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = ServerClient("it", f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        async with asyncio.timeout(LIMIT_S):
            yield client
    finally:
        await client.close()
        await runner.cleanup()


class FakeServer:
    """Takes what an engine sends to a server, and answers a request once `held` is set."""

    def __init__(self, **info: Any) -> None:
        self.info = {"version": "0.5.23", "context_length": 72, "disable_overlap_schedule": True} | info
        self.versions: Any = ONE_UNIT
        self.routes = np.zeros((0, 0, 0), np.int32)
        """Of each token of a prompt, layer by layer."""
        self.version = ""
        self.prompt_tokens = 0
        """The number of tokens of every prompt, its images expanded."""
        self.said = 1
        """The id of every answer."""
        self.loads: list[Callable[[], bool]] = []
        """What becomes of the next loads; the ones after succeed."""
        self.bodies: list[dict[str, Any]] = []
        """Of the requests."""
        self.held = asyncio.Event()
        self.breaks = False
        """Whether requests lose their connection."""
        self.silent = 0
        """Probes of liveness that are left without an answer while requests break."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ServerClient]:
        app = web.Application()
        for path in PATHS:
            app.router.add_post(f"/{path}", self._page(dict))
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/update_weights_from_disk", self._load)
        gets: dict[str, Callable[[], Any]] = {
            "server_info": lambda: self.info,
            "model_info": self._model_info,
            "v1/loads": lambda: {"loads": [{"num_running_reqs": 1}]},
        }
        for path, content in gets.items():
            app.router.add_get(f"/{path}", self._page(content))
        async with serving(app) as client:
            try:
                yield client
            finally:
                self.held.set()

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

    async def _load(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if self.loads and not self.loads.pop(0)():
            return web.json_response({"success": False, "message": "it fails"}, status=400)
        self.version = asked["weight_version"]
        return web.json_response({"success": True})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if self.breaks:
            assert request.transport is not None
            request.transport.abort()
        if body["input_ids"] == [0]:
            return web.json_response({"error": {"message": "not that one"}}, status=400)
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}, "weight_versions": self.versions}
        meta["prompt_tokens"] = self.prompt_tokens
        if watched := body.get("token_ids_logprob"):
            by = body["sampling_params"]["temperature"]
            meta["output_token_ids_logprobs"] = [[[-0.1 * (i + 1) / by, i, None] for i in watched]]
        else:
            await self.held.wait()
            meta["output_token_logprobs"] = [[-0.5, self.said, None]]
            if body.get("return_routed_experts"):
                told = self.routes[body["routed_experts_start_len"] : len(body["input_ids"])]
                meta["routed_experts"] = binascii.b2a_base64(told.tobytes()).decode()
        return web.json_response({"text": "its own", "output_ids": [self.said], "meta_info": meta})
