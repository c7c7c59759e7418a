"""Answers told while they are sampled: the local engine, a set of replicas, one episode's engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from areal_async.trajectory import Sampling
from rollout_service.engines.base import (
    DeadlinePassed,
    EngineError,
    GenerateRequest,
    GenerateResult,
)
from rollout_service.engines.local.core import EngineCore
from tests.unit.rollout.fakes import eventually
from tests.unit.rollout.fleet import FakeServer, Fleet, Snapshot, driven
from tests.unit.rollout.test_local_engine import request, running, until, update


async def collected(engine: Any, asked: GenerateRequest) -> tuple[list[Any], GenerateResult]:
    pieces: list[Any] = []
    result = await engine.generate(asked, pieces.append)
    return pieces, result


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


async def test_a_piece_is_told_at_every_step_and_updates_fall_between(
    endless: Any, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request("s", [2, 5], max_new_tokens=20, seed=3)
    steps = Steps(monkeypatch)

    async with running(endless) as engine:
        pieces: list[Any] = []
        answer = asyncio.ensure_future(engine.generate(asked, pieces.append))
        for number in range(1, 19):
            steps.allow(1)
            await until(lambda number=number: len(pieces) == number)
            assert not answer.done(), "the answer is far from complete"
            assert engine.stats().running == 1
            if number in (1, 5, 9):
                await update(engine, endless.weights(number))
        steps.allow(1)
        pieces, result = pieces, await answer
    assert [len(piece) for piece in pieces] == [2] + [1] * 17, "the first step begins and goes on"
    assert np.concatenate(pieces).tolist() == result.token_ids[:19].tolist()
    assert result.versions.tolist() == [0] * 2 + [1] * 4 + [5] * 4 + [9] * 10
    for version in (0, 1, 5, 9):
        at = result.versions == version
        logits = endless.reference(endless.weights(version))
        want = oracle.logprobs(logits, asked.prompt_ids, result, asked.sampling)
        assert np.abs(want[at] - result.logprobs[at]).max() < 1e-4


async def test_closing_a_stream_aborts_its_request_and_a_deadline_ends_it(
    endless: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch)

    async with running(endless) as engine:
        steps.allow(3)
        told: list[Any] = []
        gone = asyncio.ensure_future(engine.generate(request("gone", [2], max_new_tokens=90), told.append))
        await until(lambda: told)
        gone.cancel()
        await until(lambda: engine.stats().running == 0 and engine.stats().requests_total == 1)
        late = GenerateRequest("late", [2], Sampling(max_new_tokens=90), deadline_s=time.monotonic() + 0.1)
        with pytest.raises(DeadlinePassed, match="late"):
            await collected(engine, late)
        await until(lambda: engine.stats().running == 0)
        steps.allow(100)
        pieces, result = await collected(engine, request("after", [2], max_new_tokens=5))
        assert (len(pieces), len(result.token_ids)) == (3, 5)


# --- a set of replicas -----------------------------------------------------------------------------------


class Telling(FakeServer):
    """Tells so many units at once, and its result when it may."""

    async def generate(self, request: GenerateRequest, tell: Any = None) -> GenerateResult:
        for number in range(self.fleet.pieces if tell else 0):  # type: ignore[attr-defined]
            tell(np.array([number], np.int32))
        return await super().generate(request)


@asynccontextmanager
async def telling(count: int = 1, *, pieces: int = 2, **how: Any) -> AsyncIterator[Any]:
    class TellingFleet(Fleet):
        def _make(self, index: int) -> Any:
            self.made.append(Telling(index, self))
            return self.made[-1]

    fleet: Any = TellingFleet(count, **how)
    fleet.pieces = pieces
    await fleet.set.start(Snapshot(0))
    try:
        async with asyncio.timeout(60):
            yield fleet
    finally:
        await fleet.set.stop()


def asked_of(name: str, **marks: Any) -> GenerateRequest:
    return GenerateRequest(name, [1], Sampling(max_new_tokens=2), **marks)


async def test_a_set_passes_the_pieces_on_and_places_by_session() -> None:
    async with telling(2) as fleet:
        told: list[int] = []
        for turn in range(2):
            name = f"t{turn}"
            asking = asyncio.ensure_future(
                fleet.set.generate(asked_of(name, session="s#0.1"), lambda p: told.extend(p.tolist()))
            )
            await eventually(lambda turn=turn: len(told) == 2 * (turn + 1))
            await eventually(lambda name=name: fleet.where(name))
            assert not asking.done()
            (home,) = fleet.where(name)
            fleet.server(home).answer(name)
            await asking
        assert fleet.where("t0") == fleet.where("t1")
        assert [replica.given for replica in fleet.set.replicas] == [0, 0]


async def test_an_engine_that_is_lost_before_the_first_piece_is_not_noticed() -> None:
    async with telling(pieces=0) as fleet:
        asking = asyncio.ensure_future(collected(fleet.set, asked_of("r")))
        await eventually(lambda: fleet.where("r"))
        fleet.server(0).kill()
        await eventually(lambda: len(fleet.where("r")) == 2)
        fleet.server(0).answer("r")
        pieces, result = await asking
        assert (pieces, len(result.token_ids)) == ([], 2)


async def test_what_was_told_is_never_told_otherwise_when_the_engine_is_lost() -> None:
    async with telling() as fleet:
        told: list[Any] = []
        asking = asyncio.ensure_future(fleet.set.generate(asked_of("r"), told.append))
        await eventually(lambda: len(told) == 2 and fleet.where("r"))
        fleet.server(0).kill("the server was killed")
        with pytest.raises(EngineError, match=r"2 units .* had been streamed: the server was killed"):
            await asking
        assert fleet.where("r") == [0]
        # The set goes on: the next one is served by a new engine.
        await eventually(lambda: len(fleet.made) == 2)
        fleet.held = False
        assert len((await collected(fleet.set, asked_of("next")))[1].token_ids) == 2


async def test_a_set_over_engines_that_do_not_tell_gives_the_result_alone() -> None:
    async with driven() as fleet:
        fleet.held = False
        pieces, result = await collected(fleet.set, asked_of("s"))
        assert (pieces, result.finish_reason) == ([], "length")


async def test_a_waiting_stream_that_is_aborted_ends_with_nothing() -> None:
    async with telling(capacity=1) as fleet:
        running = [fleet.ask(f"r{n}") for n in range(2)]
        await eventually(lambda: len(fleet.seen) == 2)
        waiting = asyncio.ensure_future(collected(fleet.set, asked_of("w")))
        await eventually(lambda: fleet.set.stats().waiting == 2)
        await fleet.set.abort(["w"])
        pieces, result = await waiting
        assert (pieces, result.finish_reason, len(result.token_ids)) == ([], "abort", 0)
        for task in running:
            task.cancel()
