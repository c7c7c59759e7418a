"""Routes that a server tells: asked for where they are wanted, cut to the tokens that were fed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout_service.engines.base import EngineError
from rollout_service.engines.sglang.messages import AnswerMeta, Generated, expert_ids
from tests.unit.rollout.test_server_engine import asked, serving_engine
from tests.unit.rollout.test_server_launch import MIXTURE

TELLS = {"enable_return_routed_experts": True}
LAYERS = 4


async def test_routes_of_the_layers_with_experts_come_with_an_answer(tmp_path: Path) -> None:
    async with serving_engine(tmp_path, info=TELLS, mixture=MIXTURE) as (engine, server):
        server.held.set()
        layers = engine._adapter.facts.layers
        routes = np.arange(2 * layers * 2, dtype=np.int32).reshape(2, layers, 2) % 8
        routes[1, 1, 1] = -1  # an expert that was left out
        server.routes = routes
        got = await engine.generate(replace(asked("all"), routes_from=0))
        want = routes[:, :2].reshape(2, -1)
        want[want < 0] = 255
        assert got.routes is not None
        assert (got.routes.dtype, got.routes.tolist()) == (np.uint8, want.tolist())
        got = await engine.generate(replace(asked("rest"), routes_from=1))
        assert server.bodies[-1]["routed_experts_start_len"] == 1
        assert got.routes.tolist() == want[1:].tolist()
        assert (await engine.generate(asked("none"))).routes is None
        assert "return_routed_experts" not in server.bodies[-1]


async def test_a_server_that_runs_already_without_routes_is_used_or_refused(tmp_path: Path) -> None:
    async with serving_engine(tmp_path, mixture=MIXTURE) as (engine, server):
        server.held.set()
        assert (await engine.generate(replace(asked(), routes_from=0))).routes is None
        assert "return_routed_experts" not in server.bodies[-1]
    says = "tells no routes: start it with --enable-return-routed-experts, or set rollout.routes to off"
    with pytest.raises(EngineError, match=says):
        async with serving_engine(tmp_path / "must", mixture=MIXTURE, must_route=True):
            pass


def test_routes_of_another_form_are_refused() -> None:
    def answer(said: str | None) -> Generated:
        return Generated([1], AnswerMeta(routed_experts=said))

    assert expert_ids(answer(None), MIXTURE, LAYERS) is None
    for wrong in ("AAAAAAAA", "not base64!"):  # two numbers are no layers of four
        with pytest.raises(EngineError, match="routes are of another form"):
            expert_ids(answer(wrong), MIXTURE, LAYERS)
