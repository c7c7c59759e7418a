"""The engine `vllm` on a real server: requests."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from rollout_service.engines.base import RequestError
from rollout_service.engines.vllm.adapter import TRIAL, VllmAdapter
from rollout_service.engines.vllm.messages import Answer, generate_body
from tests.engines.vllm.served import MAX_MODEL_LEN, PROMPT, Served, tag, worst

pytestmark = pytest.mark.engine


def cut(raw: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Logits with all but the `top_k` largest, then all outside the smallest set of probability `top_p`,
    at -inf."""
    order = raw.argsort(-1, descending=True)
    ranked = raw.gather(-1, order)
    ranked[:, top_k:] = -torch.inf
    probabilities = ranked.softmax(-1)
    ranked[(probabilities.cumsum(-1) - probabilities) >= top_p] = -torch.inf
    return torch.empty_like(raw).scatter(-1, order, ranked)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_log_probs_are_of_the_distribution_sampled_from(served: Served, temperature: float) -> None:
    for result in await served.many(8, temperature=temperature):
        served.model.assert_true(PROMPT, result, temperature)
        assert result.logprobs_of == "sampled"
        assert (result.versions == 0).all()
        assert (result.epochs == 1).all()


async def test_top_k_and_top_p_are_in_the_log_probs(served: Served) -> None:
    for top_k, top_p in ((3, 1.0), (0, 0.7), (5, 0.8)):
        for result in await served.many(8, temperature=0.8, top_k=top_k, top_p=top_p):
            raw = served.model.logits(tag(0), PROMPT, result) / 0.8
            expected = cut(raw, top_k or 16, top_p)
            assert worst(result, expected) < 1e-4
            assert result.logprobs_of == "sampled"


async def test_greedy_takes_the_most_likely_id_and_gives_its_raw_log_prob(served: Served) -> None:
    (result,) = await served.many(1, temperature=0.0)
    expected = served.model.logits(tag(0), PROMPT, result)
    assert result.token_ids.tolist() == expected.argmax(-1).tolist()
    served.model.assert_true(PROMPT, result)
    assert result.logprobs_of == "raw"


async def test_greedy_and_sampled_requests_in_one_batch_do_not_mix(served: Served) -> None:
    requests = [served.request(temperature=0.5 * (i % 2), seed=i) for i in range(16)]
    results = await asyncio.gather(*map(served.engine.generate, requests))
    for i, result in enumerate(results):
        served.model.assert_true(PROMPT, result, 0.5 if i % 2 else 1.0)


async def test_an_end_of_sequence_is_among_the_ids_and_not_in_the_text(served: Served) -> None:
    results = await served.many(48, max_new_tokens=200)
    ended = [result for result in results if result.finish_reason == "stop"]
    assert ended
    for result in ended:
        assert result.token_ids[-1] == 1
        assert (result.token_ids[:-1] != 1).all()
        assert result.text == served.text(result.token_ids)
        assert "eos" not in result.text
    for result in results:
        assert result.finish_reason != "length" or result.token_ids.size == 200


async def test_a_stop_string_ends_the_answer_and_only_its_text_is_cut(served: Served) -> None:
    stops = ("7", "12")
    results = await served.many(48, max_new_tokens=100, stop=stops)
    stopped = [r for r in results if r.finish_reason == "stop" and r.token_ids[-1] != 1]
    assert stopped
    for result in stopped:
        whole = served.text(result.token_ids)
        assert any(whole == result.text + stop for stop in stops)
    for result in results:
        assert not any(stop in result.text for stop in stops)


async def test_a_seed_gives_the_same_ids_again_and_another_gives_others(served: Served) -> None:
    async def ask(*seeds: int) -> list[list[int]]:
        requests = [served.request(seed=seed) for seed in seeds]
        results = await asyncio.gather(*map(served.engine.generate, requests))
        return [result.token_ids.tolist() for result in results]

    first = await ask(5, 6, 5 + 2**32, 5 + 2**63, -1, 2**64 - 1)
    again = await ask(5, 6, 5 + 2**32, 5 + 2**63, -1, 2**64 - 1)
    assert first == again
    # -1 and 2^64 - 1 are one number in 64 bits; all others differ, also where only high bits do.
    assert len({tuple(ids) for ids in first}) == 5


async def test_seeded_prompts_of_more_tokens_than_one_step_takes_are_served(served: Served) -> None:
    """Of a prompt that is begun in one step and ended in the next, the server on a CPU would die."""
    prompts = [[3 + (i * j) % 12 for j in range(300)] for i in range(32)]
    requests = [served.request(prompt, seed=i, max_new_tokens=3) for i, prompt in enumerate(prompts)]
    results = await asyncio.gather(*map(served.engine.generate, requests))
    assert all(result.token_ids.size for result in results)
    assert served.engine.alive()


async def test_an_answer_ends_at_the_model_s_last_position(served: Served) -> None:
    request = served.endless()
    result = await served.engine.generate(request)
    length = len(request.prompt_ids) + result.token_ids.size
    assert (length, result.finish_reason) == (MAX_MODEL_LEN, "length")


