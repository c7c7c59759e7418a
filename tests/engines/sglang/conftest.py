"""One real server, and two engines on it: one that started it, and one of the other update mode, attached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from areal_async.config.engines import find_engine_python
from rollout_service.engines.http.adapter import ServerSettings
from rollout_service.engines.http.engine import HttpEngine
from rollout_service.engines.sglang.adapter import SGLangAdapter
from rollout_service.replicas import exchange
from tests.engines.sglang.served import LENGTH

SLOTS = 32
STARTUP_S = 900.0


@pytest.fixture(scope="session")
def started(
    model: Any, run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpEngine]:
    """The engine that owns the server (`recompute`)."""
    settings = ServerSettings(
        slots=SLOTS,
        max_model_len=LENGTH,
        python=find_engine_python("sglang"),
        log_path=tmp_path_factory.mktemp("logs") / "sglang.log",
        ready_s=STARTUP_S,
    )
    engine = HttpEngine(SGLangAdapter(model.directory, settings))
    run(engine.start(model.snapshot(0)), STARTUP_S + 30)
    yield engine
    run(engine.stop())


@pytest.fixture
def recompute(started: HttpEngine, model: Any, run: Callable[..., Any]) -> HttpEngine:
    """Serves version 0."""
    run(exchange(started, model.snapshot(0)))
    return started


def attached(
    started: HttpEngine, model: Any, run: Callable[..., Any], update_mode: Any
) -> Iterator[HttpEngine]:
    """Serves version 0, attached to the same server."""
    settings = ServerSettings(slots=SLOTS, max_model_len=LENGTH, update_mode=update_mode, url=started.url)
    engine = HttpEngine(SGLangAdapter(model.directory, settings))
    run(engine.start(model.snapshot(0)))
    yield engine
    run(engine.stop())


@pytest.fixture
def keep(started: HttpEngine, model: Any, run: Callable[..., Any]) -> Iterator[HttpEngine]:
    yield from attached(started, model, run, "keep")


@pytest.fixture
def of_sessions(started: HttpEngine, model: Any, run: Callable[..., Any]) -> Iterator[HttpEngine]:
    yield from attached(started, model, run, "session")
