"""Versions and log-probs across updates of a real server under many requests; keys; a failed load."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from areal_async.base.versions import VersionTag
from areal_async.trajectory import Sampling
from rollout_service.engines.base import EngineError
from rollout_service.engines.http.client import ServerClient
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.engines.http.keyed import VARIABLE
from rollout_service.replicas import exchange
from tests.engines.servers import SGLANG, Kind, Model, Offer, ask, processes
from tests.engines.updates import Asked
from tests.processes import words_of

pytestmark = pytest.mark.engine
LONG = Sampling(temperature=1.0, max_new_tokens=56)
ROUTES = {
    "sglang": [
        "POST /update_weights_from_disk",
        "POST /init_weights_update_group",
        "POST /update_weights_from_distributed",
        "POST /update_weights_from_tensor",
        "POST /pause_generation",
        "POST /flush_cache",
        "POST /generate",
        "GET /health_generate",
        "GET /health",
        "GET /metrics",
        "GET /model_info",
        "GET /server_info",
        "OPTIONS /generate",
    ],
    "vllm": [
        "POST /collective_rpc",
        "POST /sleep",
        "POST /wake_up",
        "POST /reset_prefix_cache",
        "POST /pause",
        "POST /inference/v1/generate",
        "POST /v1/completions",
        "GET /v1/models",
        "GET /server_info",
        "GET /health",
        "GET /metrics",
        "GET /load",
    ],
}


async def test_no_route_of_a_real_server_is_open_and_no_command_line_tells_the_key(
    owned: tuple[Kind, HttpEngine],
) -> None:
    kind, engine = owned
    stranger = ServerClient("server", engine.url)
    guessing = ServerClient("server", engine.url, key="0" * 64)
    try:
        for route in ROUTES[kind.name]:
            method, path = route.split()
            for client in (stranger, guessing):
                status, content = await client.request(method, path, {"model_path": "elsewhere"})
                assert (route, status, content) == (route, 401, b"")
    finally:
        await stranger.close()
        await guessing.close()
    server, *children = processes(engine.url)
    key = server.environ()[VARIABLE]
    family = [server, *server.parents()[:1], *children]
    assert not [process for process in family if key in " ".join(words_of(process))]


async def test_versions_are_true_under_many_requests_in_flight(
    owned: tuple[Kind, HttpEngine], model_of: Any
) -> None:
    kind, engine = owned
    model: Model = model_of(kind)
    snapshots = [model.snapshot(version, kind.epoch) for version in (0, 1, 2)]
    last = model.snapshot(0, kind.epoch + 1)
    await exchange(engine, snapshots[0])
    asked = Asked(engine, kind.prompt, 24, LONG)
    await asked.under([*snapshots[1:], last])
    answers = await asked.answers()
    assert len(set(zip(answers[-1][1].epochs, answers[-1][1].versions, strict=True))) > 1
    for request, result in answers:
        model.assert_true(request.prompt_ids, result)
    (late,) = await asyncio.gather(*ask(engine, 1, kind.prompt, LONG, "late"))
    assert set(zip(late.epochs.tolist(), late.versions.tolist(), strict=True)) == {(kind.epoch + 1, 0)}
    await exchange(engine, snapshots[0])


@pytest.mark.parametrize("owned", ["sglang"], indirect=True)
async def test_a_failed_load_leaves_the_old_weights_in_place(
    owned: tuple[Kind, HttpEngine], model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that goes after it was looked at. (vLLM ends: see `vllm/test_vllm.py`.)"""
    _, engine = owned
    await exchange(engine, model.snapshot(0))
    (tmp_path / "config.json").write_bytes((model.directory / "config.json").read_bytes())
    monkeypatch.setattr("rollout_service.engines.http.engine.check_folder", lambda *_: None)
    tasks = ask(engine, 8, SGLANG.prompt, LONG)
    with pytest.raises(EngineError, match="the old one is served"):
        await exchange(engine, Offer(tmp_path, VersionTag("policy", 0, 1)))
    results = await asyncio.gather(*tasks, *ask(engine, 4, SGLANG.prompt, LONG, "after"))
    assert engine.version == VersionTag("policy", 0, 0)
    assert engine.alive()
    for result in results:
        assert set(result.versions) == {0}
        model.assert_true(SGLANG.prompt, result)
