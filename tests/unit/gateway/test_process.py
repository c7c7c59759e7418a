"""The gateway in a process of its own, as a job has it: killed, it loses its open calls only."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from rollout_service.gateway import GatewayError
from rollout_service.gateway.access import start_process
from tests.processes import is_gone
from tests.unit.gateway.fakes import (
    CHAT,
    DEADLINE_S,
    ROUTE,
    Scripted,
    assert_recorded_is_what_the_engine_said,
    http_of,
    made_gateway,
    make_context,
)
from tests.waiting import until


async def test_a_killed_gateway_loses_its_open_calls_only_and_comes_back(tokenizer, tmp_path, capfd):
    tokenizer.save_pretrained(tmp_path)
    processes, held = list[Any](), asyncio.Event()
    engine = Scripted(tokenizer, ["one{END}", "lost{END}", "two{END}", "new{END}"])

    async def hold(request: Any) -> None:
        if len(engine.begun) == 2:
            await held.wait()

    def start(setup: Any) -> Any:
        with capfd.disabled():
            processes.append(start_process(setup))
        return processes[-1]

    engine.gate = hold
    with made_gateway(tokenizer, model=tmp_path, start=start) as gateway:
        ctx, other = (make_context(engine, tokenizer, gateway) for _ in range(2))

        async def failing() -> None:
            async with other.gateway() as session, http_of(session) as http:
                call = asyncio.ensure_future(http.post(ROUTE, json=CHAT))
                await until(lambda: len(engine.begun) == 2)
                os.kill(processes[0].pid, signal.SIGKILL)
                await asyncio.gather(call, return_exceptions=True)
                await until(lambda: engine.cancelled)
                assert session.calls == 0

        try:
            async with asyncio.timeout(DEADLINE_S), ctx.gateway() as session:
                async with http_of(session) as http:
                    assert (await http.post(ROUTE, json=CHAT)).status_code == 200
                    assert session.calls == 1
                with pytest.raises(GatewayError, match="died during a call"):
                    await failing()
                # The address is the same, so a client that connects meanwhile waits.
                async with http_of(session) as http:
                    assert (await http.post(ROUTE, json=CHAT, timeout=DEADLINE_S)).status_code == 200
                assert session.calls == 2
                fresh = make_context(engine, tokenizer, gateway)
                async with fresh.gateway() as third, http_of(third) as http:
                    reply = await http.post(ROUTE, json=CHAT | {"stream": True})
                    assert reply.text.endswith("data: [DONE]\n\n")
                    assert third.calls == 1
        finally:
            await gateway.close()
    assert len(processes) == 2
    assert all(is_gone(process.pid) for process in processes)
    first, last = engine.log[:2], engine.log[2:]
    assert_recorded_is_what_the_engine_said(ctx.builder.build(), first)
    assert_recorded_is_what_the_engine_said(fresh.builder.build(), last)
