"""Weight updates of a real SGLang server. Its traps that are covered here, each by the test after it:

- a pause aborts by default: `test_requests_in_flight_survive_a_pause_whole`
- in place, an update that flushes the cache is refused after the weights were changed:
  `test_keep_updates_with_requests_in_flight`
- in place, prefixes cached under old weights serve new requests:
  `test_keep_never_serves_old_kv_to_a_new_request`
- a directory without some of the tensors is loaded as an update:
  `test_a_snapshot_that_does_not_fit_changes_nothing`
- a file that is cut short kills the server, another failed load may leave a mixture of weights:
  `test_a_failed_load_leaves_the_old_weights_in_place`
- a request sent to a paused server cannot be aborted: `test_a_request_called_during_a_pause_can_be_aborted`
- paused, `/health` does not answer: `test_a_paused_server_is_alive`
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from areal_async.quickstart.model import make_tokenizer
from areal_async.rpc.schema import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError, GenerateRequest, GenerateResult
from rollout_service.engines.http.adapter import read_layout
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.engine import HttpEngine
from tests.engines.sglang.served import KEY, in_server, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]  # of the server's start
PROMPT = [5, 14, 7, 9, 4, 4, 11, 13]
LONG = Sampling(temperature=1.0, max_new_tokens=56)
Run = Callable[..., Any]
Exchange = Callable[..., Any]


def calls(engine: HttpEngine, count: int, name: str = "u") -> list[asyncio.Task[GenerateResult]]:
    return [
        asyncio.create_task(engine.generate(GenerateRequest(f"{name}{i}", PROMPT, LONG)))
        for i in range(count)
    ]


async def updated(
    engine: HttpEngine, exchange: Exchange, snapshots: list[Any], count: int = 24
) -> list[GenerateResult]:
    """Answers of requests that were in flight during an update to each of `snapshots`."""
    client = ServerClient("server", engine.url, key=KEY)
    tasks = calls(engine, count)
    for snapshot in snapshots:
        await until(client, lambda load: load.num_running_reqs > 0)
        await exchange(engine, snapshot)
        assert engine.version == snapshot.tag
    results = await asyncio.gather(*tasks)
    await client.close()
    return list(results)


def assert_whole(results: list[GenerateResult]) -> None:
    for result in results:
        assert result.finish_reason in ("stop", "length")
        assert (result.finish_reason == "stop") == (result.token_ids[-1] == 1)
        assert result.finish_reason == "stop" or len(result.token_ids) == 56


def test_versions_are_true_in_recompute_mode(
    recompute: HttpEngine, model: Any, run: Run, exchange: Exchange
) -> None:
    snapshots = [model.snapshot(1), model.snapshot(2), model.snapshot(0, epoch=1)]
    results = run(updated(recompute, exchange, snapshots))
    assert_whole(results)
    tags = {(e, v) for r in results for e, v in zip(r.epochs.tolist(), r.versions.tolist(), strict=True)}
    assert {(0, 0), (1, 0)} <= tags
    assert any(len(set(r.versions)) > 1 for r in results)
    for result in results:
        np.testing.assert_allclose(result.logprobs, model.logprobs(PROMPT, result), atol=1e-4)


def test_requests_in_flight_survive_a_pause_whole(recompute: HttpEngine, model: Any, run: Run) -> None:
    async def body() -> list[GenerateResult]:
        client = ServerClient("server", recompute.url, key=KEY)
        tasks = calls(recompute, 24)
        await in_server(client, lambda n: n > 0)
        await client.close()
        await recompute.pause()
        await recompute.resume()
        return await asyncio.gather(*tasks)

    results = run(body())
    assert_whole(results)
    for result in results:
        np.testing.assert_allclose(result.logprobs, model.logprobs(PROMPT, result), atol=1e-4)


def test_keep_updates_with_requests_in_flight(
    keep: HttpEngine, model: Any, run: Run, exchange: Exchange
) -> None:
    results = run(updated(keep, exchange, [model.snapshot(1), model.snapshot(2)]))
    assert_whole(results)
    mixed = [r for r in results if len(set(r.versions)) > 1]
    assert mixed
    for result in results:
        assert (np.diff(result.versions) >= 0).all()
        # Up to the first update all is as ever; after it the KV is of older weights.
        first = result.versions == 0
        want = model.logprobs(PROMPT, result)
        np.testing.assert_allclose(result.logprobs[first], want[first], atol=1e-4)


def test_keep_never_serves_old_kv_to_a_new_request(
    keep: HttpEngine, model: Any, run: Run, exchange: Exchange
) -> None:
    async def body() -> list[GenerateResult]:
        old = calls(keep, 24, "old")
        await asyncio.gather(*calls(keep, 2, "cached"))
        await exchange(keep, model.snapshot(1))
        new = calls(keep, 4, "new")
        results = await asyncio.gather(*new)
        await asyncio.gather(*old)
        return list(results)

    for result in run(body()):
        assert set(result.versions) == {1}
        np.testing.assert_allclose(result.logprobs, model.logprobs(PROMPT, result), atol=1e-4)


@dataclass(frozen=True)
class Offer:
    """A snapshot's directory, whatever is in it. Nothing else of a snapshot may be needed."""

    path: Path
    tag: VersionTag = field(default_factory=lambda: VersionTag("policy", 0, 1))

    @property
    def tensors(self) -> dict[str, Any]:
        raise AssertionError("the tensors would be read while the engine is paused")


