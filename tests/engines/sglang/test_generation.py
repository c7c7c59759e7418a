"""Answers of a real SGLang server. Traps of the server that are covered here, each by the test after it:

- an id outside the vocabulary kills the server: `test_what_the_server_would_die_of_is_refused_here`
- an answer ends two tokens before the context length, a long prompt is refused six tokens before it:
  `test_prompt_and_answer_fill_the_models_length`
- log-probs are of temperature, never of top-p and top-k: `test_logprobs_are_of_what_is_stated`
- defaults of the model's generation config: `test_sampling_is_what_was_asked_for`
- an abort matches every request whose id begins so: `test_an_abort_ends_one_request_only`
- an abort that overtakes its request is forgotten: `test_an_abort_right_after_the_call_ends_it`
- a client that goes away frees its request after seconds: `test_a_cancelled_call_frees_its_slot_at_once`
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal_async.rpc.schema import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import GenerateRequest, GenerateResult, RequestError
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.engines.sglang.adapter import Loads
from tests.engines.conftest import ask
from tests.engines.sglang.served import KEY, LENGTH, endless, in_server, under_way, until

pytestmark = pytest.mark.engine
PROMPT = [5, 14, 7, 9]
LONG = Sampling(temperature=1.0, max_new_tokens=60)


async def sample(
    engine: HttpEngine, count: int, sampling: Sampling, prompt: list[int] = PROMPT
) -> list[GenerateResult]:
    return await asyncio.gather(*ask(engine, count, prompt, sampling))


@pytest.mark.parametrize(
    ("sampling", "stated"),
    [
        (Sampling(temperature=1.0, max_new_tokens=40), "sampled"),
        (Sampling(temperature=0.7, max_new_tokens=40), "sampled"),
        (Sampling(temperature=0.0, max_new_tokens=40), "sampled"),
        (Sampling(temperature=1.3, top_p=0.8, max_new_tokens=40), "temperature"),
        (Sampling(temperature=0.8, top_k=3, max_new_tokens=40), "temperature"),
    ],
)
async def test_logprobs_are_of_what_is_stated(
    recompute: HttpEngine, model: Any, sampling: Sampling, stated: str
) -> None:
    for result in await sample(recompute, 8, sampling):
        assert result.logprobs_of == stated
        assert set(zip(result.epochs, result.versions, strict=True)) == {(0, 0)}
        model.assert_true(PROMPT, result, sampling.temperature or 1.0)


async def test_greedy_takes_the_likeliest_id(recompute: HttpEngine, model: Any) -> None:
    (result,) = await sample(recompute, 1, Sampling(temperature=0.0, max_new_tokens=30))
    likeliest = model.logits(VersionTag("policy", 0, 0), PROMPT, result).argmax(-1)
    assert result.token_ids.tolist() == likeliest.tolist()


async def test_sampling_is_what_was_asked_for(recompute: HttpEngine) -> None:
    answers = {tuple(r.token_ids) for r in await sample(recompute, 16, Sampling(1.0, max_new_tokens=8))}
    assert len(answers) > 8  # the model's own defaults are greedy
    few = {int(r.token_ids[0]) for r in await sample(recompute, 32, Sampling(1.0, top_k=2, max_new_tokens=1))}
    assert len(few) <= 2


async def test_eos_is_among_the_ids_and_not_in_the_text(recompute: HttpEngine) -> None:
    results = await sample(recompute, 32, LONG)
    stopped = [r for r in results if r.finish_reason == "stop"]
    assert stopped
    for result in stopped:
        assert result.token_ids[-1] == 1
        assert 1 not in result.token_ids[:-1]
        shown = [i for i in result.token_ids if i > 2]
        assert result.text == "".join("0123456789+-="[i - 3] for i in shown)


async def test_a_stop_string_ends_the_answer_and_is_cut_from_the_text_alone(recompute: HttpEngine) -> None:
    results = await sample(recompute, 32, Sampling(1.0, max_new_tokens=60, stop=("7", "+-")))
    by_string = [r for r in results if r.finish_reason == "stop" and r.token_ids[-1] != 1]
    assert by_string
    for result in by_string:
        whole = "".join("0123456789+-="[i - 3] for i in result.token_ids if i > 2)
        assert whole.startswith(result.text)
        assert whole[len(result.text) :] in ("7", "+-")


async def test_prompt_and_answer_fill_the_models_length(recompute: HttpEngine) -> None:
    for size in (LENGTH - 6, LENGTH - 2, LENGTH - 1):
        results = await sample(recompute, 8, LONG, [6] * size)
        assert max(len(r.token_ids) for r in results) == LENGTH - size
        assert any(r.finish_reason == "length" for r in results)


async def test_an_answer_may_take_all_of_the_models_length(recompute: HttpEngine) -> None:
    asked = endless("long")
    result = await recompute.generate(asked)
    assert (len(result.token_ids), result.finish_reason) == (asked.sampling.max_new_tokens, "length")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([5, 16], "token id 16 is not in the model's vocabulary of 16 ids"),
        ([-1], "token id -1"),
        ([], "at least one token id"),
        ([1.5], "at least one token id"),
        ([6] * LENGTH, "leaves no room"),
    ],
)
async def test_what_the_server_would_die_of_is_refused_here(
    recompute: HttpEngine, prompt: Any, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        await recompute.generate(GenerateRequest("bad", prompt, LONG))
    assert len(await sample(recompute, 1, LONG)) == 1


async def test_an_abort_ends_one_request_only(recompute: HttpEngine) -> None:
    # Ids of which one begins the others, as the server matches them.
    names = ["r1", "r10", "r11", "r1x"]
    calls = [asyncio.create_task(recompute.generate(GenerateRequest(n, PROMPT, LONG))) for n in names]
    await asyncio.sleep(0)
    await recompute.abort(["r1"])
    first, *others = await asyncio.gather(*calls)
    assert first.finish_reason == "abort" or len(first.token_ids) > 0
    assert all(r.finish_reason in ("stop", "length") for r in others)


async def test_an_abort_right_after_the_call_ends_it(recompute: HttpEngine) -> None:
    # More than the server computes at once: the later ones wait in its queue.
    calls = ask(recompute, 64, PROMPT, LONG, "a")
    await asyncio.sleep(0)
    await recompute.abort([f"a{i}" for i in range(64)])
    results = await asyncio.gather(*calls)
    assert sum(r.finish_reason == "abort" for r in results) > 8
    for result in results:
        assert len(result.token_ids) == len(result.logprobs) == len(result.versions)


async def test_a_cancelled_call_frees_its_slot_at_once(recompute: HttpEngine) -> None:
    call = asyncio.gather(*await under_way(recompute, 32, "c"))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    taken_s = await in_server(recompute, lambda n: n == 0)
    assert taken_s < 3.5  # by itself the server looks for clients that went away every 4 s
    assert recompute.stats().running == 0


async def test_stats_count_what_went_through(recompute: HttpEngine) -> None:
    before = recompute.stats()
    results = await sample(recompute, 4, LONG)
    after = recompute.stats()
    assert after.requests_total - before.requests_total == 4
    assert after.tokens_total - before.tokens_total == sum(len(r.token_ids) for r in results)
    assert after.busy_s > before.busy_s
    assert after.capacity == 32


async def test_units_move_a_count_before_their_answer_is_finished(recompute: HttpEngine) -> None:
    """A worker takes an engine that samples nothing for long for a stuck one."""
    client = ServerClient("server", recompute.url, key=KEY)
    before = (await client.get("/v1/loads", Loads)).decoded
    await client.close()
    task = asyncio.create_task(recompute.generate(endless("counted")))
    await until(recompute, lambda load: Loads([load]).decoded > before)
    await recompute.pause()
    await until(recompute, lambda _: recompute.stats().decoded > before)
    assert not task.done()
    await recompute.resume()
    await task
