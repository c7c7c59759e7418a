"""Reward servers for the tests: that of examples/reward_servers, and one that does what each input says."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from aiohttp import web

from areal_async.config.reward import RewardSection
from areal_async.config.reward_routing import RewardSpec
from reward_service.backends.remote.client import RemoteBackend
from tests.scoring import verdicts_of

ROOT = Path(__file__).parents[4]


class Example:
    """The example server, as a process."""

    def __init__(self, **environment):
        self._environment = os.environ | environment
        self.process = None
        self.url = ""

    def start(self):
        """Serve, after the first time at the same address."""
        node = shutil.which("node") or pytest.skip("needs Node.js: the Debian package nodejs")
        port = [self.url.rpartition(":")[2]] if self.url else []
        command = [node, str(ROOT / "examples" / "reward_servers" / "server.js"), *port]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=self._environment)
        self.url = self.process.stdout.readline().decode().split()[-1]
        return self

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def example():
    """`example()`: a running server."""
    started = []

    def start(**environment):
        started.append(Example(**environment).start())
        return started[-1]

    yield start
    for server in started:
        server.kill()


class Scripted:
    """An HTTP server whose verdict for an input is what the input's response says, as JSON; `answers` may
    replace whole answers, one after another: functions of the request that return (status, headers, body)."""

    def __init__(self):
        self.answers = []
        self.requests = []
        self.info = {"protocol": 1, "rewards": [{"name": "scripted", "version": "1"}]}
        self.health = {"status": "ready"}
        self.token = ""
        self.url = ""
        self.arrived = asyncio.Event()

    async def handle(self, request):
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": {"kind": "unauthorized", "message": "no"}}, status=401)
        if request.path.endswith("/v1/info"):
            return web.json_response(self.info)
        if request.path.endswith("/v1/health"):
            return web.json_response(self.health)
        asked = await request.json()
        if not asked["inputs"]:
            return web.json_response({"verdicts": []})
        self.requests.append(asked)
        self.arrived.set()
        for given in asked["inputs"]:
            if given["response"] == "hang":
                await asyncio.sleep(3600)
            if given["response"] == "drop":
                request.transport.abort()
                return web.Response()
        if self.answers:
            status, headers, body = self.answers.pop(0)(asked)
            return web.Response(status=status, headers=headers, body=body, content_type="application/json")
        verdicts = [json.loads(given["response"]) for given in asked["inputs"]]
        return web.json_response({"request_id": asked["request_id"], "verdicts": verdicts})

    @contextlib.asynccontextmanager
    async def serving(self, port=0):
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


@pytest.fixture
def scripted():
    return Scripted


@pytest.fixture
def backend():
    """`backend(urls, timeout_s=…, scope=…, **args)`: not entered yet."""

    def make(urls, *, timeout_s=5.0, scope="episode", **args):
        args = {"urls": [urls] if isinstance(urls, str) else urls, "connect_s": 5.0, **args}
        return RemoteBackend(RewardSpec("remote", args, scope, timeout_s), RewardSection(name="remote"))

    return make


@pytest.fixture
def collect():
    """`await collect(backend, calls)`: the verdict of each call; a call that is a list has a list."""
    return lambda entered, calls: verdicts_of(entered.submit, calls)
