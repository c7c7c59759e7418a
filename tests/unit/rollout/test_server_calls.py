"""Requests to a server, as their callers see them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from areal_async.trajectory import Sampling
from rollout_service.engines.base import (
    DeadlinePassed,
    EngineError,
    EngineLost,
    GenerateRequest,
    GenerateResult,
)
from rollout_service.engines.http.calls import Calls

NONE = np.empty(0, np.int32)


class Server:
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

    def start(self, name: str, deadline_s: float | None = None) -> asyncio.Task[GenerateResult]:
        async def answer() -> GenerateResult:
            gate = self.gates[name] = asyncio.Event()
            await gate.wait()
            reason: Any = "abort" if name in self.aborts else "stop"
            return GenerateResult(NONE, NONE.astype(np.float32), NONE, NONE, reason, "")

        request = GenerateRequest(name, [1], Sampling(), deadline_s=deadline_s)
        return asyncio.create_task(self.calls.run(request, name, answer))


def driven(body: Callable[[Server], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """The test that runs `body` within a deadline, after which no call is left."""

    async def bounded() -> None:
        server = Server()
        await asyncio.wait_for(body(server), 60)
        assert len(server.calls) == 0
        await server.calls.settle()

    return lambda: asyncio.run(bounded())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@driven
async def test_an_abort_is_repeated_until_the_server_hears_it(server: Server) -> None:
    server.forgets = 2
    call = server.start("a")
    await turns()
    server.calls.abort(["a", "unknown"])
    assert (await call).finish_reason == "abort"
    assert server.aborts == ["a"] * 3


@driven
async def test_what_is_held_is_not_sent_and_can_be_aborted(server: Server) -> None:
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
async def test_a_cancelled_caller_leaves_nothing_running_in_the_server(server: Server) -> None:
    call = server.start("a")
    await turns()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await turns()
    assert server.aborts == ["a"]
    assert server.gates["a"].is_set()


@driven
async def test_a_deadline_ends_what_is_sent_what_is_held_and_what_comes_late(server: Server) -> None:
    with pytest.raises(DeadlinePassed):
        await server.start("late", time.monotonic() - 1)
    sent = server.start("sent", time.monotonic() + 0.05)
    await turns()
    server.calls.hold()
    held = server.start("held", time.monotonic() + 0.05)
    for call in (sent, held):
        with pytest.raises(DeadlinePassed):
            await call
    assert server.aborts == ["sent"]


@driven
async def test_failing_all_ends_every_caller_with_the_error(server: Server) -> None:
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
async def test_an_abort_that_nobody_asked_for_is_no_answer(server: Server) -> None:
    call = server.start("a")
    await turns()
    await server.abort("a")
    with pytest.raises(EngineLost, match="nobody aborted"):
        await call


@driven
async def test_an_id_is_in_flight_once(server: Server) -> None:
    call = server.start("a")
    await turns()
    with pytest.raises(EngineError, match="in flight already"):
        await server.start("a")
    server.gates["a"].set()
    await call
