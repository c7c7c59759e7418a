"""The engine behind its protocol: a thread, an event loop, weights that change under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, GenerateRequest, RequestError
from rollout_service.engines.local.core import EngineCore
from rollout_service.engines.local.engine import NO_PASSES, LocalEngine, with_pass
from rollout_service.engines.local.model import LocalModel
from tests.unit.rollout.fakes import eventually
from tests.waiting import deadline_s

DEADLINE_S = deadline_s(120)


def request(name: object, prompt: list[int], **sampling: Any) -> GenerateRequest:
    return GenerateRequest(str(name), prompt, Sampling(**sampling))


@asynccontextmanager
async def running(made: Any, **how: Any) -> AsyncIterator[LocalEngine]:
    """A started engine, within a deadline; it is stopped after."""
    engine: LocalEngine = made.engine(**how)
    await engine.start(made.weights(0))
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield engine
    finally:
        await engine.stop()


class Steps:
    """Lets the engine of a test take as many steps as it says."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._allowed = threading.Semaphore(0)
        step = EngineCore.step

        def allowed_step(core: EngineCore) -> Any:
            # Not for long: between two steps the engine is paused and loaded.
            return step(core) if self._allowed.acquire(timeout=0.001) else []

        patch.setattr(EngineCore, "step", allowed_step)

    def allow(self, count: int) -> None:
        self._allowed.release(count)


async def update(engine: LocalEngine, snapshot: Any) -> None:
    await engine.pause()
    await engine.load(snapshot)
    await engine.resume()


async def test_a_paused_engine_samples_nothing_and_holds_what_it_has(endless, monkeypatch):
    steps = Steps(monkeypatch)
    async with running(endless) as engine:
        call = asyncio.ensure_future(engine.generate(request("a", [3, 4], max_new_tokens=60)))
        steps.allow(10)
        await eventually(lambda: engine.stats().running)
        with pytest.raises(EngineError, match="paused"):
            await engine.load(endless.weights(1))
        await engine.pause()
        frozen = engine.stats().tokens_total
        steps.allow(1000)
        later = asyncio.ensure_future(engine.generate(request("b", [3, 4], max_new_tokens=2)))
        await eventually(lambda: engine.stats().waiting)
        assert engine.stats().tokens_total == frozen < 60
        await engine.load(endless.weights(3))
        assert engine.stats().tokens_total == frozen
        await engine.resume()
        first, second = await asyncio.gather(call, later)
        assert len(first.token_ids) == 60
        assert set(first.versions) == {0, 3}
        assert second.versions.tolist() == [3, 3]


async def test_one_bad_request_touches_no_other(endless: Any) -> None:
    async with running(endless) as engine:
        good = [engine.generate(request(i, [3, 4], max_new_tokens=20, seed=i)) for i in range(5)]
        bad = [
            engine.generate(request("x", [999_999])),
            engine.generate(request("y", [])),
            engine.generate(request("z", [3], temperature=-1.0)),
        ]
        results = await asyncio.gather(*good, *bad, return_exceptions=True)
        assert [len(r.token_ids) for r in results[:5]] == [20] * 5
        assert [type(r) for r in results[5:]] == [RequestError] * 3


async def test_a_failed_step_fails_its_requests_and_the_engine_lives_on(endless, monkeypatch):
    async with running(endless) as engine:
        monkeypatch.setattr(LocalModel, "hidden", lambda *_: 1 / 0)
        calls = [engine.generate(request(i, [3], max_new_tokens=4)) for i in range(3)]
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(r) for r in failed] == [EngineError] * 3
        assert "division by zero" in str(failed[0])
        monkeypatch.undo()
        assert len((await engine.generate(request("b", [3], max_new_tokens=4))).token_ids) == 4


async def test_an_engine_with_nothing_to_do_or_paused_is_not_busy(endless, monkeypatch):
    steps = Steps(monkeypatch)
    steps.allow(20)
    async with running(endless) as engine:

        def still() -> bool:
            return engine.stats().busy_s == engine.stats().busy_s

        await engine.generate(request("a", [3], max_new_tokens=20))
        assert engine.stats().busy_s > 0
        await eventually(still)
        call = asyncio.ensure_future(engine.generate(request("b", [3], max_new_tokens=80)))
        steps.allow(1)
        await eventually(lambda: engine.stats().running)
        await engine.pause()
        await eventually(still)
        await engine.resume()
        await eventually(lambda: not still())
        steps.allow(1000)
        await call
        await eventually(still)


