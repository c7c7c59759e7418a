"""The engine `vllm` on a real server: new weights under requests in flight, and what ends a server. The last
tests here kill it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_async.rpc.schema import VersionTag
from rollout_service.engines.base import EngineError, EngineLost, GenerateResult
from rollout_service.engines.http.engine import HttpEngine
from tests.engines.vllm.served import Served, kept_logits, logits, worst

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]  # a start takes minutes on a busy machine

PROMPT = (3, 13, 4)
LONG_PROMPT = tuple(3 + i * i % 12 for i in range(100))
"""Of three whole blocks of the prefix cache."""


@dataclass(frozen=True)
class Offered:
    """A snapshot as an engine gets it, with a directory of the test's own."""

    tag: VersionTag
    path: Path

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.path / "model.safetensors")


@pytest.fixture(autouse=True)
def version_0(served: Served) -> None:
    """Each test begins with version 0 in the session's own engine."""
    served.run(served.update(0))


@pytest.fixture
def keeping(served: Served) -> Iterator[HttpEngine]:
    """A second engine, attached to the same server, that keeps KV over its updates."""
    engine = served.make_engine(url=served.engine.url, update_mode="keep", scratch=served.root / "scratch-2")
    # As one that died during an update leaves it.
    served.run(served.engine.pause())
    served.run(engine.start(served.snapshots[0]))
    yield engine
    served.run(engine.stop())


async def _under_updates(
    served: Served, engine: HttpEngine, versions: list[int], *, n: int, **sampling: object
) -> list[GenerateResult]:
    """Answers to `n` requests, during which the versions are served one after the other."""
    requests = [served.request(PROMPT, seed=seed, **sampling) for seed in range(n)]
    sampled = await served.sampled()
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    for version in versions:
        progress = asyncio.create_task(served.progress(n * 8, since=sampled))
        await asyncio.wait([progress, asyncio.gather(*tasks)], return_when=asyncio.FIRST_COMPLETED)
        progress.cancel()
        await served.update(version, engine)
        sampled = await served.sampled()
    return await asyncio.gather(*tasks)


def test_versions_are_true_when_kv_is_recomputed(served: Served) -> None:
    work = _under_updates(served, served.engine, [1, 2, 0, 1], n=48, max_new_tokens=300)
    results = served.run(work)
    crossed = 0
    for result in results:
        crossed += len(set(result.versions.tolist())) > 1
        assert result.finish_reason in ("stop", "length")
        assert result.finish_reason != "length" or result.token_ids.size == 300
        for version in set(result.versions.tolist()):
            expected = logits(served.models[version], PROMPT, result.token_ids)
            assert worst(result, expected, result.versions == version) < 1e-4
    assert crossed > 10


def test_versions_are_true_when_kv_is_kept(served: Served, keeping: HttpEngine) -> None:
    results = served.run(_under_updates(served, keeping, [1, 2], n=32, max_new_tokens=300))
    crossed, approximate = 0, 0.0
    for result in results:
        # Exact for what it is: old KV under new weights, cut at the very unit.
        assert worst(result, kept_logits(served.models, PROMPT, result)) < 1e-4
        if len(set(result.versions.tolist())) > 1:
            crossed += 1
            last = int(result.versions[-1])
            expected = logits(served.models[last], PROMPT, result.token_ids)
            approximate = max(approximate, worst(result, expected, result.versions == last))
    assert crossed > 5
    # And it is the other mode: a recomputation differs.
    assert approximate > 1e-2


def test_a_stop_string_over_an_update_is_found(served: Served) -> None:
    stops = ("77", "12", "903")
    results = served.run(
        _under_updates(served, served.engine, [1, 2, 0], n=48, max_new_tokens=300, stop=stops)
    )
    for result in results:
        whole = served.text(result.token_ids)
        first = min((at + len(s) for s in stops if (at := whole.find(s)) >= 0), default=None)
        assert first is None or (first == len(whole) and result.finish_reason == "stop")
        assert not any(stop in result.text for stop in stops)


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_a_new_request_never_meets_kv_of_older_weights(
    served: Served, mode: str, request: pytest.FixtureRequest
) -> None:
    engine = served.engine if mode == "recompute" else request.getfixturevalue("keeping")

    async def ask() -> GenerateResult:
        return await engine.generate(served.request(LONG_PROMPT, temperature=0.0, max_new_tokens=4))

    async def update_between() -> tuple[float, GenerateResult]:
        await ask()
        before = await served.gauge("prefix_cache_hits_total")
        await ask()
        hits = await served.gauge("prefix_cache_hits_total") - before
        await served.update(1, engine)
        return hits, await ask()

    hits, result = served.run(update_between())
    # The cache works: what comes next could have met it.
    assert hits >= 96
    assert (result.versions == 1).all()
    assert worst(result, logits(served.models[1], LONG_PROMPT, result.token_ids)) < 1e-4


def test_a_tied_output_layer_is_updated_too(served: Served) -> None:
    """vLLM's own reload leaves it out on a CPU."""

    async def greedy() -> GenerateResult:
        await served.update(2)
        return await served.engine.generate(served.request(PROMPT, temperature=0.0))

    result = served.run(greedy())
    expected = logits(served.models[2], PROMPT, result.token_ids)
    assert served.models[2].lm_head.weight is served.models[2].model.embed_tokens.weight
    assert result.token_ids.tolist() == expected.argmax(-1).tolist()
    assert worst(result, expected) < 1e-4
    assert served.engine.version == VersionTag("policy", 1, 2)


