"""A controller whose processes are made up, behind the real server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import msgspec

from areal_async.base.http_server import HttpServer, listen
from areal_async.cluster.api import LIMITS, ControllerApi
from areal_async.cluster.client import ControllerClient
from areal_async.cluster.folder import ClusterFolder
from areal_async.config.cluster import ClusterConfig
from tests.unit.controller.world import World, submission


class Served:
    """A controller that is asked over HTTP."""

    def __init__(self, folder):
        self.folder = ClusterFolder(folder)
        self.folder.make()
        self.folder.make_tokens()
        self.thread = ThreadPoolExecutor(1)
        self.world = self.thread.submit(World, folder).result()
        self.downs = []
        self.woken = 0
        self.app = ControllerApi(
            self.world.controller,
            ClusterConfig(),
            self.folder,
            self.thread,
            wake=self.wake,
            on_down=self.downs.append,
        ).app
        self.server = HttpServer(self.app, listen("127.0.0.1", 0), LIMITS, name="controller")
        self.server.start()
        self.client = ControllerClient(self.server.url, self.folder.token())

    def wake(self):
        self.woken += 1

    async def on_thread(self, function, *arguments):
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *arguments)

    async def start(self, name):
        """Have a job of this name run."""
        await self.on_thread(self.world.controller.submit, submission(name))
        await self.on_thread(self.world.tick)
        self.world.real.arrive()
        self.world.real.serve()
        await self.on_thread(self.world.tick)

    async def ask(self, method, path, body=None, token=None, **headers):
        token = self.folder.token() if token is None else token
        headers = {**headers, **({"Authorization": f"Bearer {token}"} if token else {})}
        data = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        async with aiohttp.ClientSession() as session:
            async with session.request(method, self.server.url + path, data=data, headers=headers) as answer:
                return answer.status, answer.headers, await answer.read()


Serving = Callable[[], contextlib.AbstractAsyncContextManager[Served]]


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served]:
    there = Served(folder)
    try:
        yield there
    finally:
        await there.server.close()
        await there.on_thread(there.world.end)
        there.thread.shutdown()