@pytest.mark.parametrize(
    ("prompt", "sampling", "word"),
    [
        ([3, 16], {}, "vocabulary"),
        ([3, -1], {}, "vocabulary"),
        ([], {}, "at least one"),
        ([3] * MAX_MODEL_LEN, {}, "max_model_len"),
        ([3], {"temperature": 0.001}, "temperature"),
        ([3], {"top_p": 0.0}, "top_p"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_and_touches_no_other(
    served: Served, prompt: list[int], sampling: dict[str, float], word: str
) -> None:
    (other,) = served.tasks(1, max_new_tokens=100)
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match=word):
        await served.engine.generate(served.request(prompt, **sampling))
    assert (await other).token_ids.size


async def test_what_only_the_server_refuses_is_a_request_error_too(served: Served) -> None:
    outside = generate_body("outside", [99], TRIAL, 1, cache_salt="x", priority=0)

    async with served.client() as client:
        with pytest.raises(RequestError, match="out of vocabulary"):
            await client.post(VllmAdapter.generate_path, outside, Answer)
    assert served.engine.alive()


async def test_an_aborted_request_returns_what_it_has_and_the_others_go_on(served: Served) -> None:
    gone, other = served.endless(), served.endless()
    before = await served.sampled()
    tasks = [asyncio.create_task(served.engine.generate(request)) for request in (gone, other)]
    await served.progress(4, since=before)
    await served.engine.pause()
    await served.engine.abort([gone.request_id, "unknown"])
    await served.engine.abort([])
    first = await tasks[0]
    before = await served.sampled()
    await served.engine.resume()
    await served.progress(first.token_ids.size + 1, since=before)
    await served.engine.abort([other.request_id])
    second = await tasks[1]
    assert 0 < first.token_ids.size < second.token_ids.size
    for result in (first, second):
        assert result.finish_reason == "abort"
        served.model.assert_true(PROMPT, result)


async def test_a_cancelled_call_frees_its_place_in_the_server(served: Served) -> None:
    before = await served.sampled()
    task = asyncio.create_task(served.engine.generate(served.endless()))
    await served.progress(1, since=before)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await served.running(0)
    assert await served.sampled() - before < MAX_MODEL_LEN / 2


async def test_a_stream_that_is_closed_frees_its_place_in_the_server(served: Served) -> None:
    before, begun = await served.sampled(), asyncio.Event()
    stream = asyncio.create_task(served.engine.generate(served.endless(), lambda _: begun.set()))
    await begun.wait()
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    await served.running(0)
    assert await served.sampled() - before < MAX_MODEL_LEN / 2


async def test_a_request_held_during_an_update_can_be_aborted(served: Served) -> None:
    await served.engine.pause()
    request = served.request()
    task = asyncio.create_task(served.engine.generate(request))
    await asyncio.sleep(0)
    await served.engine.abort([request.request_id])
    result = await task
    await served.engine.resume()
    assert (result.finish_reason, result.token_ids.size, result.text) == ("abort", 0, "")


async def test_the_counters_follow_the_requests(served: Served) -> None:
    before = served.engine.stats()
    await served.many(10)
    after = served.engine.stats()
    assert after.requests_total - before.requests_total == 10
    assert (after.running, after.waiting, after.capacity) == (0, 0, 64)
    assert after.busy_s > before.busy_s
    assert np.isfinite(after.kv_used)
    expected = after.tokens_total + sum(r.token_ids.size for r in await served.many(20))
    await served.until(lambda: served.engine.stats().tokens_total >= expected)


async def test_units_are_counted_before_their_answer_is_finished(served: Served) -> None:
    """A worker takes an engine that samples nothing for long for a stuck one."""
    sampled_before = await served.sampled()
    request = served.endless()
    task = asyncio.create_task(served.engine.generate(request))
    await served.until(lambda: served.engine.stats().decoded > sampled_before)
    assert not task.done()
    await served.engine.abort([request.request_id])
    await task


async def test_of_what_waits_the_smaller_priority_goes_first(served: Served) -> None:
    ended: list[int] = []

    async def ask(priority: int, **sampling: float) -> None:
        await served.engine.generate(served.request(priority=priority, **sampling))
        ended.append(priority)

    async with asyncio.TaskGroup() as group:
        # Twice what the server computes at once, long, and none ending with another: whatever comes after it
        # has to wait, and gets a place that one answer leaves.
        for n in range(128):
            group.create_task(ask(5, temperature=0.0, max_new_tokens=400 + 4 * n))
        for seed in range(64):
            group.create_task(ask(9, seed=seed, max_new_tokens=1))
        for seed in range(16):
            group.create_task(ask(1, seed=seed, max_new_tokens=1))
    first_of_nine = ended.index(9)
    assert ended[:first_of_nine].count(1) == 16
    # All 64 that wait have their place before it. A busy client may see some answers after it.
    assert ended[:first_of_nine].count(5) > 32
