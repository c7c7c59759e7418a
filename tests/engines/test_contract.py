"""What every server engine promises, against the recorded answers of the servers (`make test`) and against
the servers themselves (`make test-engines`). Traps of the servers that are covered here:

- defaults of the model's generation config take part in sampling
- SGLang's log-probs are of the temperature, never of top-p and top-k
- SGLang ends an answer two tokens before the context length and refuses a long prompt six tokens before it
- SGLang's abort matches every request whose id begins so, and is forgotten if it overtakes its request
- SGLang's pause aborts by default; paused, `/health` does not answer, and a request that is sent cannot be
  aborted
- in place, an update that flushes the cache is refused after the weights were changed
- in place, prefixes cached under old weights serve new requests
- vLLM on a CPU leaves a tied output layer out of its own reload
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from areal_async.base.versions import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, GenerateRequest, RequestError
from rollout_service.engines.http.adapter import read_layout
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.sglang import messages as sglang
from rollout_service.engines.sglang.adapter import Loads
from rollout_service.engines.vllm import messages as vllm
from rollout_service.engines.vllm.adapter import TRIAL, VllmAdapter
from rollout_service.replicas import exchange
from tests.engines.conftest import Served
from tests.engines.record import FIX, pins_of, recorded
from tests.engines.servers import KEY, KINDS, SGLANG, VLLM, Kind, Offer, ask
from tests.engines.sessions import assert_sessions_keep_their_cache, assert_turns_are_recomputed
from tests.engines.updates import EOS, LIMIT_S, begun, endless, text_of

SHORT = Sampling(temperature=1.0, max_new_tokens=24)


@contextlib.asynccontextmanager
async def talking(served: Served) -> AsyncIterator[ServerClient]:
    """A client of the server beside the engine."""
    client = ServerClient("server", served.url, key=KEY)
    try:
        yield client
    finally:
        await client.close()


async def requests_in(client: ServerClient, kind: Kind) -> int:
    """Number of requests in the server."""
    if kind is SGLANG:
        (load,) = (await client.get("/v1/loads", Loads)).loads
        return load.num_running_reqs + load.num_waiting_reqs
    _, content = await client.request("GET", "/metrics")
    counts = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    lines = [line for line in content.decode().splitlines() if line.startswith(counts)]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


@pytest.mark.parametrize("engine", KINDS)
def test_answers_are_recorded_of_the_environment_that_is_installed(engine: str) -> None:
    found = recorded(engine)
    releases = sglang.RELEASES if engine == "sglang" else vllm.RELEASES
    assert found.release.startswith(tuple(releases)), FIX
    assert found.pins == pins_of(engine), (
        f"engines/{engine} has changed since its answers were recorded: {FIX}"
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_log_probs_are_of_the_distribution_sampled_from(served: Served, temperature: float) -> None:
    how = Sampling(temperature=temperature, max_new_tokens=24)
    async with served.engine() as engine:
        results = await asyncio.gather(*ask(engine, 4, served.prompt, how))
    for result in results:
        served.model.assert_true(served.prompt, result, temperature or 1.0)
        assert set(zip(result.epochs.tolist(), result.versions.tolist(), strict=True)) == {
            (served.kind.epoch, 0)
        }
        greedy = "raw" if served.kind is VLLM else "sampled"
        assert result.logprobs_of == (greedy if temperature == 0 else "sampled")
    if temperature:
        assert len({tuple(result.token_ids) for result in results}) > 2  # the model's own defaults are greedy
    else:
        logits = served.model.logits(VersionTag("policy", served.kind.epoch, 0), served.prompt, results[0])
        assert results[0].token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.7), (5, 0.8)])
async def test_top_k_and_top_p_cut_what_is_sampled(served: Served, top_k: int, top_p: float) -> None:
    how = Sampling(temperature=0.8, top_k=top_k, top_p=top_p, max_new_tokens=24)
    async with served.engine() as engine:
        results = await asyncio.gather(*ask(engine, 4, served.prompt, how))
    for result in results:
        raw = served.model.logits(VersionTag("policy", served.kind.epoch, 0), served.prompt, result) / 0.8
        cut = cut_off(raw, top_k or raw.shape[1], top_p)
        own = np.arange(len(result.token_ids)), result.token_ids
        # SGLang takes both sets from the whole distribution, vLLM the second from what the first leaves.
        sets = [cut_off(raw, top_k or raw.shape[1], 1.0), cut_off(raw, raw.shape[1], top_p)]
        for each in sets if served.kind is SGLANG else [cut]:
            assert torch.isfinite(each[own]).all()
        stated, of = (raw, "temperature") if served.kind is SGLANG else (cut, "sampled")
        np.testing.assert_allclose(result.logprobs, stated.log_softmax(-1)[own], atol=1e-4)
        assert result.logprobs_of == of


def cut_off(raw: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Logits with all but the `top_k` largest, then all outside the smallest set of probability `top_p`,
    at -inf."""
    order = raw.argsort(-1, descending=True)
    ranked = raw.gather(-1, order)
    ranked[:, top_k:] = -torch.inf
    probabilities = ranked.softmax(-1)
    ranked[(probabilities.cumsum(-1) - probabilities) >= top_p] = -torch.inf
    return torch.empty_like(raw).scatter(-1, order, ranked)


