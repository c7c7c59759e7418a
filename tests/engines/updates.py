"""Requests in flight while the weights of a real server change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from areal_async.trajectory import Sampling
from rollout_service.engines.base import GenerateRequest, GenerateResult
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.replicas import exchange
from tests.engines.servers import TEXT, ask
from tests.waiting import deadline_s

LIMIT_S = deadline_s(300)
EOS = 1


def text_of(ids: Any) -> str:
    """Text without padding (0) and the end (1)."""
    return "".join("<unk>" if i == 2 else TEXT[i - 3] for i in ids if i > 1)


def endless(name: str) -> GenerateRequest:
    """A request whose answer takes 500 units: under version 0 the likeliest id never is the end
    (`test_an_answer_may_be_as_long_as_was_asked_for`)."""
    return GenerateRequest(name, [4], Sampling(temperature=0.0, max_new_tokens=500))


async def begun(engine: HttpEngine, name: str) -> asyncio.Task[GenerateResult]:
    """An endless request, once its first units have come."""
    first = asyncio.Event()
    task = asyncio.create_task(engine.generate(endless(name), lambda _: first.set()))
    task.add_done_callback(lambda _: first.set())
    await asyncio.wait_for(first.wait(), LIMIT_S)
    if task.done():
        task.result()  # the error of a request that has failed
    return task


class Asked:
    """Requests in flight. The last is a stream, under way until the weights change, on any machine."""

    def __init__(self, engine: HttpEngine, prompt: Sequence[int], count: int, sampling: Sampling) -> None:
        self._engine = engine
        self._sampled = asyncio.Event()
        self.requests = [GenerateRequest(f"r{n}", list(prompt), sampling) for n in range(count)] + [
            endless("long")
        ]
        self.tasks = ask(engine, count, prompt, sampling)
        stream = engine.generate(self.requests[-1], lambda _: self._sampled.set())
        self.tasks.append(asyncio.create_task(stream))

    async def sampled(self) -> None:
        """Wait until the stream has another unit, or has ended."""
        self._sampled.clear()
        unit = asyncio.create_task(self._sampled.wait())
        either = [unit, self.tasks[-1]]
        done, _ = await asyncio.wait(either, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        unit.cancel()
        assert done

    async def under(self, snapshots: list[Any]) -> None:
        """Update to each of `snapshots`: to the first in mid-answer, and as long as the stream goes on."""
        for snapshot in snapshots:
            await self.sampled()
            await exchange(self._engine, snapshot)
            assert self._engine.version == snapshot.tag

    async def answers(self, *, whole: bool = True) -> list[tuple[GenerateRequest, GenerateResult]]:
        """The answers; `whole` ones end with the end of sequence or the length."""
        answers = list(zip(self.requests, await asyncio.gather(*self.tasks), strict=True))
        for request, result in answers if whole else []:
            assert result.finish_reason in ("stop", "length")
            assert (result.finish_reason == "stop") == (result.token_ids[-1] == EOS)
            asked_for = request.sampling.max_new_tokens
            assert result.finish_reason == "stop" or len(result.token_ids) == asked_for
        return answers
