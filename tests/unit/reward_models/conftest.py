"""A judge's server whose every answer a test decides, and a small reward model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from areal_async.config.reward import RewardSection
from areal_async.config.reward_routing import RewardSpec
from reward_service.backends.judge.backend import GREETING, Judge
from tests.scoring import given, verdicts_of
from tests.waiting import deadline_s

DEADLINE_S = deadline_s(120)


def reply(text: str, *, tokens: int = 10, finish: str = "stop") -> web.Response:
    """An answer of an OpenAI-compatible server."""
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}
    return web.json_response({"choices": [choice], "usage": {"total_tokens": tokens}})


class JudgeServer:
    """`answer(body, n)` decides about the n-th request after the greeting; it may be a coroutine."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Any]) -> None:
        self._answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.under_way = 0
        self.most_under_way = 0
        self.news = asyncio.Event()
        self.greet: Callable[[], web.Response] = lambda: reply("1")

    async def __aenter__(self) -> JudgeServer:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._serve)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        if question(body) == GREETING:
            return self.greet()
        self.bodies.append(body)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.news.set()
        try:
            answer = self._answer(body, len(self.bodies))
            answer = await answer if asyncio.iscoroutine(answer) else answer
            return reply(answer) if isinstance(answer, str) else answer
        finally:
            self.under_way -= 1


def question(body: dict[str, Any]) -> str:
    """What was asked."""
    return str(body["messages"][-1]["content"])


async def judged(answer: Callable[..., Any], responses: list[str], **arguments: Any) -> Any:
    """The verdicts of a judge whose server is of its own, and that server."""
    async with JudgeServer(answer) as server, judge_of(server.url, **arguments) as judge:
        verdicts = await verdicts_of(judge.submit, [given(text) for text in responses], limit_s=DEADLINE_S)
    return verdicts, server


def judge_of(*urls: str, timeout_s: float = 10.0, start_s: float = 30.0, **arguments: Any) -> Judge:
    settings = {
        "base_url": urls,
        "model": "m",
        "template": "{response}",
        "quote": "none",
        "scale": (0, 10),
        "parse": r"(?:.* )?(\d+)",
        **arguments,
    }
    return Judge(
        RewardSpec("judge", settings, timeout_s=timeout_s),
        RewardSection(name="judge", args=settings),
        start_s=start_s,
    )
