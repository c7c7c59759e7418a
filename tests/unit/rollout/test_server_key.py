"""A server that is started here answers nobody without its key, whatever routes it has."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rollout_service.engines.base import EngineError
from rollout_service.engines.http import keyed
from rollout_service.engines.http.adapter import ServerSettings
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.process import started
from tests.processes import words_of

# Like the real ones: routes without a key, made and served by uvicorn, and a process of its own below it.
SERVER = """
import os, subprocess, sys
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

async def answer(request):
    return JSONResponse({"argv": sys.argv, "main": __name__})

paths = ["/health", "/metrics", "/v1/models", "/sleep", "/collective_rpc", "/update_weights_from_disk"]
app = Starlette(routes=[Route(path, answer, methods=["GET", "POST"]) for path in paths])
if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error")
"""
KEYLESS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def settings(folder: Path) -> ServerSettings:
    python = Path(sys.executable)
    return ServerSettings(slots=1, max_model_len=8, python=python, ready_s=60, log_path=folder / "log")


def made(folder: Path, source: str) -> tuple[Callable[[int], list[str]], dict[str, str]]:
    (folder / "tiny_server.py").write_text(source)
    command = [sys.executable, "-P", "-m", "tiny_server", "--port"]
    return lambda port: [*command, str(port)], dict(os.environ) | {"PYTHONPATH": str(folder)}


async def test_every_route_asks_for_the_key_and_no_command_line_shows_it(tmp_path: Path) -> None:
    argv, environment = made(tmp_path, SERVER)
    process, client = await started("tiny", argv, environment, settings(tmp_path), path="/health")
    strangers = [ServerClient("tiny", client.url), ServerClient("tiny", client.url, key="0" * 64)]
    try:
        for path in ("/health", "/metrics", "/v1/models", "/sleep", "/update_weights_from_disk", "/nothing"):
            for stranger in strangers:
                assert await stranger.request("POST", path, {"model_path": "elsewhere"}) == (401, b"")
        answer = await client.get("/collective_rpc", dict)
        # It runs as it would by `python -m`.
        assert answer["main"] == "__main__"
        assert answer["argv"][0].endswith("tiny_server.py")
        assert answer["argv"][1] == "--port"
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        keys = {key for member in family if (key := member.environ().get(keyed.VARIABLE))}
        assert len(keys) == 1
        assert not [member for member in family if keys & set(" ".join(words_of(member)).split())]
        # What the server starts does not have it (the guard and the server do).
        assert [keyed.VARIABLE in member.environ() for member in family] == [True, True, False]
    finally:
        for stranger in strangers:
            await stranger.close()
        await client.close()
        await process.stop()


async def test_a_server_that_does_not_ask_is_not_used(tmp_path: Path) -> None:
    argv, environment = made(tmp_path, KEYLESS)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(EngineError, match="answers without its key"):
        await started("tiny", argv, environment, settings(tmp_path), path="/health")
    assert set(psutil.Process().children(recursive=True)) <= before


def test_nothing_but_one_right_key_opens_it() -> None:
    app = keyed.AskForKey(None, "secret")
    for shown in ([], [b"secret"], [b"Bearer "], [b"Bearer secre"], [b"Bearer secret", b"Bearer secret"]):
        sent: list[dict[str, object]] = []

        async def send(message: dict[str, object], sent: list[dict[str, object]] = sent) -> None:
            sent.append(message)

        headers = [(b"authorization", value) for value in shown]
        asyncio.run(app({"type": "http", "headers": headers}, None, send))
        assert sent[0]["status"] == 401
        sent.clear()
        asyncio.run(app({"type": "websocket", "headers": headers}, None, send))
        assert sent == [{"type": "websocket.close", "code": 1008}]
