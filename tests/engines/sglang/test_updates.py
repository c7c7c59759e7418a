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
from rollout_service.replicas import exchange
from tests.engines.conftest import Offer, ask
from tests.engines.sessions import assert_sessions_keep_their_cache, assert_turns_are_recomputed
from tests.engines.sglang.served import KEY, LIMIT_S, endless, in_server, under_way

pytestmark = pytest.mark.engine
PROMPT = [5, 14, 7, 9, 4, 4, 11, 13]
LONG = Sampling(temperature=1.0, max_new_tokens=56)


class Asked:
    """Requests in flight. The last is a stream, under way until the weights change (`endless`), on any
    machine."""

    def __init__(self, engine: HttpEngine, count: int) -> None:
        self._engine = engine
        self._sampled = asyncio.Event()
        self.requests = [GenerateRequest(f"r{n}", PROMPT, LONG) for n in range(count)] + [endless("long")]
        calls = [engine.generate(request) for request in self.requests[:-1]]
        calls.append(engine.generate(self.requests[-1], lambda _: self._sampled.set()))
        self.tasks = [asyncio.create_task(call) for call in calls]

    async def sampled(self) -> None:
        """Until the stream has another unit, or has ended."""
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

    async def answers(self) -> list[tuple[GenerateRequest, GenerateResult]]:
        """All whole."""
        answers = list(zip(self.requests, await asyncio.gather(*self.tasks), strict=True))
        for request, result in answers:
            assert result.finish_reason in ("stop", "length")
            assert (result.finish_reason == "stop") == (result.token_ids[-1] == 1)
            asked_for = request.sampling.max_new_tokens
            assert result.finish_reason == "stop" or len(result.token_ids) == asked_for
        return answers


async def test_versions_are_true_in_recompute_mode(recompute: HttpEngine, model: Any) -> None:
    snapshots = [model.snapshot(1), model.snapshot(2), model.snapshot(0, epoch=1)]
    asked = Asked(recompute, 24)
    await asked.under(snapshots)
    late = await recompute.generate(GenerateRequest("late", PROMPT, LONG))
    assert set(zip(late.epochs.tolist(), late.versions.tolist(), strict=True)) == {(1, 0)}
    answers = await asked.answers()
    assert len(set(answers[-1][1].versions)) > 1
    for request, result in answers:
        model.assert_true(request.prompt_ids, result)


async def test_requests_in_flight_survive_a_pause_whole(recompute: HttpEngine, model: Any) -> None:
    asked = Asked(recompute, 24)
    await asked.sampled()
    await recompute.pause()
    await recompute.resume()
    for request, result in await asked.answers():
        model.assert_true(request.prompt_ids, result)


async def test_keep_updates_with_requests_in_flight(keep: HttpEngine, model: Any) -> None:
    asked = Asked(keep, 24)
    await asked.under([model.snapshot(1), model.snapshot(2)])
    answers = await asked.answers()
    assert len(set(answers[-1][1].versions)) > 1
    for request, result in answers:
        assert (np.diff(result.versions) >= 0).all()
        # Up to the first update all is as ever; after it the KV is of older weights.
        first = result.versions == 0
        want = model.logprobs(request.prompt_ids, result)
        np.testing.assert_allclose(result.logprobs[first], want[first], atol=1e-4)


async def test_keep_never_serves_old_kv_to_a_new_request(keep: HttpEngine, model: Any) -> None:
    old = ask(keep, 24, PROMPT, LONG, "old")
    await asyncio.gather(*ask(keep, 2, PROMPT, LONG, "cached"))
    await exchange(keep, model.snapshot(1))
    new = ask(keep, 4, PROMPT, LONG, "new")
    results = await asyncio.gather(*new)
    await asyncio.gather(*old)
    for result in results:
        assert set(result.versions) == {1}
        model.assert_true(PROMPT, result)


async def test_a_session_keeps_its_cache_over_an_update(of_sessions: HttpEngine, model: Any) -> None:
    await assert_sessions_keep_their_cache(of_sessions, model, PROMPT, epoch=0, block=1)


