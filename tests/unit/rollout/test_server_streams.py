"""Streams of a server: events cut anywhere, answers put together, and what goes wrong in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from aiohttp import web

from rollout_service.engines.base import EngineError, EngineLost, GenerateResult, RequestError
from rollout_service.engines.http.client import events
from rollout_service.engines.sglang import messages as wire
from rollout_service.engines.vllm import messages as answer
from tests.unit.rollout.fake_sglang import serving

SEEN = [b"one", b'{"a": "data: "}', b"", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_events_come_whole_wherever_the_body_is_cut(size: int) -> None:
    body = b"".join(b"data: " + event + b"\n\n" for event in SEEN) + b"data: half"

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(body), size):
            yield body[at : at + size]

    assert [event async for event in events(chunks())] == SEEN


# --- over a connection --------------------------------------------------------------------------------


class Number(msgspec.Struct):
    n: int


async def streamed(
    body: Sequence[bytes], *, status: int = 200, breaks: bool = False, times: int = 1
) -> tuple[list[int], int]:
    """What a client takes of the answers that a server sends, and over how many connections."""
    taken: list[int] = []
    ports: set[int] = set()

    async def send(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername")[1])
        answer = web.StreamResponse(status=status)
        await answer.prepare(request)
        for event in body:
            await answer.write(event)
        await asyncio.sleep(0.001)  # the end of the body comes in a packet of its own
        if breaks:
            request.transport.abort()
        return answer

    app = web.Application()
    app.router.add_post("/generate", send)
    async with serving(app) as client:
        for _ in range(times):
            await client.stream("/generate", {}, Number, lambda part: taken.append(part.n))
    return taken, len(ports)


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def test_each_event_is_taken_once_up_to_the_end_and_the_connection_used_again() -> None:
    body = [event({"n": 1}) + event({"n": 2})[:9], event({"n": 2})[9:], DONE]
    assert await streamed(body, times=5) == ([1, 2] * 5, 1)


@pytest.mark.parametrize(
    ("body", "how", "error", "words"),
    [
        ([event({"n": 1})], {}, EngineLost, "broke off its answer to /generate"),
        ([event({"n": 1})], {"breaks": True}, EngineLost, "not to be reached"),
        ([event({"error": {"message": "too long", "code": 400}}), DONE], {}, RequestError, "400: too long"),
        ([event({"error": {"message": "oom", "code": 500}}), DONE], {}, EngineError, "500: oom"),
        ([event({"m": 1}), DONE], {}, EngineError, "unknown form"),
        ([b'{"error": {"message": "no"}}'], {"status": 422}, RequestError, "422: no"),
    ],
    ids=["ended", "broken", "refused", "failed", "unknown", "status"],
)
async def test_what_goes_wrong_in_a_stream_has_its_error(body: Any, how: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words) as raised:
        await streamed(body, **how)
    assert type(raised.value) is error


# --- SGLang's ------------------------------------------------------------------------------------------


def sglang_part(ids: Sequence[int], *, so_far: int, reason: Any = None) -> wire.Generated:
    meta = {
        "finish_reason": reason,
        "weight_versions": [{"version": "policy-e0-v3", "start": 0, "end": so_far}],
        "output_token_logprobs": [[-0.1 * i, i, None] for i in ids],
    }
    content = {"text": "not read", "output_ids": list(ids), "meta_info": meta}
    return msgspec.convert(content, wire.Generated, strict=False)


@pytest.mark.parametrize("disjoint", [True, False], ids=["disjoint", "cumulative"])
def test_parts_make_the_answer_in_both_forms(disjoint: bool) -> None:
    told: list[list[int]] = []
    heard = wire.SglangStream(disjoint, lambda piece: told.append(piece.tolist()))
    ends = [1, 3, 3, 4]
    for begin, end in zip([0, *ends], ends, strict=False):
        ids = [5, 6, 7, 8][begin if disjoint else 0 : end]
        heard.take(sglang_part(ids, so_far=end, reason={"type": "length"} if end == 4 else None))
    result = wire.parse(heard.answer(), "sampled")
    assert told == [[5], [6, 7], [8]]
    assert (result.token_ids.tolist(), result.finish_reason) == ([5, 6, 7, 8], "length")
    assert result.versions.tolist() == [3] * 4
    assert result.logprobs.tolist() == pytest.approx([-0.5, -0.6, -0.7, -0.8])


@pytest.mark.parametrize("joined", [False, True], ids=["alone", "joined"])
def test_what_an_abort_in_the_servers_queue_repeats_is_told_once(joined: bool) -> None:
    """See `_handle_abort_req` of SGLang 0.5.23. `joined`: the server has made one part of the last two."""
    told: list[int] = []
    heard = wire.SglangStream(True, lambda piece: told.extend(piece.tolist()))
    heard.take(sglang_part([5, 6], so_far=2))
    if not joined:
        heard.take(sglang_part([7], so_far=3))
    last = sglang_part([7, 7] if joined else [7], so_far=3, reason={"type": "abort"})
    repeated = sglang_part([5, 6, 7], so_far=3).meta_info.output_token_logprobs
    assert repeated is not None
    last.meta_info.output_token_logprobs = [repeated[2], *repeated] if joined else repeated
    last.meta_info.completion_tokens = last.meta_info.output_token_logprobs_length = 3
    heard.take(last)
    result = wire.parse(heard.answer(), "sampled")
    assert told == result.token_ids.tolist() == [5, 6, 7]
    assert result.finish_reason == "abort"
    assert result.logprobs.tolist() == pytest.approx([-0.5, -0.6, -0.7])


def test_an_id_without_a_log_prob_is_not_told() -> None:
    told: list[int] = []
    heard = wire.SglangStream(True, lambda piece: told.extend(piece.tolist()))
    part = sglang_part([5, 6], so_far=2, reason={"type": "abort"})
    assert part.meta_info.output_token_logprobs is not None
    del part.meta_info.output_token_logprobs[1]
    heard.take(part)
    assert told == wire.parse(heard.answer(), "sampled").token_ids.tolist() == [5]


@pytest.mark.parametrize(("status", "error"), [(400, RequestError), (503, EngineError)])
def test_a_refusal_inside_sglangs_stream_is_no_abort(status: int, error: Any) -> None:
    heard = wire.SglangStream(True, lambda piece: None)
    reason = {"type": "abort", "message": "why", "status_code": status}
    with pytest.raises(error, match="why"):
        heard.take(sglang_part([], so_far=0, reason=reason))


def test_an_sglang_stream_that_never_finished_is_no_answer() -> None:
    heard = wire.SglangStream(True, lambda piece: None)
    with pytest.raises(EngineError, match="with nothing"):
        heard.answer()
    heard.take(sglang_part([5], so_far=1))
    with pytest.raises(EngineError, match="by None"):
        wire.parse(heard.answer(), "sampled")


# --- vLLM's --------------------------------------------------------------------------------------------


def test_a_vllm_stream_that_never_finished_is_no_answer() -> None:
    def parsed() -> GenerateResult:
        return answer.parse(heard.answer(), "me", logprobs_of="sampled")

    heard = answer.VllmStream(lambda piece: None)
    with pytest.raises(EngineError, match="0 answers"):
        parsed()
    logprobs = {"content": [{"token_id": 5, "logprob": -0.5}]}
    choice = {"finish_reason": None, "token_ids": [5], "logprobs": logprobs, "weight_versions": None}
    heard.take(msgspec.convert({"choices": [choice]}, answer.Answer))
    with pytest.raises(EngineError, match="ended a request by None"):
        parsed()
