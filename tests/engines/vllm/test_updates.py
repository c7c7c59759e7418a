"""The engine `vllm` on a real server: new weights under requests in flight, and what ends a server. The last
tests here kill it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_service.engines.base import EngineError, EngineLost, GenerateResult
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.replicas import exchange
from tests.engines.conftest import Offer, processes
from tests.engines.sessions import assert_sessions_keep_their_cache, assert_turns_are_recomputed
from tests.engines.vllm.served import PROMPT, Served, kept_logits, tag, worst

pytestmark = pytest.mark.engine

BLOCK = 32  # Tokens of a block of the prefix cache
LONG_PROMPT = tuple(3 + i * i % 12 for i in range(100))
"""Of three whole blocks of the prefix cache."""


@pytest.fixture(autouse=True)
def version_0(served: Served, run: Callable[..., Any]) -> None:
    """Each test begins with version 0 in the session's own engine."""
    run(served.update(0))


def _attached(served: Served, run: Callable[..., Any], update_mode: str) -> Iterator[HttpEngine]:
    """A second engine, attached to the same server."""
    scratch = served.root / "scratch-2"
    engine = served.make_engine(url=served.engine.url, update_mode=update_mode, scratch=scratch)
    # As one that died during an update leaves it.
    run(served.engine.pause())
    run(engine.start(served.model.snapshot(0, epoch=1)))
    yield engine
    run(engine.stop())


@pytest.fixture
def keeping(served: Served, run: Callable[..., Any]) -> Iterator[HttpEngine]:
    yield from _attached(served, run, "keep")


@pytest.fixture
def of_sessions(served: Served, run: Callable[..., Any]) -> Iterator[HttpEngine]:
    yield from _attached(served, run, "session")


@pytest.fixture(params=["recompute", "keep"])
def of_each_mode(served: Served, request: pytest.FixtureRequest) -> HttpEngine:
    engine: HttpEngine = served.engine if request.param == "recompute" else request.getfixturevalue("keeping")
    return engine


async def _under_updates(
    served: Served, engine: HttpEngine, versions: list[int], *, n: int, **sampling: object
) -> list[GenerateResult]:
    """Answers to `n` requests, during which the versions are served one after the other."""
    sampled, tasks = await served.sampled(), served.tasks(n, engine, **sampling)
    for version in versions:
        progress = asyncio.create_task(served.progress(n * 8, since=sampled))
        await asyncio.wait([progress, asyncio.gather(*tasks)], return_when=asyncio.FIRST_COMPLETED)
        progress.cancel()
        await served.update(version, engine)
        sampled = await served.sampled()
    return await asyncio.gather(*tasks)


async def test_versions_are_true_when_kv_is_recomputed(served: Served) -> None:
    results = await _under_updates(served, served.engine, [1, 2, 0, 1], n=48, max_new_tokens=300)
    crossed = 0
    for result in results:
        crossed += len(set(result.versions.tolist())) > 1
        assert result.finish_reason in ("stop", "length")
        assert result.finish_reason != "length" or result.token_ids.size == 300
        served.model.assert_true(PROMPT, result)
    assert crossed > 10


async def test_versions_are_true_when_kv_is_kept(served: Served, keeping: HttpEngine) -> None:
    results = await _under_updates(served, keeping, [1, 2], n=32, max_new_tokens=300)
    crossed, approximate = 0, 0.0
    for result in results:
        # Exact for what it is: old KV under new weights, cut at the very unit.
        assert worst(result, kept_logits(served.model, PROMPT, result)) < 1e-4
        if len(set(result.versions.tolist())) > 1:
            crossed += 1
            expected = served.model.logits(tag(int(result.versions[-1])), PROMPT, result)
            approximate = max(approximate, worst(result, expected, result.versions == result.versions[-1]))
    assert crossed > 5
    # And it is the other mode: a recomputation differs.
    assert approximate > 1e-2


async def test_a_stop_string_over_an_update_is_found(served: Served) -> None:
    stops = ("77", "12", "903")
    results = await _under_updates(served, served.engine, [1, 2, 0], n=48, max_new_tokens=300, stop=stops)
    for result in results:
        whole = served.text(result.token_ids)
        first = min((at + len(s) for s in stops if (at := whole.find(s)) >= 0), default=None)
        assert first is None or (first == len(whole) and result.finish_reason == "stop")
        assert not any(stop in result.text for stop in stops)


async def test_a_new_request_never_meets_kv_of_older_weights(
    served: Served, of_each_mode: HttpEngine
) -> None:
    async def answer() -> GenerateResult:
        asked = served.request(LONG_PROMPT, temperature=0.0, max_new_tokens=4)
        return await of_each_mode.generate(asked)

    await answer()
    before = await served.gauge("prefix_cache_hits_total")
    await answer()
    # The cache works: what comes next could have met it.
    assert await served.gauge("prefix_cache_hits_total") - before >= 96
    await served.update(1, of_each_mode)
    result = await answer()
    assert (result.versions == 1).all()
    served.model.assert_true(LONG_PROMPT, result)