async def test_recompute_serves_a_second_turn_from_no_cache(recompute: HttpEngine, model: Any) -> None:
    await assert_turns_are_recomputed(recompute, model, PROMPT, epoch=0)


def offer(good: Any, path: Path, tensors: dict[str, Any] | None = None) -> Offer:
    """With the configuration of a good one."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_bytes((good.path / "config.json").read_bytes())
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")
    return Offer(path, VersionTag("policy", 0, 1))


async def test_a_snapshot_that_does_not_fit_changes_nothing(
    recompute: HttpEngine, model: Any, tmp_path: Path
) -> None:
    good = model.snapshot(1)
    stored = {name: good.tensors[name] for name in read_layout(good.path)}
    norm = stored["model.norm.weight"]
    less = {name: tensor for name, tensor in stored.items() if tensor is not norm}
    other = stored | {"model.norm.weight": norm[:3].clone()}
    more = stored | {"model.other.weight": norm.clone()}
    await recompute.pause()
    for tensors, words in ((less, "lacks"), (other, "in another form"), (more, "has besides")):
        with pytest.raises(EngineError, match=words):
            await recompute.load(offer(good, tmp_path, tensors))
    with pytest.raises(EngineError, match=r"no config\.json"):
        await recompute.load(Offer(good.path.parent, good.tag))
    await recompute.resume()
    result = await recompute.generate(GenerateRequest("still", PROMPT, LONG))
    assert recompute.version == VersionTag("policy", 0, 0)
    assert set(result.versions) == {0}
    model.assert_true(PROMPT, result)


@pytest.mark.parametrize(
    ("left_bytes", "words"), [(0, "the old one is served"), (4000, "cut short"), (900_000, "cut short")]
)
async def test_a_failed_load_leaves_the_old_weights_in_place(
    recompute: HttpEngine,
    model: Any,
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
    tasks = ask(recompute, 8, PROMPT, LONG)
    await recompute.pause()
    with pytest.raises(EngineError, match=words):
        await recompute.load(bad)
    await recompute.resume()
    results = await asyncio.gather(*tasks, *ask(recompute, 4, PROMPT, LONG, "after"))
    assert recompute.version == VersionTag("policy", 0, 0)
    assert recompute.alive()
    for result in results:
        assert set(result.versions) == {0}
        model.assert_true(PROMPT, result)


async def test_weights_are_exchanged_only_while_paused(recompute: HttpEngine, model: Any) -> None:
    with pytest.raises(EngineError, match="paused"):
        await recompute.load(model.snapshot(1))


async def test_a_request_called_during_a_pause_can_be_aborted(recompute: HttpEngine) -> None:
    before = await under_way(recompute, 8, "before")
    await recompute.pause()
    held = ask(recompute, 2, PROMPT, LONG, "held")
    await asyncio.sleep(0)
    await recompute.abort(["held0", *(f"before{i}" for i in range(8))])
    first = await held[0]
    await asyncio.gather(*before)
    await recompute.resume()
    aborted, served = [first, await held[1]]
    assert (aborted.finish_reason, len(aborted.token_ids)) == ("abort", 0)
    assert served.finish_reason in ("stop", "length")


async def test_streams_that_a_pause_sent_back_to_the_queue_are_aborted_and_closed_there(
    recompute: HttpEngine,
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
        await in_server(recompute, lambda n: n == 0)
        await client.close()
        return told[1:], results

    for told, result in zip(*await body(), strict=True):
        assert told == result.token_ids.tolist()[: len(told)]
        assert len(told) >= len(result.token_ids) - 1
        assert result.finish_reason == "abort" or result.token_ids[-1] == 1
        assert result.text == make_tokenizer().decode(result.token_ids, skip_special_tokens=True)


async def test_a_paused_server_is_alive(recompute: HttpEngine) -> None:
    client = ServerClient("server", recompute.url, key=KEY)
    await recompute.pause()
    health = await client.serves("/health", timeout_s=2)
    probed = await client.serves("/model_info", timeout_s=2)
    alive = recompute.alive()
    await recompute.resume()
    await client.close()
    assert (health, probed, alive) == (False, True, True)