async def test_stopping_ends_every_call(endless, monkeypatch):
    Steps(monkeypatch).allow(1)
    async with running(endless, slots=2) as engine:
        calls = [asyncio.ensure_future(engine.generate(request(i, [3], max_new_tokens=90))) for i in range(9)]
        await eventually(lambda: engine.stats().running)
        pausing = asyncio.ensure_future(engine.pause())
        await asyncio.sleep(0)
        await engine.stop()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(r) for r in results} == {EngineError}
        await pausing
        with pytest.raises(EngineError, match="stopped"):
            await engine.resume()


async def test_a_directory_without_a_model_and_a_length_beyond_its_positions_are_refused(tmp_path, tiny):
    for folder, length, says in ((tmp_path, 8, "Hugging Face dir"), (tiny.directory, 1000, "128 positions")):
        engine = LocalEngine(folder, slots=1, max_model_len=length)
        with pytest.raises(EngineError, match=says):
            await engine.start(tiny.weights(0))
        await engine.stop()


async def test_the_oldest_priority_goes_first_wherever_requests_wait(endless: Any) -> None:
    """One slot: answers come in the order of priorities, and among equals in that of their arrival."""
    order = [5, 3, 9, 1, 7, 3, 0, 8, 2, 6]
    finished: list[tuple[int, int]] = []

    async with running(endless, slots=1) as engine:
        await engine.pause()  # until all have arrived

        async def one(number: int, priority: int) -> None:
            asked = GenerateRequest(str(number), [3], Sampling(max_new_tokens=3), priority=priority)
            await engine.generate(asked)
            finished.append((priority, number))

        calls = [asyncio.ensure_future(one(n, p)) for n, p in enumerate(order)]
        await eventually(lambda: engine.stats().waiting == len(order))
        await engine.resume()
        await asyncio.gather(*calls)
    assert finished == sorted(finished)


async def test_a_cancelled_request_ends_waiting_or_begun_and_frees_its_place(endless: Any) -> None:
    async with running(endless, slots=2) as engine:
        await engine.pause()
        asked = [GenerateRequest(str(n), [3], Sampling(max_new_tokens=5)) for n in range(8)]
        calls = [asyncio.ensure_future(engine.generate(one)) for one in asked]
        await eventually(lambda: engine.stats().waiting == len(asked))
        for call in calls[1::2]:
            call.cancel()
        await engine.resume()
        for call in calls[::2]:
            assert len((await call).token_ids) == 5
        await eventually(lambda: engine.stats().running == engine.stats().waiting == 0)
        assert engine.stats().tokens_total == 4 * 5


async def test_a_call_without_a_task_has_the_answer_of_one_with_a_task_and_is_given_up_by_its_future(endless):
    async with running(endless, slots=2) as engine:
        one = GenerateRequest("one", [3], Sampling(max_new_tokens=5, seed=7))
        with_task = await engine.generate(one)
        without = await engine.begin(one)
        assert without.token_ids.tolist() == with_task.token_ids.tolist()
        await engine.pause()
        calls = [engine.begin(replace(one, request_id=str(number))) for number in range(4)]
        with pytest.raises(EngineError, match="in flight"):
            engine.begin(replace(one, request_id="1"))
        await eventually(lambda: engine.stats().waiting == len(calls))
        calls[0].cancel()
        calls[3].set_exception(EngineError("too late"))
        await eventually(lambda: engine.stats().waiting == 2)
        await engine.resume()
        for call in calls[1:3]:
            assert len((await call).token_ids) == 5
        await eventually(lambda: engine.stats().running == engine.stats().waiting == 0)
        with pytest.raises(RequestError):
            engine.begin(replace(one, prompt_ids=[]))


async def test_a_piece_is_told_at_every_step_and_updates_fall_between(endless, monkeypatch):
    asked, steps = request("s", [2, 5], max_new_tokens=20, seed=3), Steps(monkeypatch)
    pieces: list[Any] = []
    async with running(endless) as engine:
        answer = asyncio.ensure_future(engine.generate(asked, pieces.append))
        for number in range(1, 19):
            steps.allow(1)
            await eventually(lambda number=number: len(pieces) == number)
            assert not answer.done(), "the answer is far from complete"
            assert engine.stats().running == 1
            if number in (1, 5, 9):
                await update(engine, endless.weights(number))
        steps.allow(1)
        result = await answer
    assert [len(piece) for piece in pieces] == [2] + [1] * 17, "the first step begins and goes on"
    assert np.concatenate(pieces).tolist() == result.token_ids[:19].tolist()
    assert result.versions.tolist() == [0] * 2 + [1] * 4 + [5] * 4 + [9] * 10
    endless.assert_true(asked, result)


def test_the_costs_of_passes_are_kept_as_the_sums_that_least_squares_need() -> None:
    passes = with_pass(NO_PASSES, 3, 5, 2.0)
    assert passes == (1, 3, 1, 5, 9, 3, 15, 1, 5, 25, 2, 6, 2, 10)