async def test_an_end_of_sequence_is_among_the_ids_and_not_in_the_text(served: Served) -> None:
    how = Sampling(temperature=1.0, max_new_tokens=60 if served.kind is SGLANG else 200)
    async with served.engine() as engine:
        results = await asyncio.gather(*ask(engine, 24, served.prompt, how))
    assert {result.finish_reason for result in results} >= {"stop"}
    for result in results:
        assert EOS not in result.token_ids[:-1]
        assert (result.finish_reason == "stop") == (result.token_ids[-1] == EOS)
        assert result.finish_reason == "stop" or len(result.token_ids) == how.max_new_tokens
        assert result.text == text_of(result.token_ids)


async def test_a_stop_string_ends_the_answer_and_is_cut_from_the_text_alone(served: Served) -> None:
    stops = ("7", "+-")
    async with served.engine() as engine:
        results = await asyncio.gather(
            *ask(engine, 24, served.prompt, Sampling(max_new_tokens=60, stop=stops))
        )
    by_string = [r for r in results if r.finish_reason == "stop" and r.token_ids[-1] != EOS]
    assert by_string
    for result in by_string:
        assert any(text_of(result.token_ids) == result.text + stop for stop in stops)
    assert not any(stop in result.text for result in results for stop in stops)


async def test_prompt_and_answer_fill_the_models_length(served: Served) -> None:
    length = served.kind.length
    async with served.engine() as engine:
        for size in (length - 6, length - 2, length - 1):
            results = await asyncio.gather(*ask(engine, 6, [6] * size, SHORT, f"s{size}."))
            assert max(len(r.token_ids) for r in results) == length - size
            assert any(r.finish_reason == "length" for r in results)


async def test_an_answer_may_be_as_long_as_was_asked_for(served: Served) -> None:
    async with served.engine() as engine:
        result = await engine.generate(endless("long"))
    assert (len(result.token_ids), result.finish_reason) == (500, "length")


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([5, 16], SHORT, "token id 16 is not in the model's vocabulary of 16 ids"),
        ([-1], SHORT, "token id -1"),
        ([], SHORT, "at least one token id"),
        ([1.5], SHORT, "at least one token id"),
        ([6] * 4096, SHORT, "max_model_len|leaves no room"),
        ([3], Sampling(temperature=0.001), "temperature"),
        ([3], Sampling(top_p=0.0), "top_p"),
    ],
    ids=["above", "below", "empty", "fraction", "long", "cold", "top_p"],
)
async def test_a_request_that_cannot_be_served_is_refused_and_touches_no_other(
    served: Served, prompt: Any, sampling: Sampling, words: str
) -> None:
    async with served.engine() as engine:
        (other,) = ask(engine, 1, served.prompt, SHORT)
        await asyncio.sleep(0)
        if words == "temperature" and served.kind is SGLANG:  # it takes any
            cold = replace(sampling, max_new_tokens=4)
            assert (await engine.generate(GenerateRequest("cold", prompt, cold))).token_ids.size
        else:
            with pytest.raises(RequestError, match=words):
                await engine.generate(GenerateRequest("bad", prompt, sampling))
        assert (await other).token_ids.size
        assert engine.alive()


async def test_what_only_the_server_refuses_is_a_request_error_too(served: Served) -> None:
    path: str
    body: dict[str, Any]
    async with served.engine() as engine, talking(served) as client:
        if served.kind is VLLM:
            path = VllmAdapter.generate_path
            body = vllm.generate_body("outside", [99], TRIAL, 1, cache_salt="x", priority=0)
        else:  # it would die of the id
            path = "/generate"
            body = sglang.generate_body("long", [6] * 600, SHORT, 1, cache_key=None)
        with pytest.raises(RequestError):
            await client.post(path, body, dict)
        assert engine.alive()


