"""Behaviour of a real vLLM server that SGLang's has not: seeds, priorities, exact log-probs of a kept cache,
and the loss of a server that was given weights it cannot load."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from areal_async.base.versions import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineLost, GenerateRequest, GenerateResult
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.replicas import exchange
from tests.engines.servers import VLLM, Kind, Model, Offer, ask, logprobs_under
from tests.engines.updates import Asked, text_of

pytestmark = pytest.mark.engine
PROMPT = list(VLLM.prompt)
SHORT = Sampling(temperature=1.0, max_new_tokens=32)


@pytest.fixture
def own(own_server: Callable[[Kind], HttpEngine], vllm_model: Model, run: Callable[..., Any]) -> HttpEngine:
    """The engine that owns the server; it serves version 0."""
    engine = own_server(VLLM)
    run(exchange(engine, vllm_model.snapshot(0, VLLM.epoch)))
    return engine


@pytest.fixture
def vllm_model(model_of: Callable[[Kind], Model]) -> Model:
    return model_of(VLLM)


@pytest.fixture
def keeping(
    own: HttpEngine, vllm_model: Model, run: Callable[..., Any], tmp_path: Path
) -> Iterator[HttpEngine]:
    """A second engine, attached to a server that another one left paused."""
    engine = VLLM.make(vllm_model, tmp_path, url=own.url, update_mode="keep")
    run(own.pause())
    run(engine.start(vllm_model.snapshot(0, VLLM.epoch)))
    yield engine
    run(engine.stop())


async def test_greedy_and_sampled_requests_in_one_batch_do_not_mix(
    own: HttpEngine, vllm_model: Model
) -> None:
    asked = [replace(SHORT, temperature=0.5 * (i % 2), seed=i) for i in range(16)]
    calls = [own.generate(GenerateRequest(f"r{i}", PROMPT, how)) for i, how in enumerate(asked)]
    for i, result in enumerate(await asyncio.gather(*calls)):
        vllm_model.assert_true(PROMPT, result, 0.5 if i % 2 else 1.0)


async def test_a_seed_gives_the_same_ids_again_and_another_gives_others(own: HttpEngine) -> None:
    async def answers(*seeds: int) -> list[list[int]]:
        requests = [
            GenerateRequest(f"r{n}", PROMPT, replace(SHORT, seed=seed)) for n, seed in enumerate(seeds)
        ]
        return [result.token_ids.tolist() for result in await asyncio.gather(*map(own.generate, requests))]

    first = await answers(5, 6, 5 + 2**32, 5 + 2**63, -1, 2**64 - 1)
    assert first == await answers(5, 6, 5 + 2**32, 5 + 2**63, -1, 2**64 - 1)
    # -1 and 2^64 - 1 are one number in 64 bits; all others differ, also where only high bits do.
    assert len({tuple(ids) for ids in first}) == 5


async def test_seeded_prompts_of_more_tokens_than_one_step_takes_are_served(own: HttpEngine) -> None:
    """A server on a CPU would die of a prompt that is begun in one step and ended in the next."""
    prompts = [[3 + (i * j) % 12 for j in range(300)] for i in range(32)]
    how = Sampling(max_new_tokens=3)
    calls = [
        own.generate(GenerateRequest(f"r{i}", ids, replace(how, seed=i))) for i, ids in enumerate(prompts)
    ]
    assert all(result.token_ids.size for result in await asyncio.gather(*calls))
    assert own.alive()


async def test_of_what_waits_the_smaller_priority_goes_first(own: HttpEngine) -> None:
    ended: list[int] = []
    numbers = itertools.count()

    async def generate(priority: int, **sampling: Any) -> None:
        how = Sampling(**sampling)
        await own.generate(GenerateRequest(f"p{next(numbers)}", PROMPT, how, priority=priority))
        ended.append(priority)

    async with asyncio.TaskGroup() as group:
        # Twice what the server computes at once, long, and none ending with another: whatever comes after it
        # has to wait, and gets a place that one answer leaves.
        for n in range(128):
            group.create_task(generate(5, temperature=0.0, max_new_tokens=400 + 4 * n))
        for seed in range(64):
            group.create_task(generate(9, seed=seed, max_new_tokens=1))
        for seed in range(16):
            group.create_task(generate(1, seed=seed, max_new_tokens=1))
    first_of_nine = ended.index(9)
    assert ended[:first_of_nine].count(1) == 16
    # All 64 that wait have their place before it. A busy client may see some answers after it.
    assert ended[:first_of_nine].count(5) > 32


@torch.no_grad()
def kept_logits(model: Model, prompt: Sequence[int], result: GenerateResult) -> torch.Tensor:
    """As `Model.logits`, of an answer whose KV survived its updates: what was fed stays as it was made."""
    ids = result.token_ids.tolist()
    cuts = [0, *(np.flatnonzero(np.diff(result.versions)) + 1).tolist(), len(ids)]
    past, rows = None, []
    for start, stop in itertools.pairwise(cuts):
        fed = [*prompt, *ids[: stop - 1]] if start == 0 else ids[start - 1 : stop - 1]
        network = model.network(VersionTag("policy", VLLM.epoch, int(result.versions[start])))
        out = network(torch.tensor([fed]), past_key_values=past, use_cache=True)
        past = out.past_key_values
        rows.append(out.logits[0, -(stop - start) :].double())
    return torch.cat(rows)


async def test_log_probs_of_a_kept_cache_are_exact_for_what_it_is(
    keeping: HttpEngine, vllm_model: Model
) -> None:
    asked = Asked(keeping, PROMPT, 24, replace(SHORT, max_new_tokens=300))
    await asked.under([vllm_model.snapshot(1, VLLM.epoch), vllm_model.snapshot(2, VLLM.epoch)])
    crossed = 0
    for request, result in await asked.answers():
        crossed += len(set(result.versions.tolist())) > 1
        expected = logprobs_under(kept_logits(vllm_model, request.prompt_ids, result), result)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
    assert crossed


async def test_a_stop_string_over_an_update_is_found(own: HttpEngine, vllm_model: Model) -> None:
    stops = ("77", "12", "903")
    asked = Asked(own, PROMPT, 24, replace(SHORT, max_new_tokens=300, stop=stops))
    await asked.under([vllm_model.snapshot(version, VLLM.epoch) for version in (1, 2, 0)])
    for request, result in await asked.answers(whole=False):
        if request.sampling.stop:
            whole = text_of(result.token_ids)
            first = min((at + len(s) for s in stops if (at := whole.find(s)) >= 0), default=None)
            assert first is None or (first == len(whole) and result.finish_reason == "stop")
            assert not any(stop in result.text for stop in stops)


async def test_weights_that_another_loaded_end_the_engine_and_not_the_truth(
    own: HttpEngine, vllm_model: Model, keeping: HttpEngine
) -> None:
    # `keeping` took the server with the same version: the units are still not taken for its own.
    await exchange(own, vllm_model.snapshot(0, VLLM.epoch))
    with pytest.raises(EngineLost, match="did not load"):
        await keeping.generate(GenerateRequest("r", PROMPT, SHORT))
    assert not keeping.alive()
    with pytest.raises(EngineLost):
        await keeping.generate(GenerateRequest("again", PROMPT, SHORT))


async def test_a_load_that_fails_loses_the_engine_and_a_start_serves_the_newest(
    own: HttpEngine, vllm_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A snapshot that the server fails on, and that our own look at it lets pass.
    monkeypatch.setattr("rollout_service.engines.http.engine.check_folder", lambda *_: None)
    bad = tmp_path / "foreign"
    shutil.copytree(vllm_model.snapshot(1, VLLM.epoch).path, bad)
    save_file(
        load_file(bad / "model.safetensors") | {"model.other.weight": torch.zeros(3)},
        bad / "model.safetensors",
    )
    tasks = ask(own, 48, PROMPT, replace(SHORT, max_new_tokens=400))
    asked = Asked(own, PROMPT, 0, SHORT)
    await asked.sampled()
    with pytest.raises(EngineLost):
        await exchange(own, Offer(bad, VersionTag("policy", VLLM.epoch, 1)))
    outcomes = await asyncio.gather(*tasks, *asked.tasks, return_exceptions=True)
    assert all(isinstance(outcome, GenerateResult | EngineLost) for outcome in outcomes)
    assert any(isinstance(outcome, EngineLost) for outcome in outcomes)
    assert not own.alive()
    await own.start(vllm_model.snapshot(2, VLLM.epoch))
    result = await own.generate(GenerateRequest("after", PROMPT, SHORT))
    assert own.alive()
    assert (result.versions == 2).all()
    vllm_model.assert_true(PROMPT, result)
