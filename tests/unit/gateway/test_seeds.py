"""Seeds of an agent's calls: the samples of a group differ, and each can be sampled again."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_service.gateway import Gateway
from tests.unit.gateway.fakes import CHAT, ROUTE, Scripted, http_of, made_gateway, make_context


async def seeds_of(
    gateway: Gateway, tokenizer: Any, sample: int, attempt: int = 0, calls: int = 1, **asked: Any
) -> list[int]:
    """The seeds that the engine was given by the calls of one episode, in their order."""
    engine = Scripted(tokenizer)
    episode = make_context(engine, tokenizer, gateway, sample=sample, attempt=attempt, tokens=8)
    async with episode.gateway() as session, http_of(session) as http:
        for _ in range(calls):
            assert (await http.post(ROUTE, json=CHAT | asked)).status_code == 200
    return [request.sampling.seed for request in engine.begun]


@pytest.mark.parametrize("asked", [{}, {"seed": 7}], ids=["job", "agent"])
async def test_the_samples_of_a_group_and_its_attempts_have_seeds_of_their_own(asked, tokenizer):
    with made_gateway(tokenizer) as gateway:
        places = [(sample, attempt) for sample in range(3) for attempt in range(2)]
        found = [await seeds_of(gateway, tokenizer, *place, **asked) for place in places]
        again = [await seeds_of(gateway, tokenizer, *place, **asked) for place in places]
        await gateway.close()
    assert len({seed for (seed,) in found}) == len(places)
    assert again == found, "what was sampled can be sampled again"


async def test_the_answers_and_the_calls_of_an_episode_have_seeds_of_their_own(tokenizer: Any) -> None:
    with made_gateway(tokenizer) as gateway:
        seeds = await seeds_of(gateway, tokenizer, 0, calls=3, n=4)
        await gateway.close()
    assert len(set(seeds)) == 12


async def test_a_seed_that_the_agent_names_repeats_and_tells_answers_apart(tokenizer: Any) -> None:
    with made_gateway(tokenizer) as gateway:
        first, second, other, *rest = await seeds_of(gateway, tokenizer, 0, calls=2, n=2, seed=7)
        by_another = await seeds_of(gateway, tokenizer, 0, n=2, seed=8)
        await gateway.close()
    assert (first, second) == (other, *rest)
    assert first != second
    assert not {first, second} & set(by_another)