async def test_a_streamed_answer_is_the_one_that_is_not_streamed(served: Served) -> None:
    told: list[int] = []
    one = GenerateRequest("r", served.prompt, Sampling(temperature=0.0, max_new_tokens=40))
    async with served.engine() as engine:
        whole = await engine.generate(one)
        streamed = await engine.generate(one, lambda piece: told.extend(piece.tolist()))
        stop = streamed.text[4:6]
        cut = Sampling(temperature=0.0, max_new_tokens=40, stop=(stop,))
        ended = await engine.generate(GenerateRequest("r", served.prompt, cut), lambda piece: None)
    assert whole.token_ids.tolist() == streamed.token_ids.tolist()
    assert abs(whole.logprobs - streamed.logprobs).max() < 1e-4
    assert (whole.text, whole.finish_reason) == (streamed.text, streamed.finish_reason)
    assert whole.versions.tolist() == streamed.versions.tolist()
    assert len(told) >= len(streamed.token_ids) - 1
    assert told == streamed.token_ids[: len(told)].tolist()
    assert (ended.text, ended.finish_reason) == (streamed.text[: streamed.text.index(stop)], "stop")


async def test_an_aborted_request_returns_what_it_has_and_the_others_go_on(served: Served) -> None:
    async with served.engine() as engine:
        # Ids of which one begins the others, as SGLang matches them.
        tasks = [await begun(engine, name) for name in ("r1", "r10", "r1x")]
        await engine.abort(["r1", "unknown"])
        await engine.abort([])
        first = await tasks[0]
        others = await asyncio.gather(*tasks[1:])
    assert first.finish_reason == "abort"
    assert 0 < len(first.token_ids) < 500
    served.model.assert_true([4], first)
    assert first.text == text_of(first.token_ids)
    for result in others:
        assert (result.finish_reason, len(result.token_ids)) == ("length", 500)


async def test_an_abort_right_after_the_call_ends_it(served: Served) -> None:
    async with served.engine() as engine:
        # More than the server computes at once: the later ones wait in its queue.
        calls = [asyncio.create_task(engine.generate(endless(f"a{n}"))) for n in range(served.kind.slots + 4)]
        await asyncio.sleep(0)
        await engine.abort([f"a{n}" for n in range(len(calls))])
        results = await asyncio.gather(*calls)
    assert all(result.finish_reason == "abort" for result in results)
    for result in results:
        assert len(result.token_ids) == len(result.logprobs) == len(result.versions)


async def test_a_cancelled_call_frees_its_place_in_the_server(served: Served) -> None:
    async with served.engine() as engine, talking(served) as client:
        tasks = [await begun(engine, name) for name in ("one", "two")]
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        async with asyncio.timeout(LIMIT_S):
            while await requests_in(client, served.kind):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert engine.stats().running == 0


async def test_a_request_called_during_a_pause_can_be_aborted(served: Served) -> None:
    async with served.engine() as engine:
        before = await begun(engine, "before")
        await engine.pause()
        held = ask(engine, 2, served.prompt, SHORT, "held")
        await asyncio.sleep(0)
        await engine.abort(["held0"])
        aborted = await held[0]
        await engine.resume()
        served_after, whole = await held[1], await before
    assert (aborted.finish_reason, aborted.token_ids.size, aborted.text) == ("abort", 0, "")
    assert served_after.finish_reason in ("stop", "length")
    assert (len(whole.token_ids), whole.finish_reason) == (500, "length")
    served.model.assert_true([4], whole)


async def test_a_stream_that_a_pause_holds_is_aborted_with_what_was_told(served: Served) -> None:
    told: list[int] = []
    first = asyncio.Event()

    def tell(piece: Any) -> None:
        told.extend(piece.tolist())
        first.set()

    async with served.engine() as engine:
        task = asyncio.create_task(engine.generate(endless("s"), tell))
        await asyncio.wait_for(first.wait(), LIMIT_S)
        await engine.pause()
        await engine.abort(["s"])
        result = await task
        await engine.resume()
    assert result.finish_reason == "abort"
    assert told == result.token_ids[: len(told)].tolist()
    assert len(told) >= len(result.token_ids) - 1
    assert result.text == text_of(result.token_ids)


async def test_a_paused_server_is_alive(served: Served) -> None:
    async with served.engine() as engine, talking(served) as client:
        await engine.pause()
        probed = await client.serves(engine._adapter.alive_path, timeout_s=LIMIT_S)
        assert (probed, engine.alive()) == (True, True)
        await engine.resume()


