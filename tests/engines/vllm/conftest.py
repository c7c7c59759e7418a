from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engines.vllm.served import Served


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, run: Callable[..., Any]) -> Iterator[Served]:
    """One server for all tests, which takes longer to start than they run."""
    served = Served(tmp_path_factory.mktemp("vllm"))
    try:
        run(served.engine.start(served.model.snapshot(0, epoch=1)), 300)
        yield served
    finally:
        run(served.engine.stop())
