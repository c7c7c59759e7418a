from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_async.cluster.submission import Submission
from tests.unit.controller.served import Serving, serving
from tests.unit.controller.world import World, submission


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A machine whose processes are made up, with a store on disk."""
    world = World(tmp_path)
    yield world
    world.end()


@pytest.fixture
def served(tmp_path: Path) -> Serving:
    """Serves a controller for as long as its context lasts."""
    return lambda: serving(tmp_path / "cluster")


@pytest.fixture
def sums() -> Submission:
    """A job that takes 2 cores."""
    return submission("sums")