def offer(good: Any, path: Path, tensors: dict[str, Any] | None = None) -> Offer:
    """With the configuration of a good one."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_bytes((good.path / "config.json").read_bytes())
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")
    return Offer(path)


def test_a_snapshot_that_does_not_fit_changes_nothing(
    recompute: HttpEngine, model: Any, run: Run, tmp_path: Path
) -> None:
    good = model.snapshot(1)
    stored = {name: good.tensors[name] for name in read_layout(good.path)}
    norm = stored["model.norm.weight"]
    less = {name: tensor for name, tensor in stored.items() if tensor is not norm}
    other = stored | {"model.norm.weight": norm[:3].clone()}
    more = stored | {"model.other.weight": norm.clone()}

    async def body() -> GenerateResult:
        await recompute.pause()
        for tensors, words in ((less, "lacks"), (other, "in another form"), (more, "has besides")):
            with pytest.raises(EngineError, match=words):
                await recompute.load(offer(good, tmp_path, tensors))
        with pytest.raises(EngineError, match=r"no config\.json"):
            await recompute.load(Offer(good.path.parent))
        await recompute.resume()
        return await recompute.generate(GenerateRequest("still", PROMPT, LONG))

    result = run(body())
    assert recompute.version == VersionTag("policy", 0, 0)
    assert set(result.versions) == {0}
    np.testing.assert_allclose(result.logprobs, model.logprobs(PROMPT, result), atol=1e-4)


@pytest.mark.parametrize(
    ("left_bytes", "words"), [(0, "the old one is served"), (4000, "cut short"), (900_000, "cut short")]
)
def test_a_failed_load_leaves_the_old_weights_in_place(
    recompute: HttpEngine,
    model: Any,
    run: Run,
    tmp_path: Path,
    left_bytes: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = model.snapshot(1)
    bad = offer(good, tmp_path)
    if left_bytes:
        whole = (good.path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(whole[:left_bytes])
    else:
        # Its file goes after it was looked at.
        monkeypatch.setattr("rollout_service.engines.http.engine.check_folder", lambda *_: None)

    async def body() -> list[GenerateResult]:
        tasks = calls(recompute, 8)
        await recompute.pause()
        with pytest.raises(EngineError, match=words):
            await recompute.load(bad)
        await recompute.resume()
        return await asyncio.gather(*tasks, *calls(recompute, 4, "after"))

    results = run(body())
    assert recompute.version == VersionTag("policy", 0, 0)
    assert recompute.alive()
    for result in results:
        assert set(result.versions) == {0}
        np.testing.assert_allclose(result.logprobs, model.logprobs(PROMPT, result), atol=1e-4)


def test_weights_are_exchanged_only_while_paused(recompute: HttpEngine, model: Any, run: Run) -> None:
    with pytest.raises(EngineError, match="paused"):
        run(recompute.load(model.snapshot(1)))


def test_a_request_called_during_a_pause_can_be_aborted(recompute: HttpEngine, run: Run) -> None:
    async def body() -> list[GenerateResult]:
        before = calls(recompute, 8, "before")
        await asyncio.sleep(0.05)
        await recompute.pause()
        held = calls(recompute, 2, "held")
        await asyncio.sleep(0)
        await recompute.abort(["held0", *(f"before{i}" for i in range(8))])
        first = await held[0]
        await asyncio.gather(*before)
        await recompute.resume()
        return [first, await held[1]]

    aborted, served = run(body())
    assert (aborted.finish_reason, len(aborted.token_ids)) == ("abort", 0)
    assert served.finish_reason in ("stop", "length")


def test_streams_that_a_pause_sent_back_to_the_queue_are_aborted_and_closed_there(
    recompute: HttpEngine, run: Run
) -> None:
    async def body() -> tuple[list[list[int]], list[GenerateResult]]:
        client = ServerClient("server", recompute.url, key=KEY)
        told: list[list[int]] = [[] for _ in range(8)]
        begun_all = [asyncio.Event() for _ in told]

        def stream(i: int) -> Any:
            def tell(piece: Any) -> None:
                told[i].extend(piece.tolist())
                begun_all[i].set()

            return recompute.generate(GenerateRequest(f"s{i}", PROMPT, LONG), tell)

        streams = [asyncio.create_task(stream(i)) for i in range(8)]
        await asyncio.gather(*(begun.wait() for begun in begun_all))
        await recompute.pause()
        streams[0].cancel()
        await recompute.abort([f"s{i}" for i in range(1, 8)])
        results = await asyncio.gather(*streams[1:])
        await recompute.resume()
        await in_server(client, lambda n: n == 0)
        await client.close()
        return told[1:], results

    for told, result in zip(*run(body()), strict=True):
        assert told == result.token_ids.tolist()[: len(told)]
        assert len(told) >= len(result.token_ids) - 1
        assert result.finish_reason == "abort" or result.token_ids[-1] == 1
        assert result.text == make_tokenizer().decode(result.token_ids, skip_special_tokens=True)


def test_a_paused_server_is_alive(recompute: HttpEngine, run: Run) -> None:
    async def body() -> tuple[bool, bool, bool]:
        client = ServerClient("server", recompute.url, key=KEY)
        await recompute.pause()
        health = await client.serves("/health", timeout_s=2)
        probed = await client.serves("/model_info", timeout_s=2)
        alive = recompute.alive()
        await recompute.resume()
        await client.close()
        return health, probed, alive

    assert run(body()) == (False, True, True)
