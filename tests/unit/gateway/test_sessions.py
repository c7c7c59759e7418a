"""Who may call, how often, and what becomes of a call whose client has gone."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from typing import Any

import httpx
import psutil
import pytest
from pydantic import ValidationError

from areal_async.base.errors import ArealError
from areal_async.config.rollout import GatewaySection
from rollout_service.gateway import Gateway, GatewayError
from tests.unit.gateway.fakes import (
    CHAT,
    ROUTE,
    Scripted,
    assert_recorded_is_what_the_engine_said,
    http_of,
    made_gateway,
    make_context,
    serving,
)
from tests.waiting import LIMIT_S, until


class Gated(Scripted):
    """Holds requests until `open` is set."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.open = asyncio.Event()
        self.gate = self.hold

    async def hold(self, request: Any) -> None:
        await self.open.wait()


def address_for_others() -> str:
    """An address of this machine that is not loopback."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family is socket.AF_INET and not each.address.startswith("127."):
                return each.address
    pytest.skip("this machine has no address but loopback")


@pytest.mark.parametrize("place", ["loopback", "named", "the host's"])
async def test_only_an_episodes_own_key_opens_it_and_only_while_it_lasts(place: str, tokenizer: Any) -> None:
    """The address is `rollout.gateway.host: IP`, or `host` where the run knows this host by that address."""
    address, engine = "127.0.0.1" if place == "loopback" else address_for_others(), Scripted(tokenizer)
    how = {"loopback": {}, "named": {"host": address}}.get(place, {"host": "host", "address": address})
    async with serving(engine, tokenizer, **how) as (gateway, _, first):
        assert first.origin.startswith(f"http://{address}:")
        if place != "loopback":
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(("127.0.0.1", int(first.origin.rpartition(":")[2])), timeout=5)
        other = make_context(engine, tokenizer, gateway)
        async with other.gateway() as second, http_of(second) as http:
            assert len(second.api_key) > 32
            assert (await http.post(ROUTE, json=CHAT)).status_code == 200
        assert (first.calls, second.calls) == (0, 1), "a key opens its own episode alone"
        async with httpx.AsyncClient(base_url=first.origin, trust_env=False) as http:
            for key, reason in (
                (second.api_key, "has ended"), ("guess", "no session has this"), ("", "API key is needed"),
            ):  # fmt: skip
                headers = {"authorization": f"Bearer {key}".strip(), "x-api-key": "guess"}
                for reply in (
                    await http.post(ROUTE, json=CHAT, headers=headers),
                    await http.get("/v1/models", headers=headers),
                ):
                    assert reply.status_code == 401
                    assert reply.json()["error"]["type"] == "authentication_error"
                    assert reason in reply.json()["error"]["message"]
            unknown = await http.get(f"/session/{first.api_key}/nothing")
            assert unknown.status_code == 404
            assert first.api_key not in unknown.text, "whoever put the key there"
        assert len(engine.log) == 1, "who was refused has reached no engine"
        async with http_of(first) as http:
            assert (await http.post(ROUTE, json=CHAT)).status_code == 200


async def test_nothing_of_an_episode_is_kept_once_it_has_ended(tokenizer: Any) -> None:
    async def episode(gateway: Gateway, engine: Any) -> weakref.ref[Any]:
        async with make_context(engine, tokenizer, gateway).gateway() as session, http_of(session) as http:
            assert (await http.post(ROUTE, json=CHAT)).status_code == 200
            assert session.calls == 1
            return weakref.ref(session.builder)

    with made_gateway(tokenizer) as gateway:
        kept = [await episode(gateway, Scripted(tokenizer)) for _ in range(3)]
        # A connection that is closing may still hold its last request for a moment.
        async with asyncio.timeout(LIMIT_S):
            await until(lambda: gc.collect() is not None and all(one() is None for one in kept))
        await gateway.close()


async def test_nothing_listens_before_an_episode_asks_and_after_the_end(tokenizer: Any) -> None:
    with made_gateway(tokenizer) as gateway:
        assert gateway.address == ""
        await gateway.close()
    async with serving(Scripted(tokenizer), tokenizer) as (gateway, _, session):
        port = int(session.origin.rpartition(":")[2])
        await gateway.close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=5)


async def test_a_taken_port_and_an_open_address_are_refused_by_name(tokenizer: Any) -> None:
    for host in ("0.0.0.0", "example.org"):
        with pytest.raises(ValidationError, match="loopback"):
            GatewaySection(host=host)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(GatewayError, match=r"rollout\.gateway\.port"):
            async with serving(Scripted(tokenizer), tokenizer, port=port):
                pass
    context = make_context(Scripted(tokenizer), tokenizer, None)  # type: ignore[arg-type]
    with pytest.raises(ArealError, match="without a gateway"):
        context.gateway()


async def test_too_much_at_once_is_refused(tokenizer: Any) -> None:
    engine = Gated(tokenizer)
    how: Any = {"max_calls": 3, "max_body_bytes": 2000}
    async with serving(engine, tokenizer, **how) as (_, _ctx, session), http_of(session) as http:
        first = asyncio.ensure_future(http.post(ROUTE, json=CHAT | {"n": 2}))
        await until(lambda: len(engine.begun) == 2)
        refused = await http.post(ROUTE, json=CHAT | {"n": 2})
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        assert "max_calls" in refused.json()["error"]["message"]
        assert (await http.post(ROUTE, json=CHAT | {"n": 4})).status_code == 400
        long = await http.post(ROUTE, json=CHAT | {"user": "x" * 2000})
        assert long.status_code == 413
        engine.open.set()
        assert (await first).status_code == 200
        assert (await http.post(ROUTE, json=CHAT | {"n": 3})).status_code == 200


async def test_a_call_past_its_deadline_is_aborted_and_leaves_no_trace(tokenizer: Any) -> None:
    engine = Gated(tokenizer)
    async with serving(engine, tokenizer, call_timeout_s=0.05) as (_, _ctx, session):
        async with http_of(session) as http:
            reply = await http.post(ROUTE, json=CHAT)
            assert reply.status_code == 504
        await until(lambda: engine.cancelled == 1)
        assert session.calls == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_call(stream: bool, tokenizer: Any) -> None:
    engine = Gated(tokenizer)
    async with serving(engine, tokenizer) as (_, ctx, session), http_of(session) as http:
        body = CHAT | {"stream": stream, "n": 2}
        call = asyncio.ensure_future(http.post(ROUTE, json=body))
        await until(lambda: len(engine.begun) == 2)
        call.cancel()
        await until(lambda: engine.cancelled == 2)
        engine.open.set()
        assert session.calls == 0
        assert (await http.post(ROUTE, json=CHAT)).status_code == 200
        episode, log = ctx.builder.build(), engine.log
    assert_recorded_is_what_the_engine_said(episode, log)
    assert len(episode.segments) == 2, "of the abandoned call not even the prompt is recorded"


async def test_ending_the_episode_ends_its_calls(tokenizer: Any) -> None:
    engine = Gated(tokenizer)
    async with serving(engine, tokenizer) as (gateway, _, _session):
        ctx = make_context(engine, tokenizer, gateway)
        async with ctx.gateway() as session:
            http = http_of(session)
            calls = [
                asyncio.ensure_future(http.post(ROUTE, json=CHAT | {"stream": stream}))
                for stream in (False, True)
            ]
            await until(lambda: len(engine.begun) == 2)
        await until(lambda: engine.cancelled == 2)
        assert [(await call).status_code for call in calls] == [401, 401]
        assert session.calls == 0
        await http.aclose()


async def test_a_call_that_arrives_after_the_end_of_its_episode_reaches_no_engine(tokenizer: Any) -> None:
    engine = Scripted(tokenizer)
    async with serving(engine, tokenizer) as (gateway, _, _session):
        async with make_context(engine, tokenizer, gateway).gateway() as session:
            asked, sample = [], session.sample

            async def noted(*call: Any) -> Any:
                asked.append(call)
                return await sample(*call)

            session.sample = noted  # type: ignore[method-assign]
            async with http_of(session) as http:
                assert (await http.post(ROUTE, json=CHAT)).status_code == 200
        ((call, ids, images),) = asked
        refused: Any = await sample(call, ids, images)
        assert (refused.status, session.calls, len(engine.log)) == (401, 1, 1)


async def test_calls_of_one_session_run_at_the_same_time(tokenizer: Any) -> None:
    engine = Gated(tokenizer)
    async with serving(engine, tokenizer) as (_, ctx, session), http_of(session) as http:
        bodies = [CHAT | {"messages": [{"role": "user", "content": f"{i % 3}"}]} for i in range(9)]
        calls = [asyncio.ensure_future(http.post(ROUTE, json=body)) for body in bodies]
        await until(lambda: len(engine.begun) == 9)
        engine.open.set()
        assert {(await call).status_code for call in calls} == {200}
        episode, log = ctx.builder.build(), engine.log
    assert_recorded_is_what_the_engine_said(episode, log)
    assert episode.header.metadata["roots"] == 3
    assert len(episode.segments) == 12
