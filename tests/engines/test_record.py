"""A recording gives the answers of its server again, in the order that matters, and knows nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from rollout_service.engines.http.client import ServerClient
from tests.engines.record import Exchange, Proxy, Recording, Replay, listening
from tests.waiting import LIMIT_S


class Talk:
    """A server that streams two events, the second once it is told to go on, and counts what it is asked."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.gets = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            self.gets += 1
            return web.json_response({"gets": self.gets})
        if request.path == "/continue":
            self.goes_on.set()
            return web.json_response((await request.json())["name"])
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        await self.goes_on.wait()
        await answer.write(b"data: 2\n\ndata: [DONE]\n\n")
        return answer


async def talk(url: str, owner: str) -> tuple[list[int], list[Any]]:
    """Events of a stream that goes on once its first one was heard, and what else was said."""
    client = ServerClient("it", url)
    heard: list[int] = []
    first = asyncio.Event()

    def take(event: int) -> None:
        heard.append(event)
        first.set()

    try:
        said: list[Any] = [(await client.get("/count", dict))["gets"]]
        stream = asyncio.create_task(client.stream("/stream", {"model": "/tmp/here/m"}, int, take))
        await asyncio.wait_for(first.wait(), LIMIT_S)
        said.append((await client.get("/count", dict))["gets"])
        assert heard == [1]
        said.append(await client.post("/continue", {"name": f"policy-e0-v0.{owner}"}, str))
        await asyncio.wait_for(stream, LIMIT_S)
    finally:
        await client.close()
    return heard, said


async def exchanges_of(url: str) -> list[Exchange]:
    proxy = Proxy(url)
    async with listening(proxy) as through:
        assert await talk(through, "0" * 8) == ([1, 2], [1, 2, "policy-e0-v0." + "0" * 8])
    return proxy.recorded()


async def test_a_recording_answers_as_its_server_did_for_another_owner() -> None:
    async with listening(Talk()) as url:
        exchanges = await exchanges_of(url)
    replay = Replay(exchanges)
    async with listening(replay) as url:
        assert await talk(url, "a" * 8) == ([1, 2], [1, 2, "policy-e0-v0." + "a" * 8])
    assert (replay.unknown, replay.unused) == ([], [])


async def test_a_request_that_was_not_recorded_and_one_that_does_not_come_are_found() -> None:
    async with listening(Talk()) as url:
        exchanges = await exchanges_of(url)
    replay = Replay(exchanges)
    async with listening(replay) as url:
        client = ServerClient("it", url)
        assert (await client.request("POST", "/continue", {"name": "other"}))[0] == 501
        await client.close()
    assert replay.unknown == ['POST /continue {"name": "other"}']
    assert [asked.split()[1] for asked in replay.unused] == ["/stream", "/continue"]


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    one = Exchange("POST /x", 200, parts=[(1, "é")], came=1)
    made = Recording("it", "1", "digest", {"test": [one]})
    made.write(tmp_path)
    assert Recording.read("it", tmp_path) == made