async def test_versions_are_true_when_the_cache_is_recomputed(served: Served) -> None:
    snapshot = served.model.snapshot(1, served.kind.epoch)
    new = Offer(snapshot.path, snapshot.tag)  # an update needs the directory alone
    async with served.engine() as engine:
        others = ask(engine, 6, served.prompt, SHORT)
        long = await begun(engine, "long")
        with pytest.raises(EngineError, match="paused"):
            await engine.load(new)
        await exchange(engine, new)
        assert engine.version == new.tag
        late = await engine.generate(GenerateRequest("late", served.prompt, SHORT))
        results = await asyncio.gather(*others)
        crossed = await long
    assert set(late.versions) == {1}
    assert set(crossed.versions) == {0, 1}
    served.model.assert_true([4], crossed)
    for result in (*results, late):
        assert result.finish_reason in ("stop", "length")
        served.model.assert_true(served.prompt, result)


async def test_versions_are_true_when_the_cache_is_kept(served: Served) -> None:
    new = served.model.snapshot(1, served.kind.epoch)
    async with served.engine("keep") as engine:
        await asyncio.gather(*ask(engine, 2, served.prompt, SHORT, "cached"))
        crossing = await begun(engine, "long")
        await exchange(engine, new)
        # Prefixes that were cached under the old weights are for nobody who comes now.
        late = await asyncio.gather(*ask(engine, 3, served.prompt, SHORT, "late"))
        crossed = await crossing
    assert set(crossed.versions) == {0, 1}
    assert (np.diff(crossed.versions) >= 0).all()
    # Up to the update all is as ever; after it the cache is of older weights, and it shows.
    gap = np.abs(crossed.logprobs - served.model.logprobs([4], crossed))
    old = crossed.versions == 0
    assert gap[old].max() < 1e-4
    assert gap[~old].max() > 1e-3
    for result in late:
        assert set(result.versions) == {1}
        served.model.assert_true(served.prompt, result)


LONG_PROMPT = [3 + i * i % 12 for i in range(100)]
"""Three whole blocks of vLLM's prefix cache."""


async def test_a_session_keeps_its_cache_over_an_update(served: Served) -> None:
    kind = served.kind
    async with served.engine("session") as engine:
        await assert_sessions_keep_their_cache(
            engine, served.model, LONG_PROMPT, epoch=kind.epoch, block=kind.block
        )


async def test_recompute_serves_a_second_turn_from_no_cache(served: Served) -> None:
    async with served.engine() as engine:
        await assert_turns_are_recomputed(engine, served.model, LONG_PROMPT, epoch=served.kind.epoch)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda norm: {NORM: None}, "lacks"),
        (lambda norm: {NORM: norm[:3].clone()}, "in another form"),
        (lambda norm: {NORM: norm.to(torch.bfloat16)}, "in another form"),
        (lambda norm: {"model.other.weight": norm.clone()}, "has besides model.other"),
        (None, "cut short"),
    ],
    ids=["less", "shape", "dtype", "more", "torn"],
)
async def test_a_snapshot_that_does_not_fit_changes_nothing(
    served: Served, change: Any, words: str, tmp_path: Path
) -> None:
    good = served.model.snapshot(1, served.kind.epoch)
    tensors = {name: good.tensors[name] for name in read_layout(good.path)}
    altered = tensors if change is None else tensors | change(tensors[NORM])
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in altered.items() if tensor is not None}, file)
    if change is None:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    async with served.engine() as engine:
        with pytest.raises(EngineError, match=r"no config\.json"):
            await exchange(engine, Offer(tmp_path, good.tag))
        (tmp_path / "config.json").write_bytes((good.path / "config.json").read_bytes())
        with pytest.raises(EngineError, match=words):
            await exchange(engine, Offer(tmp_path, good.tag))
        assert engine.version == VersionTag("policy", served.kind.epoch, 0)
        result = await engine.generate(GenerateRequest("still", served.prompt, SHORT))
    assert set(result.versions) == {0}
    served.model.assert_true(served.prompt, result)


async def test_counters_follow_the_requests(served: Served) -> None:
    async with served.engine() as engine:
        before = engine.stats()
        results = await asyncio.gather(*ask(engine, 4, served.prompt, SHORT))
        after = engine.stats()
    assert after.requests_total - before.requests_total == 4
    assert after.tokens_total - before.tokens_total == sum(len(r.token_ids) for r in results)
    assert after.busy_s > before.busy_s
    assert (after.running, after.capacity) == (0, served.kind.slots)


async def test_units_are_counted_before_their_answer_is_finished(served: Served) -> None:
    """A worker takes an engine that samples nothing for long for a stuck one."""
    async with served.engine() as engine, talking(served) as client:
        read = engine._adapter.read_load
        before = (await read(client)).decoded
        task = await begun(engine, "counted")
        async with asyncio.timeout(LIMIT_S):
            while (await read(client)).decoded <= before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not task.done()
        await engine.abort(["counted"])
        await task
