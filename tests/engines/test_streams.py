"""A stream of every engine: as its answer is without one, ended early, and told as it is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agreement import Snapshots, job_for

from areal_async.rpc.schema import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines import make_engine
from rollout_service.engines.base import GenerateRequest, GenerateResult
from tests.engines.conftest import LENGTH

ENGINES = [
    "local",
    pytest.param("sglang", marks=pytest.mark.engine),
    pytest.param("vllm", marks=pytest.mark.engine),
]
PROMPT = [3, 13, 4]


@pytest.fixture(params=ENGINES)
def engine(
    request: pytest.FixtureRequest, endless: Path, tmp_path: Path, endless_server: Any, run: Any
) -> Iterator[Any]:
    job = job_for(request.param, endless, max_model_len=LENGTH, url=endless_server(request.param))
    engine = make_engine(job, slots=8, activity="streams")
    run(engine.start(Snapshots(endless, tmp_path).write(VersionTag("policy", 0, 0))))
    yield engine
    run(engine.stop())


def asked(name: str, *, new: int = 40, stop: tuple[str, ...] = (), temperature: float = 0.0) -> Any:
    how = Sampling(temperature=temperature, max_new_tokens=new, stop=stop, seed=7)
    return GenerateRequest(name, [*PROMPT, 3 + len(name) % 9], how)


async def test_a_streamed_answer_is_the_one_that_is_not_streamed(engine: Any) -> None:
    told: dict[str, list[int]] = {}

    async def heard(one: GenerateRequest) -> GenerateResult:
        ids = told.setdefault(one.request_id, [])
        return await engine.generate(one, lambda piece: ids.extend(piece.tolist()))

    requests = [asked("x" * n, new=20 + n) for n in range(1, 7)]
    whole = await asyncio.gather(*(engine.generate(one) for one in requests))
    streams = await asyncio.gather(*(heard(one) for one in requests))
    for one, a, b in zip(requests, whole, streams, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert abs(a.logprobs - b.logprobs).max() < 1e-4
        assert (a.text, a.finish_reason, a.logprobs_of) == (b.text, b.finish_reason, b.logprobs_of)
        assert a.versions.tolist() == b.versions.tolist()
        ids = told[one.request_id]
        assert len(ids) >= len(b.token_ids) - 1
        assert ids == b.token_ids[: len(ids)].tolist()


async def test_a_stop_string_ends_a_stream(engine: Any) -> None:
    text = (await engine.generate(asked("r"))).text
    stop = text[10:12]
    one = asked("r", stop=(stop,))
    told: list[int] = []
    result = await engine.generate(one, lambda piece: told.extend(piece.tolist()))
    assert (result.text, result.finish_reason) == (text[: text.index(stop)], "stop")
    assert told == result.token_ids[: len(told)].tolist()


async def test_units_are_told_while_the_answer_is_under_way_and_an_abort_returns_them(engine: Any) -> None:
    told: list[int] = []
    enough = asyncio.Event()

    def tell(piece: Any) -> None:
        told.extend(piece.tolist())
        if len(told) >= 5:
            enough.set()

    one = asked("r", new=LENGTH - 8, temperature=1.0)
    asking = asyncio.ensure_future(engine.generate(one, tell))
    await enough.wait()
    assert not asking.done()
    await engine.abort(["r"])
    result = await asking
    assert result.finish_reason == "abort"
    assert 5 <= len(told) <= len(result.token_ids) < LENGTH - 8
    assert told == result.token_ids[: len(told)].tolist()
