"""The SGLang engine without a server: how its answers and its absence are understood."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from rollout_service.engines.base import EngineError, EngineLost
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.sglang.adapter import Loads
from rollout_service.engines.sglang.messages import Generated, parse
from tests.waiting import LIMIT_S


def answer(**changes: Any) -> Generated:
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length", "length": 3},
        "output_token_logprobs": [[-0.5, 4, None], [-1.5, 5, None], [-2.5, 6, None]],
        "weight_versions": [
            {"version": "policy-e0-v1", "start": 0, "end": 2},
            {"version": "policy-e1-v2", "start": 2, "end": 3},
        ],
    }
    ids = changes.pop("output_ids", [4, 5, 6])
    content = {"text": "abc", "output_ids": ids, "meta_info": meta | changes}
    return msgspec.json.decode(msgspec.json.encode(content), type=Generated)


def test_an_aborted_answer_has_what_was_handed_over() -> None:
    none = parse(answer(finish_reason={"type": "abort", "message": "x"}, output_ids=[]), "sampled")
    assert (none.finish_reason, none.token_ids.size, none.versions.size) == ("abort", 0, 0)
    spans = [{"version": "policy-e0-v1", "start": 0, "end": 0}]
    waiting: Any = {
        "output_token_logprobs": None,
        "weight_versions": spans,
        "finish_reason": {"type": "abort"},
    }
    assert parse(answer(**waiting), "sampled").token_ids.size == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output_ids": [4, 5]}, "log-probs of others"),
        ({"output_ids": [4, 5, 7]}, "log-probs of others"),
        ({"output_token_logprobs": [[None, 4, None], [-1, 5, None], [-1, 6, None]]}, "not finite"),
        ({"weight_versions": None}, "names no version"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 3}]}, "no version of this project"),
        ({"weight_versions": [{"version": "policy-e0-v1", "start": 1, "end": 3}]}, "do not fit"),
        ({"finish_reason": {"type": "tool"}}, "tool"),
    ],
)
def test_an_answer_that_does_not_account_for_its_units_is_refused(changes: Any, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        parse(answer(**changes), "sampled")


def test_units_are_counted_over_ranks_and_before_the_first_step() -> None:
    content = b'{"loads": [{"decode_moments": [2, 6, 1, 1, 1, 6.0]}, {"decode_moments": null}, {}]}'
    assert msgspec.json.decode(content, type=Loads).decoded == 6


async def test_an_idle_connection_is_closed_from_this_side() -> None:
    """A request on one that the server is just closing would look like the server's death."""
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        assert await reader.read() == b""
        closed.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = ServerClient("it", f"http://127.0.0.1:{port}", keepalive_s=0.05)
        assert await client.get("/", dict) == {}
        await asyncio.wait_for(closed.wait(), LIMIT_S)
        await client.close()


async def test_a_server_that_is_not_there_is_lost() -> None:
    client = ServerClient("it", "http://127.0.0.1:9")
    assert not await client.serves("/model_info")
    with pytest.raises(EngineLost, match="it is not to be reached"):
        await client.get("/model_info", dict)
    await client.close()
