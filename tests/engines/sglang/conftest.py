from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollout_service.engines.http.engine import HttpEngine
from rollout_service.replicas import exchange
from tests.engines.servers import SGLANG, Kind


@pytest.fixture
def recompute(own_server: Callable[[Kind], HttpEngine], model: Any, run: Callable[..., Any]) -> HttpEngine:
    """The engine that owns the server; it serves version 0."""
    engine = own_server(SGLANG)
    run(exchange(engine, model.snapshot(0)))
    return engine