async def test_a_session_keeps_its_cache_over_an_update(served: Served, of_sessions: HttpEngine) -> None:
    await assert_sessions_keep_their_cache(of_sessions, served.model, LONG_PROMPT, epoch=1, block=BLOCK)


async def test_recompute_serves_a_second_turn_from_no_cache(served: Served) -> None:
    await assert_turns_are_recomputed(served.engine, served.model, LONG_PROMPT, epoch=1)


async def test_a_tied_output_layer_is_updated_too(served: Served) -> None:
    """vLLM's own reload leaves it out on a CPU."""
    await served.update(2)
    result = await served.engine.generate(served.request(temperature=0.0))
    network = served.model.network(tag(2))
    assert network.lm_head.weight is network.model.embed_tokens.weight
    assert result.token_ids.tolist() == served.model.logits(tag(2), PROMPT, result).argmax(-1).tolist()
    served.model.assert_true(PROMPT, result)
    assert served.engine.version == tag(2)


def _altered(served: Served, case: str, root: Path) -> Offer:
    """Version 1 without a tensor, or with one too many, or torn behind its header."""
    path = root / case
    shutil.copytree(served.model.snapshot(1, epoch=1).path, path)
    tensors = load_file(path / "model.safetensors")
    if case == "missing":
        del tensors["model.layers.1.mlp.down_proj.weight"]
    if case == "foreign":
        tensors["model.other.weight"] = torch.zeros(3)
    save_file(tensors, path / "model.safetensors")
    if case == "torn":
        content = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(content[: len(content) // 2])
    return Offer(path, tag(1))


@pytest.mark.parametrize(
    ("case", "word"), [("missing", "it lacks"), ("foreign", "it has besides"), ("torn", "cut short")]
)
async def test_a_snapshot_that_does_not_fit_is_refused_and_the_old_weights_serve_on(
    served: Served, case: str, word: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=word) as caught:
        await exchange(served.engine, _altered(served, case, tmp_path))
    assert not isinstance(caught.value, EngineLost)
    result = await served.engine.generate(served.request())
    assert (result.versions == 0).all()
    assert served.engine.version == tag(0)
    served.model.assert_true(PROMPT, result)


async def test_weights_are_exchanged_only_while_paused(served: Served) -> None:
    with pytest.raises(EngineError, match="paused"):
        await served.engine.load(served.model.snapshot(1, epoch=1))
    assert served.engine.alive()


async def test_weights_that_another_loaded_end_the_engine_and_not_the_truth(
    served: Served, keeping: HttpEngine
) -> None:
    # `keeping` took the server with the same version: the units are still not taken for its own.
    await served.update(0)
    with pytest.raises(EngineLost, match="did not load"):
        await keeping.generate(served.request())
    assert not keeping.alive()
    with pytest.raises(EngineLost):
        await keeping.generate(served.request())


async def test_a_load_that_fails_loses_the_engine_and_a_start_serves_the_newest(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A snapshot that the server fails on, and that our own look at it lets pass.
    monkeypatch.setattr("rollout_service.engines.http.engine.check_folder", lambda *_: None)
    before, tasks = await served.sampled(), served.tasks(48, max_new_tokens=400)
    await served.progress(48, since=before)
    with pytest.raises(EngineLost):
        await exchange(served.engine, _altered(served, "foreign", tmp_path))
    _check_lost(await asyncio.gather(*tasks, return_exceptions=True))
    assert not served.engine.alive()
    with pytest.raises(EngineLost):
        await served.engine.generate(served.request())
    await served.engine.start(served.model.snapshot(2, epoch=1))
    result = await served.engine.generate(served.request())
    assert served.engine.alive()
    assert (result.versions == 2).all()
    served.model.assert_true(PROMPT, result)


async def test_the_death_of_the_server_ends_every_request_in_flight(served: Served) -> None:
    before, tasks = await served.sampled(), served.tasks(48, max_new_tokens=400)
    await served.progress(48, since=before)
    (core,) = (p for p in processes(served.engine.url) if "EngineCore" in " ".join(p.cmdline()))
    os.kill(core.pid, signal.SIGKILL)
    _check_lost(await asyncio.gather(*tasks, return_exceptions=True))
    assert not served.engine.alive()


def _check_lost(outcomes: list[GenerateResult | BaseException]) -> None:
    """Short answers may have been finished before; all others are lost, and none is anything else."""
    assert all(isinstance(outcome, GenerateResult | EngineLost) for outcome in outcomes)
    assert any(isinstance(outcome, EngineLost) for outcome in outcomes)