def _altered(served: Served, case: str, root: Path) -> Offered:
    """Version 1 without a tensor, or with one too many, or torn behind its header."""
    path = root / case
    shutil.copytree(served.snapshots[1].path, path)
    tensors = load_file(path / "model.safetensors")
    if case == "missing":
        del tensors["model.layers.1.mlp.down_proj.weight"]
    if case == "foreign":
        tensors["model.other.weight"] = torch.zeros(3)
    save_file(tensors, path / "model.safetensors")
    if case == "torn":
        content = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(content[: len(content) // 2])
    return Offered(VersionTag("policy", 1, 1), path)


async def _load(engine: HttpEngine, offered: Offered) -> None:
    await engine.pause()
    try:
        await engine.load(offered)
    finally:
        await engine.resume()


@pytest.mark.parametrize(
    ("case", "word"), [("missing", "it lacks"), ("foreign", "it has besides"), ("torn", "cut short")]
)
def test_a_snapshot_that_does_not_fit_is_refused_and_the_old_weights_serve_on(
    served: Served, case: str, word: str, tmp_path: Path
) -> None:
    async def refused() -> GenerateResult:
        with pytest.raises(EngineError, match=word) as caught:
            await _load(served.engine, _altered(served, case, tmp_path))
        assert not isinstance(caught.value, EngineLost)
        return await served.engine.generate(served.request(PROMPT))

    result = served.run(refused())
    assert (result.versions == 0).all()
    assert served.engine.version == VersionTag("policy", 1, 0)
    assert worst(result, logits(served.models[0], PROMPT, result.token_ids)) < 1e-4


def test_weights_are_exchanged_only_while_paused(served: Served) -> None:
    with pytest.raises(EngineError, match="paused"):
        served.run(served.engine.load(served.snapshots[1]))
    assert served.engine.alive()


def test_weights_that_another_loaded_end_the_engine_and_not_the_truth(
    served: Served, keeping: HttpEngine
) -> None:
    async def taken_over() -> None:
        # `keeping` took the server with the same version: the units are still not taken for its own.
        await served.update(0)
        with pytest.raises(EngineLost, match="did not load"):
            await keeping.generate(served.request(PROMPT))
        assert not keeping.alive()
        with pytest.raises(EngineLost):
            await keeping.generate(served.request(PROMPT))

    served.run(taken_over())


def test_a_load_that_fails_loses_the_engine_and_a_start_serves_the_newest(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A snapshot that the server fails on, and that our own look at it lets pass.
    monkeypatch.setattr("rollout_service.engines.http.engine.check_folder", lambda *_: None)

    async def lose() -> None:
        requests = [served.request(PROMPT, max_new_tokens=400, seed=seed) for seed in range(48)]
        before = await served.sampled()
        tasks = [asyncio.create_task(served.engine.generate(request)) for request in requests]
        await served.progress(48, since=before)
        with pytest.raises(EngineLost):
            await _load(served.engine, _altered(served, "foreign", tmp_path))
        _check_lost(await asyncio.gather(*tasks, return_exceptions=True))
        assert not served.engine.alive()
        with pytest.raises(EngineLost):
            await served.engine.generate(served.request(PROMPT))

    async def again() -> GenerateResult:
        await served.engine.start(served.snapshots[2])
        return await served.engine.generate(served.request(PROMPT))

    served.run(lose())
    result = served.run(again(), limit_s=300)
    assert served.engine.alive()
    assert (result.versions == 2).all()
    assert worst(result, logits(served.models[2], PROMPT, result.token_ids)) < 1e-4


def test_the_death_of_the_server_ends_every_request_in_flight(served: Served) -> None:
    async def kill() -> None:
        requests = [served.request(PROMPT, max_new_tokens=400, seed=seed) for seed in range(48)]
        before = await served.sampled()
        tasks = [asyncio.create_task(served.engine.generate(request)) for request in requests]
        await served.progress(48, since=before)
        os.kill(_process_named("EngineCore", served), signal.SIGKILL)
        _check_lost(await asyncio.gather(*tasks, return_exceptions=True))
        assert not served.engine.alive()

    served.run(kill())


def _check_lost(outcomes: list[GenerateResult | BaseException]) -> None:
    """Short answers may have been finished before; all others are lost, and none is anything else."""
    assert all(isinstance(outcome, GenerateResult | EngineLost) for outcome in outcomes)
    assert any(isinstance(outcome, EngineLost) for outcome in outcomes)


def _process_named(name: str, served: Served) -> int:
    """The process of this title among those of the server at the engine's address."""
    port = int(served.engine.url.rpartition(":")[2])
    owner = next(
        psutil.Process(found.pid)
        for found in psutil.net_connections("tcp")
        if found.laddr and found.laddr.port == port and found.status == psutil.CONN_LISTEN
    )
    family = [owner, *owner.children(recursive=True)]
    return next(process.pid for process in family if name in " ".join(process.cmdline()))
